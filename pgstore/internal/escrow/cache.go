package escrow

import (
	"hash/maphash"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// A cache remembers no more keys than sets · ways. Those with the same hash share a set.
const (
	sets = 2048
	ways = 8
)

// Cache is a process's knowledge of keys, for a moment: the tokens that it holds of one, or
// that there are too few. It is safe for concurrent use. A call that is answered from one lease
// takes no lock. A nil Cache knows nothing.
type Cache struct {
	config Config
	seed   maphash.Seed
	sets   []set

	mu sync.Mutex // to remember another key
}

// set is some entries. Each has another part of its key's hash beside it, so that those of
// other keys need not be looked at, which are seldom in a processor's cache.
type set struct {
	tags    [ways]atomic.Uint32
	entries [ways]atomic.Pointer[Entry]
}

// New returns an empty cache.
func New(c Config) *Cache {
	return &Cache{config: c, seed: maphash.MakeSeed(), sets: make([]set, sets)}
}

// Now returns the instant from which the lease of a statement must count that is not sent
// yet.
func (m *Cache) Now() time.Time {
	if m == nil {
		return time.Time{}
	}
	return m.config.now()
}

func (m *Cache) set(name, key string) (s *set, tag uint32) {
	hash := maphash.String(m.seed, key) ^ maphash.String(m.seed, name)*3
	return &m.sets[hash%sets], uint32(hash >> 32)
}

// lookup returns the entry of a key; nil if none is remembered.
func (m *Cache) lookup(name, key string) *Entry {
	if m == nil {
		return nil
	}
	s, tag := m.set(name, key)
	for i := range s.tags {
		if s.tags[i].Load() != tag {
			continue
		}
		if e := s.entries[i].Load(); e != nil && e.template.Key == key && e.template.Definition.Name == name {
			return e
		}
	}
	return nil
}

// Find returns the entry of a request's key, if the request is for a limit that was found
// sound before; else nil.
func (m *Cache) Find(r *ratelimit.Request) *Entry {
	e := m.lookup(ratelimit.NameOf(r.Limit), r.Key)
	if e == nil || e.limit == nil || e.limit != r.Limit {
		return nil
	}
	return e
}

// FindOrAdd returns the entry of an ask's key, which begins to be remembered; nil if it is not.
func (m *Cache) FindOrAdd(a *decide.Demand) *Entry {
	if m == nil || a.Sharded() {
		return nil
	}
	if e := m.lookup(a.Definition.Name, a.Key); e != nil && e.template.Definition == a.Definition {
		return e
	}
	return m.add(a)
}

func (m *Cache) add(a *decide.Demand) *Entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.lookup(a.Definition.Name, a.Key)
	if before != nil && before.template.Definition == a.Definition {
		return before
	}
	s, tag := m.set(a.Definition.Name, a.Key)
	now := m.config.moment()
	for i := range s.entries {
		there := s.entries[i].Load()
		if there != before && (before != nil || !there.idle(now)) {
			continue
		}
		e := m.newEntry(a)
		s.entries[i].Store(e)
		s.tags[i].Store(tag)
		if before != nil {
			before.discard()
		}
		return e
	}
	return nil
}

func (m *Cache) newEntry(a *decide.Demand) *Entry {
	e := &Entry{config: &m.config, template: *a, least: leastOf(&a.Definition), lowered: Lowered(&a.Definition, m.config.Lasts)}
	e.demand.begun = m.config.moment().mono
	e.template.Count, e.template.Request.AboveShare, e.template.Floor = 0, 0, 0
	e.paid = e.template.Paid()
	if reflect.TypeOf(a.Limit).Kind() != reflect.Pointer {
		e.limit = a.Limit
	}
	return e
}

// Evict takes out the tokens held of a key, which are to be returned, and forgets its state.
func (m *Cache) Evict(key decide.Key) []Return {
	e := m.lookup(key.Name, key.Key)
	if e == nil {
		return nil
	}
	return e.evict()
}

// EvictAll is Evict for all keys. Tokens that timers had taken out before have been returned by
// then, as far as GiveBack had returned.
func (m *Cache) EvictAll() (returns []Return) {
	m.each(func(e *Entry) {
		e.firing.Lock()
		defer e.firing.Unlock()
		returns = append(returns, e.evict()...)
	})
	return returns
}

// TakeSpent takes out the tokens that the row of a key is to be told of, which were spent.
func (m *Cache) TakeSpent(key decide.Key) (spent bucket.Spent) {
	e := m.lookup(key.Name, key.Key)
	if e == nil {
		return spent
	}
	now := m.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sweep(now)
	return e.takeSpent(now)
}

// RestoreSpent notes that the row of a key did not learn of the tokens that [Cache.TakeSpent] took out.
func (m *Cache) RestoreSpent(key decide.Key, spent bucket.Spent) {
	m.lookup(key.Name, key.Key).restoreSpent(spent)
}

// DatabaseTime returns an instant that is past when a return is sent now. It is on the database's
// clock, but does not go back with that.
func (m *Cache) DatabaseTime(r *Return) time.Time { return r.lease.databaseAt(m.config.moment()) }

// RowChanged forgets the state of a key that a statement has changed.
func (m *Cache) Changed(key decide.Key) { m.lookup(key.Name, key.Key).RowChanged() }

func (m *Cache) each(do func(*Entry)) {
	if m == nil {
		return
	}
	for i := range m.sets {
		for j := range m.sets[i].entries {
			if e := m.sets[i].entries[j].Load(); e != nil {
				do(e)
			}
		}
	}
}

// Held is the tokens that are held of the keys of a limit.
type Held struct {
	Keys   int
	Tokens float64
}

// Held returns the tokens that are held, by limits' names.
func (m *Cache) Held() map[string]Held {
	all := make(map[string]Held)
	m.each(func(e *Entry) {
		if left := e.held(); left > 0 {
			h := all[e.template.Definition.Name]
			all[e.template.Definition.Name] = Held{h.Keys + 1, h.Tokens + left}
		}
	})
	return all
}

func (e *Entry) held() float64 {
	now := e.config.moment()
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sweep(now)
}
