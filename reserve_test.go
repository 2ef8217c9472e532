package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

const d = 100 * time.Millisecond

// A timeline's instants. At 10 tokens a second, d brings one token, exactly.
var (
	t0 = time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)
	t1 = t0.Add(1 * d)
	t2 = t0.Add(2 * d)
	t3 = t0.Add(3 * d)
	t4 = t0.Add(4 * d)
	t5 = t0.Add(5 * d)
	t6 = t0.Add(6 * d)
	t7 = t0.Add(7 * d)
	t8 = t0.Add(8 * d)
	t9 = t0.Add(9 * d)
)

// player is one limit and key on a timeline, with its row once it has one.
type player struct {
	limit Limit
	key   string
	row   *State
}

// step is one row of a timeline: what is done at an instant and what the
// answer must be.
type step struct {
	at         time.Time
	do         move
	ok         bool
	retryAfter time.Duration
	value      float64
}

type move func(t *testing.T, p *player, at time.Time) Status

func (p *player) state(at time.Time) State {
	if p.row != nil {
		return *p.row
	}
	return p.limit.Definition().Fresh(p.key, at)
}

func (p *player) take(t *testing.T, reserve bool, at time.Time, n float64) Status {
	t.Helper()
	call, err := NewCall(reserve, p.limit.ForN(p.key, n))
	if err != nil {
		t.Fatalf("NewCall(%v, %v tokens) = %v", reserve, n, err)
	}
	result, after := call.Decide(at, []State{p.state(at)})
	for i := range after {
		p.row = &after[i]
	}
	return result.Status
}

func allow(n float64) move {
	return func(t *testing.T, p *player, at time.Time) Status { return p.take(t, false, at, n) }
}

func reserve(n float64) move {
	return func(t *testing.T, p *player, at time.Time) Status { return p.take(t, true, at, n) }
}

func credit(n float64) move {
	return func(_ *testing.T, p *player, at time.Time) Status {
		after := p.limit.Definition().Credit(p.state(at), at, n)
		p.row = &after
		return Credited(p.limit.ForN(p.key, n), []State{after}, at)
	}
}

func pause(until time.Time) move {
	return func(_ *testing.T, p *player, at time.Time) Status {
		after := p.limit.Definition().Pause(p.state(at), at, until)
		p.row = &after
		return Credited(p.limit.For(p.key), []State{after}, at)
	}
}

// reset forgets the row.
func reset(_ *testing.T, p *player, at time.Time) Status {
	p.row = nil
	return Credited(p.limit.For(p.key), []State{p.state(at)}, at)
}

// as is do after the definition was changed in code.
func as(limit Limit, do move) move {
	return func(t *testing.T, p *player, at time.Time) Status {
		p.limit = limit
		return do(t, p, at)
	}
}

func run(t *testing.T, limit Limit, steps []step) {
	t.Helper()
	p := &player{limit: limit, key: "k"}
	for i, s := range steps {
		got := s.do(t, p, s.at)
		want := step{at: s.at, ok: s.ok, retryAfter: s.retryAfter, value: s.value}
		if got := (step{at: s.at, ok: got.OK, retryAfter: got.RetryAfter, value: got.Value}); !got.equal(want) {
			t.Errorf("step %d at t0%+v: OK, RetryAfter, Value = %v, %v, %v, want %v, %v, %v",
				i, s.at.Sub(t0), got.ok, got.retryAfter, got.value, want.ok, want.retryAfter, want.value)
		}
		if want := s.at.Add(got.RetryAfter); !got.RetryAt.Equal(want) {
			t.Errorf("step %d at t0%+v: RetryAt = %v, want %v, RetryAfter later", i, s.at.Sub(t0), got.RetryAt, want)
		}
	}
}

func (s step) equal(t step) bool {
	return s.ok == t.ok && s.retryAfter == t.retryAfter && s.value == t.value
}

