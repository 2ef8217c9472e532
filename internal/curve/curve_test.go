package curve

import (
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
		{"a partner's window", Within(2, time.Second), at(0, 0.5, 0.999999), 1.5},
		{"two of a partner's windows", Within(2, time.Second), at(0, 0.5, 1), 1},
	} {
		if got := Judge(tt.events, tt.curve); got.Share != tt.want {
			t.Errorf("%s: %v, want a share of %v", tt.name, got, tt.want)
		}
	}
}
