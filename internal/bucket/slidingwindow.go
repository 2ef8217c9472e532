package bucket

import (
	"math"
	"time"

	"github.com/pgratelimit/ratelimit/internal/slots"
)

// slidingWindow is a row of slots, which hold the tokens taken in them. Whether a call fits depends
// on the slots. The value only sums them up: it is the rate less the tokens in the slots. If the
// newest slot is in the future it is the time until then, as tokens below 0.
type slidingWindow struct{}

func (*slidingWindow) String() string { return "sliding window" }

func (w *slidingWindow) last(d *Definition, ts, now int64) int64 { return edge(ts, now, w.next(d, 0)) }

func (*slidingWindow) next(d *Definition, ts int64) int64 {
	period, n := d.Period.Microseconds(), int64(max(d.Slots, 1))
	return ts + (period+n-1)/n
}

// reach serves only debt that another kind has left, which adopt turns into a reservation.
func (*slidingWindow) reach(d *Definition, ts int64, tokens float64) int64 {
	return kinds[TokenBucket].reach(d, ts, tokens)
}

func (w *slidingWindow) fresh(d *Definition, key string, now time.Time) State {
	return State{Value: d.Capacity, TS: instant(w.last(d, d.origin(key), now.UnixMicro())), Slots: slots.New(d.Tick(), d.Slots)}
}

// mostBase bounds the total before a row's oldest slot, as a multiple of the rate. Above it refill
// counts the totals anew, which a statement cannot do.
const mostBase = 8

