package bucket_test

import (
	"math"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// sliding has slots of d, ten of them in a period, of which one begins at t0.
var sliding = SlidingWindow{Name: "a", Rate: 10, Period: time.Second, Slots: 10, Start: t0}

// slot is the start of the n-th slot after t0.
func slot(n int) time.Time { return t0.Add(time.Duration(n) * d) }

// What was taken goes back to its slot, while a window can hold that.
func TestSlidingWindowRefund(t *testing.T) {
	definition := definition(sliding)
	first, _ := definition.Take(definition.Fresh("k", t0), t0, 4, 0)
	second, _ := definition.Take(first, t5, 3, 0)
	for _, tt := range []struct {
		name string
		slot int64
		now  time.Time
		n    float64
		want float64
	}{
		{"the first", definition.Slot(first), t6, 4, 7},
		{"the second", definition.Slot(second), t6, 3, 6},
		{"a part", definition.Slot(second), t6, 1, 4},
		{"more than is there", definition.Slot(second), t6, 5, 6},
		{"just in time", definition.Slot(first), slot(11).Add(-1), 4, 7},
		{"too late", definition.Slot(first), slot(11), 4, 7}, // it has come back by itself
		{"a slot that was not given", t4.UnixMicro(), t6, 4, 3},
		{"more, since it was spent", definition.Slot(second), t6, -9, -6},
	} {
		if got := definition.Refund(second, tt.now, tt.n, tt.slot); got.Value != tt.want {
			t.Errorf("%s: %v tokens, want %v", tt.name, got.Value, tt.want)
		}
	}
	if second.Value != 3 || definition.Refund(second, t6, 0, t0.UnixMicro()).Value != 3 {
		t.Error("giving back has changed the state that it was given")
	}
}

// A row that is used for long is counted anew now and then, and still right.
func TestSlidingWindowDoesNotDrift(t *testing.T) {
	definition := definition(sliding)
	state, now, ok := definition.Fresh("k", t0), t0, true
	for i := range 100_000 {
		if state, ok = definition.Take(state, now, 0.1, 0); !ok {
			now = definition.Ready(state, now, 0.1, 0)
			if state, ok = definition.Take(state, now, 0.1, 0); !ok {
				t.Fatalf("call %d: refused when promised", i)
			}
		}
		if state.Slots.Totals[0] > 80+10 {
			t.Fatalf("call %d: totals grow with time: %v", i, state.Slots.Totals)
		}
	}
	if after, ok := definition.Take(state, now.Add(2*time.Second), 10, 0); !ok || math.Abs(after.Value) > 1e-12 {
		t.Errorf("after %v and idleness: %v, %v, want 0 left", now.Sub(t0), after.Value, ok)
	}
}

// Values of a row that is older or newer than the clock, and of one that lacks
// nothing.
func TestSlidingWindowIdle(t *testing.T) {
	definition := definition(sliding)
	fresh := definition.Fresh("k", t0)
	taken, _ := definition.Take(fresh, t0, 1, 0)
	ahead, _ := definition.Take(fresh, t0, 0, -10)
	ahead.Slots = ahead.Slots.Add(0, 5)
	for _, tt := range []struct {
		name  string
		state bucket.State
		after time.Duration
		want  bool
	}{
		{"fresh", fresh, time.Minute, true},
		{"fresh of late", fresh, time.Minute - 1, false},
		{"taken from", taken, time.Minute + 11*d - 1, false},
		{"taken from, and past", taken, time.Minute + 11*d, true},
		{"ahead", ahead, time.Minute + 5*d - 1, false},
		{"ahead, and past", ahead, time.Minute + 5*d, true},
		{"credited", definition.Credit(taken, t0, 1), time.Minute, true},
		{"paused", definition.Pause(fresh, t0, t0.Add(2*time.Minute)), 2 * time.Minute, false},
		{"paused, and past", definition.Pause(fresh, t0, t0.Add(2*time.Minute)), 3 * time.Minute, true},
	} {
		if got := definition.Idle("k", tt.state, t0.Add(tt.after)); got != tt.want {
			t.Errorf("%s, after %v: Idle() = %v, want %v", tt.name, tt.after, got, tt.want)
		}
	}
}

// A definition that changes takes over what was taken, and counts it as late as it may
// have been.
func TestSlidingWindowRedefined(t *testing.T) {
	with := func(rate float64, slots int) SlidingWindow {
		return SlidingWindow{Name: "a", Rate: rate, Period: time.Second, Slots: slots, Start: t0}
	}
	bucketful := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	debt := math.Inf(-1)
	type take struct {
		limit    Limit
		at       time.Time
		n, floor float64
		wait     time.Duration // until it is granted; 0 if it is now
		left     float64
	}
	for name, takes := range map[string][]take{
		"less":           {{sliding, t0, 8, 0, 0, 2}, {with(5, 10), t0, 0, 0, 11 * d, -3}},
		"more":           {{sliding, t0, 8, 0, 0, 2}, {with(20, 10), t0, 10, 0, 0, 2}},
		"half a second":  {{sliding, t0, 8, 0, 0, 2}, {with(10, 2), t5, 2, 0, 0, 0}, {with(10, 2), slot(14), 1, 0, d, 0}, {with(10, 2), slot(15), 8, 0, 0, 0}},
		"a quarter":      {{sliding, t0, 8, 0, 0, 2}, {with(10, 40), t0, 1, 0, 75 * time.Millisecond, -0.75}, {with(10, 40), t1, 2, 0, 0, 0}},
		"a token bucket": {{bucketful, t0, 8, 0, 0, 2}, {sliding, t0, 2, 0, 0, 0}, {sliding, t0, 1, 0, 11 * d, 0}},
		"debt is ahead":  {{bucketful, t0, 15, debt, 0, -5}, {sliding, t0, 0, 0, 5 * d, -5}, {sliding, t0, 1, debt, 0, -16}},
	} {
		state := definition(takes[0].limit).Fresh("k", t0)
		for i, tt := range takes {
			definition := definition(tt.limit)
			after, ok := definition.Take(state, tt.at, tt.n, tt.floor)
			wait := definition.Ready(state, tt.at, tt.n, tt.floor).Sub(tt.at)
			if ok {
				state, wait = after, 0
			}
			if left := definition.Refill(state, tt.at).Value; wait != tt.wait || left != tt.left {
				t.Errorf("%s, step %d: a wait of %v, and %v left, want %v and %v", name, i, wait, left, tt.wait, tt.left)
			}
		}
	}
}
