package table

import "time"

// Tokens come in to a token bucket all the time:
//
//	refilled = least(value + greatest(now - ts, 0) * rate / period, capacity)
//
// The order of operations is the algebra's, so that both have the same number to the last bit. Rates
// are tokens per period, and periods microseconds. An executor that starts looks up each function of
// its statement, which costs more than the call, so no text has more than it needs.
//
// Grants pass over rows that another transaction has locked: xmax is the last one that did, and one
// that the snapshot does not see may not have ended. That is wrong if xmax is a savepoint or an ID of
// another epoch, or if a transaction locks the row just before the write. Then there is an error
// after the lock_timeout, and nothing has happened. (SKIP LOCKED needs neither, but makes a statement
// for many rows slower by a sixth.) Grants turn away calls that the algebra would grant in a pause,
// or by its tolerance. The statements that lock and write decide these.

// bucketTake returns the arguments of a take, which takes a count, and returns a row if and only if
// it took. It leaves no predicate lock under SERIALIZABLE, unless it is in a subtransaction, since
// it reads only through the row that it conflicts with. It reads the clock before it waits for the
// row, so another transaction may leave a later ts behind. greatest then counts no time, rather than
// the same time twice.
func bucketTake(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, d.Rate, micros(d.Period), c.Floor, c.over}
}

// bucketLean returns the arguments of a take that has less to compute, which makes a transaction with
// one INSERT 1.06 times as fast. It turns away what only the tolerance grants, and what may be short
// by a clock that went back. The caller reads the row then, and takes from it as others do.
func bucketLean(c taking, now *time.Time) []any {
	d := &c.Definition
	return []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, c.Count, now, d.Rate, micros(d.Period), c.Count + c.Floor}
}

// bucketMust returns the arguments of a bucket's take, with the mark.
func bucketMust(m must, now *time.Time) []any {
	args := bucketTake(m.taking, now)
	args[len(args)-1] = m.mark
	return args
}

// bucketGive returns the arguments of a give, which gives tokens back and reports spent ones. It does
// not refill the row, since the refill can be added before or after. If tokens are out (ahead has their
// number, and their latest end in seconds since 2000), it leaves room for them and for the refill
// until that end. After the end they fade as fast as the row is refilled.
func bucketGive(g *Give, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), d.Capacity, g.Tokens, now, d.Rate, micros(d.Period), g.Most, g.Spent.Spent, spentEnd(d, &g.Spent)}
}

// bucketGrant returns the arguments of a grant, which takes a count from a row with enough tokens.
func bucketGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Capacity, d.Rate, micros(d.Period), now}
}

// bucketMany returns the arguments of a grant for several rows, in the order given. To subscript an
// array costs less than to unnest it. The range of i is always true. The planner expects few rows
// from it, and goes to each by the index, also by a plan made while the table was small.
func bucketMany(m *many, now *time.Time) []any {
	periods := column(m.definitions, func(g *Grant) float64 { return micros(g.Definition.Period) })
	return append(m.args(), m.capacities(), m.rates(), periods, now)
}

// bucketPrefetch returns the arguments of a grant for several rows without slots. Where lasts is not
// NULL it takes more for a lease, but no more than half of the tokens left then. Row and leases are
// together never more than the capacity: a bucket's is lower by the refill while the lease lasts,
// and a window's lease lasts to the edge.
//
// Afterwards ahead is the tokens that were out, less those spent since; the tokens of calls that may
// still put them back; and the new lease. That is at most half of the capacity, so that the tokens
// of killed processes do not add up. ahead begins from 0 when nothing is out, and no token that was
// out can be taken off any more: for a bucket a second after the end, and when it has faded. The
// sub-select in SET gives a name to what is needed twice: OFFSET 0 keeps the planner from writing
// it out.
func bucketPrefetch(m *many, now *time.Time) []any {
	return append(append(bucketMany(m, now), m.ticks()), m.leases()...)
}
