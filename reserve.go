package ratelimit

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// State is a limit's two numbers, for one key and shard. It needs the limit's
// definition to mean anything: see [Definition.Settle].
type State struct {
	Value float64   // tokens at TS; negative is debt
	TS    time.Time // in whole microseconds
}

// tolerance is how far rounding may have moved a comparison of token counts:
// 64 units in the last place of the largest number that took part. It only
// ever decides whether a call that fits exactly still fits. What is stored is
// never rounded, so nothing is lost or gained, and nothing adds up.
func tolerance(a, b, c float64) float64 {
	return max(math.Abs(a), math.Abs(b), math.Abs(c)) * 0x1p-46
}

func (d Definition) periodMicros() float64 { return float64(d.Period.Microseconds()) }

// lastTick is the last instant up to now at which tokens came in, for a row
// with tokens coming in at ts.
func (d Definition) lastTick(ts, now int64) int64 {
	if d.Kind == KindFixedWindow {
		return d.windowTick(ts, now)
	}
	return bucketTick(now)
}

// longestWait, in microseconds, is above every wait that a definition allows.
// A debt that an earlier and faster definition left can be longer than a
// time.Time tells; this much is told of it.
const longestWait = 4 * int64(MaxSpan/time.Microsecond)

// wait is how long, in microseconds, tokens need to come in.
func (d Definition) wait(tokens float64) int64 {
	if tokens/d.Rate*d.periodMicros() > float64(longestWait) {
		return longestWait
	}
	if d.Kind == KindFixedWindow {
		return d.windowWait(tokens)
	}
	return d.bucketWait(tokens)
}

// Tick is the granularity of the limit's clock: a fixed window's stands still
// between edges, a token bucket's has the database's resolution.
func (d Definition) Tick() time.Duration {
	if d.Kind == KindFixedWindow {
		return d.Period
	}
	return time.Microsecond
}

// Origin is an instant from which a fresh row of key counts its ticks.
func (d Definition) Origin(key string) time.Time {
	if d.Kind == KindFixedWindow {
		return instant(d.origin(key))
	}
	return instant(firstEdge)
}

func instant(micros int64) time.Time { return time.UnixMicro(micros).UTC() }

// Fresh is the state of a key that has no row: full.
func (d Definition) Fresh(key string, now time.Time) State {
	return State{d.Capacity, instant(d.lastTick(d.Origin(key).UnixMicro(), now.UnixMicro()))}
}

// Settle brings s to now: adds the tokens that came in since, up to Capacity.
// A now before s.TS, from a clock that went back or a caller that comes late,
// neither takes tokens away nor creates any.
func (d Definition) Settle(s State, now time.Time) State {
	ts := s.TS.UnixMicro()
	tick := max(ts, d.lastTick(ts, now.UnixMicro()))
	came := float64(tick-ts) * d.Rate / d.periodMicros()
	return State{min(s.Value+came, d.Capacity), instant(tick)}
}

// When is the first instant at which s, if nobody touches it, holds want
// tokens: s.TS when it does already. want is at most Capacity.
func (d Definition) When(s State, want float64) time.Time {
	return d.when(s, want, want)
}

// when is When with the count that is to be taken at that instant, whose size
// counts for the tolerance. Half of it goes here, and the other half is there
// for the rounding between this promise and the decision that keeps it.
func (d Definition) when(s State, want, count float64) time.Time {
	missing := want - s.Value - tolerance(s.Value, count, d.Capacity)/2
	if missing <= 0 {
		return s.TS
	}
	return instant(s.TS.UnixMicro() + d.wait(missing))
}

// Floor is the lowest value that a call may leave behind: 0, or for a
// reservation what MaxReserved allows, and never more than comes in during
// MaxSpan, so that every wait can be told.
func (d Definition) Floor(reserve bool) float64 {
	if !reserve {
		return 0
	}
	return 0 - min(d.MaxReserved, d.Rate*float64(MaxSpan)/float64(d.Period))
}

// Take takes n tokens from s at now if that leaves at least floor; it returns
// what to store, or when ok is false, what there is.
func (d Definition) Take(s State, now time.Time, n, floor float64) (after State, ok bool) {
	settled := d.Settle(s, now)
	if settled.Value-n < floor-tolerance(s.Value, n, d.Capacity) {
		return settled, false
	}
	return State{settled.Value - n, settled.TS}, true
}

