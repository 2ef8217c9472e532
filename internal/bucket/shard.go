package bucket

import "time"

// A limit with n shards has n rows with 1/n of its rate, capacity and max reserved each. Together
// they grant no more than the limit. A call is refused only when all of them together are short.

// Shard returns one shard's share of d: d itself if it has one shard.
func (d *Definition) Shard() *Definition {
	if d.Shards <= 1 {
		return d
	}
	shard, n := *d, float64(d.Shards)
	shard.Rate, shard.Capacity, shard.MaxReserved, shard.Shards = d.Rate/n, d.Capacity/n, d.MaxReserved/n, 1
	return &shard
}

// Better reports whether to take from shard state a and not from b. It is the one with more tokens
// at the later of their instants. So if only one can serve a call it is that one. If neither can,
// it is the one that is ready first, because all shards fill at one rate.
func (d *Definition) Better(a, b State) bool {
	at, shard := Later(a.TS, b.TS), d.Shard()
	return shard.Refill(a, at).Value >= shard.Refill(b, at).Value
}

// Together returns about when n tokens can be taken from all shards of d so that floor is left, if
// nothing else is taken. A store searches around it for the first such instant.
func (d *Definition) Together(states []State, now time.Time, n, floor float64) time.Time {
	return d.kind().together(d, states, now, n, floor)
}
