package known_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/known"
)

// TestChooseBalances throws 100,000 single tokens at 16 shards. One choice
// leaves the fullest some 280 tokens above the emptiest, two leave a handful.
func TestChooseBalances(t *testing.T) {
	const places, takes, most = 16, 100_000, 12
	call, err := decide.New(false, ratelimit.TokenBucket{Name: "l", Rate: 1e9, Period: time.Hour, Shards: places}.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	ask, now := &call.Demands[0], time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	spread := func(choose func(*known.Shards) int) float64 {
		var memory known.Shards
		values := make([]float64, places)
		for range takes {
			change := ask.Change(0, choose(&memory), 1)
			values[change.Shard]--
			change.After = bucket.State{Value: values[change.Shard], TS: now}
			memory.Taken(&call, []decide.Change{change}, now)
		}
		return slices.Max(values) - slices.Min(values)
	}
	if got := spread(func(m *known.Shards) int { return m.Choose(ask, upTo(places)) }); got > most {
		t.Errorf("a spread of %v, want at most %d", got, most)
	}
	if got := spread(func(*known.Shards) int { return rand.IntN(places) }); got <= most {
		t.Errorf("one choice has a spread of %v, so this test tells nothing", got)
	}
}

func upTo(n int) (all []int) {
	for i := range n {
		all = append(all, i)
	}
	return all
}
