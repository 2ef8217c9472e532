package bucket_test

import (
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

func pause(until time.Time) move {
	return func(_ *testing.T, p *player, at time.Time) Status {
		after := definition(p.limit).Pause(p.state(at), at, until)
		p.row = &after
		return decide.Credited(p.limit.For(p.key), []bucket.State{after}, at)
	}
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

// The tolerance goes by the largest number, whatever its sign.
func TestTolerance(t *testing.T) {
	const factor = 64 * 0x1p-52
	for _, v := range []float64{0, 1, -3, 1e12} {
		want := max(v, -v) * factor
		for _, got := range []float64{bucket.Tolerance(v, 0, 0), bucket.Tolerance(0, v, 0), bucket.Tolerance(0, 0, v)} {
			if got != want {
				t.Errorf("Tolerance of %v = %v, want %v", v, got, want)
			}
		}
	}
}
