package escrow

import (
	"hash/maphash"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// A memory remembers no more keys than sets · ways. Those with the same hash share a set.
const (
	sets = 2048
	ways = 8
)

// Memory is what a process knows of keys, for a moment: what it holds of one, or that there
// is too little. It is safe for concurrent use. Nothing on the way of a call that is
// answered from memory is locked.
type Memory struct {
	lasts  time.Duration
	clock  func() time.Time // nil for the machine's
	refill func(*Holder)
	give   func([]Return)
	never  []ratelimit.Kind // from which nothing is taken ahead
	seed   maphash.Seed
	sets   []set

	mu sync.Mutex // to remember another key
}

// set is some holders. Each has another part of its key's hash beside it, so that those of
// other keys need not be looked at, which are seldom in a processor's cache.
type set struct {
	tags    [ways]atomic.Uint32
	holders [ways]atomic.Pointer[Holder]
}

// New is an empty memory of what lasts so long. The clock, if it is not nil, is one that
// was injected. refill is called when it is time to take ahead, on the way of a call that
// is not to wait for it; Refilled must be when that is over. give is called, on a goroutine
// of its own, with what is not needed. From never, which are kinds of limits, nothing is
// taken ahead.
func New(lasts time.Duration, clock func() time.Time, refill func(*Holder), give func([]Return), never ...ratelimit.Kind) *Memory {
	return &Memory{lasts: lasts, clock: clock, refill: refill, give: give, never: never, seed: maphash.MakeSeed(), sets: make([]set, sets)}
}

// Now is the instant from which a statement's lot must count that is not sent yet.
func (m *Memory) Now() time.Time {
	if m == nil {
		return time.Time{}
	}
	if m.clock != nil {
		return m.clock()
	}
	return time.Now()
}

func (m *Memory) moment() moment { return momentOf(m.Now()) }

func (m *Memory) set(name, key string) (s *set, tag uint32) {
	hash := maphash.String(m.seed, key) ^ maphash.String(m.seed, name)*3
	return &m.sets[hash%sets], uint32(hash >> 32)
}

// holder is the holder of a key; nil if none is remembered.
func (m *Memory) holder(name, key string) *Holder {
	if m == nil {
		return nil
	}
	s, tag := m.set(name, key)
	for i := range s.tags {
		if s.tags[i].Load() != tag {
			continue
		}
		if h := s.holders[i].Load(); h != nil && h.ask.Key == key && h.ask.Definition.Name == name {
			return h
		}
	}
	return nil
}

// Seen is the holder of a request's key, if the request is for a limit that was found sound
// before; else nil.
func (m *Memory) Seen(r *ratelimit.Request) *Holder {
	h := m.holder(ratelimit.NameOf(r.Limit), r.Key)
	if h == nil || h.limit == nil || h.limit != r.Limit {
		return nil
	}
	return h
}

// Of is the holder of an ask's key, which begins to be remembered; nil if it is not.
func (m *Memory) Of(a *decide.Ask) *Holder {
	if m == nil || a.Sharded() {
		return nil
	}
	if h := m.holder(a.Definition.Name, a.Key); h != nil && h.ask.Definition == a.Definition {
		return h
	}
	return m.remember(a)
}

func (m *Memory) remember(a *decide.Ask) *Holder {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.holder(a.Definition.Name, a.Key)
	if before != nil && before.ask.Definition == a.Definition {
		return before
	}
	s, tag := m.set(a.Definition.Name, a.Key)
	now := m.moment()
	for i := range s.holders {
		there := s.holders[i].Load()
		if there != before && (before != nil || !there.idle(now)) {
			continue
		}
		h := newHolder(m, a)
		s.holders[i].Store(h)
		s.tags[i].Store(tag)
		if before != nil {
			before.drop()
		}
		return h
	}
	return nil
}

func newHolder(m *Memory, a *decide.Ask) *Holder {
	h := &Holder{memory: m, ask: *a, least: leastOf(&a.Definition)}
	if !slices.Contains(m.never, a.Definition.Kind) {
		h.lowered = Lowered(&a.Definition, m.lasts)
	}
	h.ask.Count, h.ask.Floor = 0, a.Definition.Floor(false)
	h.paid = h.ask.Paid()
	if reflect.TypeOf(a.Limit).Kind() != reflect.Pointer {
		h.limit = a.Limit
	}
	return h
}

// Edited throws away what is held of a key of which something else than takes was changed,
// what is being taken ahead from it, and what is known of it.
func (m *Memory) Edited(key decide.Key) {
	if h := m.holder(key.Name, key.Key); h != nil {
		h.drop()
	}
}

// Changed forgets what is known of a key that a statement has changed.
func (m *Memory) Changed(key decide.Key) { m.holder(key.Name, key.Key).Changed() }

// DropAll throws away everything.
func (m *Memory) DropAll() {
	m.each(func(h *Holder) { h.drop() })
}

// TakeBack takes what is left of everything out of memory.
func (m *Memory) TakeBack() (returns []Return) {
	m.each(func(h *Holder) { returns = append(returns, h.takeBack(0)...) })
	return returns
}

func (m *Memory) each(do func(*Holder)) {
	if m == nil {
		return
	}
	for i := range m.sets {
		for j := range m.sets[i].holders {
			if h := m.sets[i].holders[j].Load(); h != nil {
				do(h)
			}
		}
	}
}
