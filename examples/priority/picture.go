package main

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/chart"
)

// picture draws the calls of each class that were asked and granted a second, as an SVG.
func picture(granted [][]int) string {
	styles := []chart.Style{chart.Orange, chart.Blue, chart.Violet}
	got := chart.Panel{Label: "granted a second", Height: 190}
	asked := chart.Panel{Label: "asked a second", Height: 110}
	for class := len(classes) - 1; class >= 0; class-- { // the most important one on top
		name := classes[class].name
		if above := classes[class].above; above > 0 {
			name = fmt.Sprintf("%s, above %g of the capacity", name, above)
		}
		line := chart.Line{Name: name, Style: styles[class], Steps: true}
		wants := line
		for n, tokens := range granted[class] {
			at := time.Duration(n) * step
			line.Points = append(line.Points, chart.Point{X: at.Seconds(), Y: float64(tokens) / step.Seconds()})
			wants.Points = append(wants.Points, chart.Point{X: at.Seconds(), Y: phases[min(int(at/phase), len(phases)-1)][class]})
		}
		got.Lines, asked.Lines = append(got.Lines, line), append(asked.Lines, wants)
	}
	c := chart.Chart{
		Title:  fmt.Sprintf("A limit of %g a second that three classes share", API.Rate),
		X:      chart.Time(time.Time{}, ends, false),
		Panels: []chart.Panel{got, asked},
	}
	return c.SVG()
}
