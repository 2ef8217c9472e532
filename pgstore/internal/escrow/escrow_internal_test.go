package escrow

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// For each kind: what is counted with, for how long what was taken ahead can be used, and
// until when it can be given back.
func TestRulesOfKinds(t *testing.T) {
	noon := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	tokens := bucket.Definition(ratelimit.TokenBucket{Name: "b", Rate: 10, Period: time.Second, Capacity: 100}.Definition())
	window := bucket.Definition(ratelimit.FixedWindow{Name: "w", Rate: 10, Period: 3 * time.Second, Capacity: 100}.Definition())
	sliding := bucket.Definition(ratelimit.SlidingWindow{Name: "s", Rate: 10, Period: 3 * time.Second, Slots: 3}.Definition())
	for _, test := range []struct {
		name            string
		definition      bucket.Definition
		into, lasts     time.Duration // how far into what stands still it was taken
		lowered         float64
		longest, usable time.Duration
	}{
		{"a token bucket", tokens, 0, 2 * time.Second, 80, 2 * time.Second, 2 * time.Second},
		{"a token bucket that is refilled meanwhile", tokens, 0, 10 * time.Second, 0, 10 * time.Second, 10 * time.Second},
		{"a fixed window", window, 0, 2 * time.Second, 100, 2 * time.Second, 2 * time.Second},
		{"late in a fixed window", window, 2 * time.Second, 2 * time.Second, 100, 2 * time.Second, time.Second},
		{"a short fixed window", window, 0, 10 * time.Second, 100, 3 * time.Second, 3 * time.Second},
		{"a sliding window", sliding, 0, time.Second / 2, 10, time.Second / 2, time.Second / 2},
		{"late in a slot", sliding, 999 * time.Millisecond, time.Second / 2, 10, time.Second / 2, time.Millisecond},
		{"a short slot", sliding, 0, 2 * time.Second, 10, time.Second, time.Second},
		{"a slot that is ahead of the clock", sliding, -time.Minute, 2 * time.Second, 10, time.Second, 2 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := &test.definition
			if got := Lowered(d, test.lasts); got != test.lowered {
				t.Errorf("counts with %v, want %v", got, test.lowered)
			}
			if got := usable(d, time.Unix(0, 0), time.Unix(0, 0), test.lasts); got != test.longest {
				t.Errorf("can be used for %v at the longest, want %v", got, test.longest)
			}
			if got := usable(d, noon, noon.Add(test.into), test.lasts); got != test.usable {
				t.Errorf("can be used for %v, want %v", got, test.usable)
			}
		})
	}
}
