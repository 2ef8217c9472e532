package pgstore

import (
	"context"
	"time"

	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// The queues of rows: those that somebody else has locked, and where tables are
// distributed all that are asked for.

// manyRows is how many queues there are before it is looked which are not needed any more.
const manyRows = 64

// redirect moves the calls for locked rows to the queues of those, and returns the
// others.
func (e *engine) redirect(tickets []*ticket) (left []*ticket) {
	if e.config.Portable {
		return tickets
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.rows) == 0 {
		return tickets
	}
	for _, t := range tickets {
		row, ok := e.lockedRow(t.Value)
		switch {
		case !ok:
			left = append(left, t)
		case !t.Value.prefetch:
			e.join(row, t)
		case e.queueOf(row).Idle(): // it does not wait; the row may be free
			left = append(left, t)
		default: // those who wait for the row prefetch as well
			t.Finish()
		}
	}
	return left
}

// lockedRow returns a row of a call that is waited for. It needs mu.
func (e *engine) lockedRow(p *pending) (row decide.Row, ok bool) {
	if p.check {
		return row, false
	}
	call := p.call.Head()
	for i := range call.Asks {
		a := &call.Asks[i]
		row = decide.Row{Key: a.Of()}
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
		e.join(row, t)
	}
}

// join moves a call to the queue of a row. It needs mu.
func (e *engine) join(row decide.Row, t *ticket) {
	p := t.Value
	p.locked.Store(&row)
	p.entry.Contended(p.call.Asks[0].Count)
	e.queueOf(row).Join(t)
}

// markLocked notes that somebody was just found to have a row locked.
func (e *engine) markLocked(row decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mark(row)
}

// mark notes that a row needs a queue. It needs mu.
func (e *engine) mark(row decide.Row) *lane {
	l, ok := e.rows[row]
	if !ok {
		if len(e.rows) >= e.many {
			for other, l := range e.rows {
				if l.idle() {
					delete(e.rows, other)
				}
			}
			e.many = max(2*len(e.rows), manyRows)
		}
		l = &lane{}
		e.rows[row] = l
	}
	l.used = time.Now()
	return l
}

// idle reports whether a row's queue is not needed any more.
func (l *lane) idle() bool {
	return time.Since(l.used) > contended && (l.queue == nil || l.queue.Idle())
}

// queueOf returns the queue of a row. It needs mu.
func (e *engine) queueOf(row decide.Row) *batch.Queue[*pending] {
	l := e.rows[row]
	if l == nil || e.config.Portable {
		l = e.mark(row)
	}
	switch {
	case l.queue != nil:
	case e.config.Portable:
		l.queue = e.newQueue(e.config.Timeout, func(ctx context.Context, tickets []*ticket) { e.serve(ctx, l, tickets, &row) })
	default: // those who come have a time-out already
		l.queue = e.newQueue(0, func(ctx context.Context, tickets []*ticket) { e.serveLocked(ctx, row, tickets) })
	}
	return l.queue
}

// serveLocked decides the calls that wait for a row, as soon as it is free. While
// no connection may wait for it, it looks now and then.
func (e *engine) serveLocked(ctx context.Context, row decide.Row, tickets []*ticket) {
	for w := e.waiting(0); len(tickets) > 0; {
		var left []*ticket
		if tickets = e.memory.answer(tickets); len(tickets) == 0 {
			return
		}
		_ = w.again(ctx, func(spared bool) error { // if ctx is over nobody is left
			var await *decide.Row
			if spared {
				await = &row
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
