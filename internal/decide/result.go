package decide

import (
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Granted returns the result of a call after all changes were made. known has the states of its
// shards after the changes; limits with one row need none.
func (c *Call) Granted(changes []Change, known View) ratelimit.Result {
	statuses := make([]ratelimit.Status, 0, len(c.Demands))
	for first, last := 0, 0; first < len(changes); first = last {
		i := changes[first].Demand
		for last < len(changes) && changes[last].Demand == i {
			last++
		}
		statuses = append(statuses, ratelimit.Status{})
		c.reportGranted(&statuses[len(statuses)-1], i, changes[first:last], known)
	}
	return c.result(statuses)
}

// reportGranted sets s, which is zero, to the status of the demand at place i; changes are those
// made for it.
func (c *Call) reportGranted(s *ratelimit.Status, i int, changes []Change, known View) {
	a := &c.Demands[i]
	if a.Sharded() {
		*s = a.takenAmong(known.States[i], changes, known.At)
	} else {
		d := &a.Definition
		at, due, settled := a.counts(d, changes[0].After, known.At)
		h := holdingOf(d, settled, at)
		a.report(s, true, &h, at, due)
	}
	s.Taken = a.Count
	if c.AtMost() {
		s.Taken, s.Request.Count = taken(changes), c.asked
	}
	for i := range changes {
		s.Before += changes[i].cost(known.At)
	}
}

// taken returns the whole tokens that changes took.
func taken(changes []Change) float64 {
	sum := 0.0
	for i := range changes {
		sum += changes[i].Count
	}
	return math.Round(sum)
}

// cost returns how far a change lowered the value of its row at an instant. That is its count. If
// the newest slot is in the future the value is a time, and cost compares the planned states.
func (c *Change) cost(at time.Time) float64 {
	if after := &c.After; after.Slots == nil || after.Slots.Ahead == 0 {
		return c.Count
	}
	value := func(s bucket.State) float64 { return c.Definition.ValueAt(c.Definition.Refill(s, at), at) }
	return value(c.Before) - value(c.After)
}

// Receipted returns the result of Granted with a receipt of the changes. For one change it makes
// one allocation, or two with a taker, or three for a reservation.
func (c *Call) Receipted(changes []Change, known View, taker string, conn any) (result ratelimit.Result) {
	if len(changes) > 1 {
		result = c.Granted(changes, known)
		result.Receipt = c.Receipt(changes, taker, conn, known.At)
		return result
	}
	a, left := &c.Demands[changes[0].Demand], []receipt.Left(nil)
	if c.Reserve {
		left = leftBy(changes)
	}
	paid := receipt.Payment{Tokens: a.Count}
	if c.Plain {
		at, due, settled := a.counts(&a.Definition, changes[0].After, known.At)
		a.report(&result.Status, true, &holding{settled.Value, settled.Paused, a.Definition.When(settled, a.Definition.Capacity)}, at, due)
		result.Taken, result.Before = a.Count, result.Value+a.Count
	} else {
		c.reportGranted(&result.Status, changes[0].Demand, changes, known)
		paid = c.payment(&changes[0], nil)
	}
	result.Receipt = receipt.Own(receipt.Limit{Definition: a.Definition, Key: a.Key}, paid, left, taker, conn, known.At)
	return result
}

// Receipt returns a receipt of changes. taker names their transaction, on the connection conn; it
// is "" once they are committed.
func (c *Call) Receipt(changes []Change, taker string, conn any, at time.Time) *ratelimit.Receipt {
	payments := make([]receipt.Payment, len(changes))
	for i := range changes {
		ch := &changes[i]
		if i > 0 && changes[i-1].Demand == ch.Demand {
			payments[i] = c.payment(ch, payments[i-1].Limit)
		} else {
			payments[i] = c.payment(ch, c.Demands[ch.Demand].Paid())
		}
	}
	var left []receipt.Left
	if c.Reserve {
		left = leftBy(changes)
	}
	return receipt.New(payments, left, taker, conn, at)
}

// Paid returns a's limit and key for receipts.
func (a *Demand) Paid() *receipt.Limit {
	return &receipt.Limit{Definition: a.Definition, Key: a.Key}
}

// payment returns the payment that a change makes for a limit.
func (c *Call) payment(ch *Change, limit *receipt.Limit) receipt.Payment {
	place := c.Demands[ch.Demand].index
	if c.First { // the result has the granted limit only
		place = 0
	}
	return receipt.Payment{Limit: limit, Place: place, Shard: ch.Shard, Slot: ch.Definition.Slot(ch.After), Tokens: ch.Count}
}

// leftBy returns the states that a reservation's changes leave behind.
func leftBy(changes []Change) []receipt.Left {
	left := make([]receipt.Left, len(changes))
	for i := range changes {
		after := &changes[i].After
		left[i] = receipt.Left{Value: after.Value, TS: after.TS, Paused: after.Paused}
	}
	return left
}

// Partly returns the result of a granted call that took from some of its limits only. The other
// limits let the call pass; they have no place in the receipt.
func (c *Call) Partly(changes []Change, at time.Time, taker string, conn any) ratelimit.Result {
	statuses := make([]ratelimit.Status, len(c.Demands))
	for i := range statuses {
		a := &c.Demands[i]
		statuses[i] = ratelimit.Status{Request: a.Request, Capacity: a.Definition.Capacity, At: at}
	}
	var some Call
	for i := range changes {
		of := changes[i].Demand
		statuses[of] = ratelimit.Status{}
		c.reportGranted(&statuses[of], of, changes[i:i+1], View{At: at})
		some.Demands, changes[i].Demand = append(some.Demands, c.Demands[of]), i
	}
	result := c.result(statuses)
	if result.OK = true; len(changes) == 0 {
		result.Several = statuses // even if it has one limit, whose OK differs from the call's
	} else {
		places := slices.SortedFunc(slices.Values(UpTo(len(changes))), func(i, j int) int { return some.Demands[i].index - some.Demands[j].index })
		for place, i := range places {
			some.Demands[i].index = place
		}
		result.Receipt = some.Receipt(changes, taker, conn, at)
	}
	return result
}

// RefusedBy returns the result of a call that its limit i, which has one row, has refused in this
// state. It returns false if the state does not refuse the call. The result is of that limit only.
func (c *Call) RefusedBy(i int, state bucket.State, at time.Time) (ratelimit.Result, bool) {
	alone := Call{Demands: c.Demands[i : i+1]}
	result := alone.Checked(View{States: [][]bucket.State{{state}}, At: at})
	return result, !result.OK
}

// Checked returns the result that c would get.
func (c *Call) Checked(v View) ratelimit.Result {
	statuses := make([]ratelimit.Status, len(c.Demands))
	for i := range c.Demands {
		statuses[i] = c.ask(i, v).found(c.Reserve, v.States[i], v.At)
	}
	return c.result(statuses)
}

// CheckedEach returns the statuses that c's demands would get independently.
func (c *Call) CheckedEach(v View) []ratelimit.Status {
	statuses := make([]ratelimit.Status, len(c.Demands))
	for i := range c.Demands {
		statuses[i] = c.Demands[i].found(false, v.States[i], v.At)
	}
	return statuses
}

// Shown returns the status to show of a limit's key. It is OK unless there is debt or a pause; then
// RetryAt is the end of those.
func Shown(limit ratelimit.Limit, key string, states []bucket.State, now time.Time) ratelimit.Status {
	a := Demand{Request: limit.ForN(key, 0), Definition: bucket.Definition(limit.Definition())}
	return a.found(false, states, now)
}

// Refused returns the result of a call that was refused. If other calls were faster each time, the
// states read last may have enough; then the call may be repeated at once.
func (c *Call) Refused(v View) ratelimit.Result {
	result := c.Checked(v)
	if result.OK {
		result.OK = false
		result.RetryAfter = max(result.RetryAfter, time.Microsecond)
		result.RetryAt = result.At.Add(result.RetryAfter)
	}
	return result
}

// Credited returns the status of r's limit after its count came back. It is OK unless there still
// is debt or a pause; then RetryAt is the end of those.
func Credited(r ratelimit.Request, states []bucket.State, now time.Time) ratelimit.Status {
	status := Shown(r.Limit, r.Key, states, now)
	status.Request = r
	return status
}

// result combines statuses, in the order of Demands, into a result. It does not keep the slice.
func (c *Call) result(statuses []ratelimit.Status) ratelimit.Result {
	if c.AtMost() {
		statuses[0].Request.Count = c.asked
	}
	r := ratelimit.Result{Status: statuses[0]}
	if len(statuses) == 1 {
		return r
	}
	r.Several = make([]ratelimit.Status, len(statuses))
	for i, s := range statuses {
		r.Several[c.Demands[i].index] = s
		if c.First && s.RetryAfter < r.RetryAfter || !c.First && outweighs(s, r.Status) {
			r.Status = s
		}
	}
	return r
}

// outweighs reports whether s, and not t, decides a call that asks for both.
func outweighs(s, t ratelimit.Status) bool {
	if s.OK != t.OK {
		return t.OK
	}
	if (s.RetryAfter > 0 || t.RetryAfter > 0) && !s.RetryAt.Equal(t.RetryAt) {
		return s.RetryAt.After(t.RetryAt)
	}
	return s.Remaining < t.Remaining
}

// takenAmong returns the status of a after changes of its shards; states has all of its shards
// after them.
func (a *Demand) takenAmong(states []bucket.State, changes []Change, now time.Time) ratelimit.Status {
	var at, due time.Time
	for i := range changes {
		counted, ready, _ := a.counts(&changes[i].Definition, changes[i].After, now)
		at, due = bucket.Later(at, counted), bucket.Later(due, ready)
	}
	return a.statusAmong(true, states, at, bucket.Later(at, due))
}

// counts returns the instant of the result of a take, when the take is due, and the state at that
// instant; after is the row after the take at now. If the take is due at once, the instant is the
// one at which it counts, so results keep to the limit. If it is due later, the wait runs from now,
// even if the clock went back: all rows have one clock.
func (a *Demand) counts(d *bucket.Definition, after bucket.State, now time.Time) (at, due time.Time, settled bucket.State) {
	if after.TS.Equal(now) && after.Value >= 0 && after.Slots == nil && !after.Paused.After(now) {
		return now, now, after
	}
	at = d.Charged(after, now)
	settled = d.Refill(after, at)
	due = d.Due(settled, at, a.Count)
	if at.After(now) && (due.After(at) || after.Paused.After(now)) {
		at, settled = now, d.Refill(after, now)
	}
	return at, due, settled
}

// found returns the status that a would get from the states of its shards.
func (a *Demand) found(reserve bool, states []bucket.State, now time.Time) ratelimit.Status {
	without := states
	if !reserve && paused(states, now) {
		without = unpaused(states)
	}
	counts, ok := a.Spread(now, without)
	at := now
	if ok {
		at = a.dueAmong(without, counts, now)
	} else {
		at = a.ready(without, now)
	}
	if !reserve {
		for _, s := range states {
			if s.Paused.After(now) {
				ok = false
				at = bucket.Later(at, s.Paused)
			}
		}
	}
	return a.statusAmong(ok, states, now, at)
}

// unpaused returns states without their pauses, which do not change the tokens of an allow.
func unpaused(states []bucket.State) []bucket.State {
	states = slices.Clone(states)
	for i := range states {
		states[i].Paused = time.Time{}
	}
	return states
}

// dueAmong returns when a take of counts from the shards is due.
func (a *Demand) dueAmong(states []bucket.State, counts []float64, now time.Time) time.Time {
	shard, at := a.Definition.Shard(), now
	floor, least := a.rowFloor(), a.leastChange(states, now)
	for i, s := range states {
		if counts[i] == 0 && (a.Count != 0 || i != least) {
			continue
		}
		after, ok := shard.Take(s, now, counts[i], floor)
		if !ok { // Spread tolerates this rounding error, as in plan
			after = shard.Spend(s, now, counts[i])
		}
		at = bucket.Later(at, shard.Due(after, now, a.Count))
	}
	return at
}

// holding is the value of one or several rows.
type holding struct {
	value        float64
	paused, full time.Time // the end of the pause, and when the rows are full
}

func holdingOf(d *bucket.Definition, settled bucket.State, now time.Time) holding {
	return holding{d.ValueAt(settled, now), settled.Paused, d.When(settled, d.Capacity)}
}

func (a *Demand) status(ok bool, h holding, now, retryAt time.Time) (s ratelimit.Status) {
	a.report(&s, ok, &h, now, retryAt)
	return s
}

// report sets s, which is zero.
func (a *Demand) report(s *ratelimit.Status, ok bool, h *holding, now, retryAt time.Time) {
	s.Request, s.Capacity = a.Request, a.Definition.Capacity
	s.At, s.OK = now, ok
	s.RetryAfter, s.RetryAt = retryAt.Sub(now), retryAt
	s.Value, s.Before = h.value, h.value
	s.Remaining = int64(max(0, math.Floor(h.value+bucket.Tolerance(h.value, 1, s.Capacity))))
	s.ResetAfter = max(0, h.full.Sub(now))
	if h.paused.After(now) {
		s.PausedUntil = h.paused
	}
}

// statusAmong returns the status of all shards together.
func (a *Demand) statusAmong(ok bool, states []bucket.State, now, retryAt time.Time) ratelimit.Status {
	shard := a.Definition.Shard()
	total := holdingOf(shard, shard.Refill(states[0], now), now)
	for _, s := range states[1:] {
		h := holdingOf(shard, shard.Refill(s, now), now)
		total.value += h.value
		total.paused = bucket.Later(total.paused, h.paused)
		total.full = bucket.Later(total.full, h.full)
	}
	return a.status(ok, total, now, retryAt)
}
