package table

import "time"

// A sliding window's slots are an array: the length of a slot, how many slots the newest is after
// that of ts, the value, and then the running totals (package slots), so that a decision, and the
// row that it writes, are subscripts of it. ts is the start of the slot that was written last. As
// the algebra has it:
//
//	passed	how many slots the one of now is after the newest; below 0 if that is ahead
//	newest	the newest total
//	later	as many as passed, and no more than move all totals out
//	held	newest less the total that is first when the slots have moved by later
//
// The granted count is added to newest, behind the totals that moved. A row that is not as its
// definition writes it is turned away, read, and written anew before it is asked again. If the value
// is another than in the array, a limit of another kind has written it.

// slotsTake returns the arguments of a bucket's take, in the slot of now. In the conflict's clauses
// excluded.ts is the start of that slot, counted from origin, a whole number of slots after ts.
func slotsTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{
		c.Name, c.Key.Key, int32(c.Shard), d.Rate, c.Count, tick(d), now,
		origin(d, c.Key.Key, c.Before.TS, now), size(d), c.Floor, c.over,
	}
}

// slotsGrant returns the arguments of a bucket's grant, in the slot of now.
func slotsGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Rate, tick(d), size(d), now}
}

// slotsPrefetch returns the arguments of that grant for several rows, which prefetches where lasts is
// not NULL, for a lease that ends with the slot of now.
func slotsPrefetch(m *many, now *time.Time) []any {
	sizes := column(m.definitions, func(g *Grant) int32 { return size(&g.Definition) })
	return append(append(m.args(), m.rates(), m.ticks(), sizes, now), m.leases()...)
}
