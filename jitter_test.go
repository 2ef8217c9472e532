package ratelimit

import (
	"math"
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

// An identity has the same share of every spread, so its instants stay in their order and apart.
func TestJitterForIsAlwaysTheSameShare(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i := range 100 {
		identity := strconv.Itoa(i)
		share := func(spread time.Duration) float64 {
			return float64(JitterFor(identity, at, spread).Sub(at)) / float64(spread)
		}
		want := share(time.Hour)
		for spread := time.Second; spread <= time.Minute; spread += 777 * time.Millisecond {
			if got := share(spread); math.Abs(got-want) > 1e-5 {
				t.Fatalf("identity %s: a share of %v of %v, and %v of an hour", identity, got, spread, want)
			}
		}
	}
}
