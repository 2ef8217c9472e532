package pgstore

import (
	"math/rand/v2"
	"sync"

	"github.com/pgratelimit/ratelimit"
)

// shardMemory is what this process last saw of sharded limits. It only ever
// guides which row is tried first, so it may be stale, and may be forgotten.
type shardMemory struct {
	mu   sync.Mutex
	seen map[limitKey][]ratelimit.State // by shard; a zero TS is one not seen
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

// better is the better of two shards. One that was never seen counts as full.
func (m *shardMemory) better(a ratelimit.Ask, first, second int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	states := m.seen[limitKey{a.Definition.Name, a.Key}]
	if len(states) != a.Definition.Shards || states[first].TS.IsZero() {
		return first
	}
	if states[second].TS.IsZero() || !a.Definition.Better(states[first], states[second]) {
		return second
	}
	return first
}

// note remembers a state and returns all that is known of the limit's shards;
// those never seen are full at the instant of state.
func (m *shardMemory) note(a ratelimit.Ask, shard int, state ratelimit.State) []ratelimit.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := limitKey{a.Definition.Name, a.Key}
	states := m.seen[key]
	if len(states) != a.Definition.Shards {
		if m.seen == nil || len(m.seen) >= mostSeen {
			m.seen = make(map[limitKey][]ratelimit.State)
		}
		states = make([]ratelimit.State, a.Definition.Shards)
		m.seen[key] = states
	}
	states[shard] = state
	known := make([]ratelimit.State, len(states))
	for i, s := range states {
		if s.TS.IsZero() {
			s = a.Definition.Shard().Fresh(a.Key, state.TS)
		}
		known[i] = s
	}
	return known
}

func (m *shardMemory) forget(key limitKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.seen, key)
}
