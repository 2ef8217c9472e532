package engine

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// grant grants the groups whose rows have enough for all of their calls. It returns the other calls,
// for which it has written and locked nothing.
func (e *Engine) grant(ctx context.Context, tickets []*Ticket, await *awaited) (left []*Ticket, err error) {
	tickets = slices.DeleteFunc(tickets, (*Ticket).Gone)
	room := groupings.Get().(*grouping)
	if e.Memory == nil { // the Memory may need the room after all callers gave up
		defer groupings.Put(room)
	}
	groups, grants, left := e.groups(room, tickets)
	if len(groups) == 0 {
		return left, nil
	}
	extra := e.Memory != nil && e.add(groups, grants)
	wait := await != nil && len(grants) == 1 && grants[0].Row == await.row
	if wait {
		await.seat.Share()
	}
	send := func() error {
		if wait {
			defer await.seat.Leave()
			return e.grantInTurn(ctx, grants)
		}
		return e.decider(await).Grant(ctx, e.Pool, grants, false, e.Clock())
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
	failed := err != nil && (wait || !conn.TimedOut(err)) // TimedOut: a row was locked in the same moment, and nothing is taken
	if e.Memory != nil {
		if failed {
			e.done(nil, grants, err)
		} else {
			e.done(groups, grants, nil)
		}
	}
	if failed {
		return tickets, e.Fault("take", err)
	}
	for i, group := range groups {
		if grants[i].Taken.OK {
			e.answerGroup(&room.change, group, &grants[i])
		} else {
			left = append(left, group...)
		}
	}
	slices.SortFunc(left, func(a, b *Ticket) int { return cmp.Compare(a.Value.order, b.Value.order) })
	return left, nil
}

// add lets the Memory add its tokens to grants, and reports whether it added any.
func (e *Engine) add(groups [][]*Ticket, grants []table.Grant) (extra bool) {
	for i := range grants {
		e.Memory.Add(groups[i], &grants[i])
		extra = extra || grants[i].TakesExtra()
	}
	return extra
}

// done reports the outcome of grants to the Memory. groups is nil if all callers gave up.
func (e *Engine) done(groups [][]*Ticket, grants []table.Grant, err error) {
	for i := range grants {
		var group []*Ticket
		if groups != nil {
			group = groups[i]
		}
		e.Memory.Done(group, &grants[i], err)
	}
}

// sendToEnd sends a statement with tokens for the Memory. If all callers give up first, gone is true;
// the answer is awaited all the same, and late is called with its error.
func (e *Engine) sendToEnd(ctx context.Context, send func() error, late func(error)) (gone bool, err error) {
	var ended atomic.Bool // by the answer or by the end of ctx
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

// grantInTurn waits for one row and grants from it. It sends COMMIT in the same round trip if the
// grant takes extra, or if the last wait got the row. Then each process has the row for a moment
// only, and not for a round trip. Otherwise the wait may be long, and callers who give up should
// have taken nothing, so COMMIT is not sent with it.
func (e *Engine) grantInTurn(ctx context.Context, grants []table.Grant) error {
	g := &grants[0]
	g.Pipelined = g.TakesExtra() || e.servedAtOnce(g.Row)
	err := e.decides.Grant(ctx, e.Pool, grants, true, e.Clock())
	e.mu.Lock()
	defer e.mu.Unlock()
	if q := e.rows[g.Row]; q != nil {
		q.atOnce = err == nil
		q.extra = q.atOnce && g.TakesExtra()
		if g.Waited >= conn.PassOver { // other processes wait for it
			e.mark(g.Row)
		}
	}
	return err
}

// servedAtOnce reports whether the last wait for a row got the row.
func (e *Engine) servedAtOnce(row decide.Row) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	q := e.rows[row]
	return q != nil && q.atOnce
}

// answerGroup answers the calls of a granted group. Each result shows the state that its call left.
// The Memory's tokens count as left, since this process has them.
func (e *Engine) answerGroup(changes *[1]decide.Change, tickets []*Ticket, g *table.Grant) {
	changes[0] = g.Change
	change, rest := &changes[0], g.Count+g.Taken.Extra
	for _, t := range tickets {
		p := t.Value
		if p.Extra {
			p.Result.OK = g.Taken.Extra > 0
			t.Finish()
			continue
		}
		change.Count, change.After = p.Call.Demands[0].Count, g.Taken.After
		if rest -= change.Count; rest != 0 { // put back what later calls took
			change.After = g.Definition.Spend(g.Taken.After, g.Taken.At, -rest)
		}
		p.Result = e.known.Granted(&p.Call, changes[:], g.Taken.At, "", nil)
		if p.Granted != nil {
			p.Granted(change.Count, change.After, g.Taken.At)
		}
		Finish(t)
	}
}

// grouping is room for the groups of a statement, which the next one uses again.
type grouping struct {
	singles []*Ticket
	groups  [][]*Ticket
	grants  []table.Grant
	change  [1]decide.Change
}

var groupings = sync.Pool{New: func() any { return new(grouping) }}

// groups groups calls by the row from which they take. A group is granted as a whole or not at all:
// the row must hold at least the largest running total. left holds the calls that check, take at most
// n tokens, or take from several rows. It also holds calls whose definition differs from their
// group's, while a new one is being rolled out.
func (e *Engine) groups(room *grouping, tickets []*Ticket) (groups [][]*Ticket, grants []table.Grant, left []*Ticket) {
	singles := slices.Grow(room.singles[:0], len(tickets))
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
	groups, grants = room.groups[:0], room.grants[:0]
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
		if !p.Extra { // a Memory's own call needs nothing
			g.Count += a.Count
			g.Need = max(g.Need, g.Count+p.floor)
		}
	}
	for i := range grants {
		if math.IsInf(grants[i].Need, -1) {
			grants[i].Need = 0
		}
	}
	room.singles, room.groups, room.grants = singles, groups, grants
	return groups, grants, left
}

// single sets the row of a call that takes from one row, and reports whether it does.
func (e *Engine) single(p *Pending) bool {
	if p.Call.Plain {
		p.row, p.floor = decide.Row{Key: p.Call.Demands[0].KeyOf()}, 0
		return true
	}
	call := p.Call.Head()
	if p.Check || call.AtMost() || len(call.Demands) > 1 {
		return false
	}
	a := &call.Demands[0]
	// Its group is granted at once. In a sliding window, debt lies in later slots.
	p.row, p.floor = decide.Row{Key: a.KeyOf()}, a.Definition.Keeps(a.Floor)
	if !a.Sharded() {
		return true
	}
	if a.Floor > 0 { // all shards together must leave it
		return false
	}
	changes, ok := e.known.Guess(call, func(int) int { return e.known.Choose(a) })
	if ok {
		p.row, p.floor = changes[0].Row, changes[0].Floor
	}
	return ok
}
