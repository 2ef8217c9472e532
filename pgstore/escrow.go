package pgstore

import (
	"context"
	"time"

	"github.com/pgratelimit/ratelimit/internal/escrow"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// What is taken ahead from rows, and goes back to them; package escrow has the rest, and
// the reasons.

// takeAhead gives the Store a memory of what it has taken ahead, if it is to do that.
func (b *base) takeAhead() {
	if b.config.Escrow == 0 || b.pool == nil || b.config.Portable {
		return
	}
	var now func() time.Time
	if b.config.Clock != nil {
		now = func() time.Time { return *b.clock() }
	}
	b.hints.memory = escrow.New(b.config.Escrow, now, b.giveBackOwn)
}

// order sets a grant to take ahead as well, if that is worth it; the order is zero if it is
// not. Calls of which something must be held, and not only granted, are served in no other
// way: ok is false if they cannot be.
func (b *base) order(g *table.Grant, h *escrow.Holder, hold bool) (o escrow.Order, ok bool) {
	if g.AtMost {
		return o, true // it takes all that there is
	}
	if o, ok = h.Order(g.Need); !ok || o.Ahead == 0 && !hold {
		return escrow.Order{}, ok || !hold
	}
	g.Ahead, g.Definition.Capacity = o.Ahead, o.Capacity
	return o, true
}

// arrived notes what a grant took ahead, since a statement was sent.
func arrived(o *escrow.Order, g *table.Grant, sent time.Time) *escrow.Arrival {
	return o.Arrived(escrow.Lot{Count: g.TookAhead(), After: g.Taken.After, At: g.Taken.At.UTC(), Sent: sent})
}

// refill takes ahead before what is held has run out. It is called on the way of a call,
// and does not keep that waiting.
func (b *base) refill(h *escrow.Holder) {
	if b.work.begin() != nil {
		h.Refilled(false)
		return
	}
	go func() {
		defer b.work.end()
		ctx, cancel := context.WithTimeout(context.Background(), escrowTime)
		defer cancel()
		ok := false
		defer func() { h.Refilled(ok) }()
		a := h.Ask()
		g := table.Grant{Change: a.Change(0, 0, 0)}
		o, orders := b.order(&g, h, false)
		if !orders || g.Ahead <= 0 {
			return
		}
		grants, sent := []table.Grant{g}, b.hints.memory.Now()
		if b.table.Grant(ctx, b.pool, grants, b.clock()) == nil && grants[0].Taken.OK {
			h.Changed()
			arrived(&o, &grants[0], sent)
			ok = true
		}
	}()
}

// escrowTime bounds a statement that nobody waits for. An answer that is later than the
// end brings nothing; but whoever gives up on one has lost a connection.
const escrowTime = defaultTimeout

// backTries is how often giving back is tried, since somebody may have the row locked.
const backTries = 3

// giveBackOwn gives back what is not needed, if the Store is not closed.
func (b *base) giveBackOwn(returns []escrow.Return) {
	if b.work.begin() != nil {
		return // what Close did not find in memory is lost
	}
	defer b.work.end()
	b.giveBack(returns)
}

// giveBack gives back what was taken ahead. What cannot be given back in time is lost.
func (b *base) giveBack(returns []escrow.Return) {
	ctx, cancel := context.WithTimeout(context.Background(), escrowTime)
	defer cancel()
	for i := range returns {
		r := &returns[i]
		for try := range backTries {
			given, err := b.table.GiveBack(ctx, b.pool, r.Row, &r.Definition, r.Count, r.Taken, r.End, b.clock())
			if given {
				b.hints.memory.Changed(r.Row.Key)
			}
			if given || err != nil && code(err) != lockNotAvailable || sleep(ctx, time.Duration(try+1)*poll) != nil {
				break
			}
		}
	}
}
