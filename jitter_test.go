package ratelimit

import (
	"strconv"
	"testing"
	"time"
)

func TestJitter(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	const spread = 10 * time.Microsecond
	for name, jitter := range map[string]func(i int, spread time.Duration) time.Time{
		"Jitter":    func(_ int, spread time.Duration) time.Time { return Jitter(at, spread) },
		"JitterFor": func(i int, spread time.Duration) time.Time { return JitterFor(strconv.Itoa(i), at, spread) },
	} {
		t.Run(name, func(t *testing.T) {
			seen := map[time.Duration]int{}
			for i := range 10_000 {
				seen[jitter(i, spread).Sub(at)]++
			}
			// Of 10,000, each of ten gets 1,000 with a standard deviation of 30.
			for d := range spread / time.Microsecond {
				if n := seen[d*time.Microsecond]; n < 800 || n > 1200 {
					t.Errorf("%v later: %d of 10,000, want about 1,000", d*time.Microsecond, n)
				}
			}
			if len(seen) != 10 {
				t.Errorf("got %d shifts, want the 10 microseconds of the spread: %v", len(seen), seen)
			}
			for _, spread := range []time.Duration{0, -time.Hour, 999 * time.Nanosecond} {
				if got := jitter(1, spread); !got.Equal(at) {
					t.Errorf("spread %v: got %v later, want none", spread, got.Sub(at))
				}
			}
		})
	}
}

func TestJitterForIsStable(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	if a, b := JitterFor("job 1", at, time.Hour), JitterFor("job 1", at.Add(time.Second), time.Hour); b.Sub(a) != time.Second {
		t.Errorf("got shifts that differ by %v for one identity", b.Sub(a)-time.Second)
	}
}
