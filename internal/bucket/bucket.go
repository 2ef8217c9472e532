// Package bucket is the algebra of limits: how many tokens a row holds at an instant, and how takes
// and refunds change it. It is pure and imports only arithmetic, so the root package, receipts and
// stores share it.
//
// A [Definition] defines a limit, a [State] is the content of a row, and the methods of
// Definition are the arithmetic. Each kind of limit is one file, which implements the interface
// kind: tokenbucket.go, fixedwindow.go, calendar.go and slidingwindow.go. The first three share
// level: their value is the number of tokens left. The rest of the library does not ask for
// the kind of a limit. It asks for properties:
//
//   - [Definition.Form] says which SQL statements serve the rows.
//   - [Definition.Slotted] reports whether rows have slots beside the value. Then a refund
//     needs the row to be read, and a reservation that must wait needs a later slot.
//   - [Definition.Tick] is the time between two ticks of a row's clock, in microseconds:
//     1 for a token bucket, otherwise a period or a slot.
//   - [Definition.Stepped] reports whether the clock stands still between ticks.
//   - [Definition.Next] is the next tick.
//   - [Definition.End] is when prefetched tokens end: with their window or slot, otherwise
//     after a time.
//   - [Definition.Inflow] is the tokens refilled while prefetched tokens are out: none if the
//     clock stands still.
//   - [Definition.Plain] reports whether a statement can add to a row as it is.
//   - [Definition.Whole] serves calls that take the available tokens, up to a count.
//   - [Definition.Together] serves limits with several shards.
package bucket

import (
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/ratelimit/internal/slots"
)

// MaxSpan is the longest period, the longest time to fill an empty limit, and the
// longest wait for a reservation.
const MaxSpan = 100 * 365 * 24 * time.Hour

// Kind is how a limit refills.
type Kind uint8

// The kinds of limits.
const (
	TokenBucket   Kind = iota + 1 // continuously
	FixedWindow                   // at the edge of each window
	SlidingWindow                 // slot by slot, as taken tokens leave the window
)

// CalendarWindow is the Form of fixed windows whose edges come by the calendar.
const CalendarWindow = FixedWindow | 4

// kinds holds the implementations in an array: the compiler inlines its look-up. A definition
// without a kind is treated as a token bucket; no limit's definition lacks one.
var kinds = func() (all [256]kind) {
	for i := range all {
		all[i] = &tokenBucket{}
	}
	all[FixedWindow], all[SlidingWindow] = &fixedWindow{}, &slidingWindow{}
	all[CalendarWindow] = &calendar{}
	return all
}()

// ParseKind returns the kind whose String is text.
func ParseKind(text string) (k Kind, ok bool) {
	for k := TokenBucket; k <= SlidingWindow; k++ {
		if text == k.String() {
			return k, true
		}
	}
	return 0, false
}

