package bucket

import (
	"fmt"
	"time"
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
