// Package chart draws pictures as SVG, for light and dark pages: lines, bars, levels and bands over an
// axis that they share, such as time.
package chart

import (
	"cmp"
	"fmt"
	"html"
	"math"
	"slices"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/visible"
)

// A Chart is panels above each other, with a title and a legend.
type Chart struct {
	Title  string
	X      Axis
	Panels []Panel
	Theme  Theme
}

// A Theme is the page that a picture is for; "" is Auto.
type Theme string

// The themes.
const (
	Auto  Theme = "auto"  // by the reader's preference
	Light Theme = "light" // always
	Dark  Theme = "dark"  // always
)

// An Axis is the one that the panels share.
type Axis struct {
	Label    string // its quantity, with the unit
	Log      bool   // equal steps are equal ratios; From is then above 0
	From, To float64
	Ticks    []float64
	Text     func(tick float64) string
}

// A Panel is one diagram. Its vertical axis begins at 0, or below the least that it shows.
type Panel struct {
	Label  string // of the vertical axis, with its unit
	Height float64
	Log    bool // equal steps are equal ratios: for lines alone, of values above 0
	Lines  []Line
	Bars   []Bars   // on top of each other
	Levels []Level  // horizontal lines
	Bands  []Band   // stretches of the axis
	Shade  *Shading // the area below a level
}

// A Style is a colour, which differs between light and dark.
type Style int

// The styles. They can be told apart without seeing red and green as different.
const (
	Blue Style = iota
	Orange
	Grey
	Violet
	Teal
)

// A Line joins points, straight or in steps.
type Line struct {
	Name   string
	Style  Style
	Dashed bool
	Steps  bool
	Points []Point
}

// A Point is one of a line.
type Point struct{ X, Y float64 }

// Bars are how many there are in each of a number of equal parts of the axis.
type Bars struct {
	Name   string
	Style  Style
	Values []float64
}

// A Level is a horizontal line with a name, such as a capacity.
type Level struct {
	Name string
	Y    float64
}

// A Band is a stretch of the axis, such as a pause.
type Band struct {
	Name     string
	From, To float64
}

// Shading is the area below 0, such as debt.
type Shading struct {
	Name string
}

// The layout, in pixels. It is read on a telephone, where a picture is 360 wide, and beside text.
const (
	width      = 600.0
	left       = 84.0
	right      = 24.0
	titleLine  = 21.0
	labelRoom  = 32.0 // above a panel, for its label
	tickRoom   = 22.0 // below the last panel
	legendLine = 22.0
	textSize   = 13.0
	titleSize  = 16.0
)

const plotted = width - left - right

// The colours of the classes: f0 to f4 and s0 to s4 fill and draw in a [Style].
const (
	light = ".page{fill:#ffffff}.ink{fill:#1f2328}.faint{fill:#59636e}.axis{stroke:#59636e}.grid{stroke:#d8dee4}.band{fill:#8c959f}.debt{fill:#cf222e}" +
		".f0{fill:#1f5fa8}.s0{stroke:#1f5fa8}.f1{fill:#c4570b}.s1{stroke:#c4570b}.f2{fill:#59636e}.s2{stroke:#59636e}" +
		".f3{fill:#8250df}.s3{stroke:#8250df}.f4{fill:#0f766e}.s4{stroke:#0f766e}"
	dark = ".page{fill:#0d1117}.ink{fill:#e6edf3}.faint{fill:#9198a1}.axis{stroke:#9198a1}.grid{stroke:#30363d}.band{fill:#6e7681}.debt{fill:#ff7b72}" +
		".f0{fill:#6cb6ff}.s0{stroke:#6cb6ff}.f1{fill:#ffa657}.s1{stroke:#ffa657}.f2{fill:#9198a1}.s2{stroke:#9198a1}" +
		".f3{fill:#d2a8ff}.s3{stroke:#d2a8ff}.f4{fill:#56d4c4}.s4{stroke:#56d4c4}"
)

var css = map[Theme]string{Light: light, Dark: dark, Auto: light + "@media (prefers-color-scheme: dark){" + dark + "}"}

// SVG returns the picture.
func (c *Chart) SVG() string {
	p := &painter{chart: c}
	legend := c.legend()
	height := tickRoom + 18 + legendLine*float64(len(legend)) + 8
	for _, panel := range c.Panels {
		height += labelRoom + panel.Height
	}
	top := p.begin(c.Title, height, c.Theme)
	for i := range c.Panels {
		top += labelRoom
		p.panel(&c.Panels[i], top, i == len(c.Panels)-1)
		top += c.Panels[i].Height
	}
	p.text(left+plotted, top+tickRoom+14, "end", "faint", c.X.Label)
	for i, row := range legend {
		p.legend(row, top+tickRoom+18+legendLine*float64(i)+14)
	}
	p.add("</svg>")
	return p.String()
}