func TestReserve(t *testing.T) {
	unlimited := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 2}
	run(t, unlimited, []step{
		{t0, reserve(2), true, 0, 0},
		{t0, reserve(1), true, d, -1},
		{t0, reserve(1), true, 2 * d, -2},
		{t0, allow(1), false, 3 * d, -2},
		{t0, allow(0), false, 2 * d, -2},
		{t1, reserve(3), true, 4 * d, -4},
		{t1, reserve(0), true, 4 * d, -4},
		{t5, allow(0), true, 0, 0},
		{t6, reserve(1), true, 0, 0},
	})

	// The bound is inclusive, and a refusal waits until the debt is allowed,
	// not until it is paid.
	bounded := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 2, MaxReserved: 3}
	run(t, bounded, []step{
		{t0, reserve(5), true, 3 * d, -3},
		{t0, reserve(1), false, 1 * d, -3},
		{t0, reserve(5), false, 5 * d, -3},
		{t0, reserve(0), true, 3 * d, -3},
		{t1, reserve(1), true, 3 * d, -3},
	})

	debtless := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 2, MaxReserved: None}
	run(t, debtless, []step{
		{t0, reserve(2), true, 0, 0},
		{t0, reserve(1), false, d, 0},
		{t1, reserve(1), true, 0, 0},
	})

	// Without capacity every reservation waits for its tokens, so they come
	// evenly spaced however long nobody came.
	spaced := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: None}
	run(t, spaced, []step{
		{t0, reserve(1), true, 1 * d, -1},
		{t0, reserve(1), true, 2 * d, -2},
		{t0, allow(0), false, 2 * d, -2},
		{t9, allow(0), true, 0, 0},
		{t9, reserve(1), true, 1 * d, -1},
	})

	window := FixedWindow{Name: "a", Rate: 2, Period: 4 * d, Start: t0, MaxReserved: 6}
	run(t, window, []step{
		{t1, reserve(2), true, 0, 0},
		{t1, reserve(1), true, 3 * d, -1},
		{t1, reserve(1), true, 3 * d, -2},
		{t1, reserve(1), true, 7 * d, -3},
		{t1, reserve(3), true, 11 * d, -6},
		{t1, reserve(1), false, 3 * d, -6},
		{t4, reserve(1), true, 12 * d, -5},
		{t4, allow(0), false, 12 * d, -5},
	})
}

// When a reservation is due its key is in debt no longer, also where a
// microsecond brings less than rounding moves.
func TestReservationIsDue(t *testing.T) {
	for i := range 1000 {
		capacity := 1 + float64(i)/7
		slow := TokenBucket{Name: "a", Rate: capacity / 97, Period: year, Capacity: capacity}
		p := &player{limit: slow, key: "k"}
		reserved := p.take(t, true, t0, 2*capacity)
		if due := p.take(t, false, reserved.RetryAt, 0); !due.OK {
			t.Fatalf("capacity %v: due at %v, but %v tokens then", capacity, reserved.RetryAt, due.Value)
		}
	}
}

func TestTake(t *testing.T) {
	bucket := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}.Definition()
	window := FixedWindow{Name: "a", Rate: 3, Period: time.Second, Capacity: 5}.Definition()
	tests := []struct {
		name     string
		d        Definition
		state    State
		now      time.Time
		n, floor float64
		want     State
		ok       bool
	}{
		{"all", bucket, State{5, t0}, t0, 5, 0, State{0, t0}, true},
		{"more than all", bucket, State{4, t0}, t0, 5, 0, State{4, t0}, false},
		{"settled first", bucket, State{1, t0}, t3, 4, 0, State{0, t3}, true},
		{"refused is settled", bucket, State{1, t0}, t2, 4, 0, State{3, t2}, false},
		{"to the floor", bucket, State{1, t0}, t0, 4, -3, State{-3, t0}, true},
		{"below the floor", bucket, State{1, t0}, t0, 4.5, -3, State{1, t0}, false},
		{"none, full", bucket, State{5, t0}, t0, 0, 0, State{5, t0}, true},
		{"none, in debt", bucket, State{-1, t0}, t0, 0, 0, State{-1, t0}, false},
		{"none, in allowed debt", bucket, State{-1, t0}, t0, 0, -1, State{-1, t0}, true},
		{"clock went back", bucket, State{4, t5}, t0, 4, 0, State{0, t5}, true},
		{"a hair too little is rounding", bucket, State{math.Nextafter(3, 0), t0}, t0, 3, 0, State{math.Nextafter(3, 0) - 3, t0}, true},
		{"a millionth too little is not", bucket, State{3 - 1e-6, t0}, t0, 3, 0, State{3 - 1e-6, t0}, false},
		{"window before its edge", window, State{1, t0}, t9, 2, 0, State{1, t0}, false},
		{"window at its edge", window, State{1, t0}, t0.Add(time.Second), 2, 0, State{2, t0.Add(time.Second)}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := tt.d.Take(tt.state, tt.now, tt.n, tt.floor)
			if got != tt.want || ok != tt.ok {
				t.Errorf("Take() = %v, %v, want %v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
}

func TestWhen(t *testing.T) {
	bucket := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}.Definition()
	thirds := TokenBucket{Name: "a", Rate: 3, Period: time.Second, Capacity: 5}.Definition()
	window := FixedWindow{Name: "a", Rate: 2, Period: d, Capacity: 5}.Definition()
	tests := []struct {
		name  string
		d     Definition
		state State
		want  float64
		at    time.Time
	}{
		{"has more", bucket, State{5, t0}, 1, t0},
		{"has it", bucket, State{1, t0}, 1, t0},
		{"lacks one", bucket, State{0, t0}, 1, t1},
		{"lacks half a one", bucket, State{0.5, t0}, 1, t0.Add(d / 2)},
		{"in debt", bucket, State{-4, t0}, 5, t9},
		{"out of debt", bucket, State{-4, t1}, 0, t5},
		{"a third of a second is rounded up", thirds, State{0, t0}, 1, t0.Add(333_334 * time.Microsecond)},
		{"two thirds are", thirds, State{0, t0}, 2, t0.Add(666_667 * time.Microsecond)},
		{"a whole second is not", thirds, State{0, t0}, 3, t0.Add(time.Second)},
		{"window has it", window, State{2, t0}, 2, t0},
		{"window lacks less than a window's", window, State{0, t0}, 0.5, t1},
		{"window lacks a window's", window, State{0, t0}, 2, t1},
		{"window lacks more", window, State{0, t0}, 2.5, t2},
		{"window in debt", window, State{-4, t1}, 5, t6},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.d.When(tt.state, tt.want); !got.Equal(tt.at) {
				t.Errorf("When(%v) = t0+%v, want t0+%v", tt.want, got.Sub(t0), tt.at.Sub(t0))
			}
		})
	}
}

