// Package engine decides calls on their own. They share statements: while one is under way, the
// calls that arrive gather, and the next one decides all of them (package batch). There are three
// steps, and the table has a verb for each:
//
//   - Grant takes from each row the sum of its calls, if it has enough for all of them. The row
//     need not be read first.
//   - Read answers checks, and refuses calls that cannot be granted: that writes and locks
//     nothing.
//   - Decide locks the rows of the others, which are decided in the process, in the order of
//     arrival, and writes them.
//
// On plain PostgreSQL none of them waits for a row that another transaction has locked: such rows
// are passed over, and their calls go on in a queue for that row alone, which waits for it. Later
// calls for the row join that queue at once. Where tables are distributed nothing can be passed
// over, so each row has such a queue from the beginning.
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

	// Statements is how often calls that had gathered were decided together, and Calls how many
	// they were.
	Statements, Calls atomic.Int64

	table    *table.Table
	known    *known.Known
	memory   Memory // nil for none
	observed bool

	seed   maphash.Seed
	queues [queues]queue

	mu   sync.Mutex
	rows map[decide.Row]*queue
	many int // above this number of rows, idle queues are deleted
}

// Memory is a layer above that holds tokens of rows: what a grant does for it.
type Memory interface {
	// Answer answers those calls that it can by now, before a statement is sent, and returns
	// the others.
	Answer(calls []*Ticket) (left []*Ticket)

	// Add adds to a grant, which is about to be sent for some calls, what it is to take besides
	// them.
	Add(calls []*Ticket, g *table.Grant)

	// Done reports what came of a grant, before its calls are answered. If all callers had gone
	// by then, there are no calls.
	Done(calls []*Ticket, g *table.Grant, err error)

	// Refused reports the state of a row that refused a call.
	Refused(p *Pending, state bucket.State, at time.Time)

	// Waits reports that a call waits for its row, which another transaction has locked.
	Waits(p *Pending)
}

// Pending is a call that waits for its decision.
type Pending struct {
	Call  decide.Call
	One   [1]decide.Demand // has room for those of Call, if it is one
	Check bool
	Extra bool // it is there for what a Memory adds to a grant, and wants no result

	Attachment any // what a Memory keeps with the call

	// Granted, if it is set, is called with what a row has granted, and the state that the call
	// left, before the caller is answered; and Abandoned if the caller had left by then.
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

// Finish answers a call.
func Finish(t *Ticket) {
	if !t.Finish() && t.Value.Abandoned != nil {
		t.Value.Abandoned()
	}
}

// queues is how many statements for calls of different keys, and so how many connections, decide at
// a time. Calls for one limit and key share a queue.
const queues = 2

// New returns an engine. With observed, calls learn how long they waited.
func New(c *conn.Conn, t *table.Table, k *known.Known, observed bool) *Engine {
	e := &Engine{Conn: c, table: t, known: k, observed: observed, seed: maphash.MakeSeed(), rows: make(map[decide.Row]*queue), many: manyRows}
	for i := range e.queues {
		q := &e.queues[i]
		q.calls = e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serve(ctx, q, tickets, nil) })
	}
	return e
}

// Serve has a Memory above the engine. It is called before the engine is in use.
func (e *Engine) Serve(m Memory) { e.memory = m }

func (e *Engine) newQueue(serve func(context.Context, []*Ticket)) *batch.Queue[*Pending] {
	return batch.New(conn.MostTogether, e.Timeout, serve, e.Work.Spawn)
}

// Decide decides a call, of a verb that is watched or, with nil, of none. An error is that of a
// caller who gave up, or of the database.
func (e *Engine) Decide(ctx context.Context, w *watch.Watch, p *Pending) (ratelimit.Result, error) {
	end, err := e.Enter(ctx)
	if err != nil {
		return ratelimit.Result{}, err
	}
	defer end()
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
	return p.Result, p.Err
}

// queueFor returns the queue in which a call is decided: that of a row that it waits for, or one
// that it shares; of a table that is distributed, that of its row, or one of its own.
func (e *Engine) queueFor(p *Pending) *batch.Queue[*Pending] {
	e.mu.Lock()
	defer e.mu.Unlock()
	call := &p.Call
	switch {
	case e.table.PassesOver():
		if row, ok := e.lockedRow(p); ok {
			return e.queueForLocked(row, p)
		}
		return e.queues[maphash.Comparable(e.seed, call.Demands[0].KeyOf())%queues].calls
	case p.Check || len(call.Demands) > 1 || call.Sharded():
		return e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serve(ctx, new(queue), tickets, nil) })
	}
	return e.queueOf(decide.Row{Key: call.Demands[0].KeyOf()})
}

