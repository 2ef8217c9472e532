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

// Changes is how often a statement is known to have changed the holder's row: to be asked
// before one is sent that may find a refusal, for Refused.
func (h *Holder) Changes() int {
	if h == nil {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.changes
}

// Refused notes the row that refused a call, as a statement read it that was sent then,
// unless the row has changed since: then that may not be in it.
func (h *Holder) Refused(state bucket.State, at, sent time.Time, changes int) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.changes == changes {
		h.refusal.Store(&refusal{state, at, h.memory.sent(sent, at)})
	}
}

// Changed forgets what is known of the row, which a statement has changed. What is held
// is held.
func (h *Holder) Changed() {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.forget()
}

// forget is Changed. It needs mu.
func (h *Holder) forget() {
	h.changes++
	h.refusal.Store(nil)
}

// Refuse is the result of an allow of n tokens that the row cannot grant by what is known
// of it; false if it may, or nothing is known.
func (h *Holder) Refuse(n float64) (ratelimit.Result, bool) {
	if h == nil || !(n >= h.least && n <= h.ask.Definition.Capacity) {
		return ratelimit.Result{}, false
	}
	state, at, ok := h.Refusal()
	if !ok {
		return ratelimit.Result{}, false
	}
	return h.ask.Refused(n, state, at)
}

// Refusal is the row that refused a call lately, and the instant now, on the database's
// clock; false if there is none.
func (h *Holder) Refusal() (state bucket.State, at time.Time, ok bool) {
	if h == nil {
		return state, at, false
	}
	r := h.refusal.Load()
	if r == nil {
		return state, at, false
	}
	now := h.memory.moment()
	if r.over(now, h.memory.lasts) {
		return state, at, false
	}
	return r.state, r.at.Add(now.since(r.sent).Truncate(time.Microsecond)), true
}
