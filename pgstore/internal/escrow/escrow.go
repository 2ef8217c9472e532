// Package escrow keeps what a process knows of keys for a moment: tokens that it has prefetched
// and hands out from memory (O'Neil, "The Escrow Transactional Method", 1986), and refusals of
// rows with too few tokens. It knows no database: the layer above sends the statements.
//
// In every stretch of time a limit grants no more than it would without escrow. The tokens in the
// row and in the memories of all processes are together never more than the capacity; an
// exhaustive test of a small model shows it. The statements of pgstore/internal/table apply these
// rules:
//
//   - A statement that prefetches from a token bucket counts with a lower capacity: less by the
//     tokens refilled until the end of the lease. Nothing is refilled during a lease of a window,
//     since it ends with the fixed window, or with the slot of a sliding window.
//   - The end of a lease is counted from before its statement was sent, so it is never late.
//   - The row has the number of tokens out, and their latest end. A refund fills the row no
//     further than to its capacity, less those tokens and the ones refilled until then.
//   - A refund after the end of its lease is less by the tokens refilled since, because the row
//     may have been full meanwhile, and been emptied. Tokens that a caller was granted go back
//     in full.
package escrow

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Config configures a Cache.
type Config struct {
	Lasts time.Duration    // for how long tokens are handed out
	Clock func() time.Time // nil for the machine's

	// Prefetch is called when it is time to prefetch. It must not keep the current call waiting,
	// and calls [Entry.Prefetched] at its end.
	Prefetch func(*Entry)

	// GiveBack is called with tokens to return to their rows. No lock of a key is held.
	GiveBack func([]Return)
}

func (c *Config) now() time.Time {
	if c.Clock != nil {
		return c.Clock()
	}
	return time.Now()
}

func (c *Config) moment() moment { return momentOf(c.now()) }

// sent returns when a statement was sent; at is when it decided. An injected clock stands still
// between the two.
func (c *Config) sent(sent, at time.Time) moment {
	if c.Clock != nil {
		return momentOf(at)
	}
	return momentOf(sent)
}

// margin returns how long before its end the rest of a lease is returned.
func (c *Config) margin() time.Duration { return c.Lasts / 16 }

func (c *Config) giveBack(returns []Return) {
	if len(returns) > 0 {
		c.GiveBack(returns)
	}
}

// Lowered returns the capacity less the tokens refilled during lasts, with which a statement counts
// when it prefetches for so long. If it is 0, nothing can be prefetched.
func Lowered(d *bucket.Definition, lasts time.Duration) float64 {
	return max(0, d.Capacity-d.Inflow(lasts))
}

// usable returns for how long tokens can be used. They were prefetched at an instant, and count in
// the row at ts.
func usable(d *bucket.Definition, ts, at time.Time, lasts time.Duration) time.Duration {
	return min(lasts, d.End(ts, at, lasts).Sub(at))
}

// Lease holds the tokens that one statement has prefetched from a row.
type Lease struct {
	Count float64      // tokens to hand out
	Out   float64      // tokens that the statement granted to transactions, which may put them back
	After bucket.State // the row as the statement left it
	At    time.Time    // the instant of the decision, on the database's clock
	End   time.Time    // until when the row counts the tokens as out
	Sent  time.Time    // on this machine's clock, before the statement was sent
}

// Return holds tokens that go back to their row, and spent tokens to report with them. The count
// is 0 if there is only something to report.
type Return struct {
	Row        decide.Row
	Definition bucket.Definition
	bucket.Return

	lease *lease // of the tokens
}

// A cache remembers at most sets · ways keys. Keys with the same hash share a set.
const (
	sets = 2048
	ways = 8
)

// Cache is what a process knows of keys. It is safe for concurrent use. A call that is answered
// from one lease takes no lock.
type Cache struct {
	config Config
	seed   maphash.Seed
	sets   []set

	mu sync.Mutex // to add an entry
}

// set is a few entries, with a part of each key's hash beside them. So a lookup need not touch
// entries of other keys, which are seldom in a processor's cache.
type set struct {
	tags    [ways]atomic.Uint32
	entries [ways]atomic.Pointer[Entry]
}

// New returns an empty cache.
func New(c Config) *Cache {
	return &Cache{config: c, seed: maphash.MakeSeed(), sets: make([]set, sets)}
}

// Now returns the instant from which the lease of the next statement counts.
func (m *Cache) Now() time.Time { return m.config.now() }

