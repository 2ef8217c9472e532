package bucket_test

import (
	"math"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

const (
	d    = 100 * time.Millisecond
	year = 365 * 24 * time.Hour
)

// row is a state without a pause.
func row(value float64, ts time.Time) bucket.State { return bucket.State{Value: value, TS: ts} }

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
	row   *bucket.State
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

func definition(l Limit) *bucket.Definition {
	d := bucket.Definition(l.Definition())
	return &d
}

func (p *player) state(at time.Time) bucket.State {
	if p.row != nil {
		return *p.row
	}
	return definition(p.limit).Fresh(p.key, at)
}

func (p *player) take(t *testing.T, reserve bool, at time.Time, n float64) Status {
	t.Helper()
	call, err := decide.New(reserve, p.limit.ForN(p.key, n))
	if err != nil {
		t.Fatalf("decide.New(%v, %v tokens) = %v", reserve, n, err)
	}
	view := decide.View{States: [][]bucket.State{{p.state(at)}}, At: at}
	changes, ok := call.Plan(view)
	if !ok {
		return call.Refused(view).Status
	}
	p.row = &changes[0].After
	return call.Granted(changes, view).Status
}

func allow(n float64) move {
	return func(t *testing.T, p *player, at time.Time) Status { return p.take(t, false, at, n) }
}

func reserve(n float64) move {
	return func(t *testing.T, p *player, at time.Time) Status { return p.take(t, true, at, n) }
}

func credit(n float64) move {
	return func(_ *testing.T, p *player, at time.Time) Status {
		after := definition(p.limit).Credit(p.state(at), at, n)
		p.row = &after
		return decide.Credited(p.limit.ForN(p.key, n), []bucket.State{after}, at)
	}
}

func pause(until time.Time) move {
	return func(_ *testing.T, p *player, at time.Time) Status {
		after := definition(p.limit).Pause(p.state(at), at, until)
		p.row = &after
		return decide.Credited(p.limit.For(p.key), []bucket.State{after}, at)
	}
}

func resume(_ *testing.T, p *player, at time.Time) Status {
	after := definition(p.limit).Resume(p.key, p.state(at), at)
	p.row = &after
	return decide.Credited(p.limit.For(p.key), []bucket.State{after}, at)
}

// reset forgets the row.
func reset(_ *testing.T, p *player, at time.Time) Status {
	p.row = nil
	return decide.Credited(p.limit.For(p.key), []bucket.State{p.state(at)}, at)
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
		if want := got.At.Add(got.RetryAfter); !got.RetryAt.Equal(want) {
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
	tokens := definition(TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5})
	window := definition(FixedWindow{Name: "a", Rate: 3, Period: time.Second, Capacity: 5})
	tests := []struct {
		name     string
		d        *bucket.Definition
		state    bucket.State
		now      time.Time
		n, floor float64
		want     bucket.State
		ok       bool
	}{
		{"all", tokens, row(5, t0), t0, 5, 0, row(0, t0), true},
		{"more than all", tokens, row(4, t0), t0, 5, 0, row(4, t0), false},
		{"settled first", tokens, row(1, t0), t3, 4, 0, row(0, t3), true},
		{"refused is settled", tokens, row(1, t0), t2, 4, 0, row(3, t2), false},
		{"to the floor", tokens, row(1, t0), t0, 4, -3, row(-3, t0), true},
		{"below the floor", tokens, row(1, t0), t0, 4.5, -3, row(1, t0), false},
		{"none, full", tokens, row(5, t0), t0, 0, 0, row(5, t0), true},
		{"none, in debt", tokens, row(-1, t0), t0, 0, 0, row(-1, t0), false},
		{"none, in allowed debt", tokens, row(-1, t0), t0, 0, -1, row(-1, t0), true},
		{"clock went back", tokens, row(4, t5), t0, 4, 0, row(0, t5), true},
		{"a hair too little is rounding", tokens, row(math.Nextafter(3, 0), t0), t0, 3, 0, row(math.Nextafter(3, 0)-3, t0), true},
		{"a millionth too little is not", tokens, row(3-1e-6, t0), t0, 3, 0, row(3-1e-6, t0), false},
		{"window before its edge", window, row(1, t0), t9, 2, 0, row(1, t0), false},
		{"window at its edge", window, row(1, t0), t0.Add(time.Second), 2, 0, row(2, t0.Add(time.Second)), true},
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
	tokens := definition(TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5})
	thirds := definition(TokenBucket{Name: "a", Rate: 3, Period: time.Second, Capacity: 5})
	window := definition(FixedWindow{Name: "a", Rate: 2, Period: d, Capacity: 5})
	tests := []struct {
		name  string
		d     *bucket.Definition
		state bucket.State
		want  float64
		at    time.Time
	}{
		{"has more", tokens, row(5, t0), 1, t0},
		{"has it", tokens, row(1, t0), 1, t0},
		{"lacks one", tokens, row(0, t0), 1, t1},
		{"lacks half a one", tokens, row(0.5, t0), 1, t0.Add(d / 2)},
		{"in debt", tokens, row(-4, t0), 5, t9},
		{"out of debt", tokens, row(-4, t1), 0, t5},
		{"a third of a second is rounded up", thirds, row(0, t0), 1, t0.Add(333_334 * time.Microsecond)},
		{"two thirds are", thirds, row(0, t0), 2, t0.Add(666_667 * time.Microsecond)},
		{"a whole second is not", thirds, row(0, t0), 3, t0.Add(time.Second)},
		{"window has it", window, row(2, t0), 2, t0},
		{"window lacks less than a window's", window, row(0, t0), 0.5, t1},
		{"window lacks a window's", window, row(0, t0), 2, t1},
		{"window lacks more", window, row(0, t0), 2.5, t2},
		{"window in debt", window, row(-4, t1), 5, t6},
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
			if got := definition(tt.limit).Floor(tt.reserve); got != tt.want {
				t.Errorf("Floor(%v) = %v, want %v", tt.reserve, got, tt.want)
			}
		})
	}
}