// Credit gives n tokens back to s at now, capped at Capacity.
func (d Definition) Credit(s State, now time.Time, n float64) State {
	settled := d.Settle(s, now)
	return State{min(settled.Value+n, d.Capacity), settled.TS}
}

// Pause empties s at now and lets nothing come in before until; debt stays.
// An until that is not after now changes nothing.
func (d Definition) Pause(s State, now, until time.Time) State {
	settled := d.Settle(s, now)
	if !until.After(now) {
		return settled
	}
	from := instant(until.Add(time.Microsecond - 1).UnixMicro()) // not before until
	if d.Kind == KindFixedWindow {
		from = from.Add(-d.Period) // so that the next edge is until
	}
	if from.After(settled.TS) {
		settled.TS = from
	}
	settled.Value = min(settled.Value, 0)
	return settled
}

// Idle reports whether s is full at now, and so means the same as no row of
// key. A fixed window whose edges are not those of a fresh row, since it was
// paused, means that only once it has let an edge pass unused: otherwise, with
// its edges moved, more could come in than in any window.
func (d Definition) Idle(key string, s State, now time.Time) bool {
	if !d.Settle(s, now).TS.Equal(d.Fresh(key, now).TS) {
		now = now.Add(-d.Period)
	}
	return !s.TS.After(now) && d.Settle(s, now).Value >= d.Capacity
}

// Call is what an allow, reserve or check asks: its requests, found sound,
// those for the same limit and key added up, in the one order in which every
// store locks rows. It is pure; stores decide it against their rows.
type Call struct {
	Reserve bool
	Asks    []Ask // sorted by name and key
}

// Ask is a request of a call with its limit's definition.
type Ask struct {
	Request
	Definition Definition
	Floor      float64 // the lowest value it may leave behind
	place      int     // in the order of the call
}

// NewCall checks requests and puts them in order. Its errors are ErrInvalid
// and ErrNever.
func NewCall(reserve bool, requests ...Request) (Call, error) {
	if len(requests) == 0 || len(requests) > MaxRequests {
		return Call{}, &FieldError{
			Field: "Requests", Value: len(requests),
			Reason: fmt.Sprintf("a call must have from 1 to %d", MaxRequests),
		}
	}
	call := Call{Reserve: reserve, Asks: make([]Ask, 0, len(requests))}
	for _, r := range requests {
		if err := call.add(r); err != nil {
			return Call{}, err
		}
	}
	for _, a := range call.Asks {
		if most := a.Definition.Capacity - a.Floor; a.Count > most+tolerance(a.Count, a.Floor, most)/2 {
			return Call{}, &NeverError{Request: a.Request, Reserve: reserve, Most: most}
		}
	}
	slices.SortFunc(call.Asks, func(a, b Ask) int {
		return cmp.Or(cmp.Compare(a.Definition.Name, b.Definition.Name), cmp.Compare(a.Key, b.Key))
	})
	return call, nil
}

func (c *Call) add(r Request) error {
	if err := r.Validate(); err != nil {
		return err
	}
	d := r.Limit.Definition()
	for i := range c.Asks {
		a := &c.Asks[i]
		if a.Definition.Name != d.Name || a.Key != r.Key {
			continue
		}
		if a.Definition != d {
			return &FieldError{Limit: d.Name, Field: "Limit", Value: d.Name, Reason: "has two definitions in one call"}
		}
		a.Count += r.Count
		return nil
	}
	c.Asks = append(c.Asks, Ask{Request: r, Definition: d, Floor: d.Floor(c.Reserve), place: len(c.Asks)})
	return nil
}

// Validate reports what is wrong with the request: its limit, its key or its
// count, as a *FieldError.
func (r Request) Validate() error {
	if r.Limit == nil {
		return &FieldError{Field: "Limit", Value: r.Limit, Reason: "must not be nil"}
	}
	if err := r.Limit.Validate(); err != nil {
		return err
	}
	name := r.Limit.Definition().Name
	if reason := badText(r.Key, MaxKeyLength); reason != "" {
		return &FieldError{Limit: name, Field: "Key", Value: r.Key, Reason: reason}
	}
	if reason := badAmount(r.Count); reason != "" {
		return &FieldError{Limit: name, Field: "Count", Value: r.Count, Reason: reason}
	}
	return nil
}

