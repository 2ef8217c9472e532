package engine

import (
	"context"
	"time"

	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// queue is a queue of calls that are decided together.
type queue struct {
	calls    *batch.Queue[*Pending]
	refusing bool // most of the last calls were refused, so that granting is not worth an attempt

	// Of the queue of a row:
	used   time.Time // when a call last needed it
	atOnce bool      // the row was to be had when it was waited for last
	extra  bool      // and a Memory added to the grant then
}

const (
	// Contended is for how long a row that was found locked keeps a queue of its own.
	Contended = time.Second

	contendedExtra = 10 * time.Second // the same of a row with extra grants
)

// manyRows is the number of rows with queues above which idle ones are first deleted.
const manyRows = 64

// awaited is a row that calls wait for in PostgreSQL, by a connection that may.
type awaited struct {
	row  decide.Row
	seat *conn.Seat // nil on a distributed table, on which every statement waits
}

// rowOrNil returns the row; nil for none.
func (a *awaited) rowOrNil() *decide.Row {
	if a == nil {
		return nil
	}
	return &a.row
}

// MarkLocked notes that a row was just found locked by another transaction.
func (e *Engine) MarkLocked(row decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mark(row)
}

// Shared notes that a transaction of the runner waited for a row, and that other processes have it
// for a moment only.
func (e *Engine) Shared(row decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mark(row).atOnce = true
}

// mark notes that a row needs a queue. It needs mu.
func (e *Engine) mark(row decide.Row) *queue {
	q, ok := e.rows[row]
	if !ok {
		if len(e.rows) >= e.many {
			for other, q := range e.rows {
				if q.idle() {
					delete(e.rows, other)
				}
			}
			e.many = max(2*len(e.rows), manyRows)
		}
		q = &queue{}
		e.rows[row] = q
	}
	q.used = time.Now()
	return q
}

// LockedRows returns how many rows have a queue of their own that is needed.
func (e *Engine) LockedRows() (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, q := range e.rows {
		if e.table.PassesOver() && !q.idle() {
			n++
		}
	}
	return n
}

// idle reports whether a row's queue is not needed any more. Extra grants ask a row now and then
// only, and each time that one finds it locked it has asked in vain, by a statement that it would
// not need in the queue.
func (q *queue) idle() bool {
	needed := Contended
	if q.extra {
		needed = contendedExtra
	}
	return time.Since(q.used) > needed && (q.calls == nil || q.calls.Idle())
}

// lockedRow returns a row of a call that is waited for. It needs mu.
func (e *Engine) lockedRow(p *Pending) (row decide.Row, ok bool) {
	if p.Check || len(e.rows) == 0 {
		return row, false
	}
	call := p.Call.Head()
	for i := range call.Demands {
		a := &call.Demands[i]
		row = decide.Row{Key: a.KeyOf()}
		q, ok := e.rows[row]
		switch {
		case !ok || a.Sharded(): // of which another may do
		case q.idle():
			delete(e.rows, row)
		default:
			return row, true
		}
	}
	return row, false
}

// requeue moves calls to the queues of the rows that they wait for.
func (e *Engine) requeue(tickets []*Ticket) {
	if len(tickets) == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, t := range tickets {
		row := *t.Value.locked.Load()
		e.mark(row)
		e.queueForLocked(row, t.Value).Join(t)
	}
}

// queueForLocked returns the queue of a row, for a call that waits for it. It needs mu.
func (e *Engine) queueForLocked(row decide.Row, p *Pending) *batch.Queue[*Pending] {
	p.locked.Store(&row)
	if e.memory != nil && !p.Extra {
		e.memory.Waits(p)
	}
	return e.queueOf(row)
}

// queueOf returns the queue of a row. It needs mu.
func (e *Engine) queueOf(row decide.Row) *batch.Queue[*Pending] {
	q, passes := e.rows[row], e.table.PassesOver()
	if q == nil || !passes {
		q = e.mark(row)
	}
	switch {
	case q.calls != nil:
	case passes:
		q.calls = e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serveLocked(ctx, row, tickets) })
	default:
		q.calls = e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serve(ctx, q, tickets, &awaited{row: row}) })
	}
	return q.calls
}

// serveLocked decides the calls that wait for a row, as soon as it is free. While no connection may
// wait for it, it looks now and then.
func (e *Engine) serveLocked(ctx context.Context, row decide.Row, tickets []*Ticket) {
	tickets = e.observeAll(tickets)
	for w := e.LockWait(0); len(tickets) > 0; {
		var left []*Ticket
		if tickets = e.answerFromMemory(tickets); len(tickets) == 0 {
			return
		}
		_ = w.Attempt(ctx, func(s *conn.Seat) error { // if ctx is over no caller is left
			var await *awaited
			if s != nil {
				await = &awaited{row, s}
			}
			left = e.decideAll(ctx, tickets, true, await)
			return nil
		})
		tickets = tickets[:0]
		var others []*Ticket
		for _, t := range left {
			switch {
			case t.Gone():
			case *t.Value.locked.Load() == row:
				tickets = append(tickets, t)
			default:
				others = append(others, t)
			}
		}
		e.requeue(others)
	}
}
