package bucket

import (
	"math"
	"time"
)

// calendar is a fixed window whose edges lie in a time zone, every few days or months from the
// anchor on. Windows differ in length, so edges are counted: SQL receives the edges around now and
// counts them as refill does. Nothing moves an edge. A pause leaves the value as it is, since a
// quota was sold.
//
// A row's ts is an edge, unless it was written by a definition with another anchor, zone or time.
// Then the first edge after ts does not count, and ts stays until an edge counts. Otherwise two
// definitions in turn would refill a row at the edges of both.
type calendar struct{ level }

func (*calendar) String() string { return kinds[FixedWindow].String() }

// zone returns the time zone of d's edges, or Greenwich if that zone does not exist; no limit's
// definition has such a zone.
func (d *Definition) zone() *zone {
	z, err := zoneOf(d.Zone)
	if err != nil {
		return &zone{location: time.UTC}
	}
	return z
}

// edgeDay returns the day of edge k; the anchor is edge 0. A month that is too short for the
// anchor's day has its edge on its last day.
func (d *Definition) edgeDay(k int64) int64 {
	days, months := d.Every.split()
	if a := d.Anchor; months > 0 {
		return clamped(a.Year, a.Month+time.Month(k*months), a.Day)
	}
	return d.Anchor.Days() + k*days
}

// edge returns the instant of edge k.
func (d *Definition) edge(z *zone, k int64) int64 { return z.start(d.edgeDay(k), d.timeOfDay()) }

func (d *Definition) timeOfDay() int64 { return int64(d.Time / time.Second) }

// edgeAt returns the last edge up to an instant: its number and its instant.
func (d *Definition) edgeAt(z *zone, micros int64) (k, at int64) {
	day, a := floorDiv(z.shown(micros)-d.timeOfDay(), daySeconds), d.Anchor
	if days, months := d.Every.split(); months > 0 {
		date := DateAt(day)
		k = floorDiv(int64(date.Year-a.Year)*12+int64(date.Month-a.Month), months)
	} else {
		k = floorDiv(day-a.Days(), days)
	}
	for at = d.edge(z, k+1); at <= micros; at = d.edge(z, k+1) {
		k++
	}
	for at = d.edge(z, k); at > micros; at = d.edge(z, k) {
		k--
	}
	return k, at
}

// skipped returns how many edges up to edge k do not exist, because the zone skipped their days.
// Only daily edges at midnight can be missing: any other edge of a skipped day stands at that day's
// end.
func (d *Definition) skipped(z *zone, k int64) int64 {
	if d.Every != Day || d.Time != 0 || len(z.skipped) == 0 {
		return 0
	}
	return z.skippedUpTo(d.edgeDay(k)) - z.skippedUpTo(d.Anchor.Days())
}

// between returns the number of edges after edge k up to edge l.
func (d *Definition) between(z *zone, k, l int64) int64 {
	return l - k - (d.skipped(z, l) - d.skipped(z, k))
}

// after returns the number of the n-th edge after edge k.
func (d *Definition) after(z *zone, k, n int64) int64 {
	l := k + n
	for short := n - d.between(z, k, l); short > 0; short = n - d.between(z, k, l) {
		l += short
	}
	return l
}

// slack returns how long after an edge a row's ts still counts as that edge: a zone further behind
// may have written it. Below a week the slack covers summer time only: an anchor that moves by a day each
// day would refill each window a day early.
func (d *Definition) slack() int64 {
	if d.Every < Week {
		return (3 * time.Hour).Microseconds()
	}
	return zones.Microseconds()
}

// had returns the number of the last edge that a row with this ts has had. That is the edge on
// which ts stands, otherwise the first edge after ts, which does not count.
func (d *Definition) had(z *zone, ts int64) int64 {
	k, at := d.edgeAt(z, ts)
	if ts-at > d.slack() {
		k = d.after(z, k, 1)
	}
	return k
}

func (*calendar) last(d *Definition, _, now int64) int64 {
	_, at := d.edgeAt(d.zone(), now)
	return at
}

func (c *calendar) next(d *Definition, ts int64) int64 { return c.nth(d, ts, 1) }

// nth returns the n-th edge that counts for a row with this ts.
func (*calendar) nth(d *Definition, ts, n int64) int64 {
	z := d.zone()
	return d.edge(z, d.after(z, d.had(z, ts), n))
}

func (c *calendar) reach(d *Definition, ts int64, tokens float64) int64 {
	return c.nth(d, ts, int64(math.Ceil(tokens/d.Rate)))
}

func (c *calendar) fresh(d *Definition, _ string, now time.Time) State {
	return State{Value: d.Capacity, TS: instant(c.last(d, 0, now.UnixMicro()))}
}

// refill adds Rate for each edge that counts since ts.
func (*calendar) refill(d *Definition, s State, now time.Time) State {
	ts, z := s.TS.UnixMicro(), d.zone()
	k, last := d.edgeAt(z, now.UnixMicro())
	passed := d.between(z, d.had(z, ts), k)
	if passed <= 0 {
		passed, last = 0, ts
	}
	return State{Value: min(s.Value+float64(passed)*d.Rate, d.Capacity), TS: instant(last), Paused: s.Paused}
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

// full keeps the edges that s has had.
func (*calendar) full(d *Definition, _ string, s State, out Out, now time.Time) State {
	settled := d.Refill(s, now)
	return State{Value: max(settled.Value, d.Capacity-d.Owed(out, now)), TS: settled.TS}
}

// SQL receives the edges that fill an empty row, at most mostEdges, and spareEdges more on either
// side, for a machine whose clock differs from the database's.
const (
	mostEdges  = 64
	spareEdges = 3
)

// past returns the number of edges before now that SQL receives.
func (d *Definition) past() int {
	return int(min(math.Ceil(d.Capacity/d.Rate), mostEdges)) + spareEdges
}

// Sent returns the number of edges that a statement receives.
func (d *Definition) Sent() int { return d.past() + 1 + spareEdges }

// Edges returns edges of a quota by the calendar around an instant, in order. Beside each edge
// stands the first ts of a row that has had it.
func (d *Definition) Edges(around time.Time) (edges, had []time.Time) {
	return d.EdgesFrom(around, d.Sent())
}

// EdgesFrom does what Edges does, for n edges, at least Sent; the additional ones lie in the past.
func (d *Definition) EdgesFrom(around time.Time, n int) (edges, had []time.Time) {
	z := d.zone()
	k, _ := d.edgeAt(z, around.UnixMicro())
	k, before := d.edgeAt(z, d.edge(z, k-int64(n-spareEdges)))
	edges, had = make([]time.Time, n), make([]time.Time, n)
	for i := range edges {
		k = d.after(z, k, 1)
		at := d.edge(z, k)
		edges[i], had[i] = instant(at), instant(min(before+d.slack()+1, at))
		before = at
	}
	return edges, had
}

// plain reports whether the edges that a statement receives around now include all that matter to
// s.
func (c *calendar) plain(d *Definition, s State, now time.Time) bool {
	z := d.zone()
	k, _ := d.edgeAt(z, now.UnixMicro())
	return d.between(z, d.had(z, s.TS.UnixMicro()), k) <= int64(d.past()) || s.Value+float64(d.past())*d.Rate >= d.Capacity
}