// String returns the kind in words, such as "token bucket".
func (k Kind) String() string {
	if k == 0 || k > SlidingWindow {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kinds[k].String()
}

// Definition is a limit with its defaults filled in. It has the fields of the root
// package's Definition, which converts to it; the methods are the arithmetic.
type Definition struct {
	Name        string
	Kind        Kind
	Rate        float64       // tokens per Period
	Period      time.Duration // whole microseconds
	Capacity    float64       // 0 is an empty bucket; Rate for a sliding window
	MaxReserved float64       // 0 is no debt, +Inf unlimited
	Shards      int           // at least 1
	Start       time.Time     // of a window: one of its edges; zero if the phase comes from the key
	Slots       int           // sliding window: the number of slots in its period; otherwise 0

	Every  Unit          // between edges by the calendar, otherwise 0; Period is then the longest window
	Zone   string        // the name of its time zone
	Anchor Date          // the day of one of its edges
	Time   time.Duration // of day, when edges come: since midnight by local clocks; whole minutes
}

// kind is the behavior in which the kinds of limits differ. Its values have no size. A definition
// whose address goes to a method moves to the heap, so callers pass one that is there and make no
// copy. Instants of type int64 are microseconds since 1970. A settled state has been refilled up to
// the instant of the call.
type kind interface {
	String() string

	// last returns the last tick up to now of a row with a tick at ts. next returns the tick after
	// ts.
	last(d *Definition, ts, now int64) int64
	next(d *Definition, ts int64) int64

	// reach returns when the refill from ts on amounts to tokens, a number above 0.
	reach(d *Definition, ts int64, tokens float64) int64

	fresh(d *Definition, key string, now time.Time) State
	refill(d *Definition, s State, now time.Time) State
	plain(d *Definition, s State, now time.Time) bool

	take(d *Definition, s State, now time.Time, n, floor float64) (after State, ok bool)
	spend(d *Definition, settled State, n float64) State

	// ready returns when n tokens can be taken from a settled state so that floor is left. due
	// returns when the work for n tokens may run, by the settled state after their take; the zero
	// time means at once.
	ready(d *Definition, settled State, now time.Time, n, floor float64) time.Time
	due(d *Definition, settled State, n float64) time.Time

	credit(d *Definition, s State, now time.Time, n float64) State
	refund(d *Definition, s State, now time.Time, n float64, slot int64) State

	// room returns how many tokens a settled state can still get back, given those that are out and
	// owed. full returns a state after a reset, given those that are out.
	room(d *Definition, settled State, out Out, owed float64) float64
	full(d *Definition, key string, s State, out Out, now time.Time) State

	// back implements Definition.Return.
	back(d *Definition, s State, out Out, r *Return, now time.Time) (State, Out)

	// pause and resume take a settled state. paused says whether it is paused already; until is
	// after now.
	pause(d *Definition, settled State, paused bool, now, until time.Time) State
	resume(d *Definition, key string, settled State, out Out, now time.Time) State

	whole(d *Definition, s State, now time.Time, floor float64) float64
	together(d *Definition, states []State, now time.Time, n, floor float64) time.Time

	// change implements Definition.Change for the sum of all tokens that are out. It returns the
	// state of each row of to, and the state of rows that only d has.
	change(d, to *Definition, key string, states []State, out Out, now time.Time) (each, empty State)
}

// Form returns d's Kind, or CalendarWindow.
func (d *Definition) Form() Kind {
	if d.Every != 0 {
		return CalendarWindow
	}
	return d.Kind
}

// kind returns d's behavior.
func (d *Definition) kind() kind { return kinds[d.Form()] }

// Slotted reports whether rows have slots beside the value. Then a refund goes to the slot in which
// the tokens were counted, and a reservation that must wait is counted in a later slot.
func (d *Definition) Slotted() bool { return d.Kind == SlidingWindow }

// Tick returns the time between two ticks of a row's clock, in microseconds: 1 for a token bucket,
// the period of a fixed window, the slot of a sliding window. By the calendar it is the longest
// such time.
func (d *Definition) Tick() int64 {
	if d.Every != 0 {
		return d.Period.Microseconds()
	}
	return d.kind().next(d, 0)
}

// Stepped reports whether a row's clock stands still between two ticks, as it does for all kinds
// but the token bucket.
func (d *Definition) Stepped() bool { return d.Tick() > 1 }

// Next returns the tick after ts: when a row with this ts next gets tokens.
func (d *Definition) Next(ts time.Time) time.Time {
	return instant(d.kind().next(d, ts.UnixMicro()))
}

// SlotWidth returns the length of a slot, 0 if there are none.
func (d *Definition) SlotWidth() time.Duration {
	if !d.Slotted() {
		return 0
	}
	return time.Duration(d.Tick()) * time.Microsecond
}

// Micros returns the Period in microseconds.
func (d *Definition) Micros() float64 { return float64(d.Period.Microseconds()) }

// State is the stored state of a limit for one key and shard: two numbers and a pause. It needs the
// limit's definition to mean anything: see [Definition.Refill].
type State struct {
	Value  float64      // tokens at TS; negative is debt
	TS     time.Time    // in whole microseconds
	Paused time.Time    // the end of the last pause; zero when there is none
	Slots  *slots.Slots // the tokens that a sliding window has granted; nil for the other kinds
}

// longestWait, in microseconds, is above every wait that a definition allows. Debt that an earlier,
// faster definition left can mean a wait longer than a time.Time holds; it is cut to this.
const longestWait = 4 * int64(MaxSpan/time.Microsecond)

// reach returns when the refill from ts on amounts to tokens; longestWait bounds it.
func (d *Definition) reach(ts int64, tokens float64) int64 {
	if tokens/d.Rate*d.Micros() > float64(longestWait) {
		return ts + longestWait
	}
	return d.kind().reach(d, ts, tokens)
}

// Equal reports whether two states are the same to the last bit.
func (s State) Equal(t State) bool {
	return s.Value == t.Value && s.TS.Equal(t.TS) && s.Paused.Equal(t.Paused) && s.Slots.Equal(t.Slots)
}

func instant(micros int64) time.Time { return time.UnixMicro(micros).UTC() }

// Fresh returns the state of a key without a row: full.
func (d *Definition) Fresh(key string, now time.Time) State {
	return d.kind().fresh(d, key, now)
}

// Refill brings s to now: it adds the tokens refilled since s.TS, up to Capacity. A now before
// s.TS, from a clock that went back or a late caller, changes nothing.
//
// A state that another definition of the name wrote is used as it is, so a new Rate holds at once
// for all keys. If the kind or the slots differ, a sliding window keeps the tokens taken lately,
// and counts them as late as they may have been taken. The other kinds keep the tokens left. While
// programs with both definitions run, the bound does not hold.
func (d *Definition) Refill(s State, now time.Time) State {
	return d.kind().refill(d, s, now)
}

// ValueAt returns the value of s, which is settled, at now. It differs from s.Value only if a
// sliding window's newest slot is in the future. Then it is the time from now until that slot, as
// tokens below 0.
func (d *Definition) ValueAt(s State, now time.Time) float64 {
	if s.Slots != nil && s.Slots.Ahead > 0 {
		return -d.delayed(d.slotStart(s, 0) - now.UnixMicro())
	}
	return s.Value
}

// When returns the first instant at which s, which is settled, is not paused and holds want tokens,
// if nothing is taken. That is s.TS if it does already. want is at most Capacity.
func (d *Definition) When(s State, want float64) time.Time {
	paused := s.Paused
	s.Paused = time.Time{}
	return Later(d.kind().ready(d, s, s.TS, want, 0), paused)
}

// Ready returns the first instant at which n tokens can be taken from s so that floor is left, if
// nothing else is taken. That is no later than now if they can be taken already. A pause does not
// count, because reservations ignore it; in a sliding window they get a slot after it.
func (d *Definition) Ready(s State, now time.Time, n, floor float64) time.Time {
	return d.kind().ready(d, d.Refill(s, now), now, n, floor)
}

// Tolerance returns how far rounding may have moved a comparison of token counts: 64 units in the
// last place of the largest number that took part. It only ever decides whether a call that fits
// exactly still fits; the statements of package table have the same. Stored numbers are not rounded
// to it. They are float64, so each refill can be wrong by half a unit in the last place of the number
// of tokens. Those errors add up where the refill between two calls is not much more than that unit:
// of 1e12 tokens in a century, asked for each microsecond, some 15 %.
func Tolerance(a, b, c float64) float64 {
	return max(math.Abs(a), math.Abs(b), math.Abs(c)) * 0x1p-46
}

// Later returns the later of two instants.
func Later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// Floor returns the lowest value that a call may leave behind: 0 for an allow, −MaxReserved for a
// reservation. Debt is bounded by the refill during MaxSpan, so that every wait is a time.Duration.
func (d *Definition) Floor(reserve bool) float64 {
	if !reserve {
		return 0
	}
	return 0 - min(d.MaxReserved, d.Rate*float64(MaxSpan)/float64(d.Period))
}

// Keeps returns the lowest value that a call with this floor may leave if it is granted at once. In
// a sliding window that is never below 0, because debt lies in later slots.
func (d *Definition) Keeps(floor float64) float64 {
	if d.Slotted() {
		return max(0, floor)
	}
	return floor
}

// Most returns the largest count that a call with this floor can ever take.
func (d *Definition) Most(floor float64) float64 { return d.Capacity - d.Keeps(floor) }

// Take takes n tokens from s at now if that leaves at least floor, and returns the state to store.
// If ok is false it returns the current state. It does not check whether s is paused: a pause
// refuses an allow but no reservation. A sliding window gives a reservation a slot after the pause,
// so for an allow s must not be paused.
func (d *Definition) Take(s State, now time.Time, n, floor float64) (after State, ok bool) {
	return d.kind().take(d, s, now, n, floor)
}

// Spend takes n tokens from s at now, even below 0. A negative n puts back tokens that were just
// taken.
func (d *Definition) Spend(s State, now time.Time, n float64) State {
	return d.kind().spend(d, d.Refill(s, now), n)
}

// Due returns when the work for n tokens may run; s is the state after their take. It is now,
// unless s is in debt or paused.
func (d *Definition) Due(s State, now time.Time, n float64) time.Time {
	return Later(Later(now, s.Paused), d.kind().due(d, s, n))
}

// Charged returns the instant at which a take counts; s is the state after the take at now. It is
// now, moved into the current tick of s. That tick begins after now if the clock went back, or if
// another call was decided by a later instant. It is over if now is another row's instant, for
// which the call had to wait.
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

// Missing returns the most that a credit gives back to s, which is settled.
func (d *Definition) Missing(s State) float64 { return d.kind().room(d, s, Out{}, 0) }

// Credit gives n tokens back to s at now, up to Capacity; a sliding window gives them to its oldest
// slots first. While s is paused they can be reserved, and allowed after the pause. A value above
// Capacity, left by another definition of the name, stays.
func (d *Definition) Credit(s State, now time.Time, n float64) State {
	return d.kind().credit(d, s, now, n)
}

// Charge takes n tokens that were used already from s at now, below every bound if need be. A value
// above Capacity, left by another definition of the name, stays. A sliding window counts them in
// its newest slot. Later calls get that slot or a later one, so no other window holds too many.
func (d *Definition) Charge(s State, now time.Time, n float64) State {
	settled := d.Refill(s, now)
	settled.Value = max(settled.Value, s.Value)
	return d.kind().spend(d, settled, n)
}

// Refund gives the tokens of a call back to s at now. It adds to the stored value without
// refilling, so the result is the same by every definition; the next take cuts it to the capacity.
// A sliding window refunds to the slot that contains the instant slot. If that slot has left the
// window it refunds nothing.
func (d *Definition) Refund(s State, now time.Time, n float64, slot int64) State {
	return d.kind().refund(d, s, now, n, slot)
}

// Slot returns the last instant of the slot that counted a take, in microseconds since 1970; s is
// the state after the take. Another definition would count the take in the slot with this instant,
// too. It is 0 for the other kinds.
func (d *Definition) Slot(s State) int64 {
	if s.Slots == nil {
		return 0
	}
	return d.slotStart(s, 1) - 1
}

// Plain reports whether a statement at now can add to s. It cannot if a sliding window's row
// must first be written anew, or if a quota's row lacks more edges than the statement receives.
func (d *Definition) Plain(s State, now time.Time) bool { return d.kind().plain(d, s, now) }

// Whole returns how many whole tokens can be taken from s at now so that floor is left; floor is
// not below 0. A call that takes the available tokens gets as many.
func (d *Definition) Whole(s State, now time.Time, floor float64) float64 {
	return d.kind().whole(d, s, now, floor)
}

// Pause empties s at now. Until the pause is over nothing is allowed and nothing is refilled. Debt
// stays. Of two pauses the later one holds. An until that is not after now changes nothing. A
// sliding window and a quota by the calendar keep their tokens, and go on refilling.
func (d *Definition) Pause(s State, now, until time.Time) State {
	settled := d.Refill(s, now)
	if !until.After(now) {
		return settled
	}
	until = instant(until.Add(time.Microsecond - 1).UnixMicro()) // rounded up to a microsecond
	return d.kind().pause(d, settled, s.Paused.After(now), now, until)
}

// Resume ends a pause of key at now. The value stays. A token bucket fills from now on, and a fixed
// window gets its own edges back. Without a pause it changes nothing.
func (d *Definition) Resume(key string, s State, now time.Time) State {
	return d.ResumeBeside(key, s, Out{}, now)
}

// idleFor is how long a row must have meant the same as no row before it may be deleted. A caller
// may have read the clock and then waited for the row. If the row was deleted meanwhile, the caller
// makes a new one as of that instant, at which the row must have been full, too.
const idleFor = time.Minute

// Idle reports whether s means the same as no row of key: it is full at now, has been for a minute,
// and is not paused. After a pause a fixed window can have other edges than a fresh row. Then it is
// idle only once an edge has passed unused: otherwise, with its edges moved back, a window could
// refill more than Rate. A quota's row that another definition wrote may stand on no edge. It is
// kept until an edge has counted.
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

// A limit with n shards has n rows with 1/n of its rate, capacity and max reserved each. Together
// they grant no more than the limit. A call is refused only when all of them together are short.

// Shard returns one shard's share of d: d itself if it has one shard.
func (d *Definition) Shard() *Definition {
	if d.Shards <= 1 {
		return d
	}
	shard, n := *d, float64(d.Shards)
	shard.Rate, shard.Capacity, shard.MaxReserved, shard.Shards = d.Rate/n, d.Capacity/n, d.MaxReserved/n, 1
	return &shard
}

// Better reports whether to take from shard state a and not from b. It is the one with more tokens
// at the later of their instants. So if only one can serve a call it is that one. If neither can,
// it is the one that is ready first, because all shards fill at one rate.
func (d *Definition) Better(a, b State) bool {
	at, shard := Later(a.TS, b.TS), d.Shard()
	return shard.Refill(a, at).Value >= shard.Refill(b, at).Value
}

// Together returns about when n tokens can be taken from all shards of d so that floor is left, if
// nothing else is taken. A store searches around it for the first such instant.
func (d *Definition) Together(states []State, now time.Time, n, floor float64) time.Time {
	return d.kind().together(d, states, now, n, floor)
}