// painter writes a picture.
type painter struct {
	strings.Builder
	chart *Chart
}

func (p *painter) add(format string, args ...any) { fmt.Fprintf(p, format+"\n", args...) }

// begin writes the head of a picture with so much room below its title, and returns where that begins.
func (p *painter) begin(title string, height float64, theme Theme) float64 {
	lines := wrapped(title, titleSize*1.08, width-2*right)
	top := 10 + titleLine*float64(len(lines))
	p.add(`<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" role="img" font-family="Helvetica, Arial, Liberation Sans, sans-serif" font-size="%.0f">`,
		width, top+height, width, top+height, textSize)
	p.add(`<title>%s</title><style>text{stroke:none}line,polyline,path{fill:none}%s</style>`, escaped(title), css[cmp.Or(theme, Auto)])
	p.add(`<rect class="page" width="100%%" height="100%%"/>`)
	for i, line := range lines {
		p.bold(right, 4+titleLine*float64(i+1), titleSize, line)
	}
	return top
}

func (p *painter) text(x, y float64, anchor, class, text string) {
	p.add(`<text x="%.1f" y="%.1f" text-anchor="%s" class="%s">%s</text>`, x, y, anchor, class, escaped(text))
}

func (p *painter) bold(x, y, size float64, text string) {
	p.add(`<text x="%.1f" y="%.1f" class="ink" font-size="%.0f" font-weight="bold">%s</text>`, x, y, size, escaped(text))
}

// escaped returns a text for SVG. Characters that are not printed are shown escaped.
func escaped(text string) string { return html.EscapeString(visible.Lines(text)) }

func (p *painter) x(v float64) float64 {
	return left + share(p.chart.X.From, p.chart.X.To, v, p.chart.X.Log)*plotted
}

// share returns how much of the way from one value to another v is.
func share(from, to, v float64, log bool) float64 {
	if log {
		from, to, v = math.Log(from), math.Log(to), math.Log(v)
	}
	return (v - from) / (to - from)
}

// within is x for a value that may lie beyond the ends of the axis.
func (p *painter) within(v float64) float64 { return p.x(min(max(v, p.chart.X.From), p.chart.X.To)) }

// panel draws a panel with its upper edge at top.
func (p *painter) panel(panel *Panel, top float64, last bool) {
	from, to := panel.bounds()
	bottom := top + panel.Height
	y := func(v float64) float64 { return bottom - share(from, to, v, panel.Log)*panel.Height }
	p.text(left, top-8, "start", "faint", panel.Label)
	for _, b := range panel.Bands {
		if begin, end := p.within(b.From), p.within(b.To); end > begin {
			p.add(`<rect class="band" fill-opacity="0.25" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`, begin, top, end-begin, panel.Height)
		}
	}
	for _, tick := range panel.ticks(from, to) {
		p.add(`<line class="grid" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, left, left+plotted, y(tick), y(tick))
		p.text(left-6, y(tick)+4, "end", "ink", Number(tick))
	}
	if panel.Shade != nil && from < 0 {
		p.add(`<rect class="debt" fill-opacity="0.12" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`, left, y(0), plotted, bottom-y(0))
	}
	for _, tick := range p.chart.X.Ticks {
		p.add(`<line class="axis" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, p.x(tick), p.x(tick), bottom, bottom+4)
		if last {
			p.text(p.x(tick), bottom+18, "middle", "ink", p.chart.X.Text(tick))
		}
	}
	axis := y(max(from, 0))
	p.add(`<line class="axis" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, left, left+plotted, axis, axis)
	p.bars(panel.Bars, y)
	for _, l := range panel.Levels {
		p.add(`<line class="s%d" stroke-width="1.3" stroke-dasharray="7 4" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, Grey, left, left+plotted, y(l.Y), y(l.Y))
		p.text(left+plotted-4, y(l.Y)-5, "end", "faint", l.Name)
	}
	for _, l := range panel.Lines {
		p.line(&l, y)
	}
}

// bars draws the counts in the parts of the axis, on top of each other.
func (p *painter) bars(all []Bars, y func(float64) float64) {
	if len(all) == 0 {
		return
	}
	below := make([]float64, len(all[0].Values))
	step := plotted / float64(len(below))
	for _, bars := range all {
		var path strings.Builder
		for i, v := range bars.Values {
			if v > 0 {
				fmt.Fprintf(&path, "M%.2f %.1fH%.2fV%.1fH%.2fZ", left+float64(i)*step, y(below[i]), left+float64(i+1)*step, y(below[i]+v), left+float64(i)*step)
			}
			below[i] += v
		}
		p.add(`<path class="f%d" d="%s"/>`, bars.Style, path.String())
	}
}