func TestFloor(t *testing.T) {
	tests := []struct {
		name    string
		limit   Limit
		reserve bool
		want    float64
	}{
		{"allow", TokenBucket{Name: "a", Rate: 10, Period: time.Second, MaxReserved: 5}, false, 0},
		{"reserve", TokenBucket{Name: "a", Rate: 10, Period: time.Second, MaxReserved: 5}, true, -5},
		{"none", TokenBucket{Name: "a", Rate: 10, Period: time.Second, MaxReserved: None}, true, 0},
		{"unlimited is 100 years' worth", TokenBucket{Name: "a", Rate: 2, Period: year}, true, -200},
		{"more than 100 years' worth", FixedWindow{Name: "a", Rate: 2, Period: year, MaxReserved: 1e6}, true, -200},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.limit.Definition().Floor(tt.reserve); got != tt.want {
				t.Errorf("Floor(%v) = %v, want %v", tt.reserve, got, tt.want)
			}
		})
	}
}

func TestCredit(t *testing.T) {
	bucket := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	run(t, bucket, []step{
		{t0, allow(5), true, 0, 0},
		{t0, credit(2), true, 0, 2},
		{t0, allow(3), false, d, 2},
		{t0, allow(2), true, 0, 0},
		{t2, credit(1), true, 0, 3},   // settled first
		{t2, credit(100), true, 0, 5}, // capped
		{t2, reserve(9), true, 4 * d, -4},
		{t2, credit(3), false, d, -1},
		{t2, allow(0), false, d, -1},
		{t1, credit(1), true, 0, 0}, // late, by a clock that went back
		{t2, allow(0), true, 0, 0},
		{t3, allow(1), true, 0, 0},
		{t3, credit(0), true, 0, 0},
		{t3, credit(0.5), true, 0, 0.5},
	})

	// What is stored is capped too, for a larger capacity to come.
	if got, want := bucket.Definition().Credit(State{4, t0}, t1, 3), (State{5, t1}); got != want {
		t.Errorf("Credit() = %v, want %v", got, want)
	}

	// A credit to a limit without a row is to a full one.
	run(t, bucket, []step{
		{t0, credit(3), true, 0, 5},
		{t0, allow(5), true, 0, 0},
	})

	window := FixedWindow{Name: "a", Rate: 5, Period: 4 * d, Start: t0}
	run(t, window, []step{
		{t1, allow(5), true, 0, 0},
		{t2, credit(2), true, 0, 2},
		{t2, allow(2), true, 0, 0},
		{t3, credit(1), true, 0, 1},
		{t4, allow(5), true, 0, 0}, // the credit was no extra in the next window
		{t4, allow(1), false, 4 * d, 0},
	})
}

func TestPause(t *testing.T) {
	bucket := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	run(t, bucket, []step{
		{t0, pause(t4), true, 0, 0},
		{t0, allow(1), false, 5 * d, 0},
		{t0, allow(0), true, 0, 0},
		{t3, allow(1), false, 2 * d, 0},
		{t4, allow(1), false, 1 * d, 0},
		{t5, allow(1), true, 0, 0},
	})

	// Debt stays, and is paid after the pause.
	run(t, bucket, []step{
		{t0, reserve(7), true, 2 * d, -2},
		{t0, pause(t4), false, 6 * d, -2},
		{t1, allow(0), false, 5 * d, -2},
		{t1, reserve(1), true, 6 * d, -3},
		{t7, allow(0), true, 0, 0},
	})

	// The later of two pauses holds.
	run(t, bucket, []step{
		{t0, pause(t6), true, 0, 0},
		{t1, pause(t3), true, 0, 0},
		{t1, allow(1), false, 6 * d, 0},
		{t1, pause(t8), true, 0, 0},
		{t1, allow(1), false, 8 * d, 0},
	})

	// A pause that is over before it begins changes nothing.
	run(t, bucket, []step{
		{t5, allow(1), true, 0, 4},
		{t5, pause(t5), true, 0, 4},
		{t5, pause(t1), true, 0, 4},
		{t5, allow(4), true, 0, 0},
	})

	// A credit counts at once, and only what was credited; so does a reset.
	run(t, bucket, []step{
		{t0, pause(t8), true, 0, 0},
		{t1, credit(2), true, 0, 2},
		{t1, allow(2), true, 0, 0},
		{t1, allow(1), false, 8 * d, 0},
		{t2, reset, true, 0, 5},
		{t2, allow(5), true, 0, 0},
		{t3, allow(1), true, 0, 0},
	})

	// A window opens where the pause ends.
	window := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	run(t, window, []step{
		{t0, pause(t7), true, 0, 0},
		{t1, allow(1), false, 6 * d, 0},
		{t6, allow(1), false, 1 * d, 0},
		{t7, allow(3), true, 0, 0},
		{t8, allow(1), false, 3 * d, 0},
	})

	// Within the window that is open anyway, until its end.
	run(t, window, []step{
		{t0, pause(t2), true, 0, 0},
		{t2, allow(1), false, 2 * d, 0},
		{t4, allow(3), true, 0, 0},
	})

	// What gathered before the pause does not come back with it.
	rollover := FixedWindow{Name: "a", Rate: 3, Period: 2 * d, Capacity: 9, Start: t0}
	run(t, rollover, []step{
		{t0, pause(t6), true, 0, 0},
		{t6, allow(3), true, 0, 0},
		{t6, allow(1), false, 2 * d, 0},
	})
}

