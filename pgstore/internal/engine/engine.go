// Package engine decides calls on their own. They share statements: while one is under way, the
// calls that arrive gather, and the next one decides all of them (package batch). There are three
// steps, and the table has a verb for each:
//
//   - Grant takes from each row the sum of its calls, if it has enough for all of them. The row
//     need not be read first.
//   - Read answers checks, and refuses calls that cannot be granted: that writes and locks
//     nothing.
//   - Decide locks the rows of the other calls, decides these in the process, in the order of
//     arrival, and writes them.
//
// On plain PostgreSQL none of them waits for a row that another transaction has locked: such rows
// are passed over, and their calls go on in a queue for that row alone, which waits for it. Later
// calls for the row join that queue at once. Where tables are distributed nothing can be passed
// over, so each row has such a queue from the beginning. While many calls are under way, those for
// rows of one part of the table first share a statement.
package engine

import (
	"context"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/known"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Engine decides calls on their own. It is safe for concurrent use.
type Engine struct {
	*conn.Conn

	// Statements counts batches of calls that were decided together, and Calls the calls in them.
	Statements, Calls atomic.Int64

	Memory Memory // nil for none; set before the engine is in use

	table    *table.Table
	decides  table.Decider
	known    *known.Known
	observed bool

	seed   maphash.Seed
	queues [queues]queue

	mu    sync.Mutex
	rows  map[decide.Row]*queue
	many  int // above this number of rows, idle queues are deleted
	parts parts
}

// Memory is a layer above the engine that holds tokens of rows. Grants take tokens for it.
type Memory interface {
	// Answer answers the calls that it can before a statement is sent, and returns the others.
	Answer(calls []*Ticket) (left []*Ticket)

	// Add adds the Memory's tokens to a grant that is about to be sent for calls.
	Add(calls []*Ticket, g *table.Grant)

	// Done reports a grant's outcome, before its calls are answered. There are no calls if all
	// callers gave up.
	Done(calls []*Ticket, g *table.Grant, err error)

	// Refused reports the state of the first row of a refused call.
	Refused(p *Pending, state bucket.State, at time.Time)

	// Waits reports that a call waits for its row, which another transaction has locked.
	Waits(p *Pending)
}

// Pending is a call that waits for its decision.
type Pending struct {
	Call  decide.Call
	One   [1]decide.Demand // room for the demand of a Call that has one
	Check bool
	Extra bool // a Memory's own call: it wants only the tokens added to a grant

	Attachment any // what a Memory keeps with the call

	// Granted, if set, is called with the count that a row has granted, and the state that the call
	// left, before the caller is answered. Abandoned is called if the caller gave up by then.
	Granted   func(count float64, after bucket.State, at time.Time)
	Abandoned func()

	Result ratelimit.Result
	Err    error

	row   decide.Row // from which it takes, as one of a group
	floor float64    // the lowest value that it may leave behind there
	order int        // of arrival

	locked atomic.Pointer[decide.Row] // that it waits for

	began  time.Time // if the Store is observed
	effort watch.Effort
}

// Ticket is a call in a queue.
type Ticket = batch.Ticket[*Pending]

// Finish answers a call, or calls Abandoned if its caller gave up.
func Finish(t *Ticket) {
	if !finish(t) && t.Value.Abandoned != nil {
		t.Value.Abandoned()
	}
}

// finish answers a call, and reports whether its caller was still waiting. Afterwards the Pending
// is the caller's.
func finish(t *Ticket) bool {
	t.Refused = !t.Value.Extra && !t.Value.Result.OK
	return t.Finish()
}

var pendings = sync.Pool{New: func() any { return new(Pending) }}

// NewPending returns a Pending for a call that no Memory sees.
func NewPending() *Pending { return pendings.Get().(*Pending) }

// Free returns p for later calls. Decide must have answered it without an error.
func (p *Pending) Free() {
	*p = Pending{}
	pendings.Put(p)
}

// queues is the number of queues that keys share. Each has a statement under way at a time, and so a
// connection. Calls for one limit and key share a queue.
const queues = 2

// New returns an engine. With observed it measures how long calls wait.
func New(c *conn.Conn, t *table.Table, k *known.Known, observed bool) *Engine {
	e := &Engine{Conn: c, table: t, decides: t.Decider(), known: k, observed: observed, seed: maphash.MakeSeed(), rows: make(map[decide.Row]*queue), many: manyRows}
	if c.Pool != nil {
		e.parts.alone = int64(c.Pool.Config().MaxConns / 2)
	}
	for i := range e.queues {
		q := &e.queues[i]
		q.calls = e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serve(ctx, q, tickets, nil) })
	}
	return e
}

