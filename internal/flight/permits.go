// Package flight keeps what a process knows of permits: which to try, and which callers wait for
// one in this process. It knows no database. Its knowledge is a guess: it chooses what to try, and
// grants nothing.
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

// mostKeys is the number of keys from which idle ones are forgotten.
const mostKeys = 16384

// IdleFor is how long a permit must have been free before its row is deleted.
const IdleFor = time.Minute

const (
	// turnTime is how long a permit is handed on within a process. Then it is let go, since other
	// processes may wait as well.
	turnTime = 4 * time.Second

	// attempt is how long a permit that is tried stays chosen, unless the outcome is noted before.
	attempt = time.Minute
)

// Permits holds what a process knows of the permits of all keys. The zero value is ready to use. It
// is safe for concurrent use.
type Permits struct {
	mu   sync.Mutex
	keys map[decide.Key]*keyState
	came uint64 // waiters that have come, of all keys
}

// keyState holds what a process knows of a key's permits.
type keyState struct {
	looked bool               // false until permits are read or one is tried in vain; until then one is picked at random
	free   []Choice           // permits seen free; the last is tried next
	away   map[int]mark       // permits that this process tries or holds
	line   list.List          // of *Waiter, in the order in which they came
	asking int                // permits asked for by callers that are not in line
	turns  map[int]time.Time  // since when each permit is handed on in this process
	look   time.Time          // when the first in line looks again
	others time.Time          // until this instant only other processes may collect
	newest ratelimit.InFlight // the limit of the newest caller
}

// mark says that this process tries a permit, or that it holds one since an instant. After until,
// the mark is void.
type mark struct {
	tried        bool
	since, until time.Time
}

// Choice is a permit to try.
type Choice struct {
	Number int
	New    bool // its row may not exist yet
}

// locked locks mu, and returns the state of a key.
func (s *Permits) locked(key decide.Key) *keyState {
	s.mu.Lock()
	return s.of(key)
}

// of returns the state of a key, and creates it if it is missing. The caller holds mu.
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

// examined is how many keys are examined for each new one. If more than a few are idle, the number
// of keys falls.
const examined = 8

// forgetSome forgets the idle ones among a few random keys. Examining all keys would hold up the
// callers of all keys, and make each new key as expensive as all keys in use.
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

// idle reports whether this process holds, tries and awaits no permit of the key.
func (k *keyState) idle(now time.Time) bool {
	for number, m := range k.away {
		if m.until.After(now) {
			return false
		}
		delete(k.away, number)
	}
	return k.line.Len() == 0 && k.asking == 0
}

// Meet notes the limit of a caller. Where it is smaller than the limits of waiting callers, it
// holds for them too.
func (s *Permits) Meet(key decide.Key, limit ratelimit.InFlight) {
	k := s.locked(key)
	defer s.mu.Unlock()
	k.newest = limit
}

// Wants returns what a Waiter asks for, by the limits that hold now.
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

// holds returns a Waiter's limit, with the Limit and Lease of the newest caller where they are
// smaller.
func (k *keyState) holds(limit ratelimit.InFlight) ratelimit.InFlight {
	if k.newest.Limit == 0 { // the key was forgotten, so its Waiter has left
		return limit
	}
	limit.Limit = min(limit.Limit, k.newest.Limit)
	if k.newest.LeaseOrDefault() < limit.LeaseOrDefault() {
		limit.Lease = k.newest.Lease
	}
	return limit
}

// Choose returns a permit below limit to try. Until its outcome is noted, for [attempt] at most, no
// other caller here gets it. If nothing is known of the key, Choose picks a permit at random. It
// returns false if it has none to try; then the caller must look.
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

