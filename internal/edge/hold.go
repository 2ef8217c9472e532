package edge

import (
	"maps"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	firstBackoff = time.Second            // after a refusal that names no wait
	firstDoubt   = 100 * time.Millisecond // after one that names a wait, when the wait before was kept and was not enough
	mostBackoff  = 16 * time.Second       // less than DefaultMaxWait, so that a request lives to see whether the server grants again

	slowAnswer = 250 * time.Millisecond // after which at the earliest more requests go, though none was answered
	mostPaced  = 64                     // above this number of requests, any number may go
)

// hold is what a server has said of the requests of a scope.
//
// A refusal begins a round, in which nothing is sent until the refusal is over. Then one request
// goes, and more with each answer that is not a refusal: two, four, eight, until all may. So a
// server that refuses all has one request a round, and each round is longer than the one before. Where
// no answer comes, more go in time, so that a server that grants slowly is not left idle: not before
// one that refuses slowly would have refused.
type hold struct {
	refused   time.Time // until when requests are held back, since the server has refused one
	exhausted time.Time // until when the server would refuse the next one, by its own word
	round     int
	inARow    int           // rounds that have begun since a request was not refused
	allowed   int           // how many requests of this round may go; 0 is any number
	sent      int           // how many have gone
	widens    time.Time     // when twice as many may go, since answers are slow
	slow      time.Duration // from one request or widening to the next; twice as long as a refusal takes
	changed   chan struct{} // closed when more may go
}

// over reports whether h holds nothing back, and has not for a minute.
func (h *hold) over(now time.Time) bool {
	return now.Sub(h.refused) > time.Minute && !h.exhausted.After(now)
}

// widen lets n more requests go.
func (h *hold) widen(n int, now time.Time) {
	if h.allowed += n; h.allowed > mostPaced {
		h.allowed = 0
	}
	h.widens = now.Add(h.slow)
	close(h.changed)
	h.changed = make(chan struct{})
}

// backoff returns the shortest wait after a refusal that named a wait or did not. It doubles with each round, and is drawn from its upper half.
func (h *hold) backoff(named bool) time.Duration {
	least, n := firstBackoff, h.inARow-1
	if named {
		least, n = firstDoubt, h.inARow-2
	}
	if n < 0 {
		return 0 // the first word of a server is believed
	}
	most := min(least<<min(n, 10), mostBackoff)
	return most/2 + rand.N(most/2)
}

// Round is the round in which a request goes, and when it goes.
type Round struct {
	n    int
	sent time.Time
}

// holds is the holds that are not over, by scope. The zero value is ready for use.
type holds struct {
	mu      sync.Mutex
	byScope map[string]*hold
	round   int // the last one that began, of any scope
	sweep   int // how many there may be before those that are over are looked for
}

// until returns until when requests of a scope are held back.
func (hs *holds) until(scope string) (refused, exhausted time.Time) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.byScope[scope]; h != nil {
		return h.refused, h.exhausted
	}
	return refused, exhausted
}

// enter lets a request of a scope go, and returns the round in which it goes. Otherwise it returns
// when to ask again, and a channel that is closed if that is sooner.
func (hs *holds) enter(scope string, now time.Time) (round Round, again time.Time, sooner <-chan struct{}) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.byScope[scope]
	switch {
	case h == nil:
		return Round{sent: now}, again, nil
	case now.Before(h.refused):
		return Round{}, h.refused, h.changed
	case h.allowed == 0:
		return Round{h.round, now}, again, nil
	}
	if h.sent > 0 && !now.Before(h.widens) {
		h.widen(h.allowed, now)
	}
	if h.allowed > 0 && h.sent >= h.allowed {
		return Round{}, h.widens, h.changed
	}
	if h.sent++; h.sent == 1 {
		h.widens = now.Add(h.slow)
	}
	return Round{h.round, now}, again, nil
}

// refuse notes that a request which went in a round was refused, for a wait that the server has
// named or 0, and returns until when the scope is held back. No wait counts for more than most.
func (hs *holds) refuse(scope string, round Round, wait, most time.Duration, now time.Time) time.Time {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.get(scope, now)
	if round.n >= h.round { // the first refusal of the round; those under way with it do not count
		hs.round++
		h.round, h.inARow, h.allowed, h.sent = hs.round, h.inARow+1, 1, 0
		h.slow = min(max(slowAnswer, 2*now.Sub(round.sent)), mostBackoff)
		wait = max(wait, h.backoff(wait > 0))
	}
	h.refused = latest(h.refused, now.Add(min(wait, most)))
	return h.refused
}

// grant notes that a request which went in a round was not refused.
func (hs *holds) grant(scope string, round Round, now time.Time) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.byScope[scope]
	if h == nil || round.n < h.round {
		return
	}
	if h.inARow = 0; h.allowed > 0 {
		h.widen(2, now)
	}
}

// exhaust notes that the server would refuse the next request until an instant.
func (hs *holds) exhaust(scope string, until, now time.Time) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.get(scope, now)
	h.exhausted = latest(h.exhausted, until)
}

// get returns the hold of a scope, a new one if there is none. It needs the lock.
func (hs *holds) get(scope string, now time.Time) *hold {
	h := hs.byScope[scope]
	if h != nil {
		return h
	}
	if hs.byScope == nil {
		hs.byScope, hs.sweep = map[string]*hold{}, minSweep
	}
	if len(hs.byScope) >= hs.sweep {
		maps.DeleteFunc(hs.byScope, func(_ string, h *hold) bool { return h.over(now) })
		hs.sweep = max(minSweep, 2*len(hs.byScope))
	}
	h = &hold{changed: make(chan struct{})}
	hs.byScope[scope] = h
	return h
}

const minSweep = 64

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
