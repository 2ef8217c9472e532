package pgstore

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// grant decides the calls of the groups whose rows have enough for all of them. It writes and
// locks nothing for the others, which it returns.
func (e *engine) grant(ctx context.Context, tickets []*ticket, await *awaiting) (left []*ticket, err error) {
	tickets = slices.DeleteFunc(tickets, (*ticket).Gone)
	groups, grants, left := e.groups(tickets)
	if len(groups) == 0 {
		return left, nil
	}
	orders := e.orders(groups, grants)
	sent := e.cache.Now()
	wait := await != nil && len(grants) == 1 && grants[0].Row == await.row
	if wait {
		await.seat.Share()
	}
	send := func() error {
		if wait {
			defer await.seat.Leave()
			return e.grantInTurn(ctx, grants)
		}
		return e.table.Decider().Grant(ctx, e.Pool, grants, false, e.Clock())
	}
	gone, err := e.hear(ctx, orders, send, func(err error) { e.arrivedLate(orders, grants, sent, err) })
	if gone {
		return tickets, e.Fault("take", err)
	}
	if err != nil && (wait || conn.Code(err) != conn.LockNotAvailable) { // otherwise one was locked in the same moment, and nothing is taken
		failed(orders, err)
		return tickets, e.Fault("take", err)
	}
	for i, group := range groups {
		var order *escrow.Order
		if orders != nil {
			order = &orders[i]
		}
		if !grants[i].Taken.OK {
			left = append(left, group...)
			order.Failed()
			continue
		}
		e.tellGroup(group, &grants[i], e.arrived(order, group, &grants[i], sent))
	}
	slices.SortFunc(left, func(a, b *ticket) int { return cmp.Compare(a.Value.place, b.Value.place) })
	return left, nil
}

// grantInTurn grants from one row, for which it waits: with its COMMIT in the same round trip, if
// it prefetches, or if the row was to be had when it was waited for last. However many wait then,
// each has it for a moment, while with a round trip in between each would have it for as long as
// its process needs to answer. But when a row is waited for first, it may be long until it is
// free, and callers that give up by then should have taken nothing.
func (e *engine) grantInTurn(ctx context.Context, grants []table.Grant) error {
	g := &grants[0]
	g.Pipelined = g.Lasts > 0 || e.wasFree(g.Row)
	err := e.table.Decider().Grant(ctx, e.Pool, grants, true, e.Clock())
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.rows[g.Row]; l != nil {
		l.free = err == nil
		l.ahead = l.free && g.Lasts > 0
		if g.Waited >= conn.PassOver { // others stand in its line
			l.used = time.Now()
		}
	}
	return err
}

// wasFree reports whether a row was to be had when it was waited for last.
func (e *engine) wasFree(row decide.Row) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := e.rows[row]
	return l != nil && l.free
}

// tellGroup answers the calls of a group. Each result is of the state that its call left
// behind. The arrival is that of the tokens prefetched besides, if any were.
func (e *engine) tellGroup(tickets []*ticket, g *table.Grant, arrival *escrow.Arrival) {
	changes := []decide.Change{g.Change}
	change, rest := &changes[0], g.Count+g.Prefetched() // the prefetched tokens are this process's, and count in the results
	for _, t := range tickets {
		p := t.Value
		if p.prefetch {
			p.result.OK = arrival != nil && g.Prefetched() > 0
			t.Finish()
			continue
		}
		change.Count, change.After = p.call.Demands[0].Count, g.Taken.After
		if rest -= change.Count; rest != 0 { // as before those that come after it
			change.After = g.Definition.Spend(g.Taken.After, g.Taken.At, -rest)
		}
		p.result = e.granted(&p.call, changes, g.Taken.At, "", nil)
		switch {
		case p.tokens == nil:
		case arrival != nil:
			*p.tokens = arrival.Tokens(change.Count, change.After)
		default:
			*p.tokens = p.entry.Granted(change.Count, change.After, g.Taken.At)
		}
		finish(t)
	}
}

// groups sorts calls by the row that they would take from. A group is granted as a whole or not
// at all: to grant all of it, the row needs to have no more than the most that any of its calls
// needs after those before it. Calls that check, take at most n tokens or take from several
// rows are in none, and neither are calls with another definition than the others, while a new
// one is being rolled out.
func (e *engine) groups(tickets []*ticket) (groups [][]*ticket, grants []table.Grant, left []*ticket) {
	singles := make([]*ticket, 0, len(tickets))
	for i, t := range tickets {
		if t.Value.place = i; e.single(t.Value) {
			singles = append(singles, t)
		} else {
			left = append(left, t)
		}
	}
	slices.SortFunc(singles, func(a, b *ticket) int {
		p, q := a.Value, b.Value
		if c := p.row.Compare(q.row); c != 0 {
			return c
		}
		return cmp.Compare(p.place, q.place)
	})
	rows := 0
	for i, t := range singles {
		if i == 0 || t.Value.row != singles[i-1].Value.row {
			rows++
		}
	}
	groups, grants = make([][]*ticket, 0, rows), make([]table.Grant, 0, rows)
	for i, t := range singles {
		p := t.Value
		a := &p.call.Demands[0]
		n := len(grants) - 1
		switch {
		case i == 0 || p.row != grants[n].Row:
			grants = append(grants, table.Grant{Change: a.Change(0, p.row.Shard, 0), Need: math.Inf(-1)})
			groups = append(groups, singles[i:i])
			n++
		case a.Definition != groups[n][0].Value.call.Demands[0].Definition:
			left = append(left, t)
			continue
		}
		g := &grants[n]
		groups[n] = append(groups[n], t)
		if !p.prefetch { // which asks for no more than the others do
			g.Count += a.Count
			g.Need = max(g.Need, g.Count+p.floor)
		}
	}
	for i := range grants {
		if math.IsInf(grants[i].Need, -1) {
			grants[i].Need = 0
		}
	}
	return groups, grants, left
}

// single finds the row of a call that takes from one; false if it does not.
func (e *engine) single(p *pending) bool {
	call := p.call.Head()
	if p.check || call.AtMost() || len(call.Demands) > 1 {
		return false
	}
	a := &call.Demands[0]
	p.row, p.floor = decide.Row{Key: a.KeyOf()}, a.Definition.Keeps(a.Floor) // reservations that wait have slots of their own, so a group is granted at once
	if !a.Sharded() {
		return true
	}
	if a.Floor > 0 { // it is left by all shards together
		return false
	}
	changes, ok := e.guess(call, func(int) int { return e.choose(a) })
	if ok {
		p.row, p.floor = changes[0].Row, changes[0].Floor
	}
	return ok
}
