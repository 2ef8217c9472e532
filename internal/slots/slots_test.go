package slots

import (
	"math"
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

// held is what each slot holds.
func (s *Slots) held() (held []float64) {
	for slot := range s.Count() + 1 {
		held = append(held, s.Of(slot))
	}
	return held
}

func TestChanges(t *testing.T) {
	s := of(7, 1, 2, 0, 4)
	want := slices.Clone(s.Totals)
	for _, tt := range []struct {
		name string
		got  *Slots
		want []float64
	}{
		{"as it is", s, []float64{1, 2, 0, 4}},
		{"given now", s.Add(3, 0), []float64{1, 2, 0, 7}},
		{"given two slots later", s.Add(3, 2), []float64{0, 4, 0, 3}},
		{"given long after", s.Add(3, 1<<40), []float64{0, 0, 0, 3}},
		{"taken back", s.Add(3, 1).Add(-3, 0), []float64{2, 0, 4, 0}},
		{"later", s.Move(1, 0), []float64{2, 0, 4, 0}},
		{"long after", s.Move(math.MaxInt64, 0), []float64{0, 0, 0, 0}},
		{"counted anew", s.Rebase(), []float64{1, 2, 0, 4}},
		{"nothing credited", s.Oldest(0), []float64{1, 2, 0, 4}},
		{"the oldest and a part of the next", s.Oldest(2), []float64{0, 1, 0, 4}},
		{"more than there is", s.Oldest(100), []float64{0, 0, 0, 0}},
		{"less in one", s.Change(1, -1.5), []float64{1, 0.5, 0, 4}},
		{"no less than nothing", s.Change(1, -5), []float64{1, 0, 0, 4}},
		{"more in one", s.Change(0, 5), []float64{6, 2, 0, 4}},
	} {
		if got := tt.got.held(); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
	if !slices.Equal(s.Totals, want) {
		t.Errorf("the slots that were changed are %v themselves, want %v", s.Totals, want)
	}
	if base := s.Rebase().Base(); base != 0 {
		t.Errorf("counted anew: a total of %v from before, want none", base)
	}
}

func TestFirst(t *testing.T) {
	s := of(7, 1, 2, 0, 4)
	for _, tt := range []struct {
		n    float64
		from int64
		want int64
	}{{3, 0, 0}, {3.1, 0, 1}, {4, 0, 1}, {4, 3, 3}, {4.1, 0, 2}, {6, 0, 2}, {6.1, 0, 4}, {10, 0, 4}, {10, 9, 9}} {
		if got := s.First(tt.n, 10, 1e-9, tt.from); got != tt.want {
			t.Errorf("%v from %d: %d slots later, want %d", tt.n, tt.from, got, tt.want)
		}
	}
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
