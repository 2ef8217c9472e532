package bucket_test

import (
	"errors"
	"math"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// sliding has slots of d, ten of them in a period, of which one begins at t0.
var sliding = SlidingWindow{Name: "a", Rate: 10, Period: time.Second, Slots: 10, Start: t0}

// slot is the start of the n-th slot after t0.
func slot(n int) time.Time { return t0.Add(time.Duration(n) * d) }

func TestSlidingWindow(t *testing.T) {
	run(t, sliding, []step{
		{t0, allow(10), true, 0, 0}, // all at once after idleness
		{t0, allow(1), false, 11 * d, 0},
		{slot(11).Add(-time.Microsecond), allow(1), false, time.Microsecond, 0},
		{slot(11), allow(4), true, 0, 6},
		{slot(12), allow(6), true, 0, 0},
		{slot(22), allow(5), false, d, 4},
		{slot(22), allow(4), true, 0, 0},
	})

	// A count that fits in no window is never granted, however far ahead.
	for _, reserve := range []bool{false, true} {
		var never *ExceedsCapacityError
		if _, err := decide.New(reserve, sliding.ForN("k", 10.001)); !errors.As(err, &never) || never.Most != 10 {
			t.Errorf("reserve %v: %v, want it to say that at most 10 can be had", reserve, err)
		}
	}
}

func TestSlidingWindowReserves(t *testing.T) {
	run(t, sliding, []step{
		{t0, reserve(10), true, 0, 0},
		{t0.Add(d / 2), reserve(4), true, 11*d - d/2, -10.5},
		{t0.Add(d / 2), reserve(6), true, 11*d - d/2, -10.5},
		{t0.Add(d / 2), reserve(1), true, 22*d - d/2, -21.5},
		{t0.Add(d / 2), allow(0), false, 22*d - d/2, -21.5}, // everybody waits behind the newest
		{slot(22), allow(10), false, 11 * d, 9},
		{slot(22), allow(9), true, 0, 0},
	})

	bounded := sliding
	bounded.MaxReserved = 10 // a second ahead
	run(t, bounded, []step{
		{t0, reserve(10), true, 0, 0},
		{t0, reserve(1), false, d, 0}, // 11 slots ahead are too many for now
		{t1, reserve(1), true, 10 * d, -10},
		{t1, reserve(10), false, 11 * d, -10},
		{t1.Add(11 * d), reserve(10), true, 10 * d, -10},
	})
	debtless := sliding
	debtless.MaxReserved = None
	run(t, debtless, []step{
		{t0, reserve(10), true, 0, 0},
		{t0, reserve(1), false, 11 * d, 0},
		{slot(11), reserve(1), true, 0, 9},
	})
}

// A clock that went back is put into the slot that was written last.
func TestSlidingWindowClockGoesBack(t *testing.T) {
	run(t, sliding, []step{
		{t5, allow(4), true, 0, 6},
		{t0, allow(4), true, 0, 2},
		{t0, allow(3), false, 16 * d, 2},
		{slot(15), allow(3), false, d, 2},
		{slot(16), allow(10), true, 0, 0},
	})
}

func TestSlidingWindowCredit(t *testing.T) {
	run(t, sliding, []step{
		{t0, allow(4), true, 0, 6},
		{t5, allow(4), true, 0, 2},
		{t6, credit(5), true, 0, 7},       // the oldest first,
		{slot(11), allow(0), true, 0, 7},  // so that nothing comes back here
		{slot(16), allow(10), true, 0, 0}, // and the rest as ever
		{slot(17), credit(100), true, 0, 10},
	})
}

func TestSlidingWindowPause(t *testing.T) {
	until := t5.Add(d / 2)
	run(t, sliding, []step{
		{t0, allow(4), true, 0, 6},
		{t1, pause(until), false, 4*d + d/2, 6},
		{t2, allow(1), false, 3*d + d/2, 6},
		{t2, reserve(5), true, 4 * d, -4}, // the first slot that begins after it
		{until, allow(1), false, d / 2, -0.5},
		{t6, allow(1), true, 0, 0},
	})
	run(t, sliding, []step{
		{t1, pause(until), false, 4*d + d/2, 10},
		{t2, resume, true, 0, 10},
		{t2, allow(10), true, 0, 0},
	})

	// Whoever may not reserve far ahead can get a slot before the one that a
	// reservation would have had during the pause.
	debtless := sliding
	debtless.MaxReserved = None
	run(t, debtless, []step{
		{t1, pause(until), false, 4*d + d/2, 10},
		{t2, reserve(1), false, 3*d + d/2, 10},
		{until, reserve(1), true, 0, 9},
	})
}

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

// A definition that changes takes over what was taken, and counts it as late as it may
// have been.
func TestSlidingWindowRedefined(t *testing.T) {
	with := func(change func(*SlidingWindow)) SlidingWindow {
		l := sliding
		change(&l)
		return l
	}
	run(t, sliding, []step{
		{t0, allow(8), true, 0, 2},
		{t0, as(with(func(l *SlidingWindow) { l.Rate = 5 }), allow(0)), false, 11 * d, -3},
		{t0, as(with(func(l *SlidingWindow) { l.Rate = 20 }), allow(10)), true, 0, 2},
	})
	run(t, sliding, []step{ // slots of half a second: the one that t0 is in ends then
		{t0, allow(8), true, 0, 2},
		{t5, as(with(func(l *SlidingWindow) { l.Slots = 2 }), allow(2)), true, 0, 0},
		{slot(14), allow(1), false, d, 0},
		{slot(15), allow(8), true, 0, 0},
	})
	run(t, sliding, []step{ // slots of a quarter: it ends in the fourth
		{t0, allow(8), true, 0, 2},
		{t0, as(with(func(l *SlidingWindow) { l.Slots = 40 }), allow(1)), false, 75 * time.Millisecond, -0.75},
		{t1, allow(2), true, 0, 0},
	})
	run(t, TokenBucket{Name: "a", Rate: 10, Period: time.Second}, []step{
		{t0, allow(8), true, 0, 2},
		{t0, as(sliding, allow(2)), true, 0, 0},
		{t0, allow(1), false, 11 * d, 0},
	})
	run(t, TokenBucket{Name: "a", Rate: 10, Period: time.Second}, []step{ // debt is a reservation
		{t0, reserve(15), true, 5 * d, -5},
		{t0, as(sliding, allow(0)), false, 5 * d, -5},
		{t0, reserve(1), true, 16 * d, -16},
	})
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
