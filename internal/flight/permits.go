// Package flight is a process's knowledge of the permits of limits of work in flight: which to
// try, and the waiters for one here. It knows no database. Its knowledge is a guess, which
// chooses and grants nothing.
package flight

import (
	"container/list"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// mostKeys is how many keys are remembered, beside those of which something is held or
// waited for here.
const mostKeys = 16384

// IdleFor is how long a permit must have been free before its row is deleted.
const IdleFor = time.Minute

const (
	// turnTime is for how long a permit is handed on within a process, before it is let go:
	// other processes may wait as well.
	turnTime = 4 * time.Second

	// attempt is how long a permit that is tried stays chosen, unless somebody says how it went.
	attempt = time.Minute
)

// Permits is the knowledge of all keys. The zero value is ready to use. It is safe for concurrent
// use.
type Permits struct {
	mu   sync.Mutex
	keys map[decide.Key]*keyState
	came uint64 // waiters that have come, of all keys
}

// keyState is the knowledge of a key.
type keyState struct {
	looked bool               // free has been read, and is not just empty
	free   []Choice           // seen free; the last is the next
	away   map[int]mark       // permits that are tried or held here
	line   list.List          // of *Waiter, in the order in which they came
	asking int                // permits that callers want who are not in line, and may have to go there
	turns  map[int]time.Time  // since when permits are handed on here
	look   time.Time          // when the first in line is to look again
	others time.Time          // until when it is other processes' turn to collect
	newest ratelimit.InFlight // the limit by which a caller came last
}

// mark says that a permit is tried here, or since when it is held, and until when at the latest.
type mark struct {
	tried        bool
	since, until time.Time
}

// Choice is a permit to try.
type Choice struct {
	Number int
	New    bool // it may not be there yet
}

// locked locks mu, and returns the knowledge of a key.
func (s *Permits) locked(key decide.Key) *keyState {
	s.mu.Lock()
	return s.of(key)
}

// of returns the knowledge of a key. It needs mu.
func (s *Permits) of(key decide.Key) *keyState {
	k := s.keys[key]
	if k == nil {
		if s.keys == nil {
			s.keys = make(map[decide.Key]*keyState)
		}
		if len(s.keys) >= mostKeys {
			s.forgetSome(time.Now())
		}
		k = &keyState{away: make(map[int]mark)}
		s.keys[key] = k
	}
	return k
}

// examined is how many keys are examined for each new one: if more than a few of them are idle,
// the keys become fewer.
const examined = 8

// forgetSome forgets the idle ones of a few keys at random. To examine all would hold up the callers
// of all keys, and cost each new key as much as there are keys of which something is held.
func (s *Permits) forgetSome(now time.Time) {
	left := examined
	for key, k := range s.keys {
		if k.idle(now) {
			delete(s.keys, key)
		}
		if left--; left == 0 {
			return
		}
	}
}

// idle reports whether nothing is held, tried or waited for here.
func (k *keyState) idle(now time.Time) bool {
	for number, m := range k.away {
		if m.until.After(now) {
			return false
		}
		delete(k.away, number)
	}
	return k.line.Len() == 0 && k.asking == 0
}

// Meet notes the limit by which a caller comes. It also holds for those who wait, as far as it is
// smaller than theirs.
func (s *Permits) Meet(key decide.Key, limit ratelimit.InFlight) {
	k := s.locked(key)
	defer s.mu.Unlock()
	k.newest = limit
}

// Wants returns what a Waiter asks for, with the limits that hold for it now.
func (s *Permits) Wants(w *Waiter) []ratelimit.PermitRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	wants := make([]ratelimit.PermitRequest, len(w.places))
	for i, p := range w.places {
		wants[i] = p.asked
		wants[i].Limit = s.of(p.key).holds(p.asked.Limit)
	}
	return wants
}

