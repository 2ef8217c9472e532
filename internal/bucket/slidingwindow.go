package bucket

import (
	"math"
	"time"

	"github.com/pgratelimit/ratelimit/internal/exact"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// SlotWidth is the length of a sliding window's slot, and 0 for the other kinds.
func (d *Definition) SlotWidth() time.Duration {
	if d.Kind != SlidingWindow {
		return 0
	}
	return time.Duration(d.tick()) * time.Microsecond
}

// slotMicros is the length of a slot in microseconds.
func (d *Definition) slotMicros() int64 {
	period, n := d.Period.Microseconds(), int64(d.Slots)
	return (period + n - 1) / n
}

// mostBase bounds the total before a row's oldest slot, in multiples of the rate. Past
// it totals are counted anew, which a statement cannot do.
const mostBase = 8

// slide is Settle for a sliding window.
func (d *Definition) slide(s State, now int64) State {
	if !d.own(s) {
		s = d.adopt(s)
	}
	ts := s.TS.UnixMicro()
	tick := max(ts, d.lastTick(ts, now))
	passed := (tick - ts) / s.Slots.Width
	held := s.Slots
	if passed > 0 {
		held = held.Move(max(0, passed-held.Ahead), max(0, held.Ahead-passed))
	}
	if held.Base() > mostBase*d.Rate {
		held = held.Rebase()
	}
	return d.valued(State{TS: instant(tick), Paused: s.Paused, Slots: held})
}

// valued is s with its value: what no slot holds, or when the newest is in the future
// the time until that, as tokens.
func (d *Definition) valued(s State) State {
	if s.Slots.Ahead > 0 {
		s.Value = -d.delayed(s.Slots.Ahead * s.Slots.Width)
	} else {
		s.Value = d.Rate - s.Slots.Held(0)
	}
	return s
}

// slotStart is when the slot starts that is so many slots after the newest of s.
func (d *Definition) slotStart(s State, later int64) int64 {
	return s.TS.UnixMicro() + (s.Slots.Ahead+later)*s.Slots.Width
}

// slotTolerance is the tolerance of a decision about n tokens of s.
func (d *Definition) slotTolerance(s State, n float64) float64 {
	return exact.Tolerance(s.Slots.Greatest(n), d.Rate, 0)
}

// takeSlot is Take for a sliding window. n goes into the first slot in which it fits
// and which, while s is paused, begins when the pause is over. -floor is how far ahead
// that may be, as tokens. An allow asks before whether s is paused.
func (d *Definition) takeSlot(s State, now time.Time, n, floor float64) (after State, ok bool) {
	settled := d.Settle(s, now)
	if n > d.Rate+exact.Tolerance(n, d.Rate, 0) {
		return settled, false // it fits in no window, and a shard may be asked for more than it holds
	}
	later := settled.Slots.First(n, d.Rate, d.slotTolerance(settled, n), d.unpaused(settled, now))
	if settled.Slots.Ahead+later > 0 && d.delayed(d.slotStart(settled, later)-now.UnixMicro()) > -floor {
		return settled, false
	}
	return d.give(settled, n, later), true
}

// TakeFrom takes n tokens from a sliding window's row at now, for the first slot that
// begins at from or later and has room for them.
func (d *Definition) TakeFrom(s State, now time.Time, n float64, from time.Time) State {
	settled := d.Settle(s, now)
	wait := max(0, from.UnixMicro()-d.slotStart(settled, 0))
	first := (wait + settled.Slots.Width - 1) / settled.Slots.Width
	return d.give(settled, n, settled.Slots.First(n, d.Rate, d.slotTolerance(settled, n), first))
}

// delayed is a time, in microseconds, as the tokens that MaxReserved counts.
func (d *Definition) delayed(micros int64) float64 {
	return float64(micros) * d.Rate / d.periodMicros()
}

// longestDelay is the longest time, in microseconds, that is no more than so many
// tokens by delayed, to the very microsecond.
func (d *Definition) longestDelay(tokens float64) int64 {
	delay := int64(min(tokens*d.periodMicros()/d.Rate, float64(longestWait)))
	for d.delayed(delay) > tokens {
		delay--
	}
	for delay < longestWait && d.delayed(delay+1) <= tokens {
		delay++
	}
	return delay
}

// Longest is how far ahead a sliding window's reservation may be that may leave floor
// behind.
func (d *Definition) Longest(floor float64) time.Duration {
	return time.Duration(min(d.longestDelay(-floor), math.MaxInt64/int64(time.Microsecond))) * time.Microsecond
}

// By is how many tokens a reservation from a sliding window can take at now for a slot
// that begins by an instant. s is settled.
func (d *Definition) By(s State, now, at time.Time) float64 {
	wait := at.UnixMicro() - d.slotStart(s, 0)
	if s.Slots.Ahead == 0 {
		wait = max(wait, 0) // it has begun, although a clock may have gone back
	}
	if wait < 0 || wait/s.Slots.Width < d.unpaused(s, now) {
		return 0
	}
	return d.Rate - s.Slots.Held(wait/s.Slots.Width)
}

// unpaused is how many slots after the newest of s begins the first one for a
// reservation: 0 unless s is paused.
func (d *Definition) unpaused(s State, now time.Time) int64 {
	if !s.Paused.After(now) {
		return 0
	}
	wait := s.Paused.UnixMicro() - d.slotStart(s, 0)
	if wait <= 0 {
		return 0
	}
	return (wait + s.Slots.Width - 1) / s.Slots.Width
}

// From is where the first slot of s begins for a reservation while s is paused. It is
// zero without a pause, and for the other kinds, whose reservations need not know.
func (d *Definition) From(s State, now time.Time) time.Time {
	if d.Kind != SlidingWindow || !s.Paused.After(now) {
		return time.Time{}
	}
	settled := d.Settle(s, now)
	return instant(d.slotStart(settled, d.unpaused(settled, now)))
}

// give gives n in the slot that is so many slots after the newest of s.
func (d *Definition) give(s State, n float64, later int64) State {
	s.Slots = s.Slots.Add(n, later)
	return d.valued(s)
}

// Plain reports whether s is as this definition writes it, and its totals are counted
// from not long ago, so that a statement can add to it.
func (d *Definition) Plain(s State) bool {
	return d.Kind != SlidingWindow || d.own(s) && s.Slots.Base() <= mostBase*d.Rate
}

// own reports whether s has slots, and of this definition.
func (d *Definition) own(s State) bool {
	return s.Slots != nil && s.Slots.Width == d.slotMicros() && s.Slots.Count() == d.Slots
}

// readySlot is Ready for a sliding window: when the first slot begins in which n fits,
// or the part of that wait is over which a reservation may be ahead. When a pause is
// over, an earlier slot may do than before.
func (d *Definition) readySlot(s State, now time.Time, n, floor float64) time.Time {
	settled := d.Settle(s, now)
	ahead := d.longestDelay(-floor)
	at := func(from int64) time.Time {
		later := settled.Slots.First(n, d.Rate, d.slotTolerance(settled, n)/2, from)
		if settled.Slots.Ahead+later == 0 {
			return settled.TS
		}
		return instant(d.slotStart(settled, later) - ahead)
	}
	ready := at(d.unpaused(settled, now))
	if settled.Paused.After(now) && ready.After(settled.Paused) {
		return later(at(0), settled.Paused)
	}
	return ready
}

// fitsAt is enough for a sliding window: when the first slot begins in which n fits.
func (d *Definition) fitsAt(settled State, n float64) time.Time {
	first := settled.Slots.First(n, d.Rate, d.slotTolerance(settled, n)/2, 0)
	if settled.Slots.Ahead+first == 0 {
		return settled.TS
	}
	return instant(d.slotStart(settled, first))
}

// refundSlot takes n out of the slot of settled in which the instant at lies, or what
// of it is there. A slot that no window holds any more has nothing to give back.
func (d *Definition) refundSlot(settled State, at int64, n float64) State {
	oldest := d.slotStart(settled, -int64(d.Slots))
	slot := at - oldest
	if slot < 0 || slot/settled.Slots.Width > int64(d.Slots) {
		return settled
	}
	settled.Slots = settled.Slots.Change(int(slot/settled.Slots.Width), -n)
	return d.valued(settled)
}

// adopt is s in slots of d, when another definition has written it: one with slots of
// another width, or of another kind. What a slot held goes to the one in which it ends,
// be that in the future, which is the latest and so the safe one. A value of another
// kind is what is left, and debt is a reservation for when it is paid.
func (d *Definition) adopt(s State) State {
	ts := s.TS.UnixMicro()
	edge := ts
	if !d.Start.IsZero() {
		edge = d.Start.UnixMicro()
	}
	adopted := State{TS: instant(d.windowTick(edge, ts)), Paused: s.Paused, Slots: slots.New(d.slotMicros(), d.Slots)}
	aheadOf := func(micros int64) int64 {
		return (d.windowTick(edge, micros) - adopted.TS.UnixMicro()) / adopted.Slots.Width
	}
	if s.Slots == nil {
		adopted.Slots.Ahead = aheadOf(ts + d.wait(max(0, -s.Value)))
		adopted.Slots = adopted.Slots.Add(min(max(d.Rate-s.Value, 0), d.Rate), 0)
		return adopted
	}
	adopted.Slots.Ahead = aheadOf(d.slotStart(s, 1) - 1)
	for i := range s.Slots.Count() + 1 {
		end := aheadOf(d.slotStart(s, int64(i-s.Slots.Count()+1)) - 1)
		if slot := end - adopted.Slots.Ahead + int64(d.Slots); slot >= 0 && s.Slots.Of(i) > 0 {
			adopted.Slots = adopted.Slots.Change(int(slot), s.Slots.Of(i))
		}
	}
	return adopted
}

// shareSlots is Share for a sliding window: slot by slot, up to the newest of all rows.
func (d *Definition) shareSlots(states []State, share State, now time.Time, n int) (each, empty State) {
	shard := d.Shard()
	newest := share.TS.UnixMicro()
	for _, s := range states {
		newest = max(newest, shard.slotStart(shard.Settle(s, now), 0))
	}
	total := slots.New(d.slotMicros(), d.Slots)
	total.Ahead = (newest - share.TS.UnixMicro()) / total.Width
	for _, s := range states {
		s = shard.Settle(s, now)
		moved := s.Slots.Move((newest-shard.slotStart(s, 0))/total.Width, 0)
		for i := range total.Totals {
			total.Totals[i] += (moved.Totals[i] - moved.Base()) / float64(n)
		}
	}
	after := *d
	after.Shards = n
	after = after.Shard()
	each = after.valued(State{TS: share.TS, Paused: share.Paused, Slots: total})
	nothing := shard.valued(State{TS: share.TS, Paused: share.Paused, Slots: slots.New(total.Width, d.Slots)})
	return each, shard.give(nothing, shard.Rate, 0)
}
