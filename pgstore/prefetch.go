package pgstore

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Grants that prefetch, and calls that are answered by the tokens that another has prefetched:
// nothing, without Config.Escrow.

// answer answers calls for which enough has been prefetched since they arrived, or that are
// refused by the state known by now, and returns the others.
func (e *engine) answer(tickets []*ticket) []*ticket {
	if e.cache == nil {
		return tickets
	}
	return slices.DeleteFunc(tickets, func(t *ticket) bool {
		p := t.Value
		if p.entry == nil {
			return false
		}
		if p.prefetch {
			return e.enough(t)
		}
		var tokens escrow.Tokens
		if !p.entry.Take(p.call.Demands[0].Count, p.tokens != nil, &tokens) {
			return false
		}
		tokens.Result(p.call.Reserve, &p.result)
		if p.tokens != nil {
			*p.tokens = tokens
		}
		finish(t)
		return true
	})
}

// enough answers a call that prefetches, if there is no need any more, or no more to be had.
func (e *engine) enough(t *ticket) bool {
	order := t.Value.entry.Order(0, 0)
	order.Failed() // it is not sent
	if order.Count > 0 {
		return false
	}
	t.Finish()
	return true
}

// passedOver returns those of calls that prefetch and were not granted whose rows have enough,
// and so were passed over, since another transaction had them locked. Without a turn of their
// own they would hardly ever find a row free from which many processes take.
func (e *engine) passedOver(ctx context.Context, tickets []*ticket, await *awaiting) (late []*ticket) {
	if await != nil || e.cache == nil {
		return nil
	}
	var rows table.Rows
	for _, t := range tickets {
		if t.Value.prefetch {
			late, rows.Rows = append(late, t), append(rows.Rows, decide.Row{Key: t.Value.call.Demands[0].KeyOf()})
		}
	}
	if len(late) == 0 || e.table.Read(ctx, e.Pool, &rows, e.Clock()) != nil { // nobody depends on it
		return nil
	}
	n := 0
	for i, t := range late {
		definition := &t.Value.call.Demands[0].Definition
		if rows.Found[i] && definition.Refill(rows.States[i], rows.At).Value >= 2 { // half of which is to be had
			t.Value.locked.Store(&rows.Rows[i])
			late[n] = t
			n++
		}
	}
	return late[:n]
}

// sending notes the known states of the keys of calls for which a statement is about to be
// sent, and returns the instant.
func (e *engine) sending(tickets []*ticket) time.Time {
	if e.cache == nil {
		return time.Time{}
	}
	for _, t := range tickets {
		t.Value.changes = t.Value.entry.Changes()
	}
	return e.cache.Now()
}

// orders has grants prefetch for the keys from which this process takes much.
func (e *engine) orders(groups [][]*ticket, grants []table.Grant) []escrow.Order {
	if e.cache == nil {
		return nil
	}
	orders := make([]escrow.Order, len(groups))
	for i, group := range groups {
		g, o := &grants[i], &orders[i]
		if *o = entryOf(group).Order(g.Count, g.Need); o.Count == 0 {
			continue
		}
		g.Prefetch, g.Lowered, g.Lasts = o.Count, o.Capacity, e.config.Escrow
		g.Spent = o.Spent
		for _, t := range group {
			if t.Value.tokens != nil {
				g.Out += t.Value.call.Demands[0].Count
			}
		}
	}
	return orders
}

// arrived notes the tokens that a grant took since a statement was sent: for the calls of a
// group, and if there was an order, besides.
func (e *engine) arrived(o *escrow.Order, group []*ticket, g *table.Grant, sent time.Time) *escrow.Arrival {
	if e.cache == nil {
		return nil
	}
	calls, count := 0, g.Count
	for _, t := range group {
		switch a := &t.Value.call.Demands[0]; {
		case t.Value.prefetch:
		case a.RowOnly(): // which asks the row in any case
			count -= a.Count
		default:
			calls++
		}
	}
	entry := entryOf(group)
	if entry.Note(count, calls); g.Waited >= conn.PassOver { // to take from the row would cost more still
		entry.Contended()
	}
	if o.Count == 0 {
		return nil
	}
	return o.Arrived(e.leaseOf(g, sent))
}

// hear sends a statement. If all callers give up before the end of one that prefetches, it is
// heard to its end, and late is called with its error: gone is true then.
func (e *engine) hear(ctx context.Context, orders []escrow.Order, send func() error, late func(error)) (gone bool, err error) {
	if !slices.ContainsFunc(orders, func(o escrow.Order) bool { return o.Count > 0 }) {
		return false, send()
	}
	var settled atomic.Bool // by one of the two
	heard := make(chan error, 1)
	e.Work.Spawn(func() {
		if err := send(); settled.CompareAndSwap(false, true) {
			heard <- err
		} else {
			late(err)
		}
	})
	select {
	case err := <-heard:
		return false, err
	case <-ctx.Done():
		if settled.CompareAndSwap(false, true) {
			return true, ctx.Err()
		}
		return false, <-heard
	}
}

// arrivedLate notes the tokens of orders when no caller waits any more. Those that transactions
// were to have, which did not begin, are put into memory, too.
func (e *engine) arrivedLate(orders []escrow.Order, grants []table.Grant, sent time.Time, err error) {
	if err != nil {
		failed(orders, err)
		return
	}
	for i := range orders {
		switch o, g := &orders[i], &grants[i]; {
		case !g.Taken.OK:
			o.Failed()
		case o.Count > 0:
			if arrival := o.Arrived(e.leaseOf(g, sent)); g.Out > 0 {
				calls := arrival.Tokens(g.Out, g.Taken.After)
				calls.PutBack()
			}
		}
	}
}

// failed notes that the statement of orders has failed.
func failed(orders []escrow.Order, err error) {
	if !conn.Answered(err) && !table.Unsent(err) {
		return // nobody knows
	}
	for i := range orders {
		orders[i].Failed()
	}
}

// leaseOf is the lease that a grant has prefetched, by a statement sent then.
func (e *engine) leaseOf(g *table.Grant, sent time.Time) escrow.Lease {
	if g.Waited > 0 && g.Waited <= e.cache.Now().Sub(sent) { // unless the database's clock was set meanwhile
		sent = sent.Add(g.Waited)
	}
	return escrow.Lease{Count: g.Prefetched(), Out: g.Out, After: g.Taken.After, At: g.Taken.At.UTC(), End: g.End().UTC(), Sent: sent}
}

// entryOf returns the entry of a group's key; nil if none of its calls knows it.
func entryOf(group []*ticket) *escrow.Entry {
	for _, t := range group {
		if t.Value.entry != nil {
			return t.Value.entry
		}
	}
	return nil
}

// refused remembers the row that refused a call which was asked in a statement sent then.
func (p *pending) refused(view decide.View, sent time.Time) {
	if p.entry != nil {
		p.entry.Refused(view.States[0][0], view.At, sent, p.changes)
	}
}