// Rows know whole microseconds. A pause that ends between two of them is not
// over at the first.
func TestPauseRoundsUp(t *testing.T) {
	window := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	next := t7.Add(time.Microsecond)
	run(t, window, []step{
		{t0, pause(t7.Add(1)), true, 0, 0},
		{t7, allow(1), false, time.Microsecond, 0},
		{next, allow(3), true, 0, 0},
	})
	bucket := TokenBucket{Name: "a", Rate: 1, Period: time.Microsecond}
	run(t, bucket, []step{
		{t0, pause(t7.Add(999)), true, 0, 0},
		{next, allow(1), false, time.Microsecond, 0},
		{next.Add(time.Microsecond), allow(1), true, 0, 0},
	})
}

func TestIdle(t *testing.T) {
	bucket := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	window := FixedWindow{Name: "a", Rate: 3, Period: 2 * d, Capacity: 5, Start: t0}
	spaced := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: None}
	paused := bucket.Definition().Pause(State{5, t0}, t0, t4)
	tests := []struct {
		name  string
		limit Limit
		state State
		now   time.Time
		want  bool
	}{
		{"full", bucket, State{5, t0}, t0, true},
		{"nearly full", bucket, State{4.999999, t0}, t0, false},
		{"full by now", bucket, State{3, t0}, t2, true},
		{"not full yet", bucket, State{3, t0}, t1, false},
		{"full, of the future", bucket, State{5, t2}, t1, false},
		{"in debt", bucket, State{-1, t0}, t0, false},
		{"debt paid, not full", bucket, State{-1, t0}, t5, false},
		{"debt paid, full", bucket, State{-1, t0}, t6, true},
		{"paused", bucket, paused, t3, false},
		{"pause over", bucket, paused, t4, false},
		{"full after a pause", bucket, paused, t9, true},
		{"over full, capacity lowered", bucket, State{50, t0}, t0, true},
		{"no capacity, no debt", spaced, State{0, t0}, t0, true},
		{"no capacity, debt", spaced, State{-1, t0}, t0, false},
		{"no capacity, debt paid", spaced, State{-1, t0}, t1, true},
		{"window before the edge that fills it", window, State{2, t0}, t1, false},
		{"window at the edge that fills it", window, State{2, t0}, t2, true},
		{"window after one edge of two", window, State{1, t0}, t3, false},
		{"window after two edges", window, State{1, t0}, t4, true},
		{"window with edges of its own, full", window, State{2, t1}, t3, false},
		{"window with edges of its own, before another edge", window, State{2, t1}, t5.Add(-time.Microsecond), false},
		{"window with edges of its own, after another edge", window, State{2, t1}, t5, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.limit.Definition().Idle("", tt.state, tt.now); got != tt.want {
				t.Errorf("Idle(%v, t0%+v) = %v, want %v", tt.state, tt.now.Sub(t0), got, tt.want)
			}
		})
	}
}