func TestCredit(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	run(t, tokens, []step{
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
	if got, want := definition(tokens).Credit(row(4, t0), t0, 3), row(5, t0); got != want {
		t.Errorf("Credit() = %v, want %v", got, want)
	}

	// A credit to a limit without a row is to a full one.
	run(t, tokens, []step{
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

// What was used is charged below every bound; what another definition has left above
// the capacity stays.
func TestCharge(t *testing.T) {
	tokens := definition(TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5, MaxReserved: None})
	window := definition(FixedWindow{Name: "a", Rate: 10, Period: time.Second, Start: t0})
	for _, tt := range []struct {
		name string
		d    *bucket.Definition
		s    bucket.State
		at   time.Time
		n    float64
		want bucket.State
	}{
		{"at once", tokens, row(5, t0), t0, 3, row(2, t0)},
		{"below every bound", tokens, row(1, t0), t0, 30, row(-29, t0)},
		{"refilled first, up to the capacity", tokens, row(4, t0), t0.Add(time.Hour), 30, row(-25, t0.Add(time.Hour))},
		{"a late caller", tokens, row(4, t0), t0.Add(-time.Second), 1, row(3, t0)},
		{"above the capacity", tokens, row(50, t0), t0.Add(time.Second), 1, row(49, t0.Add(time.Second))},
		{"nothing", tokens, row(4, t0), t0, 0, row(4, t0)},
		{"a window", window, row(3, t0), t0.Add(1500 * time.Millisecond), 12, row(-2, t0.Add(time.Second))},
	} {
		if got := tt.d.Charge(tt.s, tt.at, tt.n); got != tt.want {
			t.Errorf("%s: Charge() = %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestPause(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	run(t, tokens, []step{
		{t0, pause(t4), false, 4 * d, 0},
		{t0, allow(1), false, 5 * d, 0},
		{t0, allow(0), false, 4 * d, 0},
		{t3, allow(1), false, 2 * d, 0},
		{t3, allow(0), false, 1 * d, 0},
		{t4, allow(0), true, 0, 0},
		{t4, allow(1), false, 1 * d, 0},
		{t5, allow(1), true, 0, 0},
	})

	// Debt stays, and is paid after the pause.
	run(t, tokens, []step{
		{t0, reserve(7), true, 2 * d, -2},
		{t0, pause(t4), false, 6 * d, -2},
		{t1, allow(0), false, 5 * d, -2},
		{t1, reserve(1), true, 6 * d, -3},
		{t7, allow(0), true, 0, 0},
	})

	// The later of two pauses holds.
	run(t, tokens, []step{
		{t0, pause(t6), false, 6 * d, 0},
		{t1, pause(t3), false, 5 * d, 0},
		{t1, allow(1), false, 6 * d, 0},
		{t1, pause(t8), false, 7 * d, 0},
		{t1, allow(1), false, 8 * d, 0},
	})

	// A pause that is over before it begins changes nothing.
	run(t, tokens, []step{
		{t5, allow(1), true, 0, 4},
		{t5, pause(t5), true, 0, 4},
		{t5, pause(t1), true, 0, 4},
		{t5, allow(4), true, 0, 0},
	})

	// A window opens where the pause ends.
	window := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	run(t, window, []step{
		{t0, pause(t7), false, 7 * d, 0},
		{t1, allow(1), false, 6 * d, 0},
		{t6, allow(1), false, 1 * d, 0},
		{t7, allow(3), true, 0, 0},
		{t8, allow(1), false, 3 * d, 0},
	})

	// Within the window that is open anyway, until its end.
	run(t, window, []step{
		{t0, pause(t2), false, 2 * d, 0},
		{t2, allow(1), false, 2 * d, 0},
		{t4, allow(3), true, 0, 0},
	})

	// What was saved up before the pause does not return with its end.
	rollover := FixedWindow{Name: "a", Rate: 3, Period: 2 * d, Capacity: 9, Start: t0}
	run(t, rollover, []step{
		{t0, pause(t6), false, 6 * d, 0},
		{t6, allow(3), true, 0, 0},
		{t6, allow(1), false, 2 * d, 0},
	})
}

// What is given back during a pause is for reservations, which are due when it
// is over or later, and for the rest after the pause. Only a reset ends one, and
// a resume.
func TestPauseHolds(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	run(t, tokens, []step{
		{t0, pause(t6), false, 6 * d, 0},
		{t1, credit(3), false, 5 * d, 3},
		{t1, allow(1), false, 5 * d, 3},
		{t1, reserve(1), true, 5 * d, 2},
		{t1, reserve(0), true, 5 * d, 2},
		{t1, reserve(3), true, 6 * d, -1},
		{t2, credit(9), false, 4 * d, 5}, // capped
		{t5, allow(5), false, 1 * d, 5},
		{t5, reserve(4), true, 1 * d, 1},
		{t6, allow(1), true, 0, 0},
		{t6, allow(1), false, 1 * d, 0},
		{t7, allow(1), true, 0, 0},
		{t7, pause(t9), false, 2 * d, 0},
		{t8, reset, true, 0, 5},
		{t8, allow(5), true, 0, 0},
	})

	// It is as long by a clock that went back, also when it was over before.
	run(t, tokens, []step{
		{t4, pause(t6), false, 2 * d, 0},
		{t6, allow(0), true, 0, 0},
		{t3, credit(1), false, 3 * d, 1},
		{t6, allow(1), true, 0, 0},
	})
}

// A resume leaves what is there. A token bucket fills from then on, a fixed
// window has its own edges back.
func TestResume(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	run(t, tokens, []step{
		{t0, pause(t9), false, 9 * d, 0},
		{t1, credit(2), false, 8 * d, 2},
		{t2, resume, true, 0, 2},
		{t2, allow(3), false, 1 * d, 2},
		{t3, allow(3), true, 0, 0},
		{t3, reserve(2), true, 2 * d, -2},
		{t3, pause(t9), false, 8 * d, -2},
		{t4, resume, false, 2 * d, -2},
		{t6, allow(0), true, 0, 0},
		{t7, resume, true, 0, 1}, // there is no pause
	})

	window := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	run(t, window, []step{
		{t0, pause(t7), false, 7 * d, 0},
		{t1, resume, true, 0, 0},
		{t1, allow(1), false, 3 * d, 0}, // what was there is gone all the same
		{t4, allow(3), true, 0, 0},
	})
}

// A clock that went back, a pause and a resume bring no tokens twice.
func TestResumeAfterClockWentBack(t *testing.T) {
	for _, l := range []Limit{
		TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5},
		FixedWindow{Name: "a", Rate: 5, Period: 5 * d, Start: t0},
	} {
		definition := definition(l)
		s, ok := definition.Take(definition.Fresh("k", t5), t5, 5, 0)
		if !ok {
			t.Fatalf("%v: a fresh one refused", l)
		}
		for range 10 {
			s = definition.Resume("k", definition.Pause(s, t0, t1), t0)
			if got := definition.Refill(s, t5).Value; got > 0 {
				t.Fatalf("%v: %v tokens, want none", l, got)
			}
		}
	}
}

// Rows know whole microseconds. A pause that ends between two of them is not
// over at the first.
func TestPauseRoundsUp(t *testing.T) {
	window := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	next := t7.Add(time.Microsecond)
	run(t, window, []step{
		{t0, pause(t7.Add(1)), false, 7*d + time.Microsecond, 0},
		{t7, allow(1), false, time.Microsecond, 0},
		{next, allow(3), true, 0, 0},
	})
	tokens := TokenBucket{Name: "a", Rate: 1, Period: time.Microsecond}
	run(t, tokens, []step{
		{t0, pause(t7.Add(999)), false, 7*d + time.Microsecond, 0},
		{next, allow(1), false, time.Microsecond, 0},
		{next.Add(time.Microsecond), allow(1), true, 0, 0},
	})
}

// A row is idle when a minute ago it was what the table says.
func TestIdle(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 5}
	window := FixedWindow{Name: "a", Rate: 3, Period: 2 * d, Capacity: 5, Start: t0}
	spaced := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: None}
	paused := definition(tokens).Pause(row(5, t0), t0, t4)
	tests := []struct {
		name  string
		limit Limit
		state bucket.State
		now   time.Time
		want  bool
	}{
		{"full", tokens, row(5, t0), t0, true},
		{"nearly full", tokens, row(4.999999, t0), t0, false},
		{"full by now", tokens, row(3, t0), t2, true},
		{"not full yet", tokens, row(3, t0), t1, false},
		{"full, of the future", tokens, row(5, t2), t1, false},
		{"in debt", tokens, row(-1, t0), t0, false},
		{"debt paid, not full", tokens, row(-1, t0), t5, false},
		{"debt paid, full", tokens, row(-1, t0), t6, true},
		{"paused", tokens, paused, t3, false},
		{"pause over", tokens, paused, t4, false},
		{"full after a pause", tokens, paused, t9, true},
		{"window paused until one of its edges, full by what was given back", window, bucket.State{Value: 5, TS: t0, Paused: t4}, t2, false},
		{"over full, capacity lowered", tokens, row(50, t0), t0, true},
		{"no capacity, no debt", spaced, row(0, t0), t0, true},
		{"no capacity, debt", spaced, row(-1, t0), t0, false},
		{"no capacity, debt paid", spaced, row(-1, t0), t1, true},
		{"window before the edge that fills it", window, row(2, t0), t1, false},
		{"window at the edge that fills it", window, row(2, t0), t2, true},
		{"window after one edge of two", window, row(1, t0), t3, false},
		{"window after two edges", window, row(1, t0), t4, true},
		{"window with edges of its own, full", window, row(2, t1), t3, false},
		{"window with edges of its own, before another edge", window, row(2, t1), t5.Add(-time.Microsecond), false},
		{"window with edges of its own, after another edge", window, row(2, t1), t5, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			now := tt.now.Add(time.Minute)
			if got := definition(tt.limit).Idle("", tt.state, now); got != tt.want {
				t.Errorf("Idle(%v, t0%+v) = %v, want %v", tt.state, now.Sub(t0), got, tt.want)
			}
			if definition(tt.limit).Idle("", tt.state, tt.now) {
				t.Errorf("Idle(%v, t0%+v) = true, a minute early", tt.state, tt.now.Sub(t0))
			}
		})
	}
}

func BenchmarkSettle(b *testing.B) {
	limits := []Limit{
		TokenBucket{Name: "a", Rate: 10, Period: time.Second},
		FixedWindow{Name: "a", Rate: 10, Period: time.Second},
	}
	for _, limit := range limits {
		definition := definition(limit)
		b.Run(definition.Kind.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				definition.Refill(row(1, t0), t3)
			}
		})
	}
}
