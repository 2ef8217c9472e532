package pgstore

import (
	"hash/maphash"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
)

// hints are what this process remembers of limits and may forget: the shards that
// it saw last, and what calls were refused by. They guide which row is tried first,
// and refuse what cannot be granted; they grant nothing, but for what is held.
type hints struct {
	shards   shards
	refusals refusals
	held     *escrow.Memory // which does grant; nil if nothing is taken ahead
}

func (h *hints) init(refusals int) {
	h.refusals.most = (refusals + len(h.refusals.stripes) - 1) / len(h.refusals.stripes)
	h.refusals.seed = maphash.MakeSeed()
}

// took notes what a call took, and returns what is known of its limits then.
func (h *hints) took(call *decide.Call, changes []decide.Change, at time.Time) decide.View {
	for i := range changes {
		h.refusals.drop(changes[i].Key)
	}
	view := decide.View{At: at}
	if call.Sharded() {
		view.States = h.shards.took(call, changes, at)
	}
	return view
}

// saw notes what was seen of a call's limits.
func (h *hints) saw(call *decide.Call, view decide.View) {
	for i := range call.Asks {
		if call.Asks[i].Sharded() {
			h.shards.saw(&call.Asks[i], view.States[i])
		}
	}
}

// changed forgets a key to which something was given.
func (h *hints) changed(key decide.Key) {
	h.shards.forget(key)
	h.refusals.forget(key)
}

// edited forgets a key of which something else than takes was changed, and throws away
// what was taken ahead from it.
func (h *hints) edited(key decide.Key) {
	h.changed(key)
	h.held.Drop(key)
}

// clear forgets everything.
func (h *hints) clear() {
	h.shards.clear()
	h.held.DropAll()
	h.refusals.clear()
}

// shards is what this process last saw of sharded limits.
type shards struct {
	mu   sync.Mutex
	seen map[decide.Key]seenShards
}

type seenShards struct {
	definition ratelimit.Definition
	states     []ratelimit.State // one that was never seen counts as full
	short      short
}

// short is when all shards together were found to have too little: on the database's
// clock, and on this machine's. It is zero when they were not.
type short struct{ at, here time.Time }

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

// saw notes the states of all of a's shards.
func (m *shards) saw(a *decide.Ask, states []ratelimit.State) {
	if states == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(m.states(a, states[0].TS), states)
}

// took notes what changes left behind, and returns what is known of the shards of
// all sharded limits of a call then.
func (m *shards) took(call *decide.Call, changes []decide.Change, at time.Time) [][]ratelimit.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range changes {
		if a := &call.Asks[changes[i].Ask]; a.Sharded() {
			m.states(a, at)[changes[i].Shard] = changes[i].After
		}
	}
	return m.all(call, at)
}

// refused notes that a call was refused at an instant.
func (m *shards) refused(call *decide.Call, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range call.Asks {
		a := &call.Asks[i]
		if seen, ok := m.seen[a.Of()]; ok && seen.definition == a.Definition {
			seen.short = short{at, time.Now()}
			m.seen[a.Of()] = seen
		}
	}
}

// refuse reports whether a call was refused, and would be again by what was seen of the
// shards of its limits. now is an instant that was injected, or nil.
func (m *shards) refuse(call *decide.Call, now *time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range call.Asks {
		a := &call.Asks[i]
		seen := m.seen[a.Of()]
		if seen.short.at.IsZero() || seen.definition != a.Definition {
			continue
		}
		at := seen.short.at.Add(time.Since(seen.short.here))
		if now != nil {
			at = *now
		}
		if _, ok := a.Spread(at, seen.states); !ok {
			return true
		}
		seen.short = short{}
		m.seen[a.Of()] = seen
	}
	return false
}

// known is what is known of the shards of all sharded limits of a call.
func (m *shards) known(call *decide.Call, at time.Time) [][]ratelimit.State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all(call, at)
}

func (m *shards) all(call *decide.Call, at time.Time) [][]ratelimit.State {
	states := make([][]ratelimit.State, len(call.Asks))
	for i := range call.Asks {
		if a := &call.Asks[i]; a.Sharded() {
			states[i] = slices.Clone(m.states(a, at))
		}
	}
	return states
}

