package bucket_test

import (
	"math"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

func TestTokenBucket(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 3}
	run(t, tokens, []step{
		{t0, allow(1), true, 0, 2}, // no row: full
		{t0, allow(1), true, 0, 1},
		{t0, allow(1), true, 0, 0},
		{t0, allow(1), false, d, 0},
		{t0, allow(1), false, d, 0}, // a refusal costs nothing
		{t1, allow(1), true, 0, 0},
		{t1, allow(1), false, d, 0},
		{t1, allow(3), false, 3 * d, 0},
		{t3, allow(3), false, d, 2},
		{t4, allow(3), true, 0, 0},
		{t9, allow(3), true, 0, 0}, // five came, three fit
		{t9, allow(1), false, d, 0},
	})
}

func TestTokenBucketFractions(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 2.5, Period: time.Second, Capacity: 0.75}
	run(t, tokens, []step{
		{t0, allow(0.5), true, 0, 0.25},
		{t0, allow(0.5), false, d, 0.25},
		{t1, allow(0.5), true, 0, 0},
		{t2, allow(0.25), true, 0, 0},
		{t2, allow(0.75), false, 3 * d, 0},
		{t5, allow(0.75), true, 0, 0},
	})
}

// A clock that goes back takes no tokens away and creates none.
func TestTokenBucketClockGoesBack(t *testing.T) {
	tokens := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 3}
	run(t, tokens, []step{
		{t5, allow(3), true, 0, 0},
		{t0, allow(0), true, 0, 0},      // none taken away
		{t0, allow(1), false, 6 * d, 0}, // none created, and the wait is from the caller's now
		{t5, allow(1), false, 1 * d, 0},
		{t6, allow(1), true, 0, 0},
		{t2, allow(1), false, 5 * d, 0},
		{t7, allow(1), true, 0, 0}, // the way back to t6 brought nothing
		{t7, allow(1), false, d, 0},
	})

	// Back and forth brings no more than the time between the extremes.
	run(t, tokens, []step{
		{t1, allow(3), true, 0, 0},
		{t2, allow(1), true, 0, 0},
		{t1, allow(1), false, 2 * d, 0},
		{t2, allow(1), false, 1 * d, 0},
		{t0, allow(1), false, 3 * d, 0},
		{t2, allow(1), false, 1 * d, 0},
		{t3, allow(1), true, 0, 0},
	})

	// Tokens there are can be taken whatever the clock says.
	run(t, tokens, []step{
		{t5, allow(1), true, 0, 2},
		{t0, allow(2), true, 0, 0},
		{t5, allow(1), false, d, 0},
	})
}

// A definition changed in code holds from the next call.
func TestTokenBucketRedefined(t *testing.T) {
	small := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 3}
	large := TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 8}
	slow := TokenBucket{Name: "a", Rate: 5, Period: time.Second, Capacity: 3}
	run(t, large, []step{
		{t0, allow(1), true, 0, 7},
		{t0, as(small, allow(1)), true, 0, 2}, // capacity lowered: the rest is gone
		{t0, as(large, allow(0)), true, 0, 2}, // raised: room, but no tokens
		{t2, allow(1), true, 0, 3},
		{t2, allow(8), false, 5 * d, 3},
		{t7, allow(8), true, 0, 0},
		{t7, as(slow, allow(1)), false, 2 * d, 0},
		{t9, allow(1), true, 0, 0},
	})
}

func TestTokenBucketSettle(t *testing.T) {
	tokens := definition(TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 3})
	tests := []struct {
		name  string
		state bucket.State
		now   time.Time
		want  bucket.State
	}{
		{"at once", row(1, t0), t0, row(1, t0)},
		{"later", row(1, t0), t1, row(2, t1)},
		{"a microsecond later", row(0, t0), t0.Add(time.Microsecond), row(1e-5, t0.Add(time.Microsecond))},
		{"full", row(1, t0), t2, row(3, t2)},
		{"more than full", row(1, t0), t9, row(3, t9)},
		{"out of debt", row(-4, t0), t5, row(1, t5)},
		{"less debt", row(-4, t0), t3, row(-1, t3)},
		{"earlier", row(1, t5), t0, row(1, t5)},
		{"above capacity", row(7, t0), t0, row(3, t0)},
		{"above capacity, earlier", row(7, t5), t0, row(3, t5)},
		{"centuries later", row(0, time.Date(1700, 1, 1, 0, 0, 0, 0, time.UTC)), t0, row(3, t0)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tokens.Refill(tt.state, tt.now); got != tt.want {
				t.Errorf("Settle() = %v, want %v", got, tt.want)
			}
		})
	}
}

// Rounding does not add up: a bucket that is asked a million times, at
// instants whose tokens are no round numbers, grants what one that is asked
// once does.
func TestTokenBucketDoesNotDrift(t *testing.T) {
	tokens := definition(TokenBucket{Name: "a", Rate: 7, Period: 13 * time.Second, Capacity: 1000})
	const calls, gap = 1_000_000, 97 * time.Microsecond
	state := row(0, t0)
	for i := range calls {
		state, _ = tokens.Take(state, t0.Add(time.Duration(i+1)*gap), 0, 0)
	}
	got, want := state.Value, tokens.Refill(row(0, t0), t0.Add(calls*gap)).Value
	if math.Abs(got-want) > 1e-9*want {
		t.Errorf("after %d calls %v tokens, want %v", calls, got, want)
	}
}
