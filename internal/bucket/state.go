package bucket

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/slots"
)

// State is a limit's two numbers, for one key and shard, and whether it is
// paused. It needs the limit's definition to mean anything: see
// [Definition.Settle].
type State struct {
	Value  float64      // tokens at TS; negative is debt
	TS     time.Time    // in whole microseconds
	Paused time.Time    // the end of the last pause; zero when there is none
	Slots  *slots.Slots // the tokens that a sliding window has granted; nil for the other kinds
}

// longestWait, in microseconds, is above every wait that a definition allows.
// A debt that an earlier and faster definition left can be longer than a
// time.Time tells; it is cut to this.
const longestWait = 4 * int64(MaxSpan/time.Microsecond)

// reach is when a row that is refilled from ts on has been refilled with tokens.
func (d *Definition) reach(ts int64, tokens float64) int64 {
	if tokens/d.Rate*d.periodMicros() > float64(longestWait) {
		return ts + longestWait
	}
	return d.kind().reach(d, ts, tokens)
}

// Equal reports whether two states are the same, to the last bit.
func (s State) Equal(t State) bool {
	return s.Value == t.Value && s.TS.Equal(t.TS) && s.Paused.Equal(t.Paused) && s.Slots.Equal(t.Slots)
}

func instant(micros int64) time.Time { return time.UnixMicro(micros).UTC() }

// Fresh is the state of a key that has no row: full.
func (d *Definition) Fresh(key string, now time.Time) State {
	return d.kind().fresh(d, key, now)
}

// Refill brings s to now: it adds the tokens that were refilled since, up to
// Capacity. A now before s.TS, from a clock that went back or a caller that is
// late, neither takes tokens away nor creates any.
//
// A state that another definition of the name has written is taken as it is, so a new Rate
// holds at once for all keys. From a limit of another kind or with other slots, a sliding
// window takes over the tokens taken lately and counts them as late as they may have been
// taken, and the other kinds take over the tokens left; while programs with both run, the bound
// is not kept.
func (d *Definition) Refill(s State, now time.Time) State {
	return d.kind().refill(d, s, now)
}

// ValueAt is the value at now of s, which is settled. Only a sliding window's differs
// from that of s, when the newest slot is in the future: that is as far away as now says,
// and not as the beginning of a slot.
func (d *Definition) ValueAt(s State, now time.Time) float64 {
	if s.Slots != nil && s.Slots.Ahead > 0 {
		return -d.delayed(d.slotStart(s, 0) - now.UnixMicro())
	}
	return s.Value
}

// When is the first instant at which s, which is settled, is not paused and holds
// want tokens, if nothing is taken: s.TS when it does already. want is at most Capacity.
func (d *Definition) When(s State, want float64) time.Time {
	paused := s.Paused
	s.Paused = time.Time{}
	return Later(d.kind().ready(d, s, s.TS, want, 0), paused)
}

// Ready is the first instant at which n tokens can be taken from s so that at
// least floor is left, if nothing else is taken: not after now when they can be
// already. A pause does not count, since it does not for a reservation, but that of a
// sliding window is for a slot after it.
func (d *Definition) Ready(s State, now time.Time, n, floor float64) time.Time {
	return d.kind().ready(d, d.Refill(s, now), now, n, floor)
}

// Later returns the later of two instants.
func Later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// Floor returns the lowest value that a call may leave behind: 0, or for a reservation
// −MaxReserved, and never more debt than is refilled during MaxSpan, so that every wait has a
// duration.
func (d *Definition) Floor(reserve bool) float64 {
	if !reserve {
		return 0
	}
	return 0 - min(d.MaxReserved, d.Rate*float64(MaxSpan)/float64(d.Period))
}

// Keeps returns the lowest value that must be left by a call that is granted at once and may
// leave floor behind. A sliding window's reservations go ahead in time, and not below 0.
func (d *Definition) Keeps(floor float64) float64 {
	if d.Slotted() {
		return max(0, floor)
	}
	return floor
}

// Most is the largest count that a call may ever take that may leave floor behind.
func (d *Definition) Most(floor float64) float64 { return d.Capacity - d.Keeps(floor) }

// Take takes n tokens from s at now if that leaves at least floor; it returns the state to
// store, or when ok is false, the current one. It does not check whether s is paused, which
// refuses an allow and not a reservation; but a sliding window gives a reservation a slot that
// begins when the pause is over, so for an allow s must not be paused.
func (d *Definition) Take(s State, now time.Time, n, floor float64) (after State, ok bool) {
	return d.kind().take(d, s, now, n, floor)
}

// Spend takes n tokens from s at now, even below 0. A negative n puts back the tokens that were
// taken last.
func (d *Definition) Spend(s State, now time.Time, n float64) State {
	return d.kind().spend(d, d.Refill(s, now), n)
}

