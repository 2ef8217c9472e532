package table

import "time"

// Tokens come in to a token bucket all the time:
//
//	refilled = least(value + greatest(now - ts, 0) * rate / period, capacity)
//
// The order of operations is that of the algebra, so both get the same number to the last bit.
// Rates are tokens per period, and periods microseconds. An executor looks up each function of its
// statement when it starts. That costs more than calling the function, so no statement has more
// functions than it needs.
//
// Grants pass over rows that another transaction has locked. xmax is the last transaction that
// locked the row. If the snapshot does not see it, it may not have ended. That test errs if xmax is
// a savepoint or an ID of another epoch, or if a transaction locks the row just before the write.
// Then there is an error after the lock_timeout, and nothing has happened. (SKIP LOCKED needs
// neither, but makes a statement for many rows slower by a sixth.) Grants turn away calls during a
// pause, and calls that the algebra grants only by its tolerance. The statements that lock and
// write decide these.

// bucketTake returns the arguments of a take. It takes a count, and returns a row if and only if it
// took. It reads only through the row that it conflicts with, so it leaves no predicate lock under
// SERIALIZABLE, except in a subtransaction. It reads the clock before it waits for the row, so
// another transaction may leave a later ts behind. greatest then counts no time, and so no time
// twice.
func bucketTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, d.Rate, d.Micros(), c.Floor, c.over()}
}

// bucketLean returns the arguments of a take that has less to compute, which makes a transaction
// with one INSERT 1.06 times as fast. It turns away what only the tolerance grants, and what may be
// short by a clock that went back. The caller then reads the row, and takes by bucketTake.
func bucketLean(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, d.Rate, d.Micros(), c.Count + c.Floor}
}

// bucketMust returns the arguments of a must: a take's, with the mark in the last place.
func bucketMust(m must, now *time.Time) []any {
	args := bucketTake(m.taking, now)
	args[len(args)-1] = m.mark
	return args
}

// bucketGive returns the arguments of a give, which gives tokens back and reports spent ones. It
// does not refill the row, since the refill can be added before or after. If tokens are out, it
// leaves room for them and for the refill until their latest end. After the end they fade as fast
// as the row is refilled. ahead has their number and that end, in seconds since 2000.
func bucketGive(g *Give, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), d.Capacity, g.Tokens, now, d.Rate, d.Micros(), g.Most, g.Spent.Spent, spentEnd(d, &g.Spent)}
}

// bucketGrant returns the arguments of a grant, which takes a count from a row with enough tokens.
func bucketGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Capacity, d.Rate, d.Micros(), now}
}

// bucketMany returns the arguments of a grant for several rows, in the order given. The statement
// subscripts its arrays, which costs less than unnesting them. Its range of i is always true. It
// makes the planner expect few rows and find each by the index, even in a plan made while the table
// was small.
func bucketMany(m *many, now *time.Time) []any {
	periods := column(m.definitions, func(g *Grant) float64 { return g.Definition.Micros() })
	return append(m.args(), m.capacities(), m.rates(), periods, now)
}

// bucketPrefetch returns the arguments of a grant for several rows without slots. Where lasts is
// not NULL it takes more for a lease, at most half of the tokens that are left. Row and leases
// together never exceed the capacity: a bucket counts with a capacity lower by the refill during
// the lease, and a window's lease ends with the window.
//
// A row above the whole capacity has been raised meanwhile. A prefetch that no call shares takes
// nothing from it, since it would cut the row.
//
// Afterwards ahead has the tokens that were out less those spent since, the tokens of calls that
// may still put them back, and the new lease. That is at most half of the capacity, so the tokens
// of killed processes do not add up. ahead begins from 0 when nothing is out and nothing can be
// subtracted any more. For a bucket that is a second after the end, once it has faded. The
// sub-select in SET names a value that is used twice; OFFSET 0 keeps the planner from computing it
// twice.
func bucketPrefetch(m *many, now *time.Time) []any {
	whole := column(m.definitions, func(g *Grant) float64 { return g.Definition.Capacity })
	return append(append(append(bucketMany(m, now), m.ticks()), m.leases()...), whole)
}
