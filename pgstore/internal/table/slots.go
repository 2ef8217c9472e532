package table

import "time"

// A sliding window's slots are an array: the length of a slot, the number of slots from that of ts
// to the newest, the value, and then the running totals (package slots). So a decision, and the row
// that it writes, are subscripts of the array. ts is the start of the slot of the last write. The
// statements compute, as the algebra does:
//
//	passed	slots from the newest to that of now; below 0 if the newest is ahead
//	newest	the newest total
//	later	passed, but at most as many as move all totals out
//	held	newest less the first total after the totals have moved by later
//
// The granted count is added to newest, behind the totals that moved. A row that its definition
// would not write so is turned away, read, and written anew before it is asked again. If the value
// differs from that in the array, a limit of another kind has written it.

// slotsTake returns the arguments of a bucket's take, in the slot of now. In the conflict's clauses
// excluded.ts is the start of that slot, counted from origin, a whole number of slots after ts.
func slotsTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{
		c.Name, c.Key.Key, int32(c.Shard), d.Rate, c.Count, tick(d), now,
		origin(d, c.Key.Key, c.Before.TS, now), size(d), c.Floor, c.over(),
	}
}

// slotsGrant returns the arguments of a bucket's grant, for the slot of now.
func slotsGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Rate, tick(d), size(d), now}
}

// slotsPrefetch returns the arguments of that grant for several rows. Where lasts is not NULL it
// prefetches, for a lease that ends with the slot of now.
func slotsPrefetch(m *many, now *time.Time) []any {
	sizes := column(m.definitions, func(g *Grant) int32 { return size(&g.Definition) })
	return append(append(m.args(), m.rates(), m.ticks(), sizes, now), m.leases()...)
}
