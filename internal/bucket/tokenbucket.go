package bucket

import (
	"math"
	"time"
)

// tokenBucket is a level that refills continuously: it ticks with every microsecond.
type tokenBucket struct{ level }

func (*tokenBucket) String() string { return "token bucket" }

func (*tokenBucket) last(_ *Definition, _, now int64) int64 { return now }

func (*tokenBucket) next(_ *Definition, ts int64) int64 { return ts + 1 }

func (*tokenBucket) reach(d *Definition, ts int64, tokens float64) int64 {
	return ts + int64(math.Ceil(tokens*d.Micros()/d.Rate))
}

func (*tokenBucket) fresh(d *Definition, _ string, now time.Time) State {
	return State{Value: d.Capacity, TS: instant(now.UnixMicro())}
}

func (*tokenBucket) refill(d *Definition, s State, now time.Time) State {
	ts := s.TS.UnixMicro()
	tick := max(ts, now.UnixMicro())
	return State{Value: d.refilled(s.Value, tick-ts), TS: instant(tick), Paused: s.Paused}
}

func (b *tokenBucket) pause(d *Definition, settled State, paused bool, now, until time.Time) State {
	return b.emptied(d, settled, paused, now, until, until)
}

func (*tokenBucket) back(d *Definition, s State, out Out, r *Return, now time.Time) (State, Out) {
	past, n := r.past(s, now), r.Count
	out = d.less(out, r, r.End, past)
	if late := past.Sub(r.End); r.leftover() && late > 0 {
		n = max(0, n-d.Inflow(late))
	}
	above := s.Value // a value above Capacity stays; see Charge
	if s = d.Refill(s, now); !r.leftover() || !s.Paused.After(now) {
		s.Value = max(s.Value, min(s.Value+n, d.Capacity-d.Owed(out, now)))
	}
	s.Value = max(s.Value, above)
	return s, out
}

// full ends a pause, but keeps an instant ahead of now, from a clock that went back.
func (b *tokenBucket) full(d *Definition, _ string, s State, out Out, now time.Time) State {
	settled := d.Refill(s, now)
	if s.Paused.After(now) {
		settled.TS = instant(now.UnixMicro())
	}
	return State{Value: max(settled.Value, d.Capacity-d.Owed(out, now)), TS: settled.TS}
}

// level is shared by the kinds whose rows have a value, the tokens left, and a ts, the last tick at
// which they were refilled. Those kinds differ in their ticks and in the tokens that come in.
type level struct{}

// refilled returns value plus the tokens that come in during micros, at most Capacity.
func (d *Definition) refilled(value float64, micros int64) float64 {
	return min(value+float64(micros)*d.Rate/d.Micros(), d.Capacity)
}

func (*level) plain(*Definition, State, time.Time) bool { return true }

func (*level) take(d *Definition, s State, now time.Time, n, floor float64) (after State, ok bool) {
	settled := d.Refill(s, now)
	if settled.Value-n < floor-Tolerance(s.Value, n, d.Capacity) {
		return settled, false
	}
	settled.Value -= n
	return settled, true
}

func (*level) spend(_ *Definition, settled State, n float64) State {
	settled.Value -= n
	return settled
}

func (l *level) ready(d *Definition, settled State, _ time.Time, n, floor float64) time.Time {
	return l.enough(d, settled, n+floor, n)
}

func (l *level) due(d *Definition, settled State, n float64) time.Time {
	if settled.Value < -Tolerance(settled.Value, n, d.Capacity) {
		return l.enough(d, settled, 0, 0)
	}
	return time.Time{}
}

// enough returns the first instant at which a settled state holds want tokens, if n of them will be
// taken. It applies half of the tolerance of taking n. The other half covers rounding between this
// promise and the decision that keeps it.
func (*level) enough(d *Definition, settled State, want, n float64) time.Time {
	missing := want - settled.Value - Tolerance(settled.Value, n, d.Capacity)/2
	if missing <= 0 {
		return settled.TS
	}
	return instant(d.reach(settled.TS.UnixMicro(), missing))
}

func (*level) credit(d *Definition, s State, _ time.Time, n float64) State {
	s.Value = min(s.Value+n, max(s.Value, d.Capacity))
	return s
}

func (*level) refund(_ *Definition, s State, _ time.Time, n float64, _ int64) State {
	s.Value += n
	return s
}

func (*level) room(d *Definition, settled State, _ Out, owed float64) float64 {
	return d.Capacity - owed - settled.Value
}

// emptied returns a settled state without its tokens, paused until one instant and refilled from
// another. Without an earlier pause, a ts ahead of now comes from a clock that went back. That lead
// becomes debt, because resume sets ts back.
func (*level) emptied(d *Definition, settled State, paused bool, now, from, until time.Time) State {
	if ts := settled.TS.UnixMicro(); !paused {
		ahead := ts - d.kind().last(d, ts, now.UnixMicro())
		settled.Value = min(settled.Value, 0) - float64(ahead)*d.Rate/d.Micros()
	}
	return State{
		Value:  min(settled.Value, 0),
		TS:     Later(settled.TS, from),
		Paused: Later(settled.Paused, until),
	}
}

func (*level) resume(d *Definition, key string, settled State, _ Out, now time.Time) State {
	return State{Value: settled.Value, TS: d.Fresh(key, now).TS}
}

func (*level) whole(d *Definition, s State, now time.Time, floor float64) float64 {
	slack := Tolerance(s.Value, 1, d.Capacity) // the tolerance of take
	return math.Floor(max(0, d.Refill(s, now).Value-floor) + slack)
}

func (*level) together(d *Definition, states []State, now time.Time, n, floor float64) time.Time {
	shard := d.Shard()
	one := shard.Refill(states[0], now)
	for _, s := range states[1:] {
		settled := shard.Refill(s, now)
		one.Value += settled.Value
		one.TS = Later(one.TS, settled.TS)
	}
	return d.Ready(one, now, n, floor)
}
