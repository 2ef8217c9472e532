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
	refusing bool // most of the last calls were refused, so granting is not attempted

	// Of the queue of a row:
	used   time.Time // when a call last needed it
	atOnce bool      // the last wait for the row got it
	extra  bool      // with a grant that took tokens for the Memory
}

const (
	// Contended is for how long a row that was found locked keeps a queue of its own.
	Contended = time.Second

	contendedExtra = 10 * time.Second // Contended for a row with extra grants
)

// manyRows is the number of rows with queues above which idle ones are first deleted.
const manyRows = 64

// awaited is a row that calls wait for in PostgreSQL. The seat lets their connection wait.
type awaited struct {
	row  decide.Row
	seat *conn.Seat // nil on a distributed table, on which every statement waits
	part bool       // no row: the calls are for rows of a part of a distributed table
}

// rowOrNil returns the row; nil for none.
func (a *awaited) rowOrNil() *decide.Row {
	if a == nil || a.part {
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

// Shared notes that a transaction of the runner waited for a row, and that other processes keep it
// locked for a moment only.
func (e *Engine) Shared(row decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mark(row).atOnce = true
}

// mark returns the queue of a row, and notes that it is needed now. It needs mu.
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

// LockedRows returns the number of rows whose own queue is needed.
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

// idle reports whether a row's queue is not needed any more. With extra grants it is needed for longer:
// they are rare, and one that finds the row locked has sent a statement in vain.
func (q *queue) idle() bool {
	needed := Contended
	if q.extra {
		needed = contendedExtra
	}
	return time.Since(q.used) > needed && (q.calls == nil || q.calls.Idle())
}

// lockedRow returns the first row of a call with a queue of its own. It needs mu.
func (e *Engine) lockedRow(p *Pending) (row decide.Row, ok bool) {
	call := p.Call.Head()
	for i := range call.Demands {
		a := &call.Demands[i]
		row = decide.Row{Key: a.KeyOf()}
		q, ok := e.rows[row]
		switch {
		case !ok || a.Sharded(): // another shard may do
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
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, t := range tickets {
		row := *t.Value.locked.Load()
		e.mark(row)
		if !e.table.PassesOver() { // calls for it share statements, locked or not
			t.Value.locked.Store(nil)
			e.queueOf(row).Join(t)
			continue
		}
		e.queueForLocked(row, t.Value).Join(t)
	}
}

// queueForLocked returns the queue of a locked row, and notes that a call waits for it. It needs mu.
func (e *Engine) queueForLocked(row decide.Row, p *Pending) *batch.Queue[*Pending] {
	p.locked.Store(&row)
	if e.memory != nil && !p.Extra {
		e.memory.Waits(p)
	}
	return e.queueOf(row)
}

// queueOf returns the queue of a row, and makes it if it is missing. It needs mu.
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

// serveLocked decides the calls that wait for a row as soon as it is unlocked. If no connection may
// wait in PostgreSQL, it tries now and then.
func (e *Engine) serveLocked(ctx context.Context, row decide.Row, tickets []*Ticket) {
	for w := e.LockWait(0); len(tickets) > 0; {
		var left []*Ticket
		if tickets = e.answerFromMemory(tickets); len(tickets) == 0 {
			return
		}
		_ = w.Attempt(ctx, func(s *conn.Seat) error { // if ctx is over no caller is left
			var await *awaited
			if s != nil {
				await = &awaited{row: row, seat: s}
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