func (w *slidingWindow) refill(d *Definition, s State, now time.Time) State {
	if !d.own(s) {
		s = d.adopt(s)
	}
	ts := s.TS.UnixMicro()
	tick := max(ts, w.last(d, ts, now.UnixMicro()))
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

// valued returns s with its value: the rate less the tokens in its slots. If the newest slot is in
// the future it is the time until then, as tokens below 0.
func (d *Definition) valued(s State) State {
	if s.Slots.Ahead > 0 {
		s.Value = -d.delayed(s.Slots.Ahead * s.Slots.Width)
	} else {
		s.Value = d.Rate - s.Slots.Held(0)
	}
	return s
}

// slotStart returns the start of a slot of s; later counts slots from the newest one.
func (d *Definition) slotStart(s State, later int64) int64 {
	return s.TS.UnixMicro() + (s.Slots.Ahead+later)*s.Slots.Width
}

// slotTolerance returns the tolerance of a decision about n tokens of s.
func (d *Definition) slotTolerance(s State, n float64) float64 {
	return Tolerance(s.Slots.Totals[len(s.Slots.Totals)-1], n, d.Rate)
}

// take counts n in the first slot with room for it. While s is paused, that slot begins when the
// pause is over. A floor below 0 bounds how far ahead the slot may be, as tokens. A floor above 0
// must be left in the current slots. For an allow, the caller has checked that s is not paused.
func (*slidingWindow) take(d *Definition, s State, now time.Time, n, floor float64) (after State, ok bool) {
	settled := d.Refill(s, now)
	if n > d.Rate+Tolerance(n, d.Rate, 0) {
		return settled, false // no window has room; a shard may be asked for more than it holds
	}
	later := settled.Slots.First(n+max(0, floor), d.Rate, d.slotTolerance(settled, n), d.unpaused(settled, now))
	if settled.Slots.Ahead+later > 0 && d.delayed(d.slotStart(settled, later)-now.UnixMicro()) > max(0, -floor) {
		return settled, false
	}
	return d.give(settled, n, later), true
}

func (*slidingWindow) spend(d *Definition, settled State, n float64) State {
	return d.give(settled, n, 0)
}

// ready returns when the first slot with room for n begins, less the time that floor lets a
// reservation be ahead. Once a pause is over, a call may use an earlier slot than during it.
func (*slidingWindow) ready(d *Definition, settled State, now time.Time, n, floor float64) time.Time {
	ahead := d.longestDelay(max(0, -floor))
	at := func(from int64) time.Time {
		later := settled.Slots.First(n+max(0, floor), d.Rate, d.slotTolerance(settled, n)/2, from)
		if settled.Slots.Ahead+later == 0 {
			return settled.TS
		}
		return instant(d.slotStart(settled, later) - ahead)
	}
	ready := at(d.unpaused(settled, now))
	if settled.Paused.After(now) && ready.After(settled.Paused) {
		return Later(at(0), settled.Paused)
	}
	return ready
}

func (*slidingWindow) due(d *Definition, settled State, _ float64) time.Time {
	if settled.Slots.Ahead > 0 {
		return instant(d.slotStart(settled, 0))
	}
	return time.Time{}
}

// credit takes n out of the slots, the oldest first.
func (*slidingWindow) credit(d *Definition, s State, now time.Time, n float64) State {
	settled := d.Refill(s, now)
	settled.Slots = settled.Slots.Oldest(n)
	return d.valued(settled)
}

// refund takes up to n tokens out of the slot that contains the instant slot. A slot that has left
// the window refunds nothing.
func (*slidingWindow) refund(d *Definition, s State, now time.Time, n float64, slot int64) State {
	settled := d.Refill(s, now)
	past := slot - d.slotStart(settled, -int64(d.Slots))
	if past < 0 || past/settled.Slots.Width > int64(d.Slots) {
		return settled
	}
	settled.Slots = settled.Slots.Change(int(past/settled.Slots.Width), -n)
	return d.valued(settled)
}

// room excludes the tokens that are out, which count in the slot that ends with them, and all later
// slots. A credit takes from the oldest slots first.
func (*slidingWindow) room(d *Definition, settled State, out Out, _ float64) float64 {
	if out.Tokens == 0 {
		return settled.Slots.Held(0)
	}
	later := (d.slotStart(settled, 1) - out.Until.UnixMicro()) / settled.Slots.Width
	totals := settled.Slots.Totals
	last := min(max(len(totals)-1-int(max(later, 0)), 0), len(totals)-1)
	return totals[last] - totals[0] - out.Tokens
}

// back refunds to the slot of the lease. All tokens that are out belong to the slot that ends with
// them. A row written by another definition takes nothing back.
func (*slidingWindow) back(d *Definition, s State, out Out, r *Return, _ time.Time) (State, Out) {
	out = d.less(out, r, r.Taken.Add(d.SlotWidth()), out.Until.Add(-1))
	if d.own(s) {
		s = d.Refund(s, s.TS, r.Count, r.Taken.UnixMicro())
	}
	return s, out
}

// full keeps the tokens that are out, in the slot that ends with them.
func (*slidingWindow) full(d *Definition, key string, _ State, out Out, _ time.Time) State {
	return d.give(d.Fresh(key, out.Until.Add(-time.Microsecond)), out.Tokens, 0)
}

// pause keeps the slots.
func (*slidingWindow) pause(_ *Definition, settled State, _ bool, _, until time.Time) State {
	settled.Paused = Later(settled.Paused, until)
	return settled
}

func (*slidingWindow) resume(_ *Definition, _ string, settled State, _ Out, _ time.Time) State {
	settled.Paused = time.Time{}
	return settled
}

func (*slidingWindow) whole(d *Definition, s State, now time.Time, floor float64) float64 {
	value := max(0, d.Refill(s, now).Value-floor)
	return math.Floor(value + Tolerance(value, 1, d.Capacity)/2)
}

// together returns when every shard has a slot for its part of n.
func (*slidingWindow) together(d *Definition, states []State, now time.Time, n, floor float64) time.Time {
	shard, at, parts := d.Shard(), now, float64(len(states))
	for _, s := range states {
		at = Later(at, shard.Ready(s, now, n/parts, floor/parts))
	}
	return at
}

// TakeFrom takes n tokens from a sliding window's row at now. They go to the first slot with room
// that begins at from or later.
func (d *Definition) TakeFrom(s State, now time.Time, n float64, from time.Time) State {
	settled := d.Refill(s, now)
	wait := max(0, from.UnixMicro()-d.slotStart(settled, 0))
	first := (wait + settled.Slots.Width - 1) / settled.Slots.Width
	return d.give(settled, n, settled.Slots.First(n, d.Rate, d.slotTolerance(settled, n), first))
}

// delayed converts a delay in microseconds to tokens, as MaxReserved counts them.
func (d *Definition) delayed(micros int64) float64 {
	return float64(micros) * d.Rate / d.Micros()
}

// longestDelay returns the longest delay, in microseconds, that delayed converts to no more than
// tokens. It is exact to the microsecond.
func (d *Definition) longestDelay(tokens float64) int64 {
	delay := int64(min(tokens*d.Micros()/d.Rate, float64(longestWait)))
	for d.delayed(delay) > tokens {
		delay--
	}
	for delay < longestWait && d.delayed(delay+1) <= tokens {
		delay++
	}
	return delay
}

// Longest returns how far ahead a sliding window's reservation may be, by its floor.
func (d *Definition) Longest(floor float64) time.Duration {
	return time.Duration(min(d.longestDelay(-floor), math.MaxInt64/int64(time.Microsecond))) * time.Microsecond
}

// AvailableBy returns how many tokens a reservation at now can take for a slot that begins by at. s
// is settled.
func (d *Definition) AvailableBy(s State, now, at time.Time) float64 {
	wait := at.UnixMicro() - d.slotStart(s, 0)
	if s.Slots.Ahead == 0 {
		wait = max(wait, 0) // it has begun, even if the clock went back
	}
	if wait < 0 || wait/s.Slots.Width < d.unpaused(s, now) {
		return 0
	}
	return d.Rate - s.Slots.Held(wait/s.Slots.Width)
}

// unpaused returns the first slot that a reservation may use, counted from the newest slot of s. It
// is 0 unless s is paused.
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

// give counts n in a slot of s; later counts slots from the newest one.
func (d *Definition) give(s State, n float64, later int64) State {
	s.Slots = s.Slots.Add(n, later)
	return d.valued(s)
}

// plain is false above mostBase: there the totals must be counted anew, which a statement cannot
// do.
func (*slidingWindow) plain(d *Definition, s State, _ time.Time) bool {
	return d.own(s) && s.Slots.Base() <= mostBase*d.Rate
}

// own reports whether s has slots of this definition's width and number.
func (d *Definition) own(s State) bool {
	return s.Slots != nil && s.Slots.Width == d.Tick() && s.Slots.Count() == d.Slots
}

// adopt returns s in slots of d, if another definition wrote it. The tokens of a slot of another
// width go to the slot in which theirs ends, which may be in the future: the latest possible, so no
// window gets too many. The value of another kind becomes the tokens left, and debt becomes a
// reservation for when it would be paid.
func (d *Definition) adopt(s State) State {
	ts := s.TS.UnixMicro()
	origin := ts
	if !d.Start.IsZero() {
		origin = d.Start.UnixMicro()
	}
	width := d.Tick()
	adopted := State{TS: instant(edge(origin, ts, width)), Paused: s.Paused, Slots: slots.New(width, d.Slots)}
	aheadOf := func(micros int64) int64 {
		return (edge(origin, micros, width) - adopted.TS.UnixMicro()) / width
	}
	if s.Slots == nil {
		adopted.Slots.Ahead = aheadOf(d.reach(ts, max(0, -s.Value)))
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
