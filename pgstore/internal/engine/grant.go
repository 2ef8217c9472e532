package engine

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync/atomic"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// grant decides the calls of the groups whose rows have enough for all of them. It writes and locks
// nothing for the others, which it returns.
func (e *Engine) grant(ctx context.Context, tickets []*Ticket, await *awaited) (left []*Ticket, err error) {
	tickets = slices.DeleteFunc(tickets, (*Ticket).Gone)
	groups, grants, left := e.groups(tickets)
	if len(groups) == 0 {
		return left, nil
	}
	extra := e.add(groups, grants)
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
	gone := false
	if extra {
		gone, err = e.sendToEnd(ctx, send, func(err error) { e.done(nil, grants, err) })
	} else {
		err = send()
	}
	if gone {
		return tickets, e.Fault("take", err)
	}
	if err != nil && (wait || !conn.TimedOut(err)) { // otherwise one was locked in the same moment, and nothing is taken
		e.done(nil, grants, err)
		return tickets, e.Fault("take", err)
	}
	e.done(groups, grants, nil)
	for i, group := range groups {
		if grants[i].Taken.OK {
			e.answerGroup(group, &grants[i])
		} else {
			left = append(left, group...)
		}
	}
	slices.SortFunc(left, func(a, b *Ticket) int { return cmp.Compare(a.Value.order, b.Value.order) })
	return left, nil
}

// add has the Memory add to grants, and reports whether it did.
func (e *Engine) add(groups [][]*Ticket, grants []table.Grant) (extra bool) {
	if e.memory == nil {
		return false
	}
	for i := range grants {
		e.memory.Add(groups[i], &grants[i])
		extra = extra || grants[i].TakesExtra()
	}
	return extra
}

// done tells the Memory what came of grants; without groups, no caller waits for it any more.
func (e *Engine) done(groups [][]*Ticket, grants []table.Grant, err error) {
	if e.memory == nil {
		return
	}
	for i := range grants {
		var group []*Ticket
		if groups != nil {
			group = groups[i]
		}
		e.memory.Done(group, &grants[i], err)
	}
}

// sendToEnd sends a statement that takes for a Memory. If all callers give up before its end, its
// answer is awaited all the same, and late is called with its error: gone is true then.
func (e *Engine) sendToEnd(ctx context.Context, send func() error, late func(error)) (gone bool, err error) {
	var ended atomic.Bool // by one of the two
	answer := make(chan error, 1)
	e.Work.Spawn(func() {
		if err := send(); ended.CompareAndSwap(false, true) {
			answer <- err
		} else {
			late(err)
		}
	})
	select {
	case err := <-answer:
		return false, err
	case <-ctx.Done():
		if ended.CompareAndSwap(false, true) {
			return true, ctx.Err()
		}
		return false, <-answer
	}
}

// grantInTurn grants from one row, for which it waits: with its COMMIT in the same round trip, if it
// takes extra, or if the row was to be had when it was waited for last. However many wait then, each
// has it for a moment, while with a round trip in between each would have it for as long as its
// process needs to answer. But when a row is waited for first, it may be long until it is free, and
// callers that give up by then should have taken nothing.
func (e *Engine) grantInTurn(ctx context.Context, grants []table.Grant) error {
	g := &grants[0]
	g.Pipelined = g.TakesExtra() || e.servedAtOnce(g.Row)
	err := e.table.Decider().Grant(ctx, e.Pool, grants, true, e.Clock())
	e.mu.Lock()
	defer e.mu.Unlock()
	if q := e.rows[g.Row]; q != nil {
		q.atOnce = err == nil
		q.extra = q.atOnce && g.TakesExtra()
		if g.Waited >= conn.PassOver { // others stand in its line
			e.mark(g.Row)
		}
	}
	return err
}

// servedAtOnce reports whether a row was to be had when it was waited for last.
func (e *Engine) servedAtOnce(row decide.Row) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	q := e.rows[row]
	return q != nil && q.atOnce
}

// answerGroup answers the calls of a group. Each result is of the state that its call left behind.
// Tokens that were taken besides are this process's, and count in the results.
func (e *Engine) answerGroup(tickets []*Ticket, g *table.Grant) {
	changes := []decide.Change{g.Change}
	change, rest := &changes[0], g.Count+g.Extra()
	for _, t := range tickets {
		p := t.Value
		if p.Extra {
			p.Result.OK = g.Extra() > 0
			t.Finish()
			continue
		}
		change.Count, change.After = p.Call.Demands[0].Count, g.Taken.After
		if rest -= change.Count; rest != 0 { // as before those that come after it
			change.After = g.Definition.Spend(g.Taken.After, g.Taken.At, -rest)
		}
		p.Result = e.known.Granted(&p.Call, changes, g.Taken.At, "", nil)
		if p.Granted != nil {
			p.Granted(change.Count, change.After, g.Taken.At)
		}
		Finish(t)
	}
}

// groups sorts calls by the row that they would take from. A group is granted as a whole or not at
// all: to grant all of it, the row must hold at least the largest running total. Calls that check,
// take at most n tokens or take from several rows are in none, and neither are calls with another
// definition than the others, while a new one is being rolled out.
func (e *Engine) groups(tickets []*Ticket) (groups [][]*Ticket, grants []table.Grant, left []*Ticket) {
	singles := make([]*Ticket, 0, len(tickets))
	for i, t := range tickets {
		if t.Value.order = i; e.single(t.Value) {
			singles = append(singles, t)
		} else {
			left = append(left, t)
		}
	}
	slices.SortFunc(singles, func(a, b *Ticket) int {
		p, q := a.Value, b.Value
		if c := p.row.Compare(q.row); c != 0 {
			return c
		}
		return cmp.Compare(p.order, q.order)
	})
	rows := 0
	for i, t := range singles {
		if i == 0 || t.Value.row != singles[i-1].Value.row {
			rows++
		}
	}
	groups, grants = make([][]*Ticket, 0, rows), make([]table.Grant, 0, rows)
	for i, t := range singles {
		p := t.Value
		a := &p.Call.Demands[0]
		n := len(grants) - 1
		switch {
		case i == 0 || p.row != grants[n].Row:
			grants = append(grants, table.Grant{Change: a.Change(0, p.row.Shard, 0), Need: math.Inf(-1)})
			groups = append(groups, singles[i:i])
			n++
		case a.Definition != groups[n][0].Value.Call.Demands[0].Definition:
			left = append(left, t)
			continue
		}
		g := &grants[n]
		groups[n] = append(groups[n], t)
		if !p.Extra { // which asks for no more than the others do
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
func (e *Engine) single(p *Pending) bool {
	call := p.Call.Head()
	if p.Check || call.AtMost() || len(call.Demands) > 1 {
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
	changes, ok := e.known.Guess(call, func(int) int { return e.known.Choose(a) })
	if ok {
		p.row, p.floor = changes[0].Row, changes[0].Floor
	}
	return ok
}
