// Package known remembers limits for a process: the definitions that it has met, and the states of
// shards as read last, which guide what is tried first. It also reports rows that have changed. It
// grants nothing, and knows no statement.
package known

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Known is what a process remembers of limits. It is safe for concurrent use; OnChange is set before.
type Known struct {
	Definitions decide.Definitions
	Shards      Shards

	OnChange func(decide.Key) // is called for each key whose rows this process has changed; nil for none
}

// Changed reports that the rows of a key have changed.
func (k *Known) Changed(key decide.Key) {
	if k.OnChange != nil {
		k.OnChange(key)
	}
}

// Forget forgets the states of a key's rows after a change that is not a take.
func (k *Known) Forget(key decide.Key) {
	k.Shards.Forget(key)
	k.Changed(key)
}

// Question returns the call for 0 tokens of an edit of the limits and keys of requests.
func (k *Known) Question(requests ...ratelimit.Request) (decide.Call, error) {
	questions := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		questions[i] = r
		questions[i].Count = 0
	}
	call, err := decide.All.Call(&k.Definitions, nil, false, questions)
	if err != nil {
		return decide.Call{}, err
	}
	return call, k.Definitions.NoteEdit(&call)
}

// Granted returns the result of a call that changes at an instant have granted. xid is the transaction
// or savepoint of the changes, and session identifies its connection. session is nil for committed
// changes.
func (k *Known) Granted(call *decide.Call, changes []decide.Change, at time.Time, xid string, session any) ratelimit.Result {
	if k.OnChange != nil {
		for i := range changes {
			k.OnChange(changes[i].Key)
		}
	}
	view := decide.View{At: at.UTC()}
	if !call.Plain && call.Sharded() {
		view.States = k.Shards.Taken(call, changes, view.At)
	}
	return call.Receipted(changes, view, xid, session)
}

// Observe remembers the states of a call's shards, as read.
func (k *Known) Observe(call *decide.Call, view decide.View) {
	for i := range call.Demands {
		k.Shards.Observe(&call.Demands[i], view.States[i])
	}
}

// Choose returns the shard to try first.
func (k *Known) Choose(a *decide.Demand) int {
	return k.Shards.Choose(a, decide.UpTo(a.Definition.Shards))
}

// Guess returns a change for each limit of a call, of one row: choose returns its shard. It returns
// false if a count fits no single shard.
func (k *Known) Guess(call *decide.Call, choose func(i int) int) ([]decide.Change, bool) {
	changes := make([]decide.Change, len(call.Demands))
	for i := range call.Demands {
		a := &call.Demands[i]
		if !a.Sharded() {
			changes[i] = a.Change(i, 0, a.Count)
			continue
		}
		changes[i] = a.Change(i, choose(i), a.Count)
		if a.Count > changes[i].Definition.Capacity {
			return nil, false
		}
		changes[i].Floor = 0 // debt only when no shard has enough, which is not known yet
	}
	return changes, true
}

// Shards is the states of the shards of limits as they were read last. The zero value is ready to
// use. It is safe for concurrent use.
type Shards struct {
	mu     sync.Mutex
	cached map[decide.Key]limit
}

// limit holds the shards of a limit and key.
type limit struct {
	definition bucket.Definition
	states     []bucket.State // one that was never seen counts as full

	// When all shards together were found to have too little: on the database's clock, and on
	// this machine's. Both are zero when they were not.
	shortAt, shortHere time.Time
}

// mostCached is how many keys' shards are remembered; past it all is forgotten.
const mostCached = 4096

// Choose picks two of the given shards at random, and returns the better one by their known states.
func (m *Shards) Choose(a *decide.Demand, among []int) int {
	if len(among) == 1 {
		return among[0]
	}
	i := rand.IntN(len(among))
	j := (i + 1 + rand.IntN(len(among)-1)) % len(among)
	return m.better(a, among[i], among[j])
}

// better returns the better of two shards; the first if their states are not known.
func (m *Shards) better(a *decide.Demand, first, second int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	seen := m.cached[a.KeyOf()]
	if seen.definition != a.Definition || a.Definition.Better(seen.states[first], seen.states[second]) {
		return first
	}
	return second
}

// Observe notes the states of all of a's shards, if it has several.
func (m *Shards) Observe(a *decide.Demand, states []bucket.State) {
	if states == nil || !a.Sharded() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(m.states(a, states[0].TS), states)
}

// Taken notes the states that a call's changes left behind, and returns the known states of the shards
// of its sharded limits.
func (m *Shards) Taken(call *decide.Call, changes []decide.Change, at time.Time) [][]bucket.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range changes {
		if a := &call.Demands[changes[i].Demand]; a.Sharded() {
			m.states(a, at)[changes[i].Shard] = changes[i].After
		}
	}
	states := make([][]bucket.State, len(call.Demands))
	for i := range call.Demands {
		if a := &call.Demands[i]; a.Sharded() {
			states[i] = slices.Clone(m.states(a, at))
		}
	}
	return states
}

// Refused notes that all shards of a call's limits together were refused at an instant.
func (m *Shards) Refused(call *decide.Call, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range call.Demands {
		a := &call.Demands[i]
		if seen, ok := m.cached[a.KeyOf()]; ok && seen.definition == a.Definition {
			seen.shortAt, seen.shortHere = at, time.Now()
			m.cached[a.KeyOf()] = seen
		}
	}
}

// Refuse reports whether a call was refused before, and would be again by the known states of its
// shards. now is an injected instant, or nil.
func (m *Shards) Refuse(call *decide.Call, now *time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range call.Demands {
		a := &call.Demands[i]
		seen := m.cached[a.KeyOf()]
		if seen.shortAt.IsZero() || seen.definition != a.Definition {
			continue
		}
		at := seen.shortAt.Add(time.Since(seen.shortHere))
		if now != nil {
			at = *now
		}
		if _, ok := a.Spread(at, seen.states); !ok {
			return true
		}
		seen.shortAt, seen.shortHere = time.Time{}, time.Time{}
		m.cached[a.KeyOf()] = seen
	}
	return false
}

// Cached returns the known states of a's shards; full ones at an instant if they are not known.
func (m *Shards) Cached(a *decide.Demand, at time.Time) []bucket.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.states(a, at))
}

// states returns the states of a's shards, and adds them, full at an instant, if none are known under
// this definition. It needs mu.
func (m *Shards) states(a *decide.Demand, at time.Time) []bucket.State {
	seen := m.cached[a.KeyOf()]
	if seen.definition == a.Definition {
		return seen.states
	}
	if m.cached == nil || len(m.cached) >= mostCached {
		m.cached = make(map[decide.Key]limit)
	}
	each := a.Definition.Shard()
	full := each.Fresh(a.Key, at)
	seen = limit{definition: a.Definition, states: slices.Repeat([]bucket.State{full}, a.Definition.Shards)}
	m.cached[a.KeyOf()] = seen
	return seen.states
}

// Forget forgets the states of a key.
func (m *Shards) Forget(key decide.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.cached, key)
}

// Clear forgets all states.
func (m *Shards) Clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.cached)
}
