package slots

import (
	"slices"
	"testing"
)

// of is slots that hold numbers of tokens, the newest last, on a total from before.
func of(before float64, held ...float64) *Slots {
	s := &Slots{Width: 10, Totals: []float64{before}}
	for _, n := range held {
		before += n
		s.Totals = append(s.Totals, before)
	}
	return s
}

// What is stored is read again, unless somebody who does not know of it has written the
// value since.
func TestRead(t *testing.T) {
	s := of(7, 1, 2, 0.1, 4)
	s.Ahead = 3
	back := Read(s.Numbers(0.25), 0.25)
	if back == nil || back.Width != s.Width || back.Ahead != s.Ahead || !slices.Equal(back.Totals, s.Totals) {
		t.Errorf("got %v, want %v", back, s)
	}
	for name, numbers := range map[string][]float64{
		"another value": s.Numbers(0.5), "nothing": nil, "too short": s.Numbers(0.25)[:Header+2], "no width": {0, 0, 0.25, 1, 2, 3},
	} {
		if got := Read(numbers, 0.25); got != nil {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestEqual(t *testing.T) {
	s := New(10, 3).Add(2, 0)
	for name, other := range map[string]*Slots{
		"none": nil, "another width": New(11, 3).Add(2, 0), "ahead": s.Move(0, 1), "another total": s.Add(1, 0), "fewer": New(10, 2).Add(2, 0),
	} {
		if s.Equal(other) || other.Equal(s) {
			t.Errorf("%s: Equal() = true", name)
		}
	}
	if none := (*Slots)(nil); !s.Equal(New(10, 3).Add(2, 0)) || !none.Equal(nil) {
		t.Error("Equal() = false for the same")
	}
}
