package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/chart"
)

// panels are the cases that have a picture.
var panels = []string{grantedOneKey, granted10k, refusedOneKey, txOneKey}

// drawn says how the implementations in pictures are drawn, in the order of the legend.
var drawn = []struct {
	impl   string
	style  chart.Style
	dashed bool
}{
	{oursCombined, chart.Blue, false},
	{oursEscrow, chart.Teal, false},
	{goRedisLua, chart.Orange, false},
	{rueidisLua, chart.Orange, true},
	{plainUpdate, chart.Grey, false},
	{oursTx, chart.Blue, false},
	{oursBatch, chart.Blue, true},
	{oursOnCommit, chart.Teal, true},
	{oursTx32, chart.Violet, false},
	{oursTxEscrow, chart.Teal, false},
	{noLimit, chart.Grey, true},
	{forUpdateTx, chart.Violet, true},
}

// drawPlot draws the results that have a panel into benchmark.svg, by goroutines, on axes of ratios.
func drawPlot(dir string, results []result) error {
	c := chart.Chart{
		Title: "Decisions or transactions a second, by goroutines (axes of ratios)",
		X:     chart.Axis{Label: "goroutines", Log: true, Text: func(tick float64) string { return strconv.Itoa(int(tick)) }},
	}
	for _, name := range panels {
		panel := chart.Panel{Height: 190, Log: true}
		for _, d := range drawn {
			line := chart.Line{Name: d.impl, Style: d.style, Dashed: d.dashed}
			for _, r := range results {
				if r.name == name && r.impl == d.impl && r.opsPerSec > 0 {
					panel.Label = r.title
					line.Points = append(line.Points, chart.Point{X: float64(r.goroutines), Y: r.opsPerSec})
					c.X.Ticks = append(c.X.Ticks, float64(r.goroutines))
				}
			}
			if line.Points != nil {
				panel.Lines = append(panel.Lines, line)
			}
		}
		if panel.Lines != nil {
			c.Panels = append(c.Panels, panel)
		}
	}
	if c.Panels == nil {
		return fmt.Errorf("nothing to draw: the picture shows %s", strings.Join(panels, ", "))
	}
	slices.Sort(c.X.Ticks)
	c.X.Ticks = slices.Compact(c.X.Ticks)
	c.X.From, c.X.To = c.X.Ticks[0]/1.2, c.X.Ticks[len(c.X.Ticks)-1]*1.2
	return os.WriteFile(filepath.Join(dir, "benchmark.svg"), []byte(c.SVG()), 0o644)
}