// line draws a line.
func (p *painter) line(l *Line, y func(float64) float64) {
	var points strings.Builder
	for i, at := range l.Points {
		if l.Steps && i > 0 {
			fmt.Fprintf(&points, "%.1f,%.1f ", p.x(at.X), y(l.Points[i-1].Y))
		}
		fmt.Fprintf(&points, "%.1f,%.1f ", p.x(at.X), y(at.Y))
	}
	p.add(`<polyline class="s%d" stroke-width="1.8"%s points="%s"/>`, l.Style, dashes(l.Dashed), strings.TrimSpace(points.String()))
}

func dashes(dashed bool) string {
	if dashed {
		return ` stroke-dasharray="5 3"`
	}
	return ""
}

func (p *Panel) ticks(from, to float64) (ticks []float64) {
	if !p.Log {
		return Ticks(from, to, max(2, int(p.Height/40)))
	}
	for tick := from; tick <= to*1.001; tick *= 10 {
		ticks = append(ticks, tick)
	}
	return ticks
}

// bounds returns the least and the greatest value that a panel has room for.
func (p *Panel) bounds() (from, to float64) {
	var values []float64
	for _, l := range p.Lines {
		for _, at := range l.Points {
			values = append(values, at.Y)
		}
	}
	if p.Log {
		return math.Pow(10, math.Floor(math.Log10(slices.Min(values)))), math.Pow(10, math.Ceil(math.Log10(slices.Max(values))))
	}
	values = append(values, 0)
	for _, l := range p.Levels {
		values = append(values, l.Y)
	}
	for i := 0; len(p.Bars) > 0 && i < len(p.Bars[0].Values); i++ {
		sum := 0.0
		for _, bars := range p.Bars {
			sum += bars.Values[i]
		}
		values = append(values, sum)
	}
	if from, to = slices.Min(values), slices.Max(values); to == from {
		to = from + 1
	}
	room := (to - from) * 0.08
	if from < 0 {
		from -= room
	}
	return from, to + room
}

// entry is an entry of the legend: a mark, and a name right of it.
type entry struct{ name, mark string }

// legend returns the legend in rows that fit.
func (c *Chart) legend() (rows [][]entry) {
	used := plotted
	seen := map[string]bool{"": true}
	add := func(name, mark string, args ...any) {
		if seen[name] {
			return
		}
		seen[name] = true
		room := swatch + textWidth(name)*textSize
		if used+room > plotted {
			rows, used = append(rows, nil), 0
		}
		last := len(rows) - 1
		rows[last], used = append(rows[last], entry{name, fmt.Sprintf(mark, args...)}), used+room
	}
	const line, box = `<line class="s%d" stroke-width="1.8"%s x2="20" y1="-4" y2="-4"/>`, `<rect class="%s" fill-opacity="%g" x="4" y="-9" width="12" height="10"/>`
	for _, panel := range c.Panels {
		for _, l := range panel.Lines {
			add(l.Name, line, l.Style, dashes(l.Dashed))
		}
		for _, bars := range panel.Bars {
			add(bars.Name, box, fmt.Sprint("f", bars.Style), 1.0)
		}
		if from, _ := panel.bounds(); panel.Shade != nil && from < 0 {
			add(panel.Shade.Name, box, "debt", 0.25)
		}
		for _, b := range panel.Bands {
			add(b.Name, box, "band", 0.35)
		}
	}
	return rows
}

// swatch is the room of an entry of the legend beside its name, which another font may make longer.
const swatch = 56.0

func (p *painter) legend(row []entry, y float64) {
	x := left
	for _, e := range row {
		p.add(`<g transform="translate(%.1f %.1f)">%s</g>`, x, y, e.mark)
		p.text(x+26, y, "start", "ink", e.name)
		x += swatch + textWidth(e.name)*textSize
	}
}

// Ticks returns about n round numbers from one to another.
func Ticks(from, to float64, n int) (ticks []float64) {
	if to <= from || n < 1 {
		return nil
	}
	step := math.Pow(10, math.Floor(math.Log10((to-from)/float64(n))))
	for _, factor := range []float64{1, 2, 5, 10} {
		if (to-from)/(step*factor) <= float64(n) {
			step *= factor
			break
		}
	}
	for i := math.Ceil(from / step); i*step <= to+step*1e-9; i++ {
		ticks = append(ticks, i*step+0) // no -0
	}
	return ticks
}
