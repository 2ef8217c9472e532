package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

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
		e.refusal.Store(&refusal{state, at, e.config.sent(sent, at)})
	}
}

// Refuse returns the result of an allow of n tokens that the row cannot grant by its known
// state; false if it may, or the state is not known.
func (e *Entry) Refuse(n float64) (ratelimit.Result, bool) {
	if e == nil || !(n >= e.least && n <= e.template.Definition.Capacity) {
		return ratelimit.Result{}, false
	}
	state, at, ok := e.Refusal()
	if !ok {
		return ratelimit.Result{}, false
	}
	return e.template.Refused(n, state, at)
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
	now := e.config.moment()
	if r.over(now, e.config.Lasts) {
		return state, at, false
	}
	return r.state, r.at.Add(now.since(r.sent).Truncate(time.Microsecond)), true
}
