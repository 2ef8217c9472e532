// Package curve judges the grants of a limit by its arrival curve: over all stretches of a
// history, of any start and length, the most tokens granted as a share of the promised bound.
// More than 1 breaks the promise; a share that is never near 1 means that the history tests
// nothing.
package curve

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Event is a number of tokens that were used at an instant.
type Event struct {
	At    time.Time
	Count float64
}

// Curve is the most that may be used in a stretch of a length, both of its ends
// included.
type Curve func(time.Duration) float64

// Of returns the curve that a definition promises. A token bucket's is its capacity and its
// refill; a fixed window's has the tokens of one edge more than there are whole periods; a
// sliding window's is its rate for each period that is begun. Reservations count when they are
// due, for which the curve must be that of work that begins on time, but for a sliding
// window's.
func Of(d ratelimit.Definition) Curve {
	return func(length time.Duration) float64 {
		periods := float64(length) / float64(d.Period)
		if d.Every != 0 { // a month may be shorter by three days, and a day by hours
			periods = float64(length) / (float64(d.Period)*28/31 - float64(4*time.Hour))
		}
		switch d.Kind {
		case ratelimit.KindSlidingWindow:
			return d.Rate * (math.Floor(periods) + 1)
		case ratelimit.KindFixedWindow:
			return d.Capacity + d.Rate*(math.Floor(periods)+1)
		}
		return d.Capacity + d.Rate*periods
	}
}

// Within returns the curve of a party that allows no more than most in any window of a length,
// and so counts every stretch that is shorter.
func Within(most float64, window time.Duration) Curve {
	return func(length time.Duration) float64 {
		if length < window {
			return most
		}
		return math.Inf(1)
	}
}

// Worst is the stretch of a history with the largest share of its bound.
type Worst struct {
	Share    float64 // of the bound
	Used     float64
	From, To time.Time
}

func (w Worst) String() string {
	return fmt.Sprintf("%.4f of the bound: %g in %v", w.Share, w.Used, w.To.Sub(w.From))
}

// Judge looks at all stretches that begin and end with an event: the others hold no
// more. Its time grows with the square of the number of events.
func Judge(events []Event, curve Curve) (worst Worst) {
	events = together(events)
	for i := range events {
		used := 0.0
		for _, e := range events[i:] {
			used += e.Count
			most := curve(e.At.Sub(events[i].At))
			if math.IsInf(most, 1) {
				break
			}
			if share := used / most; share > worst.Share {
				worst = Worst{share, used, events[i].At, e.At}
			}
		}
	}
	return worst
}

// Burst returns the most tokens used in any stretch above the refill by a rate in it: the
// capacity that a definition of that rate would need.
func Burst(events []Event, d ratelimit.Definition) (most float64) {
	level := 0.0
	events = together(events)
	for i, e := range events {
		if i > 0 {
			level -= d.Rate * float64(e.At.Sub(events[i-1].At)) / float64(d.Period)
		}
		level = max(level, 0) + e.Count
		most = max(most, level)
	}
	return most
}

// Served is a number of tokens that were used at some instant between two, both included:
// between when somebody asked and when he was told, say.
type Served struct {
	From, To time.Time
	Count    float64
}

// JudgeServed looks at all stretches, and in each counts the tokens that were certainly used in
// it. Its time grows with the square of len(served).
func JudgeServed(served []Served, curve Curve) (worst Worst) {
	served = slices.Clone(served)
	slices.SortFunc(served, func(a, b Served) int { return a.To.Compare(b.To) })
	for i := range served {
		used, from := 0.0, served[i].From
		for _, s := range served {
			if s.From.Before(from) {
				continue
			}
			used += s.Count
			if share := used / curve(s.To.Sub(from)); share > worst.Share {
				worst = Worst{share, used, from, s.To}
			}
		}
	}
	return worst
}

// together is events in order, those of one instant as one.
func together(events []Event) (sorted []Event) {
	events = slices.Clone(events)
	slices.SortFunc(events, func(a, b Event) int { return a.At.Compare(b.At) })
	for _, e := range events {
		if n := len(sorted) - 1; n >= 0 && sorted[n].At.Equal(e.At) {
			sorted[n].Count += e.Count
			continue
		}
		sorted = append(sorted, e)
	}
	return sorted
}