func TestNewCall(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second, MaxReserved: 5}
	b := FixedWindow{Name: "b", Rate: 10, Period: time.Second, MaxReserved: None}
	tests := []struct {
		name     string
		reserve  bool
		requests []Request
		want     []string // name/key count floor, in the order of locking
	}{
		{"one", false, []Request{a.For("k")}, []string{"a/k 1 0"}},
		{"a reservation", true, []Request{a.For("k")}, []string{"a/k 1 -5"}},
		{"by name", true, []Request{b.For("k"), a.For("k")}, []string{"a/k 1 -5", "b/k 1 0"}},
		{"by key in a name", false, []Request{a.For("z"), b.For("a"), a.For("x"), a.For("")}, []string{"a/ 1 0", "a/x 1 0", "a/z 1 0", "b/a 1 0"}},
		{"by bytes, not letters", false, []Request{a.For("é"), a.For("z"), a.For("Z")}, []string{"a/Z 1 0", "a/z 1 0", "a/é 1 0"}},
		{"the same twice", false, []Request{a.ForN("k", 2), a.ForN("k", 3)}, []string{"a/k 5 0"}},
		{"the same, apart", false, []Request{a.ForN("k", 2), b.For("k"), a.ForN("k", 0.5)}, []string{"a/k 2.5 0", "b/k 1 0"}},
		{"all there is", false, []Request{a.ForN("k", 10)}, []string{"a/k 10 0"}},
		{"all there is, tenth by tenth", false, slices.Repeat([]Request{a.ForN("k", 10.0/64)}, 64), []string{"a/k 10 0"}},
		{"all there can be", true, []Request{a.ForN("k", 15)}, []string{"a/k 15 -5"}},
		{"none", false, []Request{a.ForN("k", 0)}, []string{"a/k 0 0"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := NewCall(tt.reserve, tt.requests...)
			if err != nil {
				t.Fatalf("NewCall() = %v", err)
			}
			var got []string
			for _, ask := range call.Asks {
				got = append(got, fmt.Sprintf("%s/%s %v %v", ask.Definition.Name, ask.Key, ask.Count, ask.Floor))
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("NewCall() asks %q, want %q", got, tt.want)
			}
			if call.Reserve != tt.reserve {
				t.Errorf("Reserve = %v, want %v", call.Reserve, tt.reserve)
			}
		})
	}
}

// The caller's requests stay as they were, in order and in count.
func TestNewCallLeavesRequests(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	requests := []Request{a.ForN("z", 1), a.ForN("b", 2), a.ForN("z", 3)}
	want := slices.Clone(requests)
	if _, err := NewCall(false, requests...); err != nil {
		t.Fatalf("NewCall() = %v", err)
	}
	if !slices.Equal(requests, want) {
		t.Errorf("requests = %v, want %v", requests, want)
	}
}

func TestNewCallInvalid(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	faster := a
	faster.Rate = 20
	window := windowOf(a)
	tests := []struct {
		name     string
		requests []Request
		field    string
		value    any
	}{
		{"no request", nil, "Requests", 0},
		{"too many requests", slices.Repeat([]Request{a.ForN("k", 0)}, 65), "Requests", 65},
		{"bad definition", []Request{a.For("k"), TokenBucket{Name: "b", Rate: -1, Period: time.Second}.For("k")}, "Rate", -1.0},
		{"bad key", []Request{a.For("k"), a.For("\x00")}, "Key", "\x00"},
		{"bad count", []Request{a.For("k"), a.ForN("j", -1)}, "Count", -1.0},
		{"two rates", []Request{a.For("k"), faster.For("k")}, "Limit", "a"},
		{"two kinds", []Request{a.For("k"), window.For("k")}, "Limit", "a"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := NewCall(false, tt.requests...)
			var fe *FieldError
			if !errors.As(err, &fe) || !errors.Is(err, ErrInvalid) {
				t.Fatalf("NewCall() = %v, want a *FieldError that is ErrInvalid", err)
			}
			if fe.Field != tt.field || fe.Value != tt.value {
				t.Errorf("NewCall() = %v, want field %s, value %v", err, tt.field, tt.value)
			}
			if len(call.Asks) != 0 {
				t.Errorf("NewCall() asks %v beside an error", call.Asks)
			}
		})
	}
}

// A plan's own rate under another key is no contradiction.
func TestNewCallTwoPlans(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	faster := a
	faster.Rate = 20
	call, err := NewCall(false, a.For("free"), faster.For("paid"))
	if err != nil {
		t.Fatalf("NewCall() = %v", err)
	}
	if got := []float64{call.Asks[0].Definition.Rate, call.Asks[1].Definition.Rate}; !slices.Equal(got, []float64{10, 20}) {
		t.Errorf("rates = %v, want 10 and 20", got)
	}
}

func TestNewCallMostRequests(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	var requests []Request
	for i := range 64 {
		requests = append(requests, a.For(fmt.Sprintf("%02d", 63-i)))
	}
	call, err := NewCall(false, requests...)
	if err != nil {
		t.Fatalf("NewCall() = %v", err)
	}
	if got := len(call.Asks); got != 64 {
		t.Errorf("NewCall() asks %d, want 64", got)
	}
}

