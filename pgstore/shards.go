package pgstore

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// The shards that this process saw last guide which row is tried first, and refuse calls that
// cannot be granted; they grant nothing.

// shards is the states of sharded limits that this process read last.
type shards struct {
	mu   sync.Mutex
	seen map[decide.Key]seenShards
}

type seenShards struct {
	definition bucket.Definition
	states     []bucket.State // one that was never seen counts as full

	// When all shards together were found to have too little: on the database's clock, and on
	// this machine's. Both are zero when they were not.
	shortAt, shortHere time.Time
}

// heldShard is the shard from which a transaction took last. Its connection keeps it,
// and nobody else does: a connection that is closed must not stay in memory.
type heldShard struct {
	by    *shards
	tx    pgx.Tx
	key   decide.Key
	shard int
}

// heldKey is where a connection keeps it.
const heldKey = "ratelimit.shard"

// mostSeen is how many keys' shards are remembered; past it all is forgotten.
const mostSeen = 4096

// choose is the power of two choices: of two different shards at random among
// those given, the better one as far as is known.
func (m *shards) choose(a *decide.Ask, among []int) int {
	if len(among) == 1 {
		return among[0]
	}
	i := rand.IntN(len(among))
	j := (i + 1 + rand.IntN(len(among)-1)) % len(among)
	return m.better(a, among[i], among[j])
}

// better is the better of two shards.
func (m *shards) better(a *decide.Ask, first, second int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	seen := m.seen[a.Of()]
	if seen.definition != a.Definition || a.Definition.Better(seen.states[first], seen.states[second]) {
		return first
	}
	return second
}

// saw notes the states of all of a's shards, if it has several.
func (m *shards) saw(a *decide.Ask, states []bucket.State) {
	if states == nil || !a.Sharded() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(m.states(a, states[0].TS), states)
}

// took notes the states that changes left behind, and returns the known states of the shards of
// all sharded limits of a call then.
func (m *shards) took(call *decide.Call, changes []decide.Change, at time.Time) [][]bucket.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range changes {
		if a := &call.Asks[changes[i].Ask]; a.Sharded() {
			m.states(a, at)[changes[i].Shard] = changes[i].After
		}
	}
	states := make([][]bucket.State, len(call.Asks))
	for i := range call.Asks {
		if a := &call.Asks[i]; a.Sharded() {
			states[i] = slices.Clone(m.states(a, at))
		}
	}
	return states
}

// refused notes that a call was refused at an instant.
func (m *shards) refused(call *decide.Call, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range call.Asks {
		a := &call.Asks[i]
		if seen, ok := m.seen[a.Of()]; ok && seen.definition == a.Definition {
			seen.shortAt, seen.shortHere = at, time.Now()
			m.seen[a.Of()] = seen
		}
	}
}

// refuse reports whether a call was refused, and would be again by the known states of the
// shards of its limits. now is an instant that was injected, or nil.
func (m *shards) refuse(call *decide.Call, now *time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range call.Asks {
		a := &call.Asks[i]
		seen := m.seen[a.Of()]
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
		m.seen[a.Of()] = seen
	}
	return false
}

// known returns the known states of a's shards.
func (m *shards) known(a *decide.Ask, at time.Time) []bucket.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.states(a, at))
}

// states are those of a's shards, full at an instant if none was seen by this
// definition.
func (m *shards) states(a *decide.Ask, at time.Time) []bucket.State {
	seen := m.seen[a.Of()]
	if seen.definition == a.Definition {
		return seen.states
	}
	if m.seen == nil || len(m.seen) >= mostSeen {
		m.seen = make(map[decide.Key]seenShards)
	}
	each := a.Definition.Shard()
	full := each.Fresh(a.Key, at)
	seen = seenShards{definition: a.Definition, states: slices.Repeat([]bucket.State{full}, a.Definition.Shards)}
	m.seen[a.Of()] = seen
	return seen.states
}

func (m *shards) forget(key decide.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.seen, key)
}

func (m *shards) clear() {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.seen)
}

// hold notes that a transaction has a shard locked. A second step of it on the same
// limit keeps to that: two transactions that each want another's shard deadlock.
func (m *shards) hold(tx pgx.Tx, row decide.Row) {
	if reflect.TypeOf(tx).Kind() != reflect.Pointer { // somebody's own, that may not be comparable
		return
	}
	if _, data := session(tx); data != nil {
		data[heldKey] = heldShard{m, tx, row.Key, row.Shard}
	}
}

// session returns a value that identifies the connection of a transaction, and the data kept
// with it; nil if it is not known. A transaction of package sqltx has no connection of pgx.
func session(tx pgx.Tx) (conn any, data map[string]any) {
	if tx == nil {
		return nil, nil
	}
	if conn := tx.Conn(); conn != nil {
		return conn, conn.PgConn().CustomData()
	}
	if other, ok := tx.(interface{ Session() (any, map[string]any) }); ok {
		return other.Session()
	}
	return nil, nil
}

// heldBy returns the shard of a limit that a transaction has locked; false if none is
// known.
func (m *shards) heldBy(tx pgx.Tx, a *decide.Ask) (shard int, ok bool) {
	_, data := session(tx)
	held, ok := data[heldKey].(heldShard)
	return held.shard, ok && held.by == m && held.tx == tx && held.key == a.Of() && held.shard < a.Definition.Shards
}