// holds returns a Waiter's limit, with the newest Limit and Lease where they are smaller.
func (k *keyState) holds(limit ratelimit.InFlight) ratelimit.InFlight {
	if k.newest.Limit == 0 { // the key was forgotten, since w does not wait any more
		return limit
	}
	limit.Limit = min(limit.Limit, k.newest.Limit)
	if k.newest.LeaseOrDefault() < limit.LeaseOrDefault() {
		limit.Lease = k.newest.Lease
	}
	return limit
}

// Choose returns a permit to try of so many, which nobody else here is given until [Permits.Taken],
// [Permits.Missed] or [Permits.Freed]. If nothing is known of the key it is one at random. It
// returns false when none is known to be free, and somebody has to look.
func (s *Permits) Choose(key decide.Key, limit int, now time.Time) (Choice, bool) {
	k := s.locked(key)
	defer s.mu.Unlock()
	if !k.looked && len(k.free) == 0 {
		if n := rand.IntN(limit); !k.isAway(n, now) {
			k.try(n, now)
			return Choice{n, true}, true
		}
		return Choice{}, false
	}
	for len(k.free) > 0 {
		c := k.free[len(k.free)-1]
		k.free = k.free[:len(k.free)-1]
		if c.Number < limit && !k.isAway(c.Number, now) {
			k.try(c.Number, now)
			return c, true
		}
	}
	return Choice{}, false
}

// ChooseAll returns as many permits to try, as Choose does, if so many are known to be free; otherwise
// none.
func (s *Permits) ChooseAll(key decide.Key, n, limit int, now time.Time) []Choice {
	k := s.locked(key)
	defer s.mu.Unlock()
	var chosen []Choice
	k.free = slices.DeleteFunc(k.free, func(c Choice) bool {
		if c.Number >= limit || k.isAway(c.Number, now) {
			return true // or it is there twice
		}
		chosen = append(chosen, c)
		k.try(c.Number, now)
		return true
	})
	left := len(chosen) - n
	if left < 0 {
		left = len(chosen)
	}
	for _, c := range chosen[:left] {
		delete(k.away, c.Number)
	}
	k.free = append(k.free, chosen[:left]...)
	if left == len(chosen) {
		return nil
	}
	return chosen[left:]
}

// Unchoose notes that permits were not tried.
func (s *Permits) Unchoose(key decide.Key, chosen []Choice) {
	k := s.locked(key)
	defer s.mu.Unlock()
	for _, c := range chosen {
		delete(k.away, c.Number)
	}
	k.free = append(k.free, chosen...)
}

func (k *keyState) try(number int, now time.Time) {
	k.away[number] = mark{tried: true, until: now.Add(attempt)}
}

func (k *keyState) isAway(number int, now time.Time) bool {
	m, ok := k.away[number]
	if ok && !m.until.After(now) {
		delete(k.away, number)
		return false
	}
	return ok
}

// Taken notes that a permit is held here until an instant.
func (s *Permits) Taken(key decide.Key, number int, until time.Time) {
	k := s.locked(key)
	defer s.mu.Unlock()
	k.away[number] = mark{since: time.Now(), until: until}
}

// Missed notes that a permit was tried in vain. The other permits seen free are out of date by now.
func (s *Permits) Missed(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	k.looked, k.free = true, nil
}

// Freed notes that a permit was released here, and has waiters look.
func (s *Permits) Freed(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	k.free = append(k.free, Choice{Number: number})
	k.poke(true)
}

// Lost notes that a permit is not held here any more, and wakes the first waiter.
func (s *Permits) Lost(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	k.poke(true)
}

// Observe notes the free permits of a look, or of one at a part of them, that began at an instant.
// It reports whether there are some that no caller here has tried since.
func (s *Permits) Observe(key decide.Key, free []Choice, part bool, begun time.Time) (some bool) {
	k := s.locked(key)
	defer s.mu.Unlock()
	if k.looked = true; !part {
		k.free = k.free[:0]
	}
	for _, c := range free {
		if m, ok := k.away[c.Number]; !ok || !m.tried && m.since.Before(begun) {
			delete(k.away, c.Number) // its lease is over by the database
			k.free = append(k.free, c)
		}
	}
	rand.Shuffle(len(k.free), func(i, j int) { k.free[i], k.free[j] = k.free[j], k.free[i] })
	return len(k.free) > 0
}