// serve decides the calls of a queue, but for those that go on in the queue of a locked row. await
// is the awaited row; nil for none.
func (e *Engine) serve(ctx context.Context, q *queue, tickets []*Ticket, await *awaited) {
	tickets = e.answerFromMemory(e.observeAll(tickets))
	if len(tickets) == 0 {
		return
	}
	if q.refusing {
		tickets = e.decideExtra(ctx, tickets, await)
	}
	e.requeue(e.decideAll(ctx, tickets, !q.refusing, await))
	q.refusing = mostRefused(tickets)
}

// answerFromMemory has the Memory answer the calls that it can, and returns the others.
func (e *Engine) answerFromMemory(tickets []*Ticket) []*Ticket {
	if e.memory == nil || len(tickets) == 0 {
		return tickets
	}
	return e.memory.Answer(tickets)
}

// decideExtra decides the calls that want a grant for what a Memory adds to it, and returns the
// others.
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

// decideAll decides calls, and returns those with rows that another transaction has locked. If the
// database finds fault with a statement for many, each half of them is decided by itself, so that
// only the one at fault fails.
func (e *Engine) decideAll(ctx context.Context, tickets []*Ticket, granting bool, await *awaited) (locked []*Ticket) {
	left := tickets
	var stillLocked []*Ticket // for what a Memory adds
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
			stillLocked = e.stillLockedExtra(ctx, left, await)
		}
		if left = withoutExtra(left, stillLocked); len(left) == 0 {
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
	case conn.TimedOut(err) && allWait(left):
		return append(left, stillLocked...)
	case conn.OfValues(err) && len(left) > 1:
		half := len(left) / 2
		return append(e.decideAll(ctx, left[:half:half], granting, await), e.decideAll(ctx, left[half:], granting, await)...)
	}
	for _, t := range left {
		t.Value.Result, t.Value.Err = ratelimit.Result{}, err
		t.Finish()
	}
	return stillLocked
}

// begin notes that calls are about to be decided together.
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

// observeAll remembers the definitions of calls, most of which are the same, and returns the calls
// whose definitions can be remembered.
func (e *Engine) observeAll(tickets []*Ticket) []*Ticket {
	var last bucket.Definition
	return slices.DeleteFunc(tickets, func(t *Ticket) bool {
		call := &t.Value.Call
		if len(call.Demands) == 1 && call.Demands[0].Definition == last {
			return false
		}
		if t.Value.Err = e.known.Definitions.NoteCall(call); t.Value.Err != nil {
			t.Finish()
			return true
		}
		last = call.Demands[0].Definition
		return false
	})
}

// stillLockedExtra returns those of calls for what a Memory adds that were not granted although their rows
// have enough, and so were passed over, since another transaction had them locked. Without a turn
// of their own they would hardly ever find a row free from which many processes take.
func (e *Engine) stillLockedExtra(ctx context.Context, tickets []*Ticket, await *awaited) (stillLocked []*Ticket) {
	if await != nil || e.memory == nil {
		return nil
	}
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
		if rows.Found[i] && definition.Refill(rows.States[i], rows.At).Value >= 2 { // half of which is to be had
			t.Value.locked.Store(&rows.Rows[i])
			stillLocked[n] = t
			n++
		}
	}
	return stillLocked[:n]
}

// withoutExtra returns the calls that want a result. Others are dropped unless they are in stillLocked.
func withoutExtra(tickets, stillLocked []*Ticket) []*Ticket {
	return slices.DeleteFunc(slices.Clone(tickets), func(t *Ticket) bool {
		if t.Value.Extra && !slices.Contains(stillLocked, t) {
			t.Finish()
		}
		return t.Value.Extra
	})
}

// allWait reports whether every call waits for a known row.
func allWait(tickets []*Ticket) bool {
	return !slices.ContainsFunc(tickets, func(t *Ticket) bool { return t.Value.locked.Load() == nil })
}

// mostRefused reports whether most of the calls that wanted a result were refused. A call that was
// given up may have been deleted: it is nil.
func mostRefused(tickets []*Ticket) bool {
	refused := 0
	for _, t := range tickets {
		if t != nil && t.Finished() && !t.Value.Extra && !t.Value.Result.OK {
			refused++
		}
	}
	return 2*refused > len(tickets)
}
