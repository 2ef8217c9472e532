package bucket_test

import (
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

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
