package decide

import (
	"testing"
	"time"
)

// TestEarliest: the instant from which on it is enough is found from every likely one,
// with few questions if that is near.
func TestEarliest(t *testing.T) {
	for _, from := range []time.Duration{time.Microsecond, 2 * time.Microsecond, time.Millisecond, time.Minute + time.Microsecond, 1000 * time.Hour} {
		for _, likely := range []time.Duration{-time.Second, 0, time.Microsecond, from - 3*time.Microsecond, from, from + 5*time.Microsecond, 50 * time.Hour} {
			asked := 0
			got := earliest(likely, func(wait time.Duration) bool {
				asked++
				return wait >= from
			})
			if got != from {
				t.Errorf("from %v on, likely %v: got %v", from, likely, got)
			}
			if near := (likely - from).Abs() <= 5*time.Microsecond; near && asked > 10 || asked > 150 {
				t.Errorf("from %v on, likely %v: asked %d times", from, likely, asked)
			}
		}
	}
}
