package pgstore

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// TestChooseBalances throws 100,000 single tokens at 16 shards. One choice
// leaves the fullest some 280 tokens above the emptiest, two leave a handful.
func TestChooseBalances(t *testing.T) {
	const shards, takes, most = 16, 100_000, 12
	call, err := ratelimit.NewCall(false, ratelimit.TokenBucket{Name: "l", Rate: 1e9, Period: time.Hour, Shards: shards}.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	ask, now := call.Asks[0], time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	spread := func(choose func(*shardMemory) int) float64 {
		var memory shardMemory
		values := make([]float64, shards)
		for range takes {
			shard := choose(&memory)
			values[shard]--
			memory.note(ask, shard, ratelimit.State{Value: values[shard], TS: now})
		}
		return slices.Max(values) - slices.Min(values)
	}
	if got := spread(func(m *shardMemory) int { return m.choose(ask, upTo(shards)) }); got > most {
		t.Errorf("a spread of %v, want at most %d", got, most)
	}
	if got := spread(func(*shardMemory) int { return rand.IntN(shards) }); got <= most {
		t.Errorf("one choice has a spread of %v, so this test tells nothing", got)
	}
}
