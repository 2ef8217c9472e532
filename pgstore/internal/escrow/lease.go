package escrow

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// moment is an instant on both clocks of the machine: the monotonic one stands still while the
// machine sleeps, and the wall clock can be set. Comparing these numbers takes a fraction of
// the time that comparing two time.Time takes.
type moment struct{ mono, wall time.Duration }

// epoch is the zero of the monotonic clock.
var epoch = time.Now()

func momentOf(t time.Time) moment {
	return moment{t.Sub(epoch), time.Duration(t.UnixNano())}
}

// since returns the time from an earlier moment to m. Where the clocks differ it is the longer
// time.
func (m moment) since(earlier moment) time.Duration {
	return max(m.mono-earlier.mono, m.wall-earlier.wall, 0)
}

// amount is a number of tokens that goroutines change without a lock.
type amount struct{ bits atomic.Uint64 }

func (a *amount) load() float64 { return math.Float64frombits(a.bits.Load()) }

func (a *amount) add(n float64) {
	for {
		bits := a.bits.Load()
		if a.bits.CompareAndSwap(bits, math.Float64bits(math.Float64frombits(bits)+n)) {
			return
		}
	}
}

// take takes n out of a. If a has less, it takes all of it with some, and nothing without. It
// returns how much it took, and how much is left.
func (a *amount) take(n float64, some bool) (took, left float64) {
	for {
		bits := a.bits.Load()
		had := math.Float64frombits(bits)
		took = n
		if !(n <= had) {
			if !some || had == 0 {
				return 0, had
			}
			took = had
		}
		if a.bits.CompareAndSwap(bits, math.Float64bits(had-took)) {
			return took, had - took
		}
	}
}

// lease is a Lease from which tokens are handed out.
type lease struct {
	left  amount
	calls atomic.Int64 // that got tokens since [ledger.account] counted last
	_     [48]byte     // keeps the fields below, which are only read, in another cache line

	out      amount       // taken by transactions that have not ended
	after    bucket.State // the row as the statement left it
	at       time.Time    // when the statement decided, on the database's clock
	sent     moment
	lasts    time.Duration // from sent on
	outUntil time.Time     // until when the row counts the tokens as out
	epoch    int           // the ledger's when the statement was planned

	ended     atomic.Bool // the ledger does not have it any more
	accounted float64     // unspent when it was counted last; needs the entry's lock
}

// take takes n tokens. If fewer are left, it takes them all if some is true, otherwise none. A
// transaction's tokens are added to out first, so that they never look spent in between.
func (l *lease) take(n float64, some, transaction bool) (took, left float64) {
	if !transaction {
		return l.left.take(n, some)
	}
	l.out.add(n)
	took, left = l.left.take(n, some)
	if took < n {
		l.out.add(took - n)
	}
	return took, left
}

// putBack puts tokens back that take took.
func (l *lease) putBack(n float64, transaction bool) {
	l.left.add(n)
	if transaction {
		l.out.add(-n)
	}
}

// withdraw takes up to n tokens out, which are not spent. It needs the entry's lock.
func (l *lease) withdraw(n float64) (took float64) {
	took, _ = l.left.take(n, true)
	l.accounted -= took
	return took
}

// over reports whether the tokens can be handed out no more.
func (l *lease) over(now moment) bool { return now.since(l.sent) >= l.lasts }

// remains returns for how long tokens can be handed out.
func (l *lease) remains(now moment) time.Duration { return l.lasts - now.since(l.sent) }

// databaseAt returns the instant of now on the database's clock, as the process knows it.
func (l *lease) databaseAt(now moment) time.Time {
	return l.at.Add(now.since(l.sent).Truncate(time.Microsecond))
}

// Tokens holds tokens that a call took from memory, or that a statement granted to a transaction.
// The zero value holds none.
type Tokens struct {
	Entry *Entry
	Count float64
	At    time.Time    // on the database's clock, as the process knows it
	After bucket.State // the row's state then, with the tokens left in this memory

	part part
	more []part // from further leases
}

// part is tokens of one lease, and goes back to it.
type part struct {
	lease *lease
	count float64
}

func (t *Tokens) each(do func(part)) {
	if t.Entry == nil {
		return
	}
	do(t.part)
	for _, p := range t.more {
		do(p)
	}
}

// Result writes the result of the call that got the tokens.
func (t *Tokens) Result(reserve bool, result *ratelimit.Result) {
	t.Entry.template.Held(t.Entry.paid, t.Count, reserve, &t.After, t.At, result)
}

// Balance returns the state of the tokens' limit; nil for no tokens.
func (t *Tokens) Balance() *decide.Balance {
	if t.Entry == nil {
		return nil
	}
	return &decide.Balance{State: t.After, At: t.At}
}

// Spend notes that the transaction that has the tokens was committed, or that its outcome is
// unknown.
func (t *Tokens) Spend() {
	t.each(func(p part) {
		if p.lease.out.add(-p.count); !p.lease.ended.Load() {
			return
		}
		e := t.Entry
		now := e.lock()
		defer e.mu.Unlock()
		e.account(p.lease, now)
		e.setTimer()
	})
}

// PutBack puts the tokens back after the transaction was rolled back: into memory, or into the row
// if their leases have ended.
func (t *Tokens) PutBack() {
	e := t.Entry
	if e == nil {
		return
	}
	now := e.lock()
	e.sweep(now)
	refunds := len(e.returns)
	t.each(func(p part) { e.putBack(p, now) })
	e.restock()
	var returns []Return
	if refunds < len(e.returns) { // at once, with the spent tokens: until these are reported, the row has no room
		e.reportSpent(now)
		returns = e.takeReturns()
	}
	e.setTimer()
	e.mu.Unlock()
	e.config.giveBack(returns)
}

// putBack puts a part back. If its lease has ended, or is older than an edit, the tokens go to the
// row, as those of a cancelled call do. It needs mu.
func (e *Entry) putBack(p part, now moment) {
	l := p.lease
	if l.epoch == e.epoch && !l.over(now) {
		l.putBack(p.count, true)
		l.ended.Store(false)
		e.insert(l)
		return
	}
	l.out.add(-p.count)
	if l.ended.Load() { // for the lease they are spent
		e.account(l, now)
	}
	refund := e.returnOf(l, p.count)
	refund.End = time.Time{}
	e.returns = append(e.returns, refund)
}
