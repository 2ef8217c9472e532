// Package escrow is what a process has taken ahead from limits, and hands out from
// memory for a moment (O'Neil, "The Escrow Transactional Method", 1986). It knows no
// database: whoever uses it takes ahead, and gives back, by its own statements.
//
// In every stretch of time a limit grants no more than it would without. That is so
// because what is in the row and what is in anybody's memory are together never more
// than the capacity; a test looks at all states of a small model of it. Three rules see
// to it:
//
//   - Whoever takes ahead from a token bucket counts with a capacity that is lower by
//     what is refilled until the end of what was taken ahead. What is taken ahead from
//     a fixed window ends with it, so nothing is refilled until then; and from a sliding
//     window with the slot in which it is counted.
//   - The end is judged from before the statement was sent that took, so that it is
//     never late.
//   - What is left can be given back before the end only, and of a token bucket less
//     what was refilled since it was taken: others may have taken ahead meanwhile, from
//     a row that could not have had as much with what is given back in it. A sliding
//     window knows what each of its slots holds, so what is left goes back to its own,
//     as long as any window holds that.
package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Lowered is the capacity that a definition counts with when something is taken ahead
// for so long; 0 if nothing can be.
func Lowered(d *bucket.Definition, lasts time.Duration) float64 {
	switch d.Kind {
	case ratelimit.KindTokenBucket:
		return max(0, d.Capacity-refilled(d, lasts))
	case ratelimit.KindFixedWindow, ratelimit.KindSlidingWindow:
		return d.Capacity
	}
	return 0
}

// refilled is what a token bucket is refilled with in a time.
func refilled(d *bucket.Definition, in time.Duration) float64 {
	return d.Rate * float64(in) / float64(d.Period)
}

// stands is for how long the clock of a kind of limit stands still, with which all that
// was taken ahead meanwhile ends: for a fixed window's period, or a sliding window's
// slot; 0 if it does not.
func stands(d *bucket.Definition) time.Duration {
	if d.Kind == ratelimit.KindFixedWindow {
		return d.Period
	}
	return d.SlotWidth()
}

// Longest is the longest time for which what is taken ahead can be used, if that is not
// to be longer than lasts.
func Longest(d *bucket.Definition, lasts time.Duration) time.Duration {
	if still := stands(d); still > 0 {
		return min(lasts, still)
	}
	return lasts
}

// usable is for how long what was taken ahead at an instant, and is in the row from
// another on, can be used.
func usable(d *bucket.Definition, taken, at time.Time, lasts time.Duration) time.Duration {
	if still := stands(d); still > 0 {
		return min(lasts, taken.Add(still).Sub(at))
	}
	return lasts
}

// end is the instant, of the row, before which what was taken ahead can be given back,
// if the row's was taken when it was taken.
func end(d *bucket.Definition, taken time.Time, lasts time.Duration) time.Time {
	switch d.Kind {
	case ratelimit.KindFixedWindow:
		return taken.Add(d.Period)
	case ratelimit.KindSlidingWindow:
		return taken.Add(time.Duration(d.Slots+1) * d.SlotWidth())
	}
	return taken.Add(lasts)
}

// outlasts reports whether what was taken ahead can be given back when it can be used no
// more.
func outlasts(d *bucket.Definition) bool { return d.Kind == ratelimit.KindSlidingWindow }

// Lot is what one statement has taken ahead from a row.
type Lot struct {
	Count float64
	After bucket.State // the row as the statement left it
	At    time.Time    // the instant of the decision, on the database's clock
	Sent  time.Time    // on this machine's, before the statement was sent
}

// Return is what is left of a lot, to be given back to its row.
type Return struct {
	Row        decide.Row
	Definition bucket.Definition
	Count      float64
	Taken      time.Time // the row's ts when it was taken
	End        time.Time // before which it must arrive, in the row's time
}
