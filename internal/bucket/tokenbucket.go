package bucket

import (
	"math"
	"time"
)

// tokenBucket is a level that refills continuously: it ticks with every microsecond.
type tokenBucket struct{ level }

func (*tokenBucket) String() string { return "token bucket" }

func (*tokenBucket) last(_ *Definition, _, now int64) int64 { return now }
func (*tokenBucket) next(_ *Definition, ts int64) int64     { return ts + 1 }

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
