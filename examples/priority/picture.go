package main

import (
	"fmt"
	"strings"
	"time"
)

// The picture: width and height of the drawing, and the margins around it.
const (
	width, height = 640, 230
	left, top     = 56, 100
	most          = 210 // granted a second, at the top
)

// style has the colours of readers with a light page, and of those with a dark one.
const style = `<style>
.page { fill: #ffffff } .ink { fill: #222222 } .pale { fill: #6a6a6a } .grid { stroke: #d4d4d4 } .edge { stroke: #757575; stroke-dasharray: 4 3 }
polyline { fill: none; stroke-width: 2.2 }
.s0 { stroke: #c62828 } .s1 { stroke: #1f5fa8 } .s2 { stroke: #e08a00 } .t0 { fill: #c62828 } .t1 { fill: #1f5fa8 } .t2 { fill: #a86400 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .ink { fill: #e6edf3 } .pale { fill: #9aa4af } .grid { stroke: #30363d } .edge { stroke: #8b949e }
.s0 { stroke: #ff7b72 } .s1 { stroke: #58a6ff } .s2 { stroke: #f0b041 } .t0 { fill: #ff7b72 } .t1 { fill: #58a6ff } .t2 { fill: #f0b041 }
}
</style>
`

// picture draws the calls of each class that were granted a second, as an SVG.
func picture(granted [][]int) string {
	var b strings.Builder
	x := func(at time.Duration) float64 { return left + at.Seconds()/ends.Seconds()*width }
	y := func(rate float64) float64 { return top + height - min(rate, most)/most*height }
	text := func(x, y float64, anchor, class, what string) {
		// Given its length, it is as long in the reader's font.
		fmt.Fprintf(&b, `<text textLength="%.0f" lengthAdjust="spacingAndGlyphs" x="%.0f" y="%.0f" text-anchor="%s" class="%s">%s</text>`+"\n",
			6.2*float64(len(what)), x, y, anchor, class, what)
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", left+width+40, top+height+76)
	b.WriteString(style)
	b.WriteString(`<rect width="100%" height="100%" class="page"/>` + "\n")
	for rate := 0.0; rate <= most; rate += 50 {
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" class="grid"/>`+"\n", left, left+width, y(rate), y(rate))
		text(left-8, y(rate)+4, "end", "ink", fmt.Sprint(rate))
	}
	for n, asked := range phases {
		from := x(time.Duration(n) * phase)
		fmt.Fprintf(&b, `<line x1="%.1f" x2="%.1f" y1="%d" y2="%d" class="edge"/>`+"\n", from, from, top-62, top+height)
		text(from+6, top-52, "start", "pale", "asked a second:")
		line := 0.0
		for class := range classes {
			if asked[class] > 0 {
				line++
				text(from+6, top-52+14*line, "start", fmt.Sprintf("t%d", class), fmt.Sprintf("%s %.0f", classes[class].name, asked[class]))
			}
		}
	}
	for at := time.Duration(0); at <= ends; at += phase {
		text(x(at), top+height+18, "middle", "ink", fmt.Sprint(at.Seconds()))
	}
	text(left+width/2, top+height+36, "middle", "ink", "seconds")
	text(8, top-78, "start", "ink", fmt.Sprintf("Calls granted a second, of a limit of %g a second that three classes share", API.Rate))
	at := 8.0
	for class, c := range classes {
		what := c.name
		if c.above > 0 {
			what = fmt.Sprintf("%s, above %g of the capacity", c.name, c.above)
		}
		fmt.Fprintf(&b, `<polyline points="%.0f,%d %.0f,%d" class="s%d"/>`+"\n", at, top+height+56, at+24, top+height+56, class)
		text(at+30, top+height+60, "start", fmt.Sprintf("t%d", class), what)
		at += 30 + 6.2*float64(len(what)) + 24
	}
	for class := len(classes) - 1; class >= 0; class-- { // the most important one on top
		var points strings.Builder
		for n, tokens := range granted[class] {
			rate := float64(tokens) / step.Seconds()
			fmt.Fprintf(&points, "%.1f,%.1f %.1f,%.1f ", x(time.Duration(n)*step), y(rate), x(time.Duration(n+1)*step), y(rate))
		}
		fmt.Fprintf(&b, `<polyline points="%s" class="s%d"/>`+"\n", strings.TrimSpace(points.String()), class)
	}
	b.WriteString("</svg>\n")
	return b.String()
}