// Forget forgets all about a key's permits.
func (s *Permits) Forget(key decide.Key) {
	k := s.locked(key)
	defer s.mu.Unlock()
	k.looked, k.free = false, nil
	clear(k.away)
	k.poke(true)
}

// Waiter is a caller that waits for permits, in the line of each key of which it wants some.
type Waiter struct {
	Turn <-chan bool             // has something for the first in a line: whether it is worth trying now
	Got  <-chan ratelimit.Permit // has a permit that was handed on, at most one

	places []place
	number uint64 // in the order of arrival
	asks   bool
	turn   chan bool
	got    chan ratelimit.Permit
}

// place is a Waiter's place in the line of a key.
type place struct {
	asked   ratelimit.PermitRequest // as it came
	key     decide.Key
	element *list.Element // nil when it is not in line
}

// Several reports whether a Waiter wants several permits, which it cannot be handed.
func (w *Waiter) Several() bool { return len(w.places) > 1 || w.places[0].asked.N > 1 }

// Arrive returns a Waiter, and whether it is to ask for its permits at once; otherwise it is in line.
// It must [Permits.Leave]. Callers ask at once for as many as there are permits, if nobody is in line: more
// would be refused in any case, and meanwhile be overtaken by callers that come later and ask, too.
//
// All lines are in the one order of arrival, so that of two Waiters in two lines one is before the
// other in both.
func (s *Permits) Arrive(wants ...ratelimit.PermitRequest) (w *Waiter, asks bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.came++
	w = &Waiter{number: s.came, asks: true, places: make([]place, len(wants))}
	for i, r := range wants {
		p := place{asked: r, key: decide.Key{Name: r.Limit.Name, Key: r.Key}}
		k := s.of(p.key)
		k.newest = r.Limit
		w.asks = w.asks && k.line.Len() == 0 && k.asking+r.N <= r.Limit.Limit
		w.places[i] = p
	}
	if !w.asks {
		s.enter(w)
		return w, false
	}
	for _, p := range w.places {
		s.of(p.key).asking += p.asked.N
	}
	return w, true
}

// Enter has a Waiter in line that has asked in vain, before those who came later.
func (s *Permits) Enter(w *Waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked(w)
	s.enter(w)
}

// asked notes that a Waiter asks no more, if it did.
func (s *Permits) asked(w *Waiter) {
	for _, p := range w.places {
		if w.asks {
			s.of(p.key).asking -= p.asked.N
		}
	}
	w.asks = false
}

func (s *Permits) enter(w *Waiter) {
	w.turn, w.got = make(chan bool, 1), make(chan ratelimit.Permit, 1)
	w.Turn, w.Got = w.turn, w.got
	for i := range w.places {
		p := &w.places[i]
		k := s.of(p.key)
		before := k.line.Back()
		for before != nil && before.Value.(*Waiter).number > w.number {
			before = before.Prev()
		}
		if before != nil {
			p.element = k.line.InsertAfter(w, before)
			continue
		}
		p.element = k.line.PushFront(w)
		k.poke(true)
	}
}

// First reports whether a Waiter is the first in all of its lines. One that was is not any more when
// somebody enters who came before.
func (s *Permits) First(w *Waiter) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range w.places {
		if p.element == nil || p.element != s.of(p.key).line.Front() {
			return false
		}
	}
	return true
}

// Collects reports whether the first in line of a key wants several permits.
func (s *Permits) Collects(key decide.Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.keys[key]
	return k != nil && k.collects()
}

func (k *keyState) collects() bool {
	first := k.line.Front()
	return first != nil && first.Value.(*Waiter).Several()
}

