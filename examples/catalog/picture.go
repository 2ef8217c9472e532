package main

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/chart"
)

// picture draws the calls a second that each customer was granted, as an SVG.
func picture(granted map[string][]int, raised time.Duration) string {
	panel := chart.Panel{
		Label: "calls granted a second; each customer asks 200 times", Height: 220,
		Marks: []chart.Mark{{X: raised.Seconds(), Text: "INSERT in psql"}, {X: (raised + lasts).Seconds(), Text: "until"}},
	}
	for i, customer := range customers {
		line := chart.Line{Name: customer, Style: chart.Style(i), Steps: true}
		for n, tokens := range granted[customer] {
			line.Points = append(line.Points, chart.Point{X: (time.Duration(n) * step).Seconds(), Y: float64(tokens) / step.Seconds()})
		}
		panel.Lines = append(panel.Lines, line)
	}
	c := chart.Chart{Title: "A plan is raised in psql, and ends by itself", X: chart.Time(time.Time{}, ends, false), Panels: []chart.Panel{panel}}
	return c.SVG()
}