func (e *Engine) newQueue(serve func(context.Context, []*Ticket)) *batch.Queue[*Pending] {
	return batch.New(conn.MostTogether, e.Timeout, serve, e.Work.Spawn)
}

// Decide decides a call, whose definitions are noted. It adds the call's effort to a watched verb; w is
// nil for none. It returns an error if the caller gave up or the database failed.
func (e *Engine) Decide(ctx context.Context, w *watch.Watch, p *Pending) (ratelimit.Result, error) {
	end, err := e.Enter(ctx)
	if err != nil {
		return ratelimit.Result{}, err
	}
	defer end()
	if err := ctx.Err(); err != nil { // or it would count as a call that met others at its row
		return ratelimit.Result{}, e.Fault("decide", err)
	}
	if e.observed {
		p.began = w.Start()
	}
	defer e.parts.underWay.Add(-1)
	if _, err := e.queueFor(p, e.parts.underWay.Add(1)).Do(ctx, p); err != nil {
		if row := p.locked.Load(); row != nil {
			return ratelimit.Result{}, e.Locked(err, row.Name)
		}
		return ratelimit.Result{}, e.Fault("decide", err)
	}
	if e.observed && w != nil {
		w.Add(p.effort)
	}
	return p.Result, p.Err
}

// queueFor returns the queue in which a call is decided: the queue of a locked row if the call
// needs one, or else a queue that keys share. On a distributed table it is the queue of the call's
// row or of its part, or a new queue for a check and for a call with several rows. underWay is the
// number of calls under way.
func (e *Engine) queueFor(p *Pending, underWay int64) *batch.Queue[*Pending] {
	e.mu.Lock()
	defer e.mu.Unlock()
	call := &p.Call
	switch {
	case e.table.PassesOver():
		if len(e.rows) > 0 && !p.Check {
			if row, ok := e.lockedRow(p); ok {
				return e.queueForLocked(row, p)
			}
		}
		return e.queues[maphash.Comparable(e.seed, call.Demands[0].KeyOf())%queues].calls
	case p.Check || len(call.Demands) > 1 || call.Sharded():
		return e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serve(ctx, new(queue), tickets, nil) })
	}
	return e.queueOnNode(p, underWay)
}

// serve decides the calls of a queue. Calls whose row is locked move to the queue of that row. await
// is the awaited row; nil for none.
func (e *Engine) serve(ctx context.Context, q *queue, tickets []*Ticket, await *awaited) {
	if tickets = e.answerFromMemory(tickets); len(tickets) == 0 {
		return
	}
	if q.refusing {
		tickets = e.decideExtra(ctx, tickets, await)
	}
	locked := e.decideAll(ctx, tickets, !q.refusing, await)
	q.refusing = mostRefused(tickets)
	if len(locked) > 0 {
		e.requeue(locked)
	}
}

// answerFromMemory answers the calls that the Memory can answer, and returns the others.
func (e *Engine) answerFromMemory(tickets []*Ticket) []*Ticket {
	if e.Memory == nil || len(tickets) == 0 {
		return tickets
	}
	return e.Memory.Answer(tickets)
}

