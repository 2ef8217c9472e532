package ratelimit

import (
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/ratelimit/internal/exact"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// MaxSlots is the largest number of slots of a [SlidingWindow].
const MaxSlots = 1000

// defaultSlots loses a seventeenth of the rate of a flood, and keeps a row small.
const defaultSlots = 16

// SlidingWindow is a limit that never grants more than Rate in any window of length
// Period, wherever that begins. It is for third parties that print "no more than 100
// in any 60 seconds", and ban callers who do not heed it.
//
// Time is cut into slots of Period / Slots, and what was taken in a slot comes back
// when no window can hold both the slot and now: Slots + 1 slots later. So the
// burst after idleness is all of Rate, and a flood that never ends gets
// Slots / (Slots + 1) of it.
//
// A reservation is for the start of a slot. Work that starts late, anywhere within
// that slot, still keeps the bound: up to SlotWidth after RetryAt. What is allowed at
// once is counted in the slot of its [Status].At. Work that begins when its slot is
// over, since its caller has waited long for the row, say, is counted too early.
//
// To settle for less gives back to the slot that was given, unless no window holds that
// any more. To settle for more counts it in the newest slot, so that no later grant shares
// a window with more than Rate, whether the work is thought of as done when it was granted
// or when it was settled. (With Shards that is so for each row.) Work that is reserved for
// together, by [Result.Instants] and [Result.Split], is in one slot, and due when it begins.
//
// Those who reserve are served in the order of their coming, and while a
// reservation is ahead nothing is allowed before it. In a call of several limits each is
// reserved for an instant of its own, and the result has the latest.
type SlidingWindow struct {
	// Name is the limit's identity in the database, together with the key.
	// Required, at most MaxNameLength bytes. A limit that was of another kind
	// under that name needs a new one: see [Definition.Settle].
	Name string

	// Rate is how many tokens any window may hold, and so also the largest
	// count, and the largest burst. Required, at least 1, may be a fraction.
	Rate float64

	// Period is the length of a window. Required, positive, in whole
	// microseconds (PostgreSQL's resolution).
	Period time.Duration

	// Slots is into how many slots the period is cut, at most MaxSlots. More of
	// them waste less of the rate, and make larger rows (8 bytes each) whose starts may
	// be late by less. Zero means 16.
	Slots int

	// MaxReserved is how far ahead reservations may go, as the tokens that Rate
	// is in that time; the bound is inclusive. With a Rate of 100 a minute, 50
	// are 30 seconds. Zero means unlimited (in effect, MaxSpan); None means not
	// at all.
	MaxReserved float64

	// Shards spreads each key over that many rows, so that a limit that
	// all calls take from is not one hot row. Zero means 1.
	Shards int

	// Start is an instant at which a slot starts; the others follow from it, in
	// both directions. The zero time gives each key a phase of its own, a hash of
	// name and key.
	Start time.Time
}

// For implements [Limit].
func (l SlidingWindow) For(key string) Request { return Request{l, key, 1} }

// ForN implements [Limit].
func (l SlidingWindow) ForN(key string, n float64) Request { return Request{l, key, n} }

// Validate implements [Limit].
func (l SlidingWindow) Validate() error {
	capacity := 0.0
	if badRate(l.Rate) == "" {
		capacity = l.Rate
	}
	f := fields{l.Name, l.Rate, l.Period, capacity, l.MaxReserved, l.Shards}.check()
	if l.Rate < 1 && !f.have("Rate") {
		f.add("Rate", l.Rate, "can never grant a whole token, since no window holds more: state the rate over a longer period")
	}
	if y := l.Start.UTC().Year(); y < 1 || y > 9999 {
		f.add("Start", l.Start, "must be in the years 1 to 9999")
	}
	if l.Slots < 0 || l.Slots > MaxSlots {
		f.add("Slots", l.Slots, fmt.Sprintf("must be from 1 to %d (0 means %d)", MaxSlots, defaultSlots))
	}
	return f.err()
}

// Definition implements [Limit].
func (l SlidingWindow) Definition() Definition {
	d := Definition{
		Name: l.Name, Kind: KindSlidingWindow, Rate: l.Rate, Period: l.Period,
		Capacity:    l.Rate,
		MaxReserved: orDefault(l.MaxReserved, math.Inf(1)),
		Shards:      max(l.Shards, 1),
		Start:       l.Start.Round(0).UTC(), // comparable: no monotonic clock, one zone
		Slots:       l.Slots,
	}
	if d.Slots == 0 {
		d.Slots = defaultSlots
	}
	return d
}

func (SlidingWindow) sealed() {}

// SlotWidth is the length of a sliding window's slot: how late the work of a
// reservation may start so that the bound is kept. It is Period / Slots, rounded up
// to a whole microsecond; 0 for the other kinds, whose bound is for work that starts
// on time.
func (d *Definition) SlotWidth() time.Duration {
	if d.Kind != KindSlidingWindow {
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
	if d.Kind != KindSlidingWindow || !s.Paused.After(now) {
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
	return d.Kind != KindSlidingWindow || d.own(s) && s.Slots.Base() <= mostBase*d.Rate
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
