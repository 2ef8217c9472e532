package trial

import (
	"context"
	"math"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/chart"
)

// columns is in how many parts a picture's time is.
const columns = 375

// A Watch looks at one key over a stretch of time, for a picture of it.
type Watch struct {
	Key      string
	From, To time.Time

	next    int // the column that is to be looked at
	least   [columns]float64
	most    [columns]float64
	granted [columns]float64
	refused [columns]float64
	pauses  [][2]time.Time
}

// NewWatch makes a watch. There must be some time from the one instant to the other.
func NewWatch(key string, from, to time.Time) *Watch {
	if !to.After(from) {
		to = from.Add(time.Second)
	}
	w := &Watch{Key: key, From: from, To: to}
	for i := range w.least {
		w.least[i], w.most[i] = math.Inf(1), math.Inf(-1)
	}
	return w
}

func (w *Watch) width() time.Duration { return max(1, w.To.Sub(w.From)/columns) }

func (w *Watch) column(at time.Time) int {
	return min(max(int(at.Sub(w.From)/w.width()), 0), columns-1)
}

// look looks at the key at the beginning of each column up to an instant.
func (w *Watch) look(t *Trial, to time.Time) {
	for ; w.next < columns; w.next++ {
		at := w.From.Add(time.Duration(w.next) * w.width())
		if at.After(to) {
			return
		}
		if at.After(t.now) {
			t.now = at
		}
		if result, err := t.store.Check(context.Background(), t.limit.ForN(w.Key, 0)); err == nil {
			w.value(w.next, result.Value)
		}
	}
}

// value notes how many tokens there were in a column.
func (w *Watch) value(column int, v float64) {
	w.least[column], w.most[column] = min(w.least[column], v), max(w.most[column], v)
}

// saw counts a call, and what it left.
func (w *Watch) saw(t *Trial, key string, s *ratelimit.Status, never bool) {
	if key != w.Key || t.now.Before(w.From) || t.now.After(w.To) {
		return
	}
	i := w.column(t.now)
	if !never {
		w.value(i, s.Before)
		w.value(i, s.Value)
	}
	if s.OK {
		w.granted[i]++
	} else {
		w.refused[i]++
	}
}

// Panels returns the picture of a trial's key: its tokens, and its calls.
func (w *Watch) Panels(t *Tally) []chart.Panel {
	tokens := chart.Line{Name: "tokens", Style: chart.Blue}
	for i, least := range w.least {
		x := (time.Duration(i) * w.width()).Seconds()
		if w.most[i] > least {
			tokens.Points = append(tokens.Points, chart.Point{X: x, Y: w.most[i]})
		}
		if !math.IsInf(least, 1) {
			tokens.Points = append(tokens.Points, chart.Point{X: x, Y: least})
		}
	}
	var bands []chart.Band
	for _, p := range w.pauses {
		bands = append(bands, chart.Band{Name: "paused", From: p[0].Sub(w.From).Seconds(), To: p[1].Sub(w.From).Seconds()})
	}
	capacity := chart.Level{Name: "capacity " + chart.Number(t.Limit.Capacity), Y: t.Limit.Capacity}
	return []chart.Panel{
		{
			Label: "tokens: " + t.Limit.String(), Height: 170, Lines: []chart.Line{tokens},
			Levels: []chart.Level{capacity}, Bands: bands, Shade: &chart.Shading{Name: "debt"},
		},
		{
			Label: "calls in " + w.width().Round(time.Millisecond).String(), Height: 80, Bands: bands,
			Bars: []chart.Bars{
				{Name: "granted", Style: chart.Teal, Values: w.granted[:]},
				{Name: "refused", Style: chart.Orange, Values: w.refused[:]},
			},
		},
	}
}