// Due is when the work may run for which n tokens were taken that left s behind: now,
// unless s is in debt or paused.
func (d *Definition) Due(s State, now time.Time, n float64) time.Time {
	return Later(Later(now, s.Paused), d.kind().due(d, s, n))
}

// Charged is when a taking at now counts that left s behind: now, but within the tick
// of s. That one begins later if the clock went back or another call was decided by a
// later instant, and is over if now is that of another row which had to be waited for.
func (d *Definition) Charged(s State, now time.Time) time.Time {
	last := d.Next(s.TS).Add(-time.Microsecond)
	switch {
	case now.Before(s.TS):
		return s.TS
	case now.After(last):
		return last
	}
	return now
}

// Missing is the most that a credit gives back to s, which is settled.
func (d *Definition) Missing(s State) float64 { return d.kind().room(d, s, Out{}, 0) }

// Credit gives n tokens back to s at now, up to Capacity, and a sliding window to its
// oldest slots first. While s is paused they can be
// reserved, and allowed after the pause. More than
// Capacity, which another definition of the name has left there, stays.
func (d *Definition) Credit(s State, now time.Time, n float64) State {
	return d.kind().credit(d, s, now, n)
}

// Charge takes n tokens from s at now, below every bound if need be: they were used already. A
// value above Capacity, which another definition of the name has left, stays. A sliding window
// counts them in its newest slot: later calls are given that or a later one, so no window that
// has them has too many besides.
func (d *Definition) Charge(s State, now time.Time, n float64) State {
	settled := d.Refill(s, now)
	settled.Value = max(settled.Value, s.Value)
	return d.kind().spend(d, settled, n)
}

// Refund gives the tokens of a call back to s at now. It adds to the value as it is stored:
// with nothing refilled that is the same by every definition, however it has changed since, and
// the next take cuts it to its capacity. A sliding window refunds to the slot of the instant
// slot, or not at all if that is long ago.
func (d *Definition) Refund(s State, now time.Time, n float64, slot int64) State {
	return d.kind().refund(d, s, now, n, slot)
}

// Slot is an instant of the slot in which a taking that left s behind was counted, in
// microseconds since 1970: its last, which is in the slot to which another definition
// would count it. It is 0 for the other kinds.
func (d *Definition) Slot(s State) int64 {
	if s.Slots == nil {
		return 0
	}
	return d.slotStart(s, 1) - 1
}

// Plain reports whether a statement at now can add to s: it is as this definition writes it,
// and has been settled not long ago.
func (d *Definition) Plain(s State, now time.Time) bool { return d.kind().plain(d, s, now) }

// Whole is how many whole tokens can be taken from s at now so that floor is left, which is
// not below 0; a call that takes as much as there is takes so many.
func (d *Definition) Whole(s State, now time.Time, floor float64) float64 {
	return d.kind().whole(d, s, now, floor)
}

// Pause empties s at now; before until nothing can be allowed and nothing is refilled. Debt
// stays. The later of two pauses holds. An until that is not after now changes nothing. A
// sliding window keeps its slots, and a quota by the calendar its value.
func (d *Definition) Pause(s State, now, until time.Time) State {
	settled := d.Refill(s, now)
	if !until.After(now) {
		return settled
	}
	until = instant(until.Add(time.Microsecond - 1).UnixMicro()) // not before until
	return d.kind().pause(d, settled, s.Paused.After(now), now, until)
}

// Resume ends at now a pause of key that is not over: the value stays, a token
// bucket fills from now on, and a fixed window has its own edges back. It
// changes nothing when there is no such pause.
func (d *Definition) Resume(key string, s State, now time.Time) State {
	return d.ResumeBeside(key, s, Out{}, now)
}

// idleFor is for how long a row must have meant the same as no row before it may
// go. A caller that read the clock and then waited for the row makes a new one, as
// of then, if it was deleted meanwhile; by that it must be full as well.
const idleFor = time.Minute

// Idle reports whether s is full at now, has been for a minute, and is not paused, and so means
// the same as no row of key. A fixed window with other edges than a fresh row, since it was
// paused, means that only once it has let an edge pass unused: otherwise, with its edges moved,
// more could be refilled than in any window. By the calendar such a row, which stands on no edge,
// is kept until one has counted.
func (d *Definition) Idle(key string, s State, now time.Time) bool {
	now = now.Add(-idleFor)
	settled := d.Refill(s, now)
	off := settled.TS.Sub(d.Fresh(key, now).TS)
	switch {
	case d.Every != 0 && (off < 0 || off.Microseconds() > d.slack()):
		return false
	case d.Every == 0 && off != 0:
		now = now.Add(-d.Period)
		settled = d.Refill(s, now)
	}
	return settled.Value >= d.Capacity && !s.TS.After(now) && !s.Paused.After(now)
}