func (m *Cache) set(name, key string) (s *set, tag uint32) {
	hash := maphash.String(m.seed, key) ^ maphash.String(m.seed, name)*3
	return &m.sets[hash%sets], uint32(hash >> 32)
}

// lookup returns the entry of a key; nil if it is not remembered.
func (m *Cache) lookup(name, key string) *Entry {
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

// Find returns the entry of a request's key, if the request has the entry's limit, which was
// checked before; else nil.
func (m *Cache) Find(r *ratelimit.Request) *Entry {
	e := m.lookup(ratelimit.NameOf(r.Limit), r.Key)
	if e == nil || e.limit == nil || e.limit != r.Limit {
		return nil
	}
	return e
}

// FindOrAdd returns the entry of a demand's key, and adds it if it is missing. It returns nil if the
// limit has shards, or no entry can make room.
func (m *Cache) FindOrAdd(a *decide.Demand) *Entry {
	if a.Sharded() {
		return nil
	}
	if e := m.lookup(a.Definition.Name, a.Key); e != nil && e.template.Definition == a.Definition {
		return e
	}
	e, replaced := m.add(a)
	m.config.giveBack(replaced.evict())
	return e
}

// add returns the key's entry with this definition, and makes it if it is missing. A new entry
// replaces the key's entry with another definition, which is returned as replaced. Without one it
// takes an empty place, or that of an idle entry. If there is none, add returns nil.
func (m *Cache) add(a *decide.Demand) (e, replaced *Entry) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.lookup(a.Definition.Name, a.Key)
	if before != nil && before.template.Definition == a.Definition {
		return before, nil
	}
	s, tag := m.set(a.Definition.Name, a.Key)
	now := m.config.moment()
	for i := range s.entries {
		there := s.entries[i].Load()
		if there != before && (before != nil || !there.idle(now)) {
			continue
		}
		e := newEntry(&m.config, a)
		s.entries[i].Store(e)
		s.tags[i].Store(tag)
		return e, before
	}
	return nil, nil
}

// Evict takes out the tokens held of a key, which the caller returns, and forgets its refusal.
func (m *Cache) Evict(key decide.Key) []Return { return m.lookup(key.Name, key.Key).evict() }

// EvictAll evicts all keys. Before it returns, Config.GiveBack has returned for the tokens that
// timers took out earlier.
func (m *Cache) EvictAll() (returns []Return) {
	m.each(func(e *Entry) {
		e.firing.Lock()
		defer e.firing.Unlock()
		returns = append(returns, e.evict()...)
	})
	return returns
}

// TakeSpent takes out the spent tokens of a key that a statement is about to report to its row.
func (m *Cache) TakeSpent(key decide.Key) (report bucket.Spent) {
	e := m.lookup(key.Name, key.Key)
	if e == nil {
		return report
	}
	now := e.lock()
	defer e.mu.Unlock()
	e.sweep(now)
	return e.spent.take(now)
}

// RestoreSpent notes that the tokens which [Cache.TakeSpent] took out were not reported.
func (m *Cache) RestoreSpent(key decide.Key, report bucket.Spent) {
	m.lookup(key.Name, key.Key).restoreSpent(report)
}

// DatabaseTime returns now on the database's clock, or an instant shortly before. Setting that clock
// back does not change it.
func (m *Cache) DatabaseTime(r *Return) time.Time { return r.lease.databaseAt(m.config.moment()) }

// RowChanged forgets the refusal of a key whose row a statement has changed.
func (m *Cache) RowChanged(key decide.Key) { m.lookup(key.Name, key.Key).RowChanged() }

func (m *Cache) each(do func(*Entry)) {
	for i := range m.sets {
		for j := range m.sets[i].entries {
			if e := m.sets[i].entries[j].Load(); e != nil {
				do(e)
			}
		}
	}
}

// Held counts what is held of a limit.
type Held struct {
	Keys   int
	Tokens float64
}

// Held returns what is held, by the limits' names.
func (m *Cache) Held() map[string]Held {
	all := make(map[string]Held)
	now := m.config.moment()
	m.each(func(e *Entry) {
		e.mu.Lock()
		defer e.mu.Unlock()
		if left := e.sweep(now); left > 0 {
			h := all[e.template.Definition.Name]
			all[e.template.Definition.Name] = Held{h.Keys + 1, h.Tokens + left}
		}
	})
	return all
}
