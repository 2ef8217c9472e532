package bucket

import (
	"math"
	"time"
)

// calendar is a fixed window whose edges are instants of days in a time zone: every few days or
// months from the anchor on. They differ in length, so they are counted and not measured: SQL
// receives the edges around now, and counts as refill does. Nothing moves them, not even a pause,
// which also leaves the value as it is: a quota was sold.
//
// A row's ts is an edge, unless another definition has written it: one with another anchor, zone
// or time. Then the first edge after it does not count, and ts stays until an edge counts.
// Otherwise two definitions in turn would refill a row at the edges of both.
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
	days, months := d.Every.split()
	if a := d.Anchor; months > 0 {
		return clamped(a.Year, a.Month+time.Month(k*months), a.Day)
	}
	return d.Anchor.Days() + k*days
}

// edge is when the k-th edge is.
func (d *Definition) edge(z *zone, k int64) int64 { return z.start(d.edgeDay(k), d.timeOfDay()) }

func (d *Definition) timeOfDay() int64 { return int64(d.Time / time.Second) }

// edgeAt is the last edge up to an instant: its number, and when it is.
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

// skipped is how many of the edges up to the k-th there are not, being days that the zone
// never had. Days that begin at another time than midnight are only shorter.
func (d *Definition) skipped(z *zone, k int64) int64 {
	if d.Every != Day || d.Time != 0 || len(z.skipped) == 0 {
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

// slack returns for how long after an edge a row's ts stands on it: the row was written by the
// calendar of another time zone, which is behind. For single days it is enough for summer time.
func (d *Definition) slack() int64 {
	if d.Every == Day {
		return (3 * time.Hour).Microseconds()
	}
	return zones.Microseconds()
}

// had is the number of the edge that a row with a ts has had: the last one up to it, or if it
// does not stand on that, the first one after it, which does not count.
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

// nth is the n-th edge that counts for a row with a ts.
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
// the first ts of a row that has had it.
func (d *Definition) Edges(around time.Time) (edges, had []time.Time) {
	return d.EdgesFrom(around, d.Sent())
}

// EdgesFrom is Edges for a number of them, no fewer than Sent: there are more of the past then.
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

// plain reports whether a statement with the edges around now counts all that matter.
func (c *calendar) plain(d *Definition, s State, now time.Time) bool {
	z := d.zone()
	k, _ := d.edgeAt(z, now.UnixMicro())
	return d.between(z, d.had(z, s.TS.UnixMicro()), k) <= int64(d.past()) || s.Value+float64(d.past())*d.Rate >= d.Capacity
}