// states are those of a's shards, full at an instant if none was seen by this
// definition.
func (m *shards) states(a *decide.Ask, at time.Time) []ratelimit.State {
	seen := m.seen[a.Of()]
	if seen.definition == a.Definition {
		return seen.states
	}
	if m.seen == nil || len(m.seen) >= mostSeen {
		m.seen = make(map[decide.Key]seenShards)
	}
	full := a.Definition.Shard().Fresh(a.Key, at)
	seen = seenShards{definition: a.Definition, states: slices.Repeat([]ratelimit.State{full}, a.Definition.Shards)}
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
	if conn := tx.Conn(); conn != nil {
		conn.PgConn().CustomData()[heldKey] = heldShard{m, tx, row.Key, row.Shard}
	}
}

// heldBy returns the shard of a limit that a transaction has locked; false if none is
// known.
func (m *shards) heldBy(tx pgx.Tx, a *decide.Ask) (shard int, ok bool) {
	conn := tx.Conn()
	if conn == nil {
		return 0, false
	}
	held, ok := conn.PgConn().CustomData()[heldKey].(heldShard)
	return held.shard, ok && held.by == m && held.tx == tx && held.key == a.Of() && held.shard < a.Definition.Shards
}

// refusals remembers what decisions on their own were refused by, so that a
// flood of calls that cannot succeed costs the database nothing. Until time
// has brought what a call wants, only a reset, a credit, or a definition that
// changed elsewhere can make it succeed; those it does not see.
//
// It is right about time without trusting this machine's clock: it adds the
// time that has passed here since before the refusing statement was sent, on
// the monotonic clock, so it never believes the database's clock to be behind
// where it is.
type refusals struct {
	most    int // per stripe; 0 remembers nothing
	seed    maphash.Seed
	stripes [64]stripe
	changes atomic.Uint64 // how often something was given to a key
}

type stripe struct {
	sync.RWMutex
	seen map[decide.Key]refusal
}

type refusal struct {
	definition ratelimit.Definition
	state      ratelimit.State
	at         time.Time // on the database's clock
	sent       time.Time // on this machine's
}

func (m *refusals) stripe(key decide.Key) *stripe {
	return &m.stripes[maphash.Comparable(m.seed, key)%uint64(len(m.stripes))]
}

// answer is the result of a call that is refused by what is remembered. now is
// an instant that was injected, or nil.
func (m *refusals) answer(call *decide.Call, now *time.Time) (ratelimit.Result, bool) {
	if m.most == 0 || len(call.Asks) != 1 {
		return ratelimit.Result{}, false
	}
	a := &call.Asks[0]
	stripe := m.stripe(a.Of())
	stripe.RLock()
	r, ok := stripe.seen[a.Of()]
	stripe.RUnlock()
	if !ok || r.definition != a.Definition {
		return ratelimit.Result{}, false
	}
	at := r.at.Add(time.Since(r.sent).Truncate(time.Microsecond))
	if now != nil {
		at = *now
	}
	result := call.Checked(decide.View{States: [][]ratelimit.State{{r.state}}, At: at})
	return result, !result.OK
}

// moment is when a statement was sent that may find a refusal.
type moment struct {
	sent    time.Time
	changes uint64
}

func (m *refusals) moment() moment {
	if m.most == 0 {
		return moment{}
	}
	return moment{time.Now(), m.changes.Load()}
}

// note remembers the state that refused a call, unless this process credited
// or reset something since: then that may not be in the state.
func (m *refusals) note(call *decide.Call, view decide.View, asked moment) {
	if m.most == 0 || len(call.Asks) != 1 || call.Sharded() {
		return
	}
	a := &call.Asks[0]
	stripe := m.stripe(a.Of())
	stripe.Lock()
	defer stripe.Unlock()
	if m.changes.Load() != asked.changes {
		return
	}
	if stripe.seen == nil || len(stripe.seen) >= m.most {
		stripe.seen = make(map[decide.Key]refusal)
	}
	stripe.seen[a.Of()] = refusal{a.Definition, view.States[0][0], view.At, asked.sent}
}

// forget forgets a key to which this process gave something.
func (m *refusals) forget(key decide.Key) {
	if m.most == 0 {
		return
	}
	m.changes.Add(1)
	m.drop(key)
}

func (m *refusals) clear() {
	m.changes.Add(1)
	for i := range m.stripes {
		stripe := &m.stripes[i]
		stripe.Lock()
		clear(stripe.seen)
		stripe.Unlock()
	}
}

// drop forgets a key from which this process took something: what is
// remembered still refuses rightly, but promises too early an instant.
func (m *refusals) drop(key decide.Key) {
	if m.most == 0 {
		return
	}
	stripe := m.stripe(key)
	stripe.Lock()
	defer stripe.Unlock()
	delete(stripe.seen, key)
}
