package pgstore

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
)

// manyRows is how many queues there are before it is looked which are not needed any more.
const manyRows = 64

// markLocked notes that somebody was just found to have a row locked.
func (e *engine) markLocked(row decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mark(row)
}

// shared notes that a transaction of the runner waited for a row, and that others have it for a
// moment only.
func (e *engine) shared(row decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mark(row).free = true
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

// lockedRows is how many rows have a queue of their own that is needed.
func (e *engine) lockedRows() (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range e.rows {
		if e.table.PassesOver() && !l.idle() {
			n++
		}
	}
	return n
}

// idle reports whether a row's queue is not needed any more.
func (l *lane) idle() bool {
	return time.Since(l.used) > contended && (l.queue == nil || l.queue.Idle())
}
