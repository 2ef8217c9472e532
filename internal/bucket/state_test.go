package bucket_test

import (
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
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

func definition(l Limit) *bucket.Definition {
	d := bucket.Definition(l.Definition())
	return &d
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

// Rows know whole microseconds. A pause that ends between two of them is not over at the first.
func TestPauseRoundsUp(t *testing.T) {
	next := t7.Add(time.Microsecond)
	for _, tt := range []struct {
		limit Limit
		ends  time.Duration // after t7
		want  time.Time     // when a token can be had
	}{
		{FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}, 1, next},
		{TokenBucket{Name: "a", Rate: 1, Period: time.Microsecond}, 999, next.Add(time.Microsecond)},
	} {
		d := definition(tt.limit)
		if got := d.Ready(d.Pause(d.Fresh("k", t0), t0, t7.Add(tt.ends)), t0, 1, 0); !got.Equal(tt.want) {
			t.Errorf("%v: there is a token at %v, want it at %v", tt.limit, got, tt.want)
		}
	}
}