// ChooseAll chooses n permits below limit that were seen free, as Choose does. If fewer were seen,
// it chooses none.
func (s *Permits) ChooseAll(key decide.Key, n, limit int, now time.Time) []Choice {
	k := s.locked(key)
	defer s.mu.Unlock()
	var chosen []Choice
	k.free = slices.DeleteFunc(k.free, func(c Choice) bool {
		if c.Number >= limit || k.isAway(c.Number, now) {
			return true // or free held it twice
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

// Unchoose puts back chosen permits that were not tried.
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

// Taken notes that this process holds a permit until an instant.
func (s *Permits) Taken(key decide.Key, number int, until time.Time) {
	k := s.locked(key)
	defer s.mu.Unlock()
	k.away[number] = mark{since: time.Now(), until: until}
}

// Missed notes that a permit was tried in vain. It also discards the other permits seen free, which
// are out of date.
func (s *Permits) Missed(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	k.looked, k.free = true, nil
}

// Freed notes that this process released a permit, and wakes the first waiter.
func (s *Permits) Freed(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	k.free = append(k.free, Choice{Number: number})
	k.poke(true)
}

// Lost notes that this process holds a permit no more, and wakes the first waiter.
func (s *Permits) Lost(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	k.poke(true)
}

// Observe notes the free permits found by a look that began at an instant; part says that it read a
// part of them only. It reports whether any is left to try.
func (s *Permits) Observe(key decide.Key, free []Choice, part bool, begun time.Time) (some bool) {
	k := s.locked(key)
	defer s.mu.Unlock()
	if k.looked = true; !part {
		k.free = k.free[:0]
	}
	for _, c := range free {
		if m, ok := k.away[c.Number]; !ok || !m.tried && m.since.Before(begun) {
			delete(k.away, c.Number) // the database says that its lease is over
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

// Waiter is a caller that waits for permits. It stands in the line of each key from which it wants
// some.
type Waiter struct {
	Turn <-chan bool             // tells the first in a line whether to try now
	Got  <-chan ratelimit.Permit // receives a permit that was handed on, at most one

	places []place
	number uint64 // in the order of arrival
	asks   bool
	turn   chan bool
	got    chan ratelimit.Permit
}

// place is a Waiter's place in the line of a key.
type place struct {
	asked   ratelimit.PermitRequest // the request as it came
	key     decide.Key
	element *list.Element // nil outside of the line
}

// Several reports whether a Waiter wants several permits. Such a Waiter is handed none.
func (w *Waiter) Several() bool { return len(w.places) > 1 || w.places[0].asked.N > 1 }

// Arrive returns a Waiter, which must [Permits.Leave]. asks reports whether it asks for its permits
// at once; otherwise it is in line. While the line is empty, callers ask at once for as many
// permits as the limit has. More would be refused, and later callers that ask would overtake them.
//
// All lines are in one order of arrival, so two Waiters in two lines have the same order in both.
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

// Enter puts a Waiter that has asked in vain in line, before later arrivals.
func (s *Permits) Enter(w *Waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked(w)
	s.enter(w)
}

// asked notes that a Waiter has stopped asking.
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

// First reports whether a Waiter is the first in all of its lines. It stops being first if an
// earlier arrival enters.
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

// Leave ends a Waiter, in line or not. If a permit was handed on that the Waiter has not read from
// Got, Leave returns it and true.
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

// poke tells the first in line that it is first, and whether to try now.
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
	turn <- now // there is room: all senders hold mu
}

// LookAgain notes when the first in line looks again.
func (s *Permits) LookAgain(key decide.Key, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of(key).look = at
}

// Look returns when the first in line looks again.
func (s *Permits) Look(key decide.Key) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.of(key).look
}

// Collected notes that a waiter here has had the turn to collect. Until an instant, it is the turn
// of other processes.
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

// HandOn reports whether a permit that is about to be released is taken for a waiter here, and
// returns the waiter's limit. It is false if there is no waiter, if the first wants several, if its
// limit has no such number, or if other processes have their turn.
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
		since = now.Add(-rand.N(turnTime)) // spread the ends of turns
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

// LetGo notes that a permit was released for other processes to take. Here it wakes only a waiter
// that collects.
func (s *Permits) LetGo(key decide.Key, number int) {
	k := s.locked(key)
	defer s.mu.Unlock()
	delete(k.away, number)
	if k.collects() {
		k.poke(true)
	}
}

// Waiting returns how many callers of this process wait for a permit of a key.
func (s *Permits) Waiting(key decide.Key) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.keys[key]; k != nil {
		return k.line.Len()
	}
	return 0
}

// Hand gives a permit that was taken to the first in line. It reports false if the line is empty,
// if the first wants several, or if the permit's number is not below the limit any more.
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
	w.got <- permit // there is room: a waiter that was given a permit has left the line
	k.away[permit.Number] = mark{since: time.Now(), until: permit.Ends()}
	k.poke(len(k.free) > 0)
	return true
}