// decideExtra decides the Memory's own calls, and returns the others.
func (e *Engine) decideExtra(ctx context.Context, tickets []*Ticket, await *awaited) (others []*Ticket) {
	var extra []*Ticket
	for _, t := range tickets {
		if t.Value.Extra {
			extra = append(extra, t)
		} else {
			others = append(others, t)
		}
	}
	if len(extra) > 0 {
		e.requeue(e.decideAll(ctx, extra, true, await))
	}
	return others
}

// decideAll decides calls, and returns the calls whose rows another transaction has locked. If the
// database rejects the values of several calls, each half of them is decided by itself, so that only
// the call at fault fails.
func (e *Engine) decideAll(ctx context.Context, tickets []*Ticket, granting bool, await *awaited) (locked []*Ticket) {
	left := tickets
	var stillLocked []*Ticket // the Memory's own
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
			if e.Memory != nil && await == nil {
				stillLocked = e.stillLockedExtra(ctx, left)
			}
		}
		if e.Memory != nil {
			left = withoutExtra(left, stillLocked)
		}
		if len(left) == 0 {
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
		return append(left, stillLocked...)
	case conn.TimedOut(err) && !slices.ContainsFunc(left, func(t *Ticket) bool { return t.Value.locked.Load() == nil }): // all wait
		return append(left, stillLocked...)
	case conn.OfValues(err) && len(left) > 1:
		half := len(left) / 2
		return append(e.decideAll(ctx, left[:half:half], granting, await), e.decideAll(ctx, left[half:], granting, await)...)
	}
	for _, t := range left {
		t.Value.Result, t.Value.Err = ratelimit.Result{}, err
		finish(t)
	}
	return stillLocked
}

// begin counts calls that are about to be decided together.
func (e *Engine) begin(tickets []*Ticket) {
	e.Statements.Add(1)
	e.Calls.Add(int64(len(tickets)))
	if !e.observed {
		return
	}
	now := time.Now()
	for _, t := range tickets {
		t.Value.effort.Queued, t.Value.effort.Batch = now.Sub(t.Value.began), len(tickets)
	}
}

// stillLockedExtra returns the Memory's own calls that were granted nothing although their rows
// have enough: another transaction had these locked. The calls wait for a turn at the row, since
// they would hardly ever find it unlocked while many processes take from it.
func (e *Engine) stillLockedExtra(ctx context.Context, tickets []*Ticket) (stillLocked []*Ticket) {
	var rows table.Rows
	for _, t := range tickets {
		if t.Value.Extra {
			stillLocked, rows.Rows = append(stillLocked, t), append(rows.Rows, decide.Row{Key: t.Value.Call.Demands[0].KeyOf()})
		}
	}
	if len(stillLocked) == 0 || e.table.Read(ctx, e.Pool, &rows, e.Clock()) != nil { // no caller depends on it
		return nil
	}
	n := 0
	for i, t := range stillLocked {
		definition := &t.Value.Call.Demands[0].Definition
		if rows.Found[i] && definition.Refill(rows.States[i], rows.At).Value >= 2 { // a grant takes at most half as extra
			t.Value.locked.Store(&rows.Rows[i])
			stillLocked[n] = t
			n++
		}
	}
	return stillLocked[:n]
}

// withoutExtra returns the calls that want a result. It finishes the others, unless they are in
// stillLocked.
func withoutExtra(tickets, stillLocked []*Ticket) []*Ticket {
	return slices.DeleteFunc(slices.Clone(tickets), func(t *Ticket) bool {
		if t.Value.Extra && !slices.Contains(stillLocked, t) {
			t.Finish()
		}
		return t.Value.Extra
	})
}

// mostRefused reports whether more than half of the calls were refused. Calls that were deleted
// from the slice are nil.
func mostRefused(tickets []*Ticket) bool {
	refused := 0
	for _, t := range tickets {
		if t != nil && t.Refused {
			refused++
		}
	}
	return 2*refused > len(tickets)
}

// decider returns the Decider of calls that wait for await.
func (e *Engine) decider(await *awaited) table.Decider {
	if await != nil && await.part {
		return e.table.Part()
	}
	return e.decides
}
