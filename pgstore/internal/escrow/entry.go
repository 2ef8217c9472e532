package escrow

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Entry is what a process knows of one key. A nil Entry is of a key that is not remembered.
type Entry struct {
	limit ratelimit.Limit // of the key, to compare; nil if it can change
	paid  *receipt.Limit  // the limit in receipts
	least float64         // the least count that is handed out

	changes atomic.Int64            // of the row, known to this process
	refusal atomic.Pointer[refusal] // nil if none is known

	prefetching atomic.Bool
	scarceUntil atomic.Int64 // on the monotonic clock: until then nothing is prefetched ahead

	mu      sync.Mutex
	ledger                // needs mu, but for its stock
	latency time.Duration // from the plan of a prefetch to its tokens, lately
	service time.Duration // the part of latency since the prefetch's turn at the row

	firing     sync.Mutex // held while the timer fires, until its returns are under way; locked before mu
	timer      *time.Timer
	timerSet   bool
	timerSetAt moment
}

func newEntry(c *Config, a *decide.Demand) *Entry {
	e := &Entry{least: max(bucket.Tolerance(a.Definition.Capacity, 0, 0), 1e-300)} // a smaller one cannot be told from 0
	e.ledger = ledger{config: c, template: *a, lowered: Lowered(&a.Definition, c.Lasts), ahead: c.Lasts / 4}
	e.template.Count, e.template.Request.AboveShare, e.template.Floor = 0, 0, 0
	e.spent.definition = &e.template.Definition
	e.demand.begun = c.moment().mono
	e.paid = e.template.Paid()
	if _, ok := decide.Constant(a.Limit); ok {
		e.limit = a.Limit
	}
	return e
}

// lock locks mu, and returns the moment.
func (e *Entry) lock() moment {
	e.mu.Lock()
	return e.config.moment()
}

// Template returns a demand for 0 tokens of the entry's key.
func (e *Entry) Template() *decide.Demand { return &e.template }

// CanPrefetch reports whether tokens of the entry's key can be prefetched at all.
func (e *Entry) CanPrefetch() bool { return e != nil && e.lowered > 0 }

// Take takes n tokens into t, if as many are held, and reports whether it did. A transaction's
// tokens are out until [Tokens.Spend] or [Tokens.PutBack]. A count of 0 is for the row, which
// may have debt.
func (e *Entry) Take(n float64, transaction bool, t *Tokens) bool {
	if e == nil || !(n >= e.least) {
		return false
	}
	s := e.stock.Load()
	if s == nil {
		return false
	}
	now := e.config.moment()
	if !s.over(now) {
		if took, left := s.take(n, false, transaction); took > 0 {
			t.part = part{s.lease, n}
			e.complete(t, n, s.lease, s, left+s.others, now)
			return true
		}
	}
	return e.takeOfSeveral(n, now, transaction, t)
}

// takeOfSeveral takes tokens from several leases together. In a window, all must count in one
// window or slot, because a call gets one instant.
func (e *Entry) takeOfSeveral(n float64, now moment, transaction bool, t *Tokens) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !(n <= e.remaining(now)) {
		return false
	}
	rest := n
	var parts []part
	for _, l := range e.leases {
		if e.template.Definition.Stepped() && !l.after.TS.Equal(e.newest().after.TS) {
			continue
		}
		if took, _ := l.take(rest, true, transaction); took > 0 {
			parts = append(parts, part{l, took})
			rest -= took
		}
	}
	e.restock()
	if rest > 0 { // other callers were faster, or not all is of one window
		for _, p := range parts {
			p.lease.putBack(p.count, transaction)
		}
		return false
	}
	t.part, t.more = parts[0], parts[1:]
	s := e.stock.Load()
	e.complete(t, n, parts[len(parts)-1].lease, s, s.left.load()+s.others, now)
	return true
}

// complete fills in t, and prefetches if it is time. from is the lease of the last tokens.
func (e *Entry) complete(t *Tokens, n float64, from *lease, s *stock, left float64, now moment) {
	from.calls.Add(1)
	t.Entry, t.Count, t.At = e, n, from.databaseAt(now)
	t.After = e.template.Definition.Refill(s.newest.after, t.At)
	t.After.Value += left
	if left < s.low || now.since(s.newest.sent) > s.fresh {
		e.prefetchAhead(now)
	}
}

// CountDemand counts n tokens that the row has granted to calls, and ends their wait for the row.
func (e *Entry) CountDemand(n float64, calls int) {
	if e == nil {
		return
	}
	now := e.lock()
	defer e.mu.Unlock()
	e.demand.unblock(now)
	e.demand.add(n, calls, now, e.config.Lasts)
}

