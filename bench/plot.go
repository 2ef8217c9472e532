package main

import (
	"bytes"
	"fmt"
	"html"
	"image/color"
	"math"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// The picture, from top to bottom: the title, two rows of two panels with the
// legend beside them, and the facts.
const (
	pictureWidth  = 13.5 * vg.Inch
	pictureHeight = 9 * vg.Inch
	titleHeight   = 0.5 * vg.Inch
	factHeight    = 0.2 * vg.Inch // a line
	legendWidth   = 4.3 * vg.Inch
	panelGap      = 0.3 * vg.Inch
	margin        = 0.2 * vg.Inch
)

// panels are the cases that have a picture.
var panels = []string{grantedOneKey, granted10k, refusedOneKey, txOneKey}

// look is how an implementation is drawn.
type look struct {
	color  color.Color
	glyph  draw.GlyphDrawer
	dashes []vg.Length
	width  vg.Length
}

var (
	blue   = color.RGBA{0x1f, 0x5f, 0xa8, 0xff}
	sky    = color.RGBA{0x4a, 0xa3, 0xdf, 0xff}
	navy   = color.RGBA{0x0b, 0x2a, 0x5b, 0xff}
	red    = color.RGBA{0xc6, 0x28, 0x28, 0xff}
	orange = color.RGBA{0xef, 0x8a, 0x17, 0xff}
	black  = color.RGBA{0x22, 0x22, 0x22, 0xff}
	grey   = color.RGBA{0x75, 0x75, 0x75, 0xff}
	silver = color.RGBA{0xb0, 0xb0, 0xb0, 0xff}
	faint  = color.RGBA{0xd4, 0xd4, 0xd4, 0xff}
)

var (
	dashed = []vg.Length{6, 3}
	dotted = []vg.Length{2, 3}
)

// looks has ours in blue, Redis in warm colours, and the rest in grey, in the
// order of the legend.
var looks = []struct {
	impl string
	look look
}{
	{oursCombined, look{blue, draw.CircleGlyph{}, nil, 2.5}},
	{oursEscrow, look{navy, draw.PyramidGlyph{}, nil, 2.5}},
	{oursPortable, look{sky, draw.BoxGlyph{}, nil, 2}},
	{oneUpsert, look{sky, draw.RingGlyph{}, dashed, 1.2}},
	{goRedisLua, look{red, draw.CircleGlyph{}, nil, 1.5}},
	{rueidisLua, look{orange, draw.BoxGlyph{}, nil, 1.5}},
	{serverBound, look{black, draw.TriangleGlyph{}, dotted, 1.2}},
	{plainUpdate, look{black, draw.RingGlyph{}, dotted, 1.2}},
	{forUpdate, look{grey, draw.PyramidGlyph{}, dashed, 1.2}},
	{serializable, look{silver, draw.CrossGlyph{}, dashed, 1.2}},
	{oursTxEscrow, look{sky, draw.PyramidGlyph{}, nil, 2.5}},
	{oursTx, look{blue, draw.BoxGlyph{}, nil, 2.5}},
	{oursBatch, look{blue, draw.RingGlyph{}, nil, 2.5}},
	{oursTx32, look{navy, draw.CircleGlyph{}, nil, 2.5}},
	{noLimit, look{black, draw.RingGlyph{}, dotted, 1.2}},
	{bareUpsert, look{grey, draw.RingGlyph{}, dotted, 1.2}},
	{forUpdateTx, look{grey, draw.PyramidGlyph{}, dashed, 1.2}},
	{serializableTx, look{silver, draw.CrossGlyph{}, dashed, 1.2}},
}

// drawPlot draws the results that have a panel.
func drawPlot(file string, results []result, facts []string) error {
	svg, c := newPicture(pictureWidth, pictureHeight)
	var drawn []*plot.Plot
	for _, name := range panels {
		p, err := panel(results, name)
		if err != nil {
			return fmt.Errorf("drawing %s: %w", name, err)
		}
		if p != nil {
			drawn = append(drawn, p)
		}
	}
	if len(drawn) == 0 {
		return fmt.Errorf("nothing to draw: --plot shows %s", strings.Join(panels, ", "))
	}
	legend, err := legendOf(results)
	if err != nil {
		return err
	}
	arrange(c, drawn, legend, facts)
	return writePicture(svg, file)
}

var pictureFont = font.Font{Typeface: "Liberation", Variant: "Sans"}

// newPicture returns a white picture, and the canvas within its margins. Its fonts apply to
// everything that is made after it.
func newPicture(width, height vg.Length) (*vgsvg.Canvas, draw.Canvas) {
	plot.DefaultFont = pictureFont
	plotter.DefaultFont = plot.DefaultFont
	svg := vgsvg.New(width, height)
	c := draw.New(svg)
	c.SetColor(color.White)
	c.Fill(c.Rectangle.Path())
	return svg, draw.Crop(c, margin, -margin, margin, -margin)
}

// writePicture writes a picture to a file.
func writePicture(svg *vgsvg.Canvas, file string) error {
	var picture bytes.Buffer
	if _, err := svg.WriteTo(&picture); err != nil {
		return fmt.Errorf("making the picture: %w", err)
	}
	if err := os.WriteFile(file, withLengths(picture.Bytes()), 0o644); err != nil {
		return fmt.Errorf("writing the picture: %w", err)
	}
	return nil
}

// pictureText is a text in a picture: its start tag, in which is the size, and the text.
var pictureText = regexp.MustCompile(`<text ([^>]*font-family:)Liberation Sans(;[^>]*font-size:([0-9.]+)px[^>]*)>([^<]*)</text>`)

// withLengths gives each text of a picture the length that it has in the font by which
// the picture was laid out: readers have other fonts, and a wider one would be cut off.
func withLengths(picture []byte) []byte {
	return pictureText.ReplaceAllFunc(picture, func(text []byte) []byte {
		part := pictureText.FindSubmatch(text)
		size, err := strconv.ParseFloat(string(part[3]), 64)
		if err != nil {
			return text // which the expression has no room for
		}
		face := font.DefaultCache.Lookup(pictureFont, vg.Points(size))
		length := face.Width(html.UnescapeString(string(part[4]))).Points()
		return fmt.Appendf(nil, `<text textLength="%.5g" lengthAdjust="spacingAndGlyphs" %sLiberation Sans, Arial, Helvetica, sans-serif%s>%s</text>`,
			length, part[1], part[2], part[4])
	})
}

// arrange puts everything in its place.
func arrange(c draw.Canvas, panels []*plot.Plot, legend plot.Legend, facts []string) {
	title := textStyle(18, black)
	c.FillText(title, vg.Point{X: c.Min.X, Y: c.Max.Y - titleHeight/2}, "Rate limits side by side on one machine: decisions or transactions a second (log scales)")
	small := textStyle(9.5, grey)
	for i, fact := range facts {
		c.FillText(small, vg.Point{X: c.Min.X, Y: c.Min.Y + factHeight*vg.Length(len(facts)-1-i)}, fact)
	}
	c = draw.Crop(c, 0, 0, factHeight*vg.Length(len(facts))+panelGap/2, -titleHeight)
	legend.Draw(draw.Crop(c, c.Max.X-c.Min.X-legendWidth+panelGap, 0, 0, -panelGap))

	c = draw.Crop(c, 0, -legendWidth, 0, 0)
	tiles := draw.Tiles{Rows: (len(panels) + 1) / 2, Cols: 2, PadX: panelGap, PadY: panelGap}
	for i, p := range panels {
		p.Draw(tiles.At(c, i%2, i/2))
	}
}

func textStyle(size font.Length, c color.Color) draw.TextStyle {
	style := plot.New().Title.TextStyle
	style.Font = font.From(plot.DefaultFont, size)
	style.Color, style.XAlign, style.YAlign = c, draw.XLeft, draw.YBottom
	return style
}

// legendOf has all implementations in the panels.
func legendOf(results []result) (plot.Legend, error) {
	legend := plot.NewLegend()
	legend.Top, legend.Left = true, true
	legend.TextStyle.Font.Size = 10
	legend.ThumbnailWidth = 0.5 * vg.Inch
	legend.Padding = 4
	for _, l := range looks {
		shown := func(r result) bool { return r.impl == l.impl && slices.Contains(panels, r.name) }
		if !slices.ContainsFunc(results, shown) {
			continue
		}
		line, points, err := l.look.line(plotter.XYs{{X: 1, Y: 1}})
		if err != nil {
			return legend, err
		}
		legend.Add(l.impl, line, points)
	}
	return legend, nil
}

// panel draws one case, or nothing if it was not measured.
func panel(results []result, name string) (*plot.Plot, error) {
	p := plot.New()
	// The label of a log axis would take room beyond its end, so the vertical
	// one has none: its unit is in the picture's title.
	p.X.Label.Text = "goroutines"
	p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
	p.Y.Tick.Marker = plot.TickerFunc(decades)
	p.Title.TextStyle.Font.Size = 13
	p.Title.Padding = 6
	grid := plotter.NewGrid()
	grid.Horizontal.Color, grid.Vertical.Color = faint, faint
	p.Add(grid)

	var levels []plot.Tick
	for _, l := range looks {
		var xys plotter.XYs
		for _, r := range results {
			if r.name == name && r.impl == l.impl && r.opsPerSec > 0 {
				p.Title.Text = r.title
				xys = append(xys, plotter.XY{X: float64(r.goroutines), Y: r.opsPerSec})
				level := plot.Tick{Value: float64(r.goroutines), Label: strconv.Itoa(r.goroutines)}
				if !slices.Contains(levels, level) {
					levels = append(levels, level)
				}
			}
		}
		if xys == nil {
			continue
		}
		line, points, err := l.look.line(xys)
		if err != nil {
			return nil, err
		}
		p.Add(line, points)
	}
	if levels == nil {
		return nil, nil
	}
	p.X.Tick.Marker = plot.ConstantTicks(levels)
	p.X.Min, p.X.Max = p.X.Min/1.3, p.X.Max*1.3
	p.Y.Min = math.Pow(10, math.Floor(math.Log10(p.Y.Min)))
	p.Y.Max = math.Pow(10, math.Ceil(math.Log10(p.Y.Max)))
	return p, nil
}

func (l look) line(xys plotter.XYs) (*plotter.Line, *plotter.Scatter, error) {
	line, points, err := plotter.NewLinePoints(xys)
	if err != nil {
		return nil, nil, fmt.Errorf("drawing a line: %w", err)
	}
	line.LineStyle = draw.LineStyle{Color: l.color, Width: l.width, Dashes: l.dashes}
	points.GlyphStyle = draw.GlyphStyle{Color: l.color, Radius: 3.5, Shape: l.glyph}
	return line, points, nil
}

// decades returns the ticks of a log axis: 1,000, 10,000 and so on, with those in
// between unlabelled.
func decades(low, high float64) []plot.Tick {
	var ticks []plot.Tick
	for decade := math.Pow(10, math.Floor(math.Log10(low))); decade <= high; decade *= 10 {
		for digit := 1.0; digit < 10; digit++ {
			tick := plot.Tick{Value: digit * decade}
			if digit == 1 {
				tick.Label = thousands(decade)
			}
			if tick.Value >= low && tick.Value <= high {
				ticks = append(ticks, tick)
			}
		}
	}
	return ticks
}
