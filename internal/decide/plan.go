package decide

import (
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// View holds the states of all shards of a call's limits at one instant, in the order of its
// demands.
type View struct {
	States [][]bucket.State
	At     time.Time
}

// Read sets the state of each shard that was not found to full.
func (a *Demand) Read(states []bucket.State, found []bool, at time.Time) []bucket.State {
	each := a.Definition.Shard()
	for shard := range states {
		if !found[shard] {
			states[shard] = each.Fresh(a.Key, at)
		}
	}
	return states
}

// Plan returns the changes of a call, each with the row that it leaves. It returns false if one of
// the limits is short or paused; for a call that takes from the first of several, if all are.
func (c *Call) Plan(v View) ([]Change, bool) {
	changes := make([]Change, 0, len(c.Demands))
	for i := range c.Demands {
		with, ok := c.plan(changes, i, v)
		if ok == c.First {
			return with, ok
		}
		changes = with
	}
	return changes, !c.First
}

// plan appends the changes for one demand.
func (c *Call) plan(changes []Change, i int, v View) ([]Change, bool) {
	a := c.ask(i, v)
	if !c.Reserve && paused(v.States[i], v.At) {
		return nil, false
	}
	counts, ok := a.Spread(v.At, v.States[i])
	if !ok {
		return nil, false
	}
	least, first := a.leastChange(v.States[i], v.At), len(changes)
	for shard, n := range counts {
		if n > 0 || a.Count == 0 && shard == least {
			changes = append(changes, a.Change(i, shard, n))
			changes[len(changes)-1].plan(v)
		}
	}
	if len(changes) > first+1 && a.Definition.Slotted() {
		inOneSlot(changes[first:], v.At)
	}
	return changes, true
}

// ask returns the demand at place i. For an AtMost call its count is what is available; if that is
// 0, the demand waits for one token.
func (c *Call) ask(i int, v View) *Demand {
	a := &c.Demands[i]
	if !c.AtMost() {
		return a
	}
	some := *a
	some.Count = max(1, min(a.Count, a.wholeTokens(v.States[i], v.At)))
	return &some
}

// wholeTokens returns the whole tokens in all of a's shards.
func (a *Demand) wholeTokens(states []bucket.State, now time.Time) float64 {
	if len(states) == 1 {
		return a.Definition.Whole(states[0], now, a.Floor)
	}
	shard, sum, most := a.Definition.Shard(), 0.0, -a.Floor
	for _, s := range states {
		value := shard.Refill(s, now).Value
		sum += max(0, value)
		most += value
	}
	if a.Floor > 0 {
		sum = max(0, min(sum, most))
	}
	return math.Floor(sum + bucket.Tolerance(sum, 1, a.Definition.Capacity)/2)
}

// leastChange returns the shard that serves a count of 0: the fullest one, because a shard not
// known to exist counts as empty.
func (a *Demand) leastChange(states []bucket.State, now time.Time) int {
	if a.Count > 0 || !a.Sharded() {
		return 0
	}
	values, each := make([]float64, len(states)), a.Definition.Shard()
	for shard, s := range states {
		values[shard] = each.Refill(s, now).Value
	}
	return fullest(values)
}

// plan fills in a change from a view.
func (c *Change) plan(v View) {
	c.Before = v.States[c.Demand][c.Shard]
	c.Past = v.At
	var ok bool
	if c.After, ok = c.Definition.Take(c.Before, v.At, c.Count, c.Floor); !ok {
		// Spread has granted this count: the rounding error of several rows is in this one, which
		// alone could not tolerate it.
		c.After = c.Definition.Spend(c.Before, v.At, c.Count)
		c.Floor = min(c.Floor, c.After.Value)
	}
}

// inOneSlot moves the changes of one sliding window to the same slot, the latest one that a
// reservation got. The work runs once, and every row must count it then. A row that is ahead of
// now, from a clock that went back, keeps a slot of its own: moving the other rows' clocks to it
// would end slots that still count.
func inOneSlot(changes []Change, now time.Time) {
	var from time.Time
	for i := range changes {
		c := &changes[i]
		if at := c.Definition.Due(c.After, now, c.Count); at.After(now) {
			from = bucket.Later(from, at)
		}
	}
	if from.IsZero() {
		return
	}
	for i := range changes {
		c := &changes[i]
		c.After = c.Definition.TakeFrom(c.Before, now, c.Count, from)
	}
}

// paused reports whether a limit is paused. A pause is in all of its rows.
func paused(states []bucket.State, now time.Time) bool {
	return slices.ContainsFunc(states, func(s bucket.State) bool { return s.Paused.After(now) })
}

// Chosen returns the call of the one demand that changes serve, and the changes for that call. c
// takes from the first of several, and Plan made the changes.
func (c *Call) Chosen(changes []Change) (*Call, []Change) {
	i := changes[0].Demand
	for j := range changes {
		changes[j].Demand = 0
	}
	return &Call{Reserve: c.Reserve, First: true, Demands: c.Demands[i : i+1]}, changes
}