func TestNewCallNever(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second, MaxReserved: 5}
	debtless := TokenBucket{Name: "b", Rate: 10, Period: time.Second, MaxReserved: None}
	empty := TokenBucket{Name: "c", Rate: 10, Period: time.Second, Capacity: None}
	unlimited := TokenBucket{Name: "d", Rate: 1, Period: year}
	tests := []struct {
		name     string
		reserve  bool
		requests []Request
		limit    string
		count    float64
		most     float64
	}{
		{"above capacity", false, []Request{a.ForN("k", 10.5)}, "a", 10.5, 10},
		{"above capacity by little", false, []Request{a.ForN("k", 10.000001)}, "a", 10.000001, 10},
		{"above capacity and debt", true, []Request{a.ForN("k", 16)}, "a", 16, 15},
		{"above capacity without debt", true, []Request{debtless.ForN("k", 11)}, "b", 11, 10},
		{"above capacity when added up", false, []Request{a.ForN("k", 6), a.ForN("k", 5)}, "a", 11, 10},
		{"one of several", false, []Request{a.For("k"), debtless.ForN("k", 11)}, "b", 11, 10},
		{"from an empty bucket", false, []Request{empty.ForN("k", 0.1)}, "c", 0.1, 0},
		{"above 100 years' worth", true, []Request{unlimited.ForN("k", 102)}, "d", 102, 101},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := NewCall(tt.reserve, tt.requests...)
			var ne *NeverError
			if !errors.As(err, &ne) || !errors.Is(err, ErrNever) {
				t.Fatalf("NewCall() = %v, want a *NeverError that is ErrNever", err)
			}
			if got := ne.Request.Limit.Definition().Name; got != tt.limit || ne.Request.Count != tt.count || ne.Most != tt.most || ne.Reserve != tt.reserve {
				t.Errorf("NewCall() = %+v, want limit %s, Count %v, Most %v, Reserve %v", ne, tt.limit, tt.count, tt.most, tt.reserve)
			}
			if errors.Is(err, ErrRefused) || errors.Is(err, ErrInvalid) {
				t.Errorf("%v is ErrRefused or ErrInvalid", err)
			}
		})
	}
}

// Of several limits all are taken from or none, and the answer's wait is the
// longest of those that refused.
func TestDecideSeveral(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	b := TokenBucket{Name: "b", Rate: 10, Period: time.Second}
	c := TokenBucket{Name: "c", Rate: 10, Period: time.Second, MaxReserved: 5}
	tests := []struct {
		name     string
		reserve  bool
		requests []Request
		states   []State // in the order of name
		decides  string  // name of the limit that does
		ok       bool
		retry    time.Duration
		each     []float64 // values, in the order of the call
		eachOK   []bool
		after    []State // in the order of name
	}{
		{
			"all", false,
			[]Request{c.ForN("", 3), a.ForN("", 1), b.ForN("", 2)},
			[]State{{10, t0}, {10, t0}, {10, t0}},
			"c", true, 0,
			[]float64{7, 9, 8},
			[]bool{true, true, true},
			[]State{{9, t0}, {8, t0}, {7, t0}},
		},
		{
			"one refuses", false,
			[]Request{c.For(""), a.For(""), b.For("")},
			[]State{{10, t0}, {0, t0}, {5, t0}},
			"b", false, d,
			[]float64{5, 10, 0},
			[]bool{true, true, false},
			nil,
		},
		{
			"two refuse", false,
			[]Request{c.ForN("", 5), a.ForN("", 3), b.For("")},
			[]State{{0, t0}, {0, t0}, {5, t0}},
			"a", false, 3 * d,
			[]float64{5, 0, 0},
			[]bool{true, false, false},
			nil,
		},
		{
			"a debt that waits longer does not decide", true,
			[]Request{a.ForN("", 9), c.ForN("", 1)},
			[]State{{0, t0}, {-5, t0}},
			"c", false, d,
			[]float64{0, -5},
			[]bool{true, false},
			nil,
		},
		{
			"the longest debt decides", true,
			[]Request{a.ForN("", 2), c.ForN("", 4), b.For("")},
			[]State{{0, t0}, {10, t0}, {0, t0}},
			"c", true, 4 * d,
			[]float64{-2, -4, 9},
			[]bool{true, true, true},
			[]State{{-2, t0}, {9, t0}, {-4, t0}},
		},
		{
			"the fewest tokens left decide", false,
			[]Request{a.For(""), b.For("")},
			[]State{{10, t0}, {4, t0}},
			"b", true, 0,
			[]float64{9, 3},
			[]bool{true, true},
			[]State{{9, t0}, {3, t0}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := NewCall(tt.reserve, tt.requests...)
			if err != nil {
				t.Fatalf("NewCall() = %v", err)
			}
			before := slices.Clone(tt.states)
			result, after := call.Decide(t0, tt.states)
			if got := result.Request.Limit.Definition().Name; got != tt.decides || result.OK != tt.ok || result.RetryAfter != tt.retry {
				t.Errorf("Decide() = limit %s, OK %v, RetryAfter %v, want %s, %v, %v", got, result.OK, result.RetryAfter, tt.decides, tt.ok, tt.retry)
			}
			var each []float64
			var eachOK []bool
			for i, s := range result.Each {
				each = append(each, s.Value)
				eachOK = append(eachOK, s.OK)
				if s.Request != tt.requests[i] {
					t.Errorf("Each[%d].Request = %v, want %v", i, s.Request, tt.requests[i])
				}
			}
			if !slices.Equal(each, tt.each) || !slices.Equal(eachOK, tt.eachOK) {
				t.Errorf("Each: Value, OK = %v, %v, want %v, %v", each, eachOK, tt.each, tt.eachOK)
			}
			if !slices.Equal(after, tt.after) {
				t.Errorf("Decide() stores %v, want %v", after, tt.after)
			}
			if !slices.Equal(tt.states, before) {
				t.Errorf("Decide() changed its states to %v", tt.states)
			}

			// Check says the same, but what there is and not what there would be.
			checked := call.Check(t0, tt.states)
			if checked.OK != tt.ok || checked.RetryAfter != tt.retry {
				t.Errorf("Check() = OK %v, RetryAfter %v, want %v, %v", checked.OK, checked.RetryAfter, tt.ok, tt.retry)
			}
			for i, s := range call.Asks {
				if got, want := checked.Each[s.place].Value, tt.states[i].Value; got != want {
					t.Errorf("Check(): Value of %s = %v, want %v", s.Definition.Name, got, want)
				}
			}
		})
	}
}

