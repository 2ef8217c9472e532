package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// refusal is a row that had too little. Until time has brought what a call wants, only
// what others do can make it succeed; what this process does is known.
//
// It is right about time without trusting this machine's clocks: to the database's, it adds
// the time that has passed here since before the statement was sent that read the row, so
// it never takes that to be behind where it is.
type refusal struct {
	state bucket.State
	at    time.Time // on the database's clock
	sent  moment
}

// over reports whether the row must be asked again: also when a clock, that was injected,
// went back.
func (r *refusal) over(now moment, lasts time.Duration) bool {
	return now.since(r.sent) >= lasts || now.mono < r.sent.mono
}

// Changes is how often a statement is known to have changed the entry's row: to be asked
// before one is sent that may find a refusal, for Refused.
func (e *Entry) Changes() int {
	if e == nil {
		return 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.changes
}

// Refused notes the row that refused a call, as a statement read it that was sent then,
// unless the row has changed since: then that may not be in it.
func (e *Entry) Refused(state bucket.State, at, sent time.Time, changes int) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.changes == changes {
		e.refusal.Store(&refusal{state, at, e.cache.sent(sent, at)})
	}
}

// Changed forgets what is known of the row, which a statement has changed. What is held
// is held.
func (e *Entry) Changed() {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.forget()
}

// forget is Changed. It needs mu.
func (e *Entry) forget() {
	e.changes++
	e.refusal.Store(nil)
}

// Refuse is the result of an allow of n tokens that the row cannot grant by what is known
// of it; false if it may, or nothing is known.
func (e *Entry) Refuse(n float64) (ratelimit.Result, bool) {
	if e == nil || !(n >= e.least && n <= e.ask.Definition.Capacity) {
		return ratelimit.Result{}, false
	}
	state, at, ok := e.Refusal()
	if !ok {
		return ratelimit.Result{}, false
	}
	return e.ask.Refused(n, state, at)
}

// Refusal is the row that refused a call lately, and the instant now, on the database's
// clock; false if there is none.
func (e *Entry) Refusal() (state bucket.State, at time.Time, ok bool) {
	if e == nil {
		return state, at, false
	}
	r := e.refusal.Load()
	if r == nil {
		return state, at, false
	}
	now := e.cache.moment()
	if r.over(now, e.cache.lasts) {
		return state, at, false
	}
	return r.state, r.at.Add(now.since(r.sent).Truncate(time.Microsecond)), true
}
