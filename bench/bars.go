package main

import (
	"fmt"
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// barPanel is a panel of bars, from the top down.
type barPanel struct {
	title string
	bars  []bar
	line  float64 // that no bar should reach over; 0 for none
}

type bar struct {
	name  string
	value float64
	color color.Color
}

// drawBars draws panels side by side. The first has the names of the bars.
func drawBars(file string, panels []barPanel) error {
	svg, c := newPicture(pictureWidth, 4.6*vg.Inch)
	tiles := draw.Tiles{Rows: 1, Cols: len(panels), PadX: panelGap}
	for i, panel := range panels {
		p, err := panel.plot(i == 0)
		if err != nil {
			return err
		}
		p.Draw(tiles.At(c, i, 0))
	}
	return writePicture(svg, file)
}

func (panel *barPanel) plot(names bool) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.Title.Padding = panel.title, 6
	p.Title.TextStyle.Font.Size = 12
	p.X.Min, p.X.Tick.Marker = 0, plot.TickerFunc(inThousands)
	labels := make([]string, len(panel.bars))
	for i, b := range panel.bars {
		row := len(panel.bars) - 1 - i
		if names {
			labels[row] = b.name
		}
		chart, err := plotter.NewBarChart(plotter.Values{b.value}, 16)
		if err != nil {
			return nil, fmt.Errorf("drawing a bar: %w", err)
		}
		chart.Horizontal, chart.XMin, chart.LineStyle.Width, chart.Color = true, float64(row), 0, b.color
		p.Add(chart)
	}
	bottom, top := -0.5, float64(len(panel.bars))-0.5
	if panel.line > 0 {
		mark, err := plotter.NewLine(plotter.XYs{{X: panel.line, Y: bottom}, {X: panel.line, Y: top}})
		if err != nil {
			return nil, fmt.Errorf("drawing a line: %w", err)
		}
		mark.LineStyle = draw.LineStyle{Color: black, Width: 1.2, Dashes: dashed}
		p.Add(mark)
	}
	p.NominalY(labels...)
	p.Y.Min, p.Y.Max = bottom, top
	return p, nil
}

// inThousands returns the usual ticks, with commas in large numbers.
func inThousands(low, high float64) []plot.Tick {
	ticks := plot.DefaultTicks{}.Ticks(low, high)
	for i, t := range ticks {
		if t.Label != "" && high >= 1000 {
			ticks[i].Label = thousands(t.Value)
		}
	}
	return ticks
}
