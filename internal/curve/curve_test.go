package curve

import (
	"math"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
)

var start = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)

// at is one event each at so many seconds.
func at(seconds ...float64) (events []Event) {
	for _, s := range seconds {
		events = append(events, Event{start.Add(time.Duration(s * float64(time.Second))), 1})
	}
	return events
}

func TestJudge(t *testing.T) {
	bucket := ratelimit.TokenBucket{Name: "a", Rate: 1, Period: time.Second, Capacity: 2}.Definition()
	window := ratelimit.FixedWindow{Name: "a", Rate: 2, Period: time.Second}.Definition()
	sliding := ratelimit.SlidingWindow{Name: "a", Rate: 2, Period: time.Second}.Definition()
	for _, tt := range []struct {
		name   string
		curve  Curve
		events []Event
		want   float64
	}{
		{"nothing", Of(bucket), nil, 0},
		{"half a burst", Of(bucket), at(0), 0.5},
		{"a burst and what comes in", Of(bucket), at(0, 0, 1, 2, 3), 1},
		{"more than comes in", Of(bucket), at(0, 0, 1, 2, 2), 1.25},
		{"not the whole history but a part of it", Of(bucket), at(0, 100, 100, 100, 200), 1.5},
		{"both sides of an edge", Of(window), at(0.9, 0.9, 1.1, 1.1), 1},
		{"three windows in one period", Of(window), at(0, 0.1, 0.2, 0.3, 0.4, 0.5), 1.5},
		{"a window", Of(sliding), at(0, 0.999999, 1, 1.999999), 1},
		{"one too many in a window", Of(sliding), at(0, 0.5, 0.999999), 1.5},
		{"just not in a window", Of(sliding), at(0, 0, 1, 1, 2, 2), 1},
		{"out of order", Of(sliding), at(0.5, 0, 0.999999), 1.5},
		{"a partner's window", Within(2, time.Second), at(0, 0.5, 0.999999), 1.5},
		{"two of a partner's windows", Within(2, time.Second), at(0, 0.5, 1), 1},
	} {
		if got := Judge(tt.events, tt.curve); got.Share != tt.want {
			t.Errorf("%s: %v, want a share of %v", tt.name, got, tt.want)
		}
	}
}

// between is one that was served from one second to another.
func between(from, to float64) Served {
	return Served{at(from)[0].At, at(to)[0].At, 1}
}

func TestBurst(t *testing.T) {
	d := ratelimit.TokenBucket{Name: "b", Rate: 10, Period: time.Second}.Definition()
	for name, test := range map[string]struct {
		events []Event
		want   float64
	}{
		"nothing":                  {nil, 0},
		"at one instant":           {at(0, 0, 0), 3},
		"in any order":             {at(1, 0, 0), 2},
		"what was refilled is not": {at(0, 0, 0, 0.2, 0.2), 3},
		"a pause saves up nothing": {at(0, 0, 60, 60, 60, 60.1), 3},
	} {
		if got := Burst(test.events, d); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("%s: got %v, want %v", name, got, test.want)
		}
	}
}

func TestJudgeServed(t *testing.T) {
	sliding := ratelimit.SlidingWindow{Name: "a", Rate: 2, Period: time.Second}.Definition()
	for _, tt := range []struct {
		name   string
		served []Served
		want   float64
	}{
		{"nothing", nil, 0},
		{"at an instant each", []Served{between(0, 0), between(0.5, 0.5), between(0.9, 0.9)}, 1.5},
		{"one in the other", []Served{between(0.1, 0.8), between(0.2, 0.3), between(0.9, 0.95)}, 1.5},
		{"over more than one window", []Served{between(0, 0.1), between(0.2, 0.3), between(0.4, 1)}, 1},
		{"perhaps in one window and perhaps not", []Served{between(0, 0.5), between(0.1, 0.6), between(0.2, 1.1)}, 1},
		{"out of order", []Served{between(0.9, 0.9), between(0, 0), between(0.5, 0.5)}, 1.5},
	} {
		if got := JudgeServed(tt.served, Of(sliding)); got.Share != tt.want {
			t.Errorf("%s: %v, want a share of %v", tt.name, got, tt.want)
		}
	}
}
