package pgstore

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// The first of the two ways in which calls are decided: an UPDATE that takes what those
// for one row want together, of all rows that have enough.

// grant decides the calls of the groups whose rows have enough for all of them.
// Nothing is written or locked for the others, which it returns.
func (o *own) grant(ctx context.Context, tickets []*ticket, await *decide.Row) (left []*ticket, err error) {
	groups, grants, left := o.groups(tickets)
	defer spare(grants)
	orders, groups, grants, left := o.orders(groups, grants, left)
	if len(groups) == 0 {
		return left, nil
	}
	sent := o.hints.memory.Now()
	grant := o.grantFree
	if await != nil && len(grants) == 1 && grants[0].Row == *await {
		grant = o.grantInTurn
	}
	if err := grant(ctx, grants); err != nil {
		return tickets, o.fault("take", err)
	}
	for i, g := range groups {
		if !grants[i].Taken.OK {
			left = append(left, g...)
			continue
		}
		note(g, grants[i].Count)
		if orders == nil || orders[i].Holder == nil {
			o.tellGroup(g, &grants[i], nil)
		} else {
			o.tellGroup(g, &grants[i], arrived(&orders[i], &grants[i], sent))
		}
	}
	return left, nil
}

// orders has grants take ahead for keys from which this process takes much. Those of
// which something must be held, and cannot be, are left.
func (o *own) orders(groups [][]*ticket, grants []table.Grant, left []*ticket) ([]escrow.Order, [][]*ticket, []table.Grant, []*ticket) {
	if o.hints.memory == nil {
		return nil, groups, grants, left
	}
	orders, n := make([]escrow.Order, 0, len(groups)), 0
	for i, g := range groups {
		order, ok := o.order(&grants[i], holderOf(g), wanting(g, toHold))
		if !ok {
			left = append(left, g...)
			continue
		}
		orders = append(orders, order)
		groups[n], grants[n] = g, grants[i]
		n++
	}
	return orders, groups[:n], grants[:n], left
}

// grantFree grants what can be had from rows that nobody has locked: nothing, if one
// of them was locked in the same moment.
func (o *own) grantFree(ctx context.Context, grants []table.Grant) error {
	if err := o.table.Grant(ctx, o.pool, grants, o.clock()); code(err) != lockNotAvailable {
		return err
	}
	return nil
}

// grantInTurn waits for its row, among all who do, in other processes too.
func (o *own) grantInTurn(ctx context.Context, grants []table.Grant) error {
	conn, err := o.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer release(ctx, conn)
	var b pgx.Batch
	b.Queue(beginSQL)
	o.bounds(&b, awaited)
	o.table.QueueGrant(&b, &grants[0], o.clock())
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	// Not with the rest: the server would go on to it when nobody waits any more.
	_, err = conn.Exec(ctx, "COMMIT")
	return err
}

// tellGroup answers the calls of a group. Each is told what it left behind. What they
// got can be put back if it came with an arrival.
func (o *own) tellGroup(tickets []*ticket, g *table.Grant, arrival *escrow.Arrival) {
	changes := []decide.Change{g.Change}
	change, rest := &changes[0], g.Count+g.TookAhead() // which is this process's, as what others are told counts
	for _, t := range tickets {
		p := t.Value
		if p.wants == ahead {
			p.result.OK = arrival != nil && g.TookAhead() > 0
			t.Finish()
			continue
		}
		change.Count = p.call.Asks[0].Count
		if g.AtMost { // alone: less, if there was less
			change.Count = g.Count
		}
		change.After = g.Taken.After
		if rest -= change.Count; rest != 0 { // as before those that come after it
			change.After = g.Definition.Spend(g.Taken.After, g.Taken.At, -rest)
		}
		if p.wants == toHold {
			tokens := arrival.Tokens(change.Count, change.After)
			p.tokens = &tokens
		} else {
			p.result = o.granted(&p.call, changes, g.Taken.At, "", nil)
		}
		t.Finish()
	}
}

// groups sorts calls by the row that they would take from. A group is granted as a
// whole or not at all: to grant all of it, the row needs to have no more than the most
// that any of its calls needs after those before it. Those that check or take from
// several rows are in none, and neither are those whose definition is not that of the
// others, while a new one is being rolled out.
func (o *own) groups(tickets []*ticket) (groups [][]*ticket, grants []table.Grant, left []*ticket) {
	singles := make([]*ticket, 0, len(tickets))
	for i, t := range tickets {
		if o.single(t.Value) {
			t.Value.place = i
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
	groups, grants = make([][]*ticket, 0, rows), spareGrants(rows)
	for i, t := range singles {
		p := t.Value
		a := &p.call.Asks[0]
		n := len(grants) - 1
		switch {
		case i == 0 || p.row != grants[n].Row:
			grants = append(grants, table.Grant{Change: a.Change(0, p.row.Shard, 0), Need: math.Inf(-1)})
			groups = append(groups, singles[i:i])
			n++
		case a.Definition != groups[n][0].Value.call.Asks[0].Definition:
			left = append(left, t)
			continue
		}
		g := &grants[n]
		groups[n] = append(groups[n], t)
		if p.wants == ahead { // which goes with the others, and asks for no more than they do
			continue
		}
		g.AtMost = math.IsInf(g.Need, -1) && p.call.AtMost()
		g.Count += a.Count
		g.Need = max(g.Need, g.Count+p.floor)
	}
	for i := range grants {
		if math.IsInf(grants[i].Need, -1) {
			grants[i].Need = 0
		}
	}
	return groups, grants, left
}

// holderOf is the holder of a group's key; nil if none of its calls knows it.
func holderOf(group []*ticket) *escrow.Holder {
	for _, t := range group {
		if t.Value.holder != nil {
			return t.Value.holder
		}
	}
	return nil
}

// note notes that so much was handed out to a group.
func note(group []*ticket, n float64) {
	calls := 0
	for _, t := range group {
		if t.Value.wants != ahead {
			calls++
		}
	}
	holderOf(group).Note(n, calls)
}

// spares are grants that are not in use, for the next statement: one is half a kilobyte,
// and there is one for each row.
var spares sync.Pool

// spareGrants has room for n grants.
func spareGrants(n int) []table.Grant {
	if grants, ok := spares.Get().(*[]table.Grant); ok && cap(*grants) >= n {
		return *grants
	}
	return make([]table.Grant, 0, n)
}

func spare(grants []table.Grant) {
	clear(grants)
	grants = grants[:0]
	spares.Put(&grants)
}

// single finds the row of a call that takes from one; false if it does not.
func (o *own) single(p *pending) bool {
	call := p.call.Head()
	if p.check || len(call.Asks) > 1 {
		return false
	}
	a := &call.Asks[0]
	if p.row, p.floor = (decide.Row{Key: a.Of()}), a.Floor; a.Definition.Kind == ratelimit.KindSlidingWindow {
		p.floor = 0 // what must wait has a slot of its own, so a group has all of it at once
	}
	if !a.Sharded() {
		return true
	}
	changes, ok := o.guess(call, func(int) int { return o.choose(a) })
	if ok {
		p.row, p.floor = changes[0].Row, changes[0].Floor
	}
	return ok
}
