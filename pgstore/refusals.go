package pgstore

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
)

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
	changes atomic.Uint64 // how often forget was called
}

type stripe struct {
	sync.RWMutex
	seen map[limitKey]refusal
}

type refusal struct {
	definition ratelimit.Definition
	state      ratelimit.State
	at         time.Time // on the database's clock
	sent       time.Time // on this machine's
}

// remember makes m remember about so many keys.
func (m *refusals) remember(keys int) {
	m.most = (keys + len(m.stripes) - 1) / len(m.stripes)
	m.seed = maphash.MakeSeed()
}

func (m *refusals) stripe(key limitKey) *stripe {
	return &m.stripes[maphash.Comparable(m.seed, key)%uint64(len(m.stripes))]
}

// answer is the result of a call that is refused by what is remembered. now is
// an instant that was injected, or nil.
func (m *refusals) answer(call ratelimit.Call, now *time.Time) (ratelimit.Result, bool) {
	if m.most == 0 || len(call.Asks) != 1 {
		return ratelimit.Result{}, false
	}
	a := call.Asks[0]
	key := limitKey{a.Definition.Name, a.Key}
	stripe := m.stripe(key)
	stripe.RLock()
	r, ok := stripe.seen[key]
	stripe.RUnlock()
	if !ok || r.definition != a.Definition {
		return ratelimit.Result{}, false
	}
	at := r.at.Add(time.Since(r.sent).Truncate(time.Microsecond))
	if now != nil {
		at = *now
	}
	settled, ok := a.Definition.Take(r.state, at, a.Count, a.Floor)
	if ok {
		return ratelimit.Result{}, false
	}
	return call.Result(at, []ratelimit.Status{a.Refused(settled, at)}), true
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
func (m *refusals) note(call ratelimit.Call, f found, asked moment) {
	if m.most == 0 || len(call.Asks) != 1 || len(f.states[0]) != 1 {
		return
	}
	a := call.Asks[0]
	key := limitKey{a.Definition.Name, a.Key}
	stripe := m.stripe(key)
	stripe.Lock()
	defer stripe.Unlock()
	if m.changes.Load() != asked.changes {
		return
	}
	if stripe.seen == nil || len(stripe.seen) >= m.most {
		stripe.seen = make(map[limitKey]refusal)
	}
	stripe.seen[key] = refusal{a.Definition, f.states[0][0], f.at, asked.sent}
}

// forget forgets a key to which this process gave something.
func (m *refusals) forget(key limitKey) {
	if m.most == 0 {
		return
	}
	m.changes.Add(1)
	m.drop(key)
}

// drop forgets a key from which this process took something: what is
// remembered still refuses rightly, but promises too early an instant.
func (m *refusals) drop(key limitKey) {
	if m.most == 0 {
		return
	}
	stripe := m.stripe(key)
	stripe.Lock()
	defer stripe.Unlock()
	delete(stripe.seen, key)
}
