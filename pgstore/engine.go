package pgstore

import (
	"context"
	"hash/maphash"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

func newEngine(b *base) *engine {
	e := &engine{base: b, seed: maphash.MakeSeed(), rows: make(map[decide.Row]*lane), many: manyRows}
	for i := range e.lanes {
		l := &e.lanes[i]
		l.queue = e.newQueue(func(ctx context.Context, tickets []*ticket) { e.serve(ctx, l, tickets, nil) })
	}
	return e
}

func (e *engine) newQueue(serve func(context.Context, []*ticket)) *batch.Queue[*pending] {
	return batch.New(conn.MostTogether, e.Timeout, serve, e.Work.Spawn)
}

// decide decides a call, of a verb that is watched or, with nil, of none. An error is that of
// a caller who gave up, or of the database.
func (e *engine) decide(ctx context.Context, w *watch.Watch, p *pending) (ratelimit.Result, error) {
	if e.Pool == nil {
		return ratelimit.Result{}, conn.ErrNoPool
	}
	if err := e.Work.Begin(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	defer e.Work.End()
	if err := ctx.Err(); err != nil { // or it would count as a call that met others at its row
		return ratelimit.Result{}, e.Fault("decide", err)
	}
	p.began = w.Start()
	if _, err := e.queueFor(p).Do(ctx, p); err != nil {
		if row := p.locked.Load(); row != nil {
			return ratelimit.Result{}, conn.Locked(row.Name, err)
		}
		return ratelimit.Result{}, e.Fault("decide", err)
	}
	if w.On() {
		w.Add(p.effort)
	}
	return p.result, p.err
}

// queueFor returns the queue in which a call is decided: that of a row that it waits for, or a
// lane; of a table that is distributed, that of its row, or one of its own.
func (e *engine) queueFor(p *pending) *batch.Queue[*pending] {
	e.mu.Lock()
	defer e.mu.Unlock()
	call := &p.call
	switch {
	case e.table.PassesOver():
		if row, ok := e.lockedRow(p); ok {
			return e.enter(row, p)
		}
		return e.lanes[maphash.Comparable(e.seed, call.Demands[0].KeyOf())%lanes].queue
	case p.check || len(call.Demands) > 1 || call.Sharded():
		return e.newQueue(func(ctx context.Context, tickets []*ticket) { e.serve(ctx, new(lane), tickets, nil) })
	}
	return e.queueOf(decide.Row{Key: call.Demands[0].KeyOf()})
}

// serve decides the calls of a lane, but for those that go on in the queue of a locked row.
// That of a row that is waited for is await.
func (e *engine) serve(ctx context.Context, l *lane, tickets []*ticket, await *awaiting) {
	tickets = e.answer(e.noteAll(tickets))
	if len(tickets) == 0 {
		return
	}
	if l.refusing {
		tickets = e.prefetchAlone(ctx, tickets, await)
	}
	e.await(e.decideAll(ctx, tickets, !l.refusing, await))
	l.refusing = mostRefused(tickets)
}

// prefetchAlone decides the calls that prefetch, which takes a grant, and returns the others.
func (e *engine) prefetchAlone(ctx context.Context, tickets []*ticket, await *awaiting) (others []*ticket) {
	var more []*ticket
	for _, t := range tickets {
		if t.Value.prefetch {
			more = append(more, t)
		} else {
			others = append(others, t)
		}
	}
	if len(more) > 0 {
		e.await(e.decideAll(ctx, more, true, await))
	}
	return others
}

// decideAll decides calls, and returns those with rows that another transaction has locked. If
// the database finds fault with a statement for many, each half of them is decided by itself,
// so that only the one at fault fails. A row that is to be waited for is await.
func (e *engine) decideAll(ctx context.Context, tickets []*ticket, granting bool, await *awaiting) (locked []*ticket) {
	left := tickets
	var late []*ticket // that prefetch
	e.begin(left)
	again := func() {
		for _, t := range left {
			t.Value.effort.Retries++
		}
	}
	err := e.RetryCounted(ctx, again, func() (err error) {
		if granting {
			if left, err = e.grant(ctx, left, await); err != nil {
				return err
			}
			granting = false
			late = e.passedOver(ctx, left, await)
		}
		if left = withoutPrefetching(left, late); len(left) == 0 {
			return nil
		}
		var snapshot *decide.Snapshot
		if left, snapshot, err = e.read(ctx, left); err != nil || len(left) == 0 {
			return err
		}
		left, err = e.lock(ctx, left, snapshot, await)
		return err
	})
	switch {
	case err == nil:
		return append(left, late...)
	case conn.Code(err) == conn.LockNotAvailable && allWait(left):
		return append(left, late...)
	case conn.OfValues(err) && len(left) > 1:
		half := len(left) / 2
		return append(e.decideAll(ctx, left[:half:half], granting, await), e.decideAll(ctx, left[half:], granting, await)...)
	}
	for _, t := range left {
		t.Value.result, t.Value.err = ratelimit.Result{}, err
		t.Finish()
	}
	return late
}

// begin notes that calls are about to be decided together.
func (e *engine) begin(tickets []*ticket) {
	e.counts.statements.Add(1)
	e.counts.calls.Add(int64(len(tickets)))
	if e.observer == nil {
		return
	}
	now := time.Now()
	for _, t := range tickets {
		t.Value.effort.Queued, t.Value.effort.Batch = now.Sub(t.Value.began), len(tickets)
	}
}

// read answers checks, and refuses calls that cannot be granted. It returns the others, and the
// rows as it has read them.
func (e *engine) read(ctx context.Context, tickets []*ticket) (left []*ticket, snapshot *decide.Snapshot, err error) {
	if tickets = slices.DeleteFunc(tickets, (*ticket).Gone); len(tickets) == 0 {
		return nil, nil, nil
	}
	snapshot = newSnapshot(tickets)
	sent := e.sending(tickets)
	rows := table.Rows{Rows: snapshot.Rows}
	if err := e.table.Read(ctx, e.Pool, &rows, e.Clock()); err != nil {
		return tickets, nil, e.Fault("read", err)
	}
	snapshot.States, snapshot.Found, snapshot.At = rows.States, rows.Found, rows.At
	for _, t := range tickets {
		p := t.Value
		view := snapshot.View(&p.call)
		e.saw(&p.call, view)
		if !p.check {
			if changes, ok := p.call.Plan(view); ok {
				snapshot.Need(&p.call, changes)
				left = append(left, t)
				continue
			}
			p.refused(view, sent)
		}
		p.result = p.call.Checked(view)
		t.Finish()
	}
	return left, snapshot, nil
}

// lock decides calls with their rows locked, from the reading to the writing. It returns those
// with rows that another transaction has locked.
func (e *engine) lock(ctx context.Context, tickets []*ticket, seen *decide.Snapshot, await *awaiting) (left []*ticket, err error) {
	if tickets = slices.DeleteFunc(tickets, (*ticket).Gone); len(tickets) == 0 {
		return nil, nil
	}
	snapshot := newSnapshot(tickets)
	sent := e.sending(tickets)
	var decided []*ticket
	d := table.Decision{
		Rows: snapshot.Rows, Definitions: snapshot.Definitions, Missing: e.missing(snapshot, seen, await), Await: await.of(),
		OnLocked: e.markLocked,
		Decide: func(rows *table.Rows) ([]int, error) {
			snapshot.States, snapshot.Found, snapshot.At = rows.States, rows.Found, rows.At
			snapshot.Assume(seen)
			left, decided = e.decideLocked(tickets, snapshot)
			return snapshot.Changes(), nil
		},
	}
	if err := e.table.Decider().Decide(ctx, e.Pool, &d, e.Clock()); err != nil {
		if conn.Code(err) == conn.LockNotAvailable && await != nil {
			for _, t := range tickets {
				t.Value.locked.Store(await.of())
			}
		}
		return tickets, e.Fault("decide", err)
	}
	for _, t := range decided { // it is in the database now
		e.tell(t, snapshot, sent)
	}
	return left, nil
}

// decideLocked decides calls on a snapshot of locked rows. Those are left of which somebody
// else has locked a row that they need.
func (e *engine) decideLocked(tickets []*ticket, snapshot *decide.Snapshot) (left, decided []*ticket) {
	for _, t := range tickets {
		p := t.Value
		changes, ok := p.call.Plan(snapshot.Unlocked(&p.call))
		if ok && !snapshot.Passes(&p.call, changes) {
			snapshot.Apply(changes)
			p.result = p.call.Receipted(changes, snapshot.View(&p.call), "", nil)
			if p.tokens != nil {
				*p.tokens = p.entry.Granted(changes[0].Count, changes[0].After, snapshot.At)
			}
		} else if missing := snapshot.MissingOf(&p.call); missing != nil {
			p.locked.Store(&missing[0])
			left = append(left, t)
			continue
		} else {
			p.result = p.call.Refused(snapshot.View(&p.call))
		}
		decided = append(decided, t)
	}
	return left, decided
}

// tell answers a call that was decided on a snapshot that has been written.
func (e *engine) tell(t *ticket, snapshot *decide.Snapshot, sent time.Time) {
	p, view := t.Value, snapshot.View(&t.Value.call)
	e.saw(&p.call, view)
	if p.result.OK {
		for i := range p.call.Demands {
			e.cache.Changed(p.call.Demands[i].KeyOf())
		}
	} else {
		p.refused(view, sent)
	}
	finish(t)
}

func newSnapshot(tickets []*ticket) *decide.Snapshot {
	calls := make([]*decide.Call, len(tickets))
	for i, t := range tickets {
		calls[i] = &t.Value.call
	}
	return decide.NewSnapshot(calls)
}

// missing returns the rows of a snapshot that were not found on the one that was read, but
// for the awaited one and those that somebody is known to have made.
func (e *engine) missing(snapshot, seen *decide.Snapshot, await *awaiting) (rows []decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, row := range seen.Missing(snapshot) {
		l, locked := e.rows[row]
		locked = locked && e.table.PassesOver() && time.Since(l.used) <= contended
		if !locked && (await == nil || row != await.row) {
			rows = append(rows, row)
		}
	}
	return rows
}

// noteAll remembers the definitions of calls, most of which are the same, and returns the
// calls that have some that can be.
func (e *engine) noteAll(tickets []*ticket) []*ticket {
	var last bucket.Definition
	return slices.DeleteFunc(tickets, func(t *ticket) bool {
		call := &t.Value.call
		if len(call.Demands) == 1 && call.Demands[0].Definition == last {
			return false
		}
		if t.Value.err = e.seen.NoteCall(call); t.Value.err != nil {
			t.Finish()
			return true
		}
		last = call.Demands[0].Definition
		return false
	})
}

// withoutPrefetching returns the calls that want a result. Orders that a grant did not prefetch
// are dropped, but for those that are late.
func withoutPrefetching(tickets, late []*ticket) []*ticket {
	return slices.DeleteFunc(slices.Clone(tickets), func(t *ticket) bool {
		if t.Value.prefetch && !slices.Contains(late, t) {
			t.Finish()
		}
		return t.Value.prefetch
	})
}

// allWait reports whether of each call the row is known that it waits for.
func allWait(tickets []*ticket) bool {
	return !slices.ContainsFunc(tickets, func(t *ticket) bool { return t.Value.locked.Load() == nil })
}

// mostRefused reports whether most of the calls were refused that wanted a result. A call that
// was given up may have been deleted: it is nil.
func mostRefused(tickets []*ticket) bool {
	refused := 0
	for _, t := range tickets {
		if t != nil && t.Finished() && !t.Value.prefetch && !t.Value.result.OK {
			refused++
		}
	}
	return 2*refused > len(tickets)
}

// lockedRow returns a row of a call that is waited for. It needs mu.
func (e *engine) lockedRow(p *pending) (row decide.Row, ok bool) {
	if p.check || len(e.rows) == 0 {
		return row, false
	}
	call := p.call.Head()
	for i := range call.Demands {
		a := &call.Demands[i]
		row = decide.Row{Key: a.KeyOf()}
		l, ok := e.rows[row]
		switch {
		case !ok || a.Sharded(): // of which another may do
		case l.idle():
			delete(e.rows, row)
		default:
			return row, true
		}
	}
	return row, false
}

// await moves calls to the queues of the rows that they wait for.
func (e *engine) await(tickets []*ticket) {
	if len(tickets) == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, t := range tickets {
		row := *t.Value.locked.Load()
		e.mark(row)
		e.enter(row, t.Value).Join(t)
	}
}

// enter returns the queue of a row, for a call that waits for it. It needs mu.
func (e *engine) enter(row decide.Row, p *pending) *batch.Queue[*pending] {
	p.locked.Store(&row)
	if !p.prefetch {
		p.entry.Contended()
	}
	return e.queueOf(row)
}

// queueOf returns the queue of a row. It needs mu.
func (e *engine) queueOf(row decide.Row) *batch.Queue[*pending] {
	l, passes := e.rows[row], e.table.PassesOver()
	if l == nil || !passes {
		l = e.mark(row)
	}
	switch {
	case l.queue != nil:
	case passes:
		l.queue = e.newQueue(func(ctx context.Context, tickets []*ticket) { e.serveLocked(ctx, row, tickets) })
	default:
		l.queue = e.newQueue(func(ctx context.Context, tickets []*ticket) { e.serve(ctx, l, tickets, &awaiting{row: row}) })
	}
	return l.queue
}

// serveLocked decides the calls that wait for a row, as soon as it is free. While
// no connection may wait for it, it looks now and then.
func (e *engine) serveLocked(ctx context.Context, row decide.Row, tickets []*ticket) {
	tickets = e.noteAll(tickets)
	for w := e.LockWait(0); len(tickets) > 0; {
		var left []*ticket
		if tickets = e.answer(tickets); len(tickets) == 0 {
			return
		}
		_ = w.Attempt(ctx, func(p *conn.Seat) error { // if ctx is over nobody is left
			var await *awaiting
			if p != nil {
				await = &awaiting{row, p}
			}
			left = e.decideAll(ctx, tickets, true, await)
			return nil
		})
		tickets = tickets[:0]
		var others []*ticket
		for _, t := range left {
			switch {
			case t.Gone():
			case *t.Value.locked.Load() == row:
				tickets = append(tickets, t)
			default:
				others = append(others, t)
			}
		}
		e.await(others)
	}
}
