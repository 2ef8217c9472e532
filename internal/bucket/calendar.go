package bucket

import (
	"math"
	"time"
)

// calendar is a fixed window whose edges are the first instants of days in a time zone: days,
// weeks, months or years from the anchor on. They differ in length, so they are counted and not
// measured: SQL receives the edges around now, and counts as refill does. Nothing moves them,
// not even a pause, which also leaves the value as it is: a quota was sold.
type calendar struct{ level }

func (*calendar) String() string     { return kinds[FixedWindow].String() }
func (*calendar) statements() string { return "calendar" }

// zone is that of a quota by the calendar; Greenwich's if there is no such zone, which no
// limit's definition has.
func (d *Definition) zone() *zone {
	z, err := zoneOf(d.Zone)
	if err != nil {
		return &zone{location: time.UTC}
	}
	return z
}

// edgeDay is the day of the k-th edge, of which the anchor is 0. A month that has not as many
// days ends one on its last.
func (d *Definition) edgeDay(k int64) int64 {
	switch a := d.Anchor; d.Every {
	case Day:
		return a.Days() + k
	case Week:
		return a.Days() + 7*k
	case Month:
		return clamped(a.Year, a.Month+time.Month(k), a.Day)
	default:
		return clamped(a.Year+int(k), a.Month, a.Day)
	}
}

// edgeAt is the last edge up to an instant: its number, and when it is.
func (d *Definition) edgeAt(z *zone, micros int64) (k, at int64) {
	day := z.day(micros)
	switch date, a := DateAt(day), d.Anchor; d.Every {
	case Day:
		k = day - a.Days()
	case Week:
		k = floorDiv(day-a.Days(), 7)
	case Month:
		k = int64(date.Year-a.Year)*12 + int64(date.Month-a.Month)
	default:
		k = int64(date.Year - a.Year)
	}
	for at = z.start(d.edgeDay(k + 1)); at <= micros; at = z.start(d.edgeDay(k + 1)) {
		k++
	}
	for at = z.start(d.edgeDay(k)); at > micros; at = z.start(d.edgeDay(k)) {
		k--
	}
	return k, at
}

// skipped is how many of the edges up to the k-th there are not, being days that the zone
// never had.
func (d *Definition) skipped(z *zone, k int64) int64 {
	if d.Every != Day || len(z.skipped) == 0 {
		return 0
	}
	return z.skippedUpTo(d.edgeDay(k)) - z.skippedUpTo(d.Anchor.Days())
}

// between is how many edges there are after the k-th, up to the one that is l.
func (d *Definition) between(z *zone, k, l int64) int64 {
	return l - k - (d.skipped(z, l) - d.skipped(z, k))
}

// after is the number of the edge that is n edges after the k-th.
func (d *Definition) after(z *zone, k, n int64) int64 {
	l := k + n
	for short := n - d.between(z, k, l); short > 0; short = n - d.between(z, k, l) {
		l += short
	}
	return l
}

// slack returns the time after a row's ts within which an edge counts as the one already
// passed, by the calendar of another time zone: the row of a customer that moves to the west is
// not refilled again a few hours later. It is shorter than any window, and there is none for
// days, of which a row may have had one here and not yet there.
func (d *Definition) slack() int64 { return units[d.Every].slack.Microseconds() }

func (*calendar) last(d *Definition, _, now int64) int64 {
	_, at := d.edgeAt(d.zone(), now)
	return at
}

func (c *calendar) next(d *Definition, ts int64) int64 { return c.edge(d, ts, 1) }

// edge is the n-th edge that a row has at ts before it.
func (*calendar) edge(d *Definition, ts, n int64) int64 {
	z := d.zone()
	k, _ := d.edgeAt(z, ts+d.slack())
	return z.start(d.edgeDay(d.after(z, k, n)))
}

func (c *calendar) reach(d *Definition, ts int64, tokens float64) int64 {
	return c.edge(d, ts, int64(math.Ceil(tokens/d.Rate)))
}

func (c *calendar) fresh(d *Definition, _ string, now time.Time) State {
	return State{Value: d.Capacity, TS: instant(c.last(d, 0, now.UnixMicro()))}
}

// refill adds Rate for each edge since ts.
func (*calendar) refill(d *Definition, s State, now time.Time) State {
	ts, z := s.TS.UnixMicro(), d.zone()
	k, last := d.edgeAt(z, now.UnixMicro())
	had, _ := d.edgeAt(z, ts+d.slack())
	passed := max(d.between(z, had, k), 0)
	return State{
		Value: min(s.Value+float64(passed)*d.Rate, d.Capacity),
		TS:    instant(max(ts, last)), Paused: s.Paused,
	}
}

func (*calendar) pause(_ *Definition, settled State, _ bool, _, until time.Time) State {
	settled.Paused = Later(settled.Paused, until)
	return settled
}

func (*calendar) resume(_ *Definition, _ string, settled State, _ Out, _ time.Time) State {
	settled.Paused = time.Time{}
	return settled
}

func (*calendar) back(d *Definition, s State, out Out, r *Return, now time.Time) (State, Out) {
	return d.backInWindow(s, out, r, now, false)
}

// full has the edges that it had.
func (*calendar) full(d *Definition, _ string, s State, out Out, now time.Time) State {
	settled := d.Refill(s, now)
	return State{Value: max(settled.Value, d.Capacity-d.Owed(out, now)), TS: settled.TS}
}

// Edges that SQL receives: those by which an empty row is full, unless they are too many, and
// some on either side, for a machine with another clock than the database's.
const (
	mostEdges  = 64
	spareEdges = 3
)

// past is the number of edges before now that SQL receives.
func (d *Definition) past() int {
	return int(min(math.Ceil(d.Capacity/d.Rate), mostEdges)) + spareEdges
}

// Sent returns the number of edges that a statement receives.
func (d *Definition) Sent() int { return d.past() + 1 + spareEdges }

// Edges returns edges of a quota by the calendar around an instant, growing; and beside each
// the ts from which on a row has had it.
func (d *Definition) Edges(around time.Time) (edges, had []time.Time) {
	return d.EdgesFrom(around, d.Sent())
}

// EdgesFrom is Edges for a number of them, no fewer than Sent: there are more of the past then.
func (d *Definition) EdgesFrom(around time.Time, n int) (edges, had []time.Time) {
	z := d.zone()
	k, _ := d.edgeAt(z, around.UnixMicro())
	edges, had = make([]time.Time, n), make([]time.Time, n)
	k, _ = d.edgeAt(z, z.start(d.edgeDay(k-int64(n-1-spareEdges))))
	for i := range edges {
		at := z.start(d.edgeDay(k))
		edges[i], had[i] = instant(at), instant(at-d.slack())
		k = d.after(z, k, 1)
	}
	return edges, had
}

// plain reports whether a statement with the edges around now counts all that matter.
func (c *calendar) plain(d *Definition, s State, now time.Time) bool {
	z := d.zone()
	k, _ := d.edgeAt(z, now.UnixMicro())
	first := z.start(d.edgeDay(k - int64(d.past())))
	return s.TS.UnixMicro() >= first-d.slack() || s.Value+float64(d.past())*d.Rate >= d.Capacity
}
