// Package slots is the tokens that a sliding window has granted, slot by slot: pure arithmetic
// that knows neither rates nor instants. It imports nothing of the library, so that the root
// package can name it.
package slots

import (
	"math"
	"slices"
	"sort"
)

// Slots is the tokens in the S + 1 newest slots of a row, as running totals. It is immutable:
// methods that change something return another.
//
// Totals has S + 2 numbers: the tokens granted before the oldest of the slots, before the one
// after it, and so on, and last those granted in all. The difference of two is the tokens in
// the slots between them, so that a decision needs two of them and no sum.
type Slots struct {
	Width  int64 // of a slot, in microseconds
	Ahead  int64 // how many slots the newest one is after the one that was written last
	Totals []float64
}

// New returns slots that hold nothing.
func New(width int64, slots int) *Slots {
	return &Slots{Width: width, Totals: make([]float64, slots+2)}
}

// Count returns the number of slots that make up a period: one less than there are.
func (s *Slots) Count() int { return len(s.Totals) - 2 }

func (s *Slots) newest() float64 { return s.Totals[len(s.Totals)-1] }

// Base returns the total before the oldest slot.
func (s *Slots) Base() float64 { return s.Totals[0] }

// Held returns the tokens in all slots together, when the newest is later slots later.
func (s *Slots) Held(later int64) float64 { return s.newest() - s.Totals[s.place(later)] }

// Of returns the tokens in one of the slots: 0 is the oldest.
func (s *Slots) Of(slot int) float64 { return s.Totals[slot+1] - s.Totals[slot] }

// place returns the place of the total before the oldest slot, when the newest is so many
// slots later.
func (s *Slots) place(later int64) int64 { return min(max(later, 0), int64(len(s.Totals)-1)) }

// First returns how many slots after the newest is the first, not before from, in which n
// more fit: then the slots hold less than most and the tolerance. When all that they
// hold is gone, n fits in any case.
func (s *Slots) First(n, most, tolerance float64, from int64) int64 {
	over := s.newest() + n - most - tolerance
	first := sort.Search(len(s.Totals)-1, func(i int) bool { return s.Totals[i] > over })
	return max(from, int64(first))
}

// Add returns the slots when n more are given in the one that is so many slots after
// the newest.
func (s *Slots) Add(n float64, later int64) *Slots {
	after := s.Move(later, s.Ahead+later)
	if later == 0 {
		after.Totals = append([]float64(nil), s.Totals...)
	}
	after.Totals[len(after.Totals)-1] += n
	return after
}

// Move returns the slots when the newest is so many slots later. It shares the totals
// when that is none.
func (s *Slots) Move(later, ahead int64) *Slots {
	moved := &Slots{Width: s.Width, Ahead: ahead, Totals: s.Totals}
	if later = min(later, int64(len(s.Totals))); later > 0 {
		moved.Totals = make([]float64, len(s.Totals))
		for i := range moved.Totals {
			moved.Totals[i] = s.Totals[s.place(later+int64(i))]
		}
	}
	return moved
}

// Equal reports whether two rows have the same slots, or none.
func (s *Slots) Equal(t *Slots) bool {
	if s == nil || t == nil {
		return s == t
	}
	return s.Width == t.Width && s.Ahead == t.Ahead && slices.Equal(s.Totals, t.Totals)
}

// Rebase returns the slots with the totals counted from the oldest slot. They would
// otherwise grow with all that was ever given, and lose their last digits.
func (s *Slots) Rebase() *Slots {
	rebased := &Slots{Width: s.Width, Ahead: s.Ahead, Totals: make([]float64, len(s.Totals))}
	for i := range rebased.Totals {
		rebased.Totals[i] = s.Totals[i] - s.Totals[0]
	}
	return rebased
}

// Oldest returns the slots with n taken out of them, from the oldest first.
func (s *Slots) Oldest(n float64) *Slots {
	out := &Slots{Width: s.Width, Ahead: s.Ahead, Totals: make([]float64, len(s.Totals))}
	base := min(s.Totals[0]+n, s.newest())
	for i := range out.Totals {
		out.Totals[i] = max(s.Totals[i], base)
	}
	return out
}

// Change returns the slots with n more in one of them, which is the oldest when slot is 0; a
// negative n takes out at most the tokens in it.
func (s *Slots) Change(slot int, n float64) *Slots {
	out := &Slots{Width: s.Width, Ahead: s.Ahead, Totals: append([]float64(nil), s.Totals...)}
	n = max(n, -s.Of(slot))
	for i := slot + 1; i < len(out.Totals); i++ {
		out.Totals[i] = max(out.Totals[i]+n, out.Totals[i-1]) // rounding must not turn them around
	}
	return out
}

// Numbers returns the slots as they are stored beside a value: the width, how far they
// are ahead, the value, by which it is found whether another kind of limit has
// written the row since, and the totals.
func (s *Slots) Numbers(value float64) []float64 {
	return append([]float64{float64(s.Width), float64(s.Ahead), value}, s.Totals...)
}

// Header is how many Numbers are before the totals.
const Header = 3

// Read returns the slots that are stored beside a value, nil if these are not they. A
// connection may read numbers as text with 15 digits.
func Read(numbers []float64, value float64) *Slots {
	if len(numbers) < Header+3 || math.Abs(numbers[2]-value) > math.Abs(value)*1e-14 || numbers[0] < 1 || numbers[0] > math.MaxInt64/2 {
		return nil
	}
	return &Slots{Width: int64(numbers[0]), Ahead: int64(numbers[1]), Totals: numbers[Header:]}
}