// Leave ends a Waiter, in line or not. If a permit was handed on that it has not read from Got, that
// is returned, and ok.
func (s *Permits) Leave(w *Waiter) (permit ratelimit.Permit, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked(w)
	for i := range w.places {
		p := &w.places[i]
		if p.element == nil {
			continue
		}
		k := s.of(p.key)
		first := p.element == k.line.Front()
		k.line.Remove(p.element)
		p.element = nil
		if first {
			k.poke(len(k.free) > 0 || k.collects())
		}
	}
	select {
	case permit = <-w.got:
		return permit, true
	default:
		return permit, false
	}
}

// poke tells the first in line that it is, and whether it is worth trying now.
func (k *keyState) poke(now bool) {
	first := k.line.Front()
	if first == nil {
		return
	}
	turn := first.Value.(*Waiter).turn
	select {
	case told := <-turn:
		now = now || told
	default:
	}
	turn <- now // which has room, as nobody else sends
}

// LookAgain notes when the caller that is first in line then is to look again.
func (s *Permits) LookAgain(key decide.Key, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of(key).look = at
}

// Look returns when the first in line is to look.
func (s *Permits) Look(key decide.Key) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.of(key).look
}

// Collected notes that a waiter here has had the turn to collect, which is other processes' until an instant.
func (s *Permits) Collected(key decide.Key, others time.Time) {
	k := s.locked(key)
	defer s.mu.Unlock()
	k.others = others
}

// MayCollect reports whether a waiter here may take the turn to collect.
func (s *Permits) MayCollect(key decide.Key, now time.Time) bool {
	k := s.locked(key)
	defer s.mu.Unlock()
	return !now.Before(k.others)
}

// HandOn returns the limit by which a permit that is about to be released is to be taken for a
// waiter here, and true; or false, when there is none, it wants several, or it is other processes' turn.
func (s *Permits) HandOn(key decide.Key, number int, now time.Time) (ratelimit.InFlight, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.keys[key]
	if k == nil {
		return ratelimit.InFlight{}, false
	}
	if k.line.Len() == 0 {
		k.turns = nil
		return ratelimit.InFlight{}, false
	}
	if k.turns == nil {
		k.turns = make(map[int]time.Time)
	}
	since, ok := k.turns[number]
	if !ok {
		since = now.Add(-rand.N(turnTime)) // so that they are not all let go at once
		k.turns[number] = since
	}
	first := k.line.Front().Value.(*Waiter)
	limit := k.holds(first.places[0].asked.Limit)
	if first.Several() {
		return limit, false
	}
	if now.Sub(since) > turnTime {
		delete(k.turns, number)
		return limit, false
	}
	return limit, number < limit.Limit
}

// LetGo notes that a permit was released that is others' to take: nobody here is told but a waiter
// that collects.
func (s *Permits) LetGo(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	if k.collects() {
		k.poke(true)
	}
}

// Waiting is how many wait for a permit of a key here.
func (s *Permits) Waiting(key decide.Key) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.keys[key]; k != nil {
		return k.line.Len()
	}
	return 0
}

// Hand gives a permit that was taken to the first in line. It reports false if none waits any more,
// or the limit is smaller by now than the permit's number.
func (s *Permits) Hand(key decide.Key, permit ratelimit.Permit) bool {
	k := s.locked(key)
	defer s.mu.Unlock()
	first := k.line.Front()
	if first == nil {
		return false
	}
	w := first.Value.(*Waiter)
	if permit.InFlight = k.holds(w.places[0].asked.Limit); permit.Number >= permit.InFlight.Limit || w.Several() {
		return false
	}
	k.line.Remove(first)
	w.places[0].element = nil
	w.got <- permit // it has room, since a waiter that was given a permit is not in line
	k.away[permit.Number] = mark{since: time.Now(), until: permit.Ends()}
	k.poke(len(k.free) > 0)
	return true
}