// Requests for the same limit and key have one status, with the counts added.
func TestDecideSameTwice(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	b := TokenBucket{Name: "b", Rate: 10, Period: time.Second}
	call, err := NewCall(false, b.ForN("", 6), a.For(""), b.ForN("", 3))
	if err != nil {
		t.Fatalf("NewCall() = %v", err)
	}
	result, after := call.Decide(t0, []State{{10, t0}, {10, t0}})
	if want := []State{{9, t0}, {1, t0}}; !slices.Equal(after, want) {
		t.Errorf("Decide() stores %v, want %v", after, want)
	}
	var got []Request
	for _, s := range result.Each {
		got = append(got, s.Request)
	}
	if want := []Request{b.ForN("", 9), a.For("")}; !slices.Equal(got, want) {
		t.Errorf("Each: %v, want %v", got, want)
	}
}

// A decision is made at whole microseconds, as in the database.
func TestDecideTruncates(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 1, Period: time.Microsecond}
	call, err := NewCall(false, a.For(""))
	if err != nil {
		t.Fatalf("NewCall() = %v", err)
	}
	result, after := call.Decide(t0.Add(1999), []State{{0, t0}})
	if want := t0.Add(1000); !result.At.Equal(want) {
		t.Errorf("At = %v, want %v", result.At, want)
	}
	if want := []State{{0, t0.Add(1000)}}; !slices.Equal(after, want) {
		t.Errorf("Decide() stores %v, want %v", after, want)
	}
}

// A count of 0 asks whether the key is in debt.
func TestInDebt(t *testing.T) {
	tests := []struct {
		name  string
		value float64
		ok    bool
		retry time.Duration
	}{
		{"full", 10, true, 0},
		{"empty", 0, true, 0},
		{"a little debt", -0.5, false, d / 2},
		{"debt", -3, false, 3 * d},
	}
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := NewCall(false, a.ForN("", 0))
			if err != nil {
				t.Fatalf("NewCall() = %v", err)
			}
			result := call.Check(t0, []State{{tt.value, t0}})
			if result.OK != tt.ok || result.RetryAfter != tt.retry {
				t.Errorf("OK, RetryAfter = %v, %v, want %v, %v", result.OK, result.RetryAfter, tt.ok, tt.retry)
			}
		})
	}
}

// A debt can be paid by the time that the store reads the clock, if the row was
// waited for.
func TestTakenAfterWaiting(t *testing.T) {
	now := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	call, err := NewCall(true, TokenBucket{Name: "l", Rate: 1, Period: time.Second}.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	got := call.Asks[0].Taken(State{Value: -1, TS: now.Add(-3 * time.Second)}, now)
	if !got.OK || got.RetryAfter != 0 || !got.RetryAt.Equal(now) {
		t.Errorf("got OK %v, RetryAfter %v, RetryAt %v, want no wait from %v on", got.OK, got.RetryAfter, got.RetryAt, now)
	}
}

func TestStatus(t *testing.T) {
	tests := []struct {
		name      string
		value     float64
		remaining int64
		reset     time.Duration
	}{
		{"full", 10, 10, 0},
		{"fraction", 7.5, 7, d * 5 / 2},
		{"less than one", 0.75, 0, d * 37 / 4},
		{"a hair below a whole", math.Nextafter(3, 0), 3, 7 * d},
		{"empty", 0, 0, 10 * d},
		{"less than one of debt", -0.5, 0, d * 21 / 2},
		{"debt", -5, 0, 15 * d},
		{"deep debt", -1e6, 0, 1_000_010 * d},
	}
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			call, err := NewCall(false, a.ForN("k", 1))
			if err != nil {
				t.Fatalf("NewCall() = %v", err)
			}
			got := call.Check(t0, []State{{tt.value, t0}}).Status
			if got.Remaining != tt.remaining || got.ResetAfter != tt.reset {
				t.Errorf("Remaining, ResetAfter = %v, %v, want %v, %v", got.Remaining, got.ResetAfter, tt.remaining, tt.reset)
			}
			if got.Capacity != 10 || got.Value != tt.value || got.Request != a.ForN("k", 1) {
				t.Errorf("Capacity, Value, Request = %v, %v, %v, want 10, %v, %v", got.Capacity, got.Value, got.Request, tt.value, a.ForN("k", 1))
			}
		})
	}
}

