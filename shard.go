package ratelimit

import (
	"math"
	"slices"
	"time"
)

// A limit with n shards is n rows with 1/n of rate, capacity and max reserved
// each. They are one limit all the same: what the rows grant together never
// exceeds it, and a call is refused only when all of them together are short.

// Shard is one shard's share of d.
func (d Definition) Shard() Definition {
	n := float64(d.Shards)
	d.Rate, d.Capacity, d.MaxReserved, d.Shards = d.Rate/n, d.Capacity/n, d.MaxReserved/n, 1
	return d
}

// Spread says how many tokens of a to take from each of its shards, in states
// as they are at now; ok is false when they are short together.
//
// It touches as few rows as it can without keeping the caller waiting. What
// can be had at once comes from the fullest shard, or if none has enough, from
// the fullest ones together. A reservation that must wait goes to the shard
// that is ready first, unless several together are ready in less than half the
// time, or that shard may not go so deep into debt.
func (a Ask) Spread(now time.Time, states []State) (counts []float64, ok bool) {
	if len(states) == 1 { // the very decision that Found promises
		_, ok = a.Definition.Take(states[0], now, a.Count, a.Floor)
		return []float64{a.Count}, ok
	}
	shard := a.Definition.Shard()
	values := make([]float64, len(states))
	for i, s := range states {
		values[i] = shard.Settle(s, now).Value
	}
	if counts, ok = a.draw(values, 0); ok || a.Floor == 0 {
		return counts, ok
	}
	floor := a.Floor / float64(len(states))
	slack := tolerance(a.Count, shard.Capacity, floor)
	best, level := fullest(values), a.level(values, floor)
	if alone := values[best] - a.Count; alone >= floor-slack && alone >= 2*level {
		counts = make([]float64, len(values))
		counts[best] = a.Count
		return counts, true
	}
	return a.draw(values, level)
}

// draw takes a's count from the shards with the given values, leaving at
// least floor in each: from the fullest alone, or from the fullest first.
func (a Ask) draw(values []float64, floor float64) (counts []float64, ok bool) {
	counts = make([]float64, len(values))
	slack := tolerance(a.Count, a.Definition.Capacity, floor)
	left, rest := a.Count, slices.Clone(values)
	for range rest {
		i := fullest(rest)
		have := rest[i] - floor
		if have >= left-slack {
			counts[i] = left
			return counts, true
		}
		if have <= 0 {
			break
		}
		counts[i], left, rest[i] = have, left-have, math.Inf(-1)
	}
	return nil, false
}

// level is the highest value, not below floor, at which the shards together
// have a's count above it: leaving all of them there makes the last of them
// ready as early as can be.
func (a Ask) level(values []float64, floor float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	slices.Reverse(sorted)
	sum := 0.0
	for i, v := range sorted {
		sum += v
		level := (sum - a.Count) / float64(i+1)
		if i+1 == len(sorted) || level >= sorted[i+1] {
			return max(level, floor)
		}
	}
	return floor
}

// Fill says how to give n tokens back to d's shards, which hold values: to the
// emptiest first, and what no shard has room for to none.
func (d Definition) Fill(values []float64, n float64) []float64 {
	room := make([]float64, len(values)) // what is missing, as if it were held
	most := 0.0
	for i, v := range values {
		room[i] = d.Shard().Capacity - v
		most += max(0, room[i])
	}
	a := Ask{Request: Request{Count: min(n, most)}, Definition: d}
	counts, ok := a.draw(room, a.level(room, 0))
	if !ok {
		return make([]float64, len(values))
	}
	return counts
}

func fullest(values []float64) int {
	best := 0
	for i, v := range values {
		if v > values[best] {
			best = i
		}
	}
	return best
}

// Better reports whether a, of two shards' states, is the one to take from:
// the one that has more when both are brought to the later of their instants.
// If only one could serve it is that one, and if none, the one that is ready
// first, since all shards of a limit fill at one rate.
func (d Definition) Better(a, b State) bool {
	at := a.TS
	if b.TS.After(at) {
		at = b.TS
	}
	shard := d.Shard()
	return shard.Settle(a, at).Value >= shard.Settle(b, at).Value
}

// FoundAmong is Found against the states of all shards.
func (a Ask) FoundAmong(states []State, now time.Time) Status {
	if len(states) == 1 {
		return a.Found(states[0], now)
	}
	counts, ok := a.Spread(now, states)
	at := now
	if ok {
		at = a.ready(states, counts, now)
	} else {
		at = a.earliest(states, now)
	}
	return a.statusAmong(ok, states, now, at)
}

// TakenFrom is the status of a when counts were taken from its shards at now
// and left after behind.
func (a Ask) TakenFrom(after []State, counts []float64, now time.Time) Status {
	return a.statusAmong(true, after, now, a.paid(after, counts, now))
}

// ready is when the debts are paid that taking counts leaves behind.
func (a Ask) ready(states []State, counts []float64, now time.Time) time.Time {
	shard := a.Definition.Shard()
	after := make([]State, len(states))
	for i, s := range states {
		after[i] = shard.Settle(s, now)
		after[i].Value -= counts[i]
	}
	return a.paid(after, counts, now)
}

// paid is when every shard that counts were taken from is back at 0.
func (a Ask) paid(after []State, counts []float64, now time.Time) time.Time {
	shard := a.Definition.Shard()
	at := now
	for i, s := range after {
		if counts[i] == 0 || s.Value >= -tolerance(s.Value, a.Count, shard.Capacity) {
			continue
		}
		if paid := shard.When(s, 0); paid.After(at) {
			at = paid
		}
	}
	return at
}

// earliest is the first instant after now at which the shards are not short.
// They fill at different times, so it is looked for by halving; the promise
// is honest because the decision itself is what is asked.
func (a Ask) earliest(states []State, now time.Time) time.Time {
	enough := func(wait time.Duration) bool {
		_, ok := a.Spread(now.Add(wait), states)
		return ok
	}
	most := max(a.Definition.Tick(), time.Microsecond)
	for !enough(most) && most < math.MaxInt64/4 {
		most *= 2
	}
	least := time.Duration(0)
	for most-least > time.Microsecond {
		middle := (least + (most-least)/2).Truncate(time.Microsecond)
		if enough(middle) {
			most = middle
		} else {
			least = middle
		}
	}
	return now.Add(most)
}

func (a Ask) statusAmong(ok bool, states []State, now, retryAt time.Time) Status {
	shard := a.Definition.Shard()
	total, full := State{TS: now}, now
	for _, s := range states {
		settled := shard.Settle(s, now)
		total.Value += settled.Value
		if at := shard.When(settled, shard.Capacity); at.After(full) {
			full = at
		}
	}
	status := a.status(ok, total, now, retryAt)
	status.ResetAfter = full.Sub(now)
	return status
}
