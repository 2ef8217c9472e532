package edge

import (
	"maps"
	"math/rand/v2"
	"sync"
	"time"
)

const (
	firstBackoff = time.Second            // after a refusal that names no wait
	firstDoubt   = 100 * time.Millisecond // the same after a refusal that names a wait, from the second in a row on
	mostBackoff  = 16 * time.Second       // less than DefaultMaxWait, so a request can learn whether the server grants again

	slowAnswer = 250 * time.Millisecond // the shortest time after which more requests go without an answer
	mostPaced  = 64                     // above this number, all requests go
)

// hold keeps what a server has said about the requests of a scope.
//
// A refusal begins a round, in which nothing is sent until the refusal is over. Then one request
// goes, and each answer that is not a refusal lets more go: two, four, eight, until all may. So a
// server that refuses everything gets one request a round, and rounds grow. If no answer comes,
// more requests go after twice the time of the refusal, so a slow server is not left idle.
type hold struct {
	refused   time.Time // the end of the wait after a refusal
	exhausted time.Time // until then the server refuses, by the hint of a granted answer
	round     int
	inARow    int           // rounds since a request was not refused
	allowed   int           // requests that may go in this round; 0 means all
	sent      int           // requests that have gone
	widens    time.Time     // when the allowed number doubles, since answers are slow
	slow      time.Duration // the time until it doubles; twice the time of a refusal
	changed   chan struct{} // closed when more may go
}

// over reports whether h has held nothing back for a minute.
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

// backoff returns the shortest wait after a refusal; named says whether the refusal named a wait.
// It doubles with each round, and is random within its upper half.
func (h *hold) backoff(named bool) time.Duration {
	least, n := firstBackoff, h.inARow-1
	if named {
		least, n = firstDoubt, h.inARow-2
	}
	if n < 0 {
		return 0 // trust the server the first time
	}
	most := min(least<<min(n, 10), mostBackoff)
	return most/2 + rand.N(most/2)
}

// Round is the round and the instant in which a request was sent.
type Round struct {
	n    int
	sent time.Time
}

// holds keeps the current hold of each scope. The zero value is ready to use.
type holds struct {
	mu      sync.Mutex
	byScope map[string]*hold
	round   int // the newest round of any scope
	sweep   int // at this number of holds, those that are over are removed
}

// until returns when requests of a scope may go again: after a refusal, and by the server's hint.
func (hs *holds) until(scope string) (refused, exhausted time.Time) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.byScope[scope]; h != nil {
		return h.refused, h.exhausted
	}
	return refused, exhausted
}

// enter lets a request of a scope go, and returns its round. If the request must wait, it returns
// when to ask again, and a channel that closes if it may ask sooner.
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

// refuse notes a refusal, for a named wait or 0, and returns the end of the scope's hold. No wait
// is longer than most.
func (hs *holds) refuse(scope string, round Round, wait, most time.Duration, now time.Time) time.Time {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.get(scope, now)
	if round.n >= h.round { // the first refusal of the round; later ones were already under way
		hs.round++
		h.round, h.inARow, h.allowed, h.sent = hs.round, h.inARow+1, 1, 0
		h.slow = min(max(slowAnswer, 2*now.Sub(round.sent)), mostBackoff)
		wait = max(wait, h.backoff(wait > 0))
	}
	h.refused = latest(h.refused, now.Add(min(wait, most)))
	return h.refused
}

// grant notes that a request was not refused.
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

// exhaust notes that the server would refuse requests until an instant.
func (hs *holds) exhaust(scope string, until, now time.Time) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	h := hs.get(scope, now)
	h.exhausted = latest(h.exhausted, until)
}

// get returns the hold of a scope, or a new one. The caller holds the lock.
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
