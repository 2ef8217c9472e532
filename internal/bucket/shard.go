package bucket

import "time"

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
func (d *Definition) Better(a, b State) bool {
	at, shard := later(a.TS, b.TS), d.Shard()
	return shard.Settle(a, at).Value >= shard.Settle(b, at).Value
}

// Share is what each of n rows holds that hold together what d's shards do at now,
// debt and pause included. To a definition with more rows a missing one would be full,
// so those past the n-th must be empty.
func (d *Definition) Share(states []State, now time.Time, n int) (share, empty State) {
	shard := d.Shard()
	for i, s := range states {
		s = shard.Settle(s, now)
		share.Value += s.Value / float64(n)
		share.Paused = later(share.Paused, s.Paused)
		if i == 0 || s.TS.After(share.TS) { // paused: nothing comes in before the last of them
			share.TS = s.TS
		}
	}
	empty = State{TS: share.TS, Paused: share.Paused}
	if d.Kind == SlidingWindow {
		return d.shareSlots(states, share, now, n)
	}
	return share, empty
}
