package table

import "time"

// A fixed window is a token bucket whose clock stands still between its edges, which are a period
// apart. So ts is an edge, and the last edge before now decides.

// windowTake returns the arguments of a bucket's take. In the conflict's clauses excluded.ts is the
// edge before now, counted from origin. A row may have other edges, if it was paused or had another
// Start. For such a row excluded.ts is no edge, so it is turned away: the caller reads it, and
// sends its ts as origin. If a pause has ended since the edge, the caller must say that it is over.
func windowTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{
		c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, d.Micros(), now,
		origin(d, c.Key.Key, c.Before.TS, now), d.Rate, c.Floor, c.over(),
	}
}

// windowMust returns the arguments of a window's take, with the mark in the last place.
func windowMust(m must, now *time.Time) []any {
	args := windowTake(m.taking, now)
	args[len(args)-1] = m.mark
	return args
}

// windowGive returns the arguments of a bucket's give. Tokens that are out end with their window,
// and until then nothing comes in. The proposed ts is an edge, so the proposed ahead carries now.
func windowGive(g *Give, now *time.Time) []any {
	d := &g.Definition
	return []any{
		g.Name, g.Key.Key, int32(g.Shard), d.Capacity, g.Tokens, d.Micros(), now,
		origin(d, g.Key.Key, g.Before.TS, now), g.Most, g.Spent.Spent, spentEnd(d, &g.Spent),
	}
}
