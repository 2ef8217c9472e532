package main

import (
	"fmt"
	"strings"
	"time"
)

// The picture: width and height of the drawing, and the margins around it.
const (
	width, height = 640, 220
	left, top     = 50, 30
	most          = 140 // granted a second, at the top
)

// picture draws the calls a second that each customer was granted, as an SVG.
func picture(granted map[string][]int, raised time.Duration) string {
	var b strings.Builder
	x := func(at time.Duration) float64 { return left + at.Seconds()/ends.Seconds()*width }
	y := func(rate float64) float64 { return top + height - min(rate, most)/most*height }
	text := func(x, y float64, anchor, color, what string) {
		// Given its length, it is as long in the reader's font.
		fmt.Fprintf(&b, `<text textLength="%.0f" lengthAdjust="spacingAndGlyphs" x="%.0f" y="%.0f" text-anchor="%s" fill="%s">%s</text>`+"\n",
			6.2*float64(len(what)), x, y, anchor, color, what)
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", left+width+20, top+height+50)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="white"/>`+"\n")
	for rate := 0.0; rate <= most; rate += 20 {
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#d4d4d4"/>`+"\n", left, left+width, y(rate), y(rate))
		text(left-6, y(rate)+4, "end", "#222", fmt.Sprint(rate))
	}
	for at := time.Duration(0); at <= ends; at += 3 * time.Second {
		text(x(at), top+height+16, "middle", "#222", fmt.Sprintf("%v", at))
	}
	text(left, top-12, "start", "#222", "granted a second; each asks 200 times a second")
	for _, mark := range []struct {
		at   time.Duration
		text string
	}{{raised, "INSERT in psql"}, {raised + lasts, "until"}} {
		fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" stroke="#757575" stroke-dasharray="4 3"/>`+"\n", x(mark.at), x(mark.at), top, top+height)
		text(x(mark.at)+4, top+12, "start", "#757575", mark.text)
	}
	for i, customer := range customers {
		color := []string{"#1f5fa8", "#ef8a17"}[i]
		var points strings.Builder
		for n, tokens := range granted[customer] {
			rate := float64(tokens) / step.Seconds()
			fmt.Fprintf(&points, "%.1f,%.1f %.1f,%.1f ", x(time.Duration(n)*step), y(rate), x(min(time.Duration(n+1)*step, ends)), y(rate))
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.TrimSpace(points.String()), color)
		text(left+float64(i)*80, top+height+38, "start", color, customer)
	}
	b.WriteString("</svg>\n")
	return b.String()
}
