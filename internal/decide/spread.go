package decide

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Spread returns how many tokens to take from each of a's shards at now. ok is false if they are
// short together.
//
// It takes from as few rows as it can without delaying the caller. Available tokens come from the
// fullest shard, or if that has too few, from the fullest ones together. A reservation that must
// wait goes to the shard that is ready first, with two exceptions: several shards together are
// ready in less than half the time, or that shard may not take on as much debt.
func (a *Demand) Spread(now time.Time, states []bucket.State) (counts []float64, ok bool) {
	if len(states) == 1 { // the same decision as the row's
		_, ok = a.Definition.Take(states[0], now, a.Count, a.Floor)
		return []float64{a.Count}, ok
	}
	shard := a.Definition.Shard()
	values := make([]float64, len(states))
	for i, s := range states {
		values[i] = shard.Refill(s, now).Value
	}
	if a.Floor > 0 && !a.leaves(values) {
		return nil, false
	}
	if counts, ok = a.draw(values, 0); ok || a.Floor >= 0 {
		return counts, ok
	}
	floor := a.Floor / float64(len(states))
	if a.Definition.Slotted() {
		return a.spreadAhead(now, states, floor)
	}
	best, level := fullest(values), a.level(values, floor)
	if alone := values[best] - a.Count; alone >= floor-a.slack(1, floor) && alone >= 2*level {
		counts = make([]float64, len(values))
		counts[best] = a.Count
		return counts, true
	}
	return a.draw(values, level)
}

// spreadAhead spreads a reservation that must wait among the shards of a sliding window. It goes to
// the shard with the first free slot, with two exceptions: several shards together have slots in
// less than half the time, or no slot has room for all of it.
func (a *Demand) spreadAhead(now time.Time, states []bucket.State, floor float64) (counts []float64, ok bool) {
	shard := a.Definition.Shard()
	settled, best, due := make([]bucket.State, len(states)), -1, time.Time{}
	for i, s := range states {
		settled[i] = shard.Refill(s, now)
		if after, ok := shard.Take(s, now, a.Count, floor); ok {
			if at := shard.Due(after, now, a.Count); best < 0 || at.Before(due) {
				best, due = i, at
			}
		}
	}
	if a.Count == 0 { // any slot serves it
		return make([]float64, len(states)), best >= 0
	}
	together := func(wait time.Duration) (counts []float64, ok bool) {
		values := make([]float64, len(settled))
		for i, s := range settled {
			values[i] = shard.AvailableBy(s, now, now.Add(wait))
		}
		return a.draw(values, 0)
	}
	wait := shard.Longest(floor)
	if _, ok := together(wait); !ok {
		return nil, false
	}
	wait = earliest(0, func(wait time.Duration) bool { _, ok := together(wait); return ok })
	if best >= 0 && due.Sub(now) <= 2*wait {
		counts = make([]float64, len(states))
		counts[best] = a.Count
		return counts, true
	}
	return together(wait)
}

// draw takes a's count from shards with these values, and leaves at least floor in each. It takes
// from the fullest alone, or from the fullest first. The last of several may end a rounding error
// below floor: the rows must count all the tokens, or would grant the missing ones again and again.
func (a *Demand) draw(values []float64, floor float64) (counts []float64, ok bool) {
	counts = make([]float64, len(values))
	order := UpTo(len(values)) // the fullest first
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(values[j], values[i]) })
	if best := order[0]; values[best]-floor >= a.Count-a.slack(1, floor) {
		counts[best] = a.Count
		return counts, true
	}
	left := a.Count
	for taken, i := range order {
		have := values[i] - floor
		if have <= 0 {
			break
		}
		if have >= left-a.slack(len(values), floor)*(1+float64(taken)/rounds) {
			counts[i] = left
			return counts, true
		}
		counts[i], left = have, left-have
	}
	return nil, false
}

// leaves reports whether a's shards together have its count above its floor.
func (a *Demand) leaves(values []float64) bool {
	left := -a.Count
	for _, v := range values {
		left += v
	}
	return left >= a.Floor-a.slack(len(values), a.Floor)
}

// slack returns the tolerance of taking a's count from some of its shards.
func (a *Demand) slack(shards int, floor float64) float64 {
	return bucket.Tolerance(a.Count, a.Definition.Shard().Capacity*float64(shards), floor)
}

// rounds is how many subtractions one tolerance covers.
const rounds = 64

// level returns the highest value, at least floor, above which the shards together have a's count.
// If all of them end at that value, the last of them is ready as early as possible.
func (a *Demand) level(values []float64, floor float64) float64 {
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

// Fill returns how many of n tokens to give back to each of a's shards at now, to the emptiest
// first. Tokens for which no shard has room are dropped.
func (a *Demand) Fill(states []bucket.State, n float64, now time.Time) []float64 {
	if len(states) == 1 {
		return []float64{n}
	}
	shard := a.Definition.Shard()
	room := make([]float64, len(states)) // the missing tokens, as draw's values
	most := 0.0
	for i, s := range states {
		room[i] = shard.Missing(shard.Refill(s, now))
		most += max(0, room[i])
	}
	give := Demand{Request: ratelimit.Request{Count: min(n, most)}, Definition: a.Definition}
	counts, ok := give.draw(room, give.level(room, 0))
	if !ok {
		return make([]float64, len(states))
	}
	return counts
}

func fullest(values []float64) int { return slices.Index(values, slices.Max(values)) }

// ready returns the first instant after now at which the shards have enough. Several shards fill at
// different times, so ready searches for it. The decision itself tests each instant, so the answer
// is exact.
func (a *Demand) ready(states []bucket.State, now time.Time) time.Time {
	if len(states) == 1 {
		return a.Definition.Ready(states[0], now, a.Count, a.Floor)
	}
	return now.Add(earliest(a.Definition.Together(states, now, a.Count, a.Floor).Sub(now), func(wait time.Duration) bool {
		_, ok := a.Spread(now.Add(wait), states)
		return ok
	}))
}

// earliest returns the shortest wait above 0 that is enough, in whole microseconds. It starts at a
// likely wait, looks further and further away, and then halves.
func earliest(likely time.Duration, enough func(time.Duration) bool) time.Duration {
	const farthest = math.MaxInt64 / 4
	least, most, step := time.Duration(0), max(likely, time.Microsecond), time.Microsecond
	for !enough(most) && most < farthest {
		least, most, step = most, most+step, 2*step
	}
	for step = time.Microsecond; most-step > least && enough(most-step); step *= 2 {
		most -= step
	}
	least = max(least, most-step)
	for most-least > time.Microsecond {
		middle := (least + (most-least)/2).Truncate(time.Microsecond)
		if enough(middle) {
			most = middle
		} else {
			least = middle
		}
	}
	return most
}