// Taken is the status of a when it was taken at now and left after behind.
func (a Ask) Taken(after State, now time.Time) Status {
	at := now
	if after.Value < -tolerance(after.Value, a.Count, a.Definition.Capacity) {
		if paid := a.Definition.When(after, 0); paid.After(now) { // it may have been while the row was waited for
			at = paid
		}
	}
	return a.status(true, after, now, at)
}

// Refused is the status of a when settled was too little at now.
func (a Ask) Refused(settled State, now time.Time) Status {
	return a.status(false, settled, now, a.Definition.when(settled, a.Count+a.Floor, a.Count))
}

// Found is the status of a against s at now, with nothing taken.
func (a Ask) Found(s State, now time.Time) Status {
	after, ok := a.Definition.Take(s, now, a.Count, a.Floor)
	if !ok {
		return a.Refused(after, now)
	}
	status := a.Taken(after, now)
	settled := a.Definition.Settle(s, now)
	return a.status(true, settled, now, status.RetryAt)
}

func (a Ask) status(ok bool, s State, now, retryAt time.Time) Status {
	d := a.Definition
	return Status{
		Request:    a.Request,
		OK:         ok,
		RetryAfter: retryAt.Sub(now),
		RetryAt:    retryAt,
		Value:      s.Value,
		Remaining:  int64(max(0, math.Floor(s.Value+tolerance(s.Value, 1, d.Capacity)))),
		Capacity:   d.Capacity,
		ResetAfter: max(0, d.When(s, d.Capacity).Sub(now)),
	}
}

// Credited is the status of r's limit, whose shards are in states, once its
// count was given back at now. It is OK unless there is debt still, and then
// RetryAt is when that is paid.
func Credited(r Request, states []State, now time.Time) Status {
	a := Ask{Request: r, Definition: r.Limit.Definition()}
	a.Count = 0
	status := a.FoundAmong(states, now)
	status.Request = r
	return status
}

// Result puts the statuses of c's asks, in the order of Asks, together. It may
// keep statuses.
func (c Call) Result(now time.Time, statuses []Status) Result {
	if len(statuses) == 1 {
		return Result{Status: statuses[0], At: now, Each: statuses}
	}
	r := Result{Status: statuses[0], At: now, Each: make([]Status, len(statuses))}
	for i, s := range statuses {
		r.Each[c.Asks[i].place] = s
		if s.outweighs(r.Status) {
			r.Status = s
		}
	}
	return r
}

// outweighs reports whether s, rather than t, is what a caller of both must
// know.
func (s Status) outweighs(t Status) bool {
	if s.OK != t.OK {
		return t.OK
	}
	if s.RetryAfter != t.RetryAfter {
		return s.RetryAfter > t.RetryAfter
	}
	return s.Remaining < t.Remaining
}

// Decide decides c against the states of its asks, in the order of Asks, at
// now: all or nothing. It returns what to store, nil when nothing is.
func (c Call) Decide(now time.Time, states []State) (Result, []State) {
	now = now.Truncate(time.Microsecond)
	after := make([]State, len(states))
	statuses := make([]Status, len(states))
	all := true
	for i, a := range c.Asks {
		var ok bool
		after[i], ok = a.Definition.Take(states[i], now, a.Count, a.Floor)
		all = all && ok
	}
	for i, a := range c.Asks {
		if all {
			statuses[i] = a.Taken(after[i], now)
		} else {
			statuses[i] = a.Found(states[i], now)
		}
	}
	result := c.Result(now, statuses)
	if !all {
		return result, nil
	}
	return result, after
}

// Check is Decide with nothing taken.
func (c Call) Check(now time.Time, states []State) Result {
	now = now.Truncate(time.Microsecond)
	statuses := make([]Status, len(states))
	for i, a := range c.Asks {
		statuses[i] = a.Found(states[i], now)
	}
	return c.Result(now, statuses)
}
