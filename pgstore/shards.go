package pgstore

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// shardMemory is what this process last saw of sharded limits. It only ever
// guides which row is tried first, so it may be stale, and may be forgotten.
type shardMemory struct {
	mu   sync.Mutex
	seen map[limitKey]seenShards
}

type seenShards struct {
	definition ratelimit.Definition
	states     []ratelimit.State // one that was never seen counts as full
}

type limitKey struct{ name, key string }

// mostSeen bounds the memory; past it all is forgotten.
const mostSeen = 4096

// choose is the power of two choices: of two different shards at random among
// those given, the better one as far as is known.
func (m *shardMemory) choose(a ratelimit.Ask, among []int) int {
	if len(among) == 1 {
		return among[0]
	}
	i := rand.IntN(len(among))
	j := (i + 1 + rand.IntN(len(among)-1)) % len(among)
	return m.better(a, among[i], among[j])
}

// better is the better of two shards.
func (m *shardMemory) better(a ratelimit.Ask, first, second int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	seen := m.seen[limitKey{a.Definition.Name, a.Key}]
	if seen.definition != a.Definition || a.Definition.Better(seen.states[first], seen.states[second]) {
		return first
	}
	return second
}

// note remembers a state.
func (m *shardMemory) note(a ratelimit.Ask, shard int, state ratelimit.State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.states(a, state.TS)[shard] = state
}

// taken remembers what a's parts left behind when they were taken at an
// instant, and tells a's status by what is known of all shards.
func (m *shardMemory) taken(a ratelimit.Ask, parts []part, outcomes []outcome, at time.Time) ratelimit.Status {
	counts := make([]float64, a.Definition.Shards)
	m.mu.Lock()
	defer m.mu.Unlock()
	states := m.states(a, at)
	for i, p := range parts {
		states[p.shard], counts[p.shard] = outcomes[i].after, p.count
	}
	return a.TakenFrom(states, counts, at)
}

// states are those of a's shards, full at an instant if none was seen by this
// definition.
func (m *shardMemory) states(a ratelimit.Ask, at time.Time) []ratelimit.State {
	key := limitKey{a.Definition.Name, a.Key}
	seen := m.seen[key]
	if seen.definition == a.Definition {
		return seen.states
	}
	if m.seen == nil || len(m.seen) >= mostSeen {
		m.seen = make(map[limitKey]seenShards)
	}
	full := a.Definition.Shard().Fresh(a.Key, at)
	seen = seenShards{a.Definition, slices.Repeat([]ratelimit.State{full}, a.Definition.Shards)}
	m.seen[key] = seen
	return seen.states
}

func (m *shardMemory) forget(key limitKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.seen, key)
}
