package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// refusal is the row that refused a call. Until it is refilled, only another process can make such
// a call succeed: this one's changes are counted.
//
// Its time does not depend on this machine's clock being right. To the database's instant it adds
// the time since before the statement was sent, so it is never behind the database.
type refusal struct {
	state   bucket.State
	at      time.Time // on the database's clock
	sent    moment
	changes int64 // to the row, known when the statement was sent
}

// over reports whether the row must be asked again: after a lease's time, or when an injected
// clock went back.
func (r *refusal) over(now moment, lasts time.Duration) bool {
	return now.since(r.sent) >= lasts || now.mono < r.sent.mono
}

// Changes returns how many changes to the entry's row this process knows of. A caller gets it
// before it sends a statement, for Refused.
func (e *Entry) Changes() int64 { return e.changes.Load() }

// RowChanged notes that a statement has changed the row, and forgets its refusal. Leases stay.
func (e *Entry) RowChanged() {
	if e != nil {
		e.changes.Add(1)
	}
}

// Refused remembers the row that refused a call, read by a statement sent at an instant. A change
// that is not among changes may be missing in what was read, and voids the refusal.
func (e *Entry) Refused(state bucket.State, at, sent time.Time, changes int64) {
	e.refusal.Store(&refusal{state, at, e.config.sent(sent, at), changes})
}

// Refuse returns the refusal of an allow of n tokens. It returns false if the row may grant them,
// or is not known.
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

// Refusal returns the row that refused a call lately, and now on the database's clock; false if
// there is none.
func (e *Entry) Refusal() (state bucket.State, at time.Time, ok bool) {
	r := e.refusal.Load()
	if r == nil || r.changes != e.changes.Load() {
		return state, at, false
	}
	now := e.config.moment()
	if r.over(now, e.config.Lasts) {
		return state, at, false
	}
	return r.state, r.at.Add(now.since(r.sent).Truncate(time.Microsecond)), true
}
