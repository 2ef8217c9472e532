package chart

import "fmt"

// Figures are values side by side, as bars that begin at 0, with each value beside its bar.
type Figures struct {
	Title  string
	Panels []FiguresPanel
	Theme  Theme
}

// A FiguresPanel has one quantity, in groups.
type FiguresPanel struct {
	Label  string // the quantity, with its unit
	Limit  float64
	Groups []Group
}

// A Group is bars under a name, or without one.
type Group struct {
	Name string
	Bars []Bar
}

// A Bar is one value. It is drawn as one that is too much if it is above the panel's Limit.
type Bar struct {
	Name  string
	Style Style
	Value float64
}

// The layout of figures, in pixels.
const (
	barsLeft = 276.0
	barsEnd  = 84.0 // right of the longest bar, for its value
	barLine  = 22.0
	barsRoom = width - barsLeft - barsEnd
)

// SVG returns the picture.
func (f *Figures) SVG() string {
	height := 14.0
	for _, panel := range f.Panels {
		height += labelRoom + panel.height()
	}
	p := &painter{}
	top := p.begin(f.Title, height, f.Theme)
	for i := range f.Panels {
		top = p.figures(&f.Panels[i], top+labelRoom)
	}
	p.add("</svg>")
	return p.String()
}

// height returns the room of the bars and of their groups' names.
func (panel *FiguresPanel) height() (height float64) {
	for _, g := range panel.Groups {
		height += barLine * float64(len(g.Bars))
		if g.Name != "" {
			height += barLine
		}
	}
	return height
}

// figures draws a panel with its upper edge at top, and returns its lower one.
func (p *painter) figures(panel *FiguresPanel, top float64) float64 {
	most := panel.Limit
	for _, g := range panel.Groups {
		for _, b := range g.Bars {
			most = max(most, b.Value)
		}
	}
	p.text(right, top-8, "start", "faint", panel.Label)
	if panel.Limit > 0 {
		x := barsLeft + panel.Limit/most*barsRoom
		p.add(`<line class="axis" stroke-width="1.5" stroke-dasharray="5 3" x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f"/>`, x, x, top-4, top+panel.height())
	}
	bottom := top
	for _, g := range panel.Groups {
		if g.Name != "" {
			p.bold(right, bottom+15, textSize, g.Name)
			bottom += barLine
		}
		for _, b := range g.Bars {
			p.bar(b, bottom, most, panel.Limit)
			bottom += barLine
		}
	}
	return bottom
}

func (p *painter) bar(b Bar, y, most, limit float64) {
	class := fmt.Sprintf("f%d", b.Style)
	if limit > 0 && b.Value > limit*1.005 {
		class = "debt"
	}
	room := 0.0
	if most > 0 {
		room = b.Value / most * barsRoom
	}
	p.text(barsLeft-8, y+15, "end", "ink", b.Name)
	p.add(`<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="15"/>`, class, barsLeft, y+3, max(room, 1))
	p.text(barsLeft+room+6, y+15, "start", "ink", Number(b.Value))
}
