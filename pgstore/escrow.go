package pgstore

import (
	"context"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/escrow"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// What is taken ahead from rows, and goes back to them; package escrow has the rest, and
// the reasons.

// takeAhead gives the Store a memory of what it has taken ahead, if it is to do that.
func (o *own) takeAhead() {
	if o.config.Escrow == 0 || o.pool == nil {
		return
	}
	var now func() time.Time
	if o.config.Clock != nil {
		now = func() time.Time { return *o.clock() }
	}
	var never []ratelimit.Kind
	if o.config.Portable { // a row with slots is not given back to in one statement there
		never = []ratelimit.Kind{ratelimit.KindSlidingWindow}
	}
	o.hints.memory = escrow.New(o.config.Escrow, now, o.refill, o.giveBackOwn, never...)
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
// and does not keep that waiting. It goes with the calls for its key that were too late, by
// the same statement: two would find each other's lock on the row.
func (o *own) refill(h *escrow.Holder) {
	if o.work.begin() != nil {
		h.Refilled(false)
		return
	}
	go func() {
		defer o.work.end()
		ctx, cancel := context.WithTimeout(context.Background(), o.lateRefill())
		defer cancel()
		p := callOf(h.Ask(), ahead, h)
		h.Refilled(o.together(ctx, p) == nil && p.result.OK)
	}()
}

// lateRefill is when to give up on taking ahead: what comes later than what is held lasts is
// of no use, and a connection that has fallen silent holds up all who gather behind it.
func (o *own) lateRefill() time.Duration {
	late := max(o.config.Escrow, 250*time.Millisecond)
	if o.config.Timeout > 0 {
		late = min(late, o.config.Timeout)
	}
	return late
}

// escrowTime bounds a statement that nobody waits for. An answer that is later than the
// end brings nothing; but whoever gives up on one has lost a connection.
const escrowTime = defaultTimeout

// giveBackOwn gives back what is not needed, if the Store is not closed.
func (b *base) giveBackOwn(returns []escrow.Return) {
	if b.work.begin() != nil {
		return // what Close did not find in memory is lost
	}
	defer b.work.end()
	b.giveBack(returns)
}

// giveBack gives back what was taken ahead. What cannot be given back in time is lost.
// Where somebody has the row locked, which is often if others take from it as much, it is
// tried again, after the others' turn.
func (b *base) giveBack(returns []escrow.Return) {
	ctx, cancel := context.WithTimeout(context.Background(), escrowTime)
	defer cancel()
	begun := b.hints.memory.Now()
	for pause := passOver; ; pause = min(2*pause, slowPoll) {
		past := b.hints.memory.Now().Sub(begun)
		returns = slices.DeleteFunc(returns, func(r escrow.Return) bool {
			return past > r.End.Sub(r.Taken) || b.giveBackOnce(ctx, &r)
		})
		if len(returns) == 0 || sleep(ctx, pause) != nil {
			return
		}
	}
}

// giveBackOnce reports whether there is nothing left to be done: not if somebody has the
// row locked, or it is too late, which PostgreSQL does not tell apart.
func (b *base) giveBackOnce(ctx context.Context, r *escrow.Return) bool {
	give := b.table.GiveBack
	if b.config.Portable {
		give = b.table.BringBack
	}
	given, err := give(ctx, b.pool, r.Row, &r.Definition, r.Count, r.Taken, r.End, b.clock())
	if given {
		b.hints.memory.Changed(r.Row.Key)
	}
	return given || err != nil && code(err) != lockNotAvailable
}
