package bucket

import "time"

// A limit with n shards is n rows with 1/n of rate, capacity and max reserved each. They are
// one limit all the same: together the rows never grant more, and a call is refused only when
// all of them together are short.

// Shard is one shard's share of d, which is d itself if there is only one.
func (d *Definition) Shard() *Definition {
	if d.Shards <= 1 {
		return d
	}
	shard, n := *d, float64(d.Shards)
	shard.Rate, shard.Capacity, shard.MaxReserved, shard.Shards = d.Rate/n, d.Capacity/n, d.MaxReserved/n, 1
	return &shard
}

// Better reports whether a, of two shards' states, is the one to take from:
// the one that has more when both are brought to the later of their instants.
// If only one could serve it is that one, and if none, the one that is ready
// first, since all shards of a limit fill at one rate.
func (d *Definition) Better(a, b State) bool {
	at, shard := Later(a.TS, b.TS), d.Shard()
	return shard.Refill(a, at).Value >= shard.Refill(b, at).Value
}

// Together is about when n tokens can be taken from the shards of d together so that floor
// is left, if nothing else is taken. A store looks around it for the first instant.
func (d *Definition) Together(states []State, now time.Time, n, floor float64) time.Time {
	return d.kind().together(d, states, now, n, floor)
}