// Contended notes that a call met others at the row: it waited for them, or was run again.
// Prefetching pays sooner then.
func (e *Entry) Contended() {
	if !e.CanPrefetch() {
		return
	}
	now := e.lock()
	defer e.mu.Unlock()
	e.demand.contendedUntil = now.mono + max(contendedFor, 2*e.config.Lasts)
}

// Miss counts n tokens that a call takes from the row because they are not held, and prefetches
// for later calls if that pays.
func (e *Entry) Miss(n float64) {
	if !e.CanPrefetch() {
		return
	}
	now := e.lock()
	defer e.mu.Unlock()
	e.demand.add(n, 1, now, e.config.Lasts)
	if e.demand.want(0, now, e.config.Lasts) >= 1 {
		e.prefetchAhead(now)
	}
}

// WorthPrefetching reports whether a call for which no tokens are held should prefetch by its own
// statement.
func (e *Entry) WorthPrefetching() bool {
	if !e.CanPrefetch() {
		return false
	}
	now := e.lock()
	defer e.mu.Unlock()
	e.demand.roll(now, e.config.Lasts)
	return len(e.leases) > 0 || e.demand.enough(now)
}

// idle reports whether nothing is known of the key any more.
func (e *Entry) idle(now moment) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, _, refused := e.Refusal()
	return len(e.leases)+len(e.returns) == 0 && !e.prefetching.Load() && now.mono-e.demand.begun >= 2*e.config.Lasts && !refused
}

// evict takes out the held tokens. Those being prefetched are returned when they arrive.
func (e *Entry) evict() []Return {
	if e == nil {
		return nil
	}
	now := e.lock()
	defer e.mu.Unlock()
	e.RowChanged()
	e.epoch++
	for _, l := range e.leases {
		e.endLease(l, now)
	}
	e.leases = nil
	e.restock()
	e.reportSpent(now)
	return e.takeReturns()
}

// setTimer sets the timer, unless it is set or there is nothing to do: to fire at once if tokens are
// to be returned, four times during a lease, and before a lease ends. It needs mu.
func (e *Entry) setTimer() {
	now := e.config.moment()
	if e.timerSet || len(e.leases)+len(e.returns) == 0 && !e.spent.any(now) {
		return
	}
	e.timerSet, e.timerSetAt, e.used = true, now, 0
	next := e.config.Lasts / 4
	if len(e.returns) > 0 {
		next = 0
	}
	for _, l := range e.leases {
		next = min(next, max(l.remains(now)-e.config.margin(), 0))
	}
	if e.timer == nil {
		e.timer = time.AfterFunc(next, e.onTimer)
	} else {
		e.timer.Reset(next)
	}
}

// onTimer returns the tokens that are not needed. On a contended key it keeps what is needed until
// the end of a lease, since prefetching anew costs more.
func (e *Entry) onTimer() {
	e.firing.Lock()
	defer e.firing.Unlock()
	now, lasts := e.lock(), e.config.Lasts
	e.sweep(now)
	needed := max(0, e.used) * float64(lasts) / float64(max(now.since(e.timerSetAt), 1))
	if e.demand.contended(now) {
		needed = max(needed, e.demand.want(0, now, lasts))
	}
	e.release(needed, now)
	returns := e.takeReturns()
	e.timerSet = false
	e.setTimer()
	e.mu.Unlock()
	e.config.giveBack(returns)
}

// refusal is the row that refused a call. Until the row is refilled, only another process can make
// such a call succeed. A change by this one voids the refusal.
//
// Its time does not depend on this machine's clock being right. To the database's instant it adds
// the time since before the statement was sent, so it is never behind the database.
type refusal struct {
	state   bucket.State
	at      time.Time // on the database's clock
	sent    moment
	changes int64 // to the row, known when the statement was sent
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

// Refusal returns the state of the row that refused a call lately, and the present instant on the
// database's clock. It returns false if no refusal is known.
func (e *Entry) Refusal() (state bucket.State, at time.Time, ok bool) {
	r := e.refusal.Load()
	if r == nil || r.changes != e.changes.Load() {
		return state, at, false
	}
	now := e.config.moment()
	if now.since(r.sent) >= e.config.Lasts || now.mono < r.sent.mono { // an injected clock went back
		return state, at, false
	}
	return r.state, r.at.Add(now.since(r.sent).Truncate(time.Microsecond)), true
}