func TestResultErr(t *testing.T) {
	a := TokenBucket{Name: "a", Rate: 10, Period: time.Second}
	call, err := NewCall(false, a.ForN("k", 2))
	if err != nil {
		t.Fatalf("NewCall() = %v", err)
	}
	if err := call.Check(t0, []State{{2, t0}}).Err(); err != nil {
		t.Errorf("Err() = %v for a result that is OK", err)
	}
	refused := call.Check(t0, []State{{0, t0}}).Err()
	var re *RefusedError
	if !errors.Is(refused, ErrRefused) || !errors.As(refused, &re) {
		t.Fatalf("Err() = %v, want a *RefusedError that is ErrRefused", refused)
	}
	if got, want := re.Result.RetryAfter, 2*d; got != want {
		t.Errorf("RetryAfter = %v, want %v", got, want)
	}
	if got, want := refused.Error(), `ratelimit: limit "a" refused, retry after 200ms`; got != want {
		t.Errorf("Error() = %q, want %q", got, want)
	}
	if errors.Is(refused, ErrNever) || errors.Is(refused, ErrInvalid) {
		t.Errorf("%v is ErrNever or ErrInvalid", refused)
	}
}

// The zero Result is that of a call that failed: not OK, and its error can be
// told.
func TestZeroResultErr(t *testing.T) {
	err := Result{}.Err()
	if !errors.Is(err, ErrRefused) {
		t.Errorf("Err() = %v, want ErrRefused", err)
	}
	if got := err.Error(); !strings.Contains(got, "refused") {
		t.Errorf("Error() = %q, want a refusal", got)
	}
}

// A row's debt can be larger than its definition now allows: it was made
// under another. The wait is longer than can be told, and so is not told
// shorter.
func TestWaitBeyondMaxSpan(t *testing.T) {
	slow := TokenBucket{Name: "a", Rate: 1, Period: 100 * year}
	call, err := NewCall(false, slow.For(""))
	if err != nil {
		t.Fatalf("NewCall() = %v", err)
	}
	for _, debt := range []float64{1e3, 1e6, 1e12, 1e27} {
		result := call.Check(t0, []State{{-debt, t0}})
		if result.OK || result.RetryAfter < MaxSpan || !result.RetryAt.After(t0.Add(MaxSpan-1)) {
			t.Errorf("debt of %g: OK %v, RetryAfter %v, RetryAt %v, want a refusal for longer than %v", debt, result.OK, result.RetryAfter, result.RetryAt, MaxSpan)
		}
	}
}

func BenchmarkNewCall(b *testing.B) {
	one := []Request{TokenBucket{Name: "a", Rate: 10, Period: time.Second}.For("k")}
	for _, bm := range []struct {
		name     string
		requests []Request
	}{
		{"1", one},
		{"4", fourLimits()},
	} {
		b.Run(bm.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := NewCall(true, bm.requests...); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkDecide(b *testing.B) {
	full := []State{{10, t0}, {10, t0}, {10, t0}, {10, t0}}
	empty := []State{{0, t0}, {0, t0}, {0, t0}, {0, t0}}
	for _, bm := range []struct {
		name     string
		requests []Request
		states   []State
	}{
		{"1/taken", fourLimits()[:1], full[:1]},
		{"1/refused", fourLimits()[:1], empty[:1]},
		{"4/taken", fourLimits(), full},
		{"4/refused", fourLimits(), empty},
	} {
		b.Run(bm.name, func(b *testing.B) {
			call, err := NewCall(false, bm.requests...)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				call.Decide(t0, bm.states)
			}
		})
	}
}

func BenchmarkSettle(b *testing.B) {
	for _, limit := range fourLimits()[:2] {
		definition := limit.Limit.Definition()
		b.Run(definition.Kind.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				definition.Settle(State{1, t0}, t3)
			}
		})
	}
}

// fourLimits is a call on limits of both kinds, not in order.
func fourLimits() []Request {
	return []Request{
		TokenBucket{Name: "d", Rate: 10, Period: time.Second}.For("k"),
		FixedWindow{Name: "a", Rate: 10, Period: time.Second}.For("k"),
		TokenBucket{Name: "c", Rate: 10, Period: time.Second}.For("k"),
		FixedWindow{Name: "b", Rate: 10, Period: time.Second}.For("k"),
	}
}
