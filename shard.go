package ratelimit

// A limit with n shards is n rows with 1/n of rate, capacity and max reserved
// each. They are one limit all the same: what the rows grant together never
// exceeds it, and a call is refused only when all of them together are short.

// Shard is one shard's share of d.
func (d Definition) Shard() Definition {
	n := float64(d.Shards)
	d.Rate, d.Capacity, d.MaxReserved, d.Shards = d.Rate/n, d.Capacity/n, d.MaxReserved/n, 1
	return d
}

// Better reports whether a, of two shards' states, is the one to take from:
// the one that has more when both are brought to the later of their instants.
// If only one could serve it is that one, and if none, the one that is ready
// first, since all shards of a limit fill at one rate.
func (d Definition) Better(a, b State) bool {
	at, shard := later(a.TS, b.TS), d.Shard()
	return shard.Settle(a, at).Value >= shard.Settle(b, at).Value
}
