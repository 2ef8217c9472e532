package table

import "time"

// The edges of a quota by the calendar are not a period apart, so they are arguments: the edges
// around now, ascending. Beside each stands the first ts of a row that has had the edge. The refill
// is Rate for each edge up to now that the row has not had. A give is a window's, which counts no
// edges. A row that stands on no edge has had the first one after it: see package bucket,
// calendar.go.
//
// The machine's clock chooses the edges that are sent, and the database's clock decides by them. A
// row is turned away if the database's clock is outside of the edges. It is also turned away if it
// is older than the first edge and would not be full by all edges up to now. The caller reads it,
// and sends other edges or writes it anew.

// calendarTake returns the arguments of a bucket's take. excluded.ts is the edge before now. If
// that edge was not sent, excluded.ts is the last argument, an edge of long ago. A new row with
// that ts would count as full, so the caller must read the answer as a refusal.
func calendarTake(c taking, now *time.Time) []any {
	d := &c.Definition
	at := around(now)
	if !c.reserve && !c.Past.IsZero() && now == nil {
		at = c.Past // the database's clock has shown it
	}
	edges, had := d.Edges(at)
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, edges, had, d.Rate, c.Floor, c.over(), d.Fresh("", longAgo).TS}
}

// calendarMust returns the arguments of a calendar's take, with the mark in the last place. If now
// is outside of the edges, the error has the mark and no state.
func calendarMust(m must, now *time.Time) []any {
	args := calendarTake(m.taking, now)
	return append(args[:len(args)-2], m.mark)
}

// calendarGrant returns the arguments of a bucket's grant.
func calendarGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	edges, had := d.Edges(around(now))
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Capacity, d.Rate, now, edges, had}
}

// calendarPrefetch returns the arguments of a bucket's grant for several rows. Where lasts is not
// NULL it prefetches, for a lease to the next edge. The edges are those of all definitions, as many
// for each.
func calendarPrefetch(m *many, now *time.Time) []any {
	edges, had := m.edges(around(now))
	return append(append(m.args(), m.capacities(), m.rates(), edges, had, int32(m.sent()), now), m.leases()...)
}
