package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Tokens holds tokens that a call took from memory, or that a statement granted to a transaction.
// The zero Tokens are none.
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

// Balance returns the state of the limit that the tokens are of; nil for none.
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
	if refunds < len(e.returns) { // without waiting for the timer, and with the spent tokens, which leave no room for them
		e.reportSpent(now)
		returns = e.takeReturns()
	}
	e.setTimer()
	e.mu.Unlock()
	e.config.giveBack(returns)
}

// putBack puts a part back. Tokens of a lease that has ended, or of before an edit, go to the row
// as those of a cancelled call do. It needs mu.
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
