package pgstore

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
)

// engine decides calls on their own. They share statements: while one is under way, the
// calls that arrive gather, and the next one decides all of them (package batch). There
// are three steps, and the table has a verb for each:
//
//   - Grant takes from each row the sum of its calls, if it has enough for all of them. The row
//     need not be read first.
//   - Read answers checks, and refuses calls that cannot be granted: that writes and locks
//     nothing.
//   - Decide locks the rows of the others, which are decided in memory, in the order of
//     arrival, and writes them.
//
// On plain PostgreSQL none of them waits for a row that another transaction has locked: such
// rows are passed over, and their calls go on in a queue for that row alone, which waits for
// it. Later calls for the row join that queue at once. Where tables are distributed nothing can
// be passed over, so each row has such a queue from the beginning.
type engine struct {
	*base
	seed  maphash.Seed
	lanes [lanes]lane

	mu   sync.Mutex
	rows map[decide.Row]*lane
	many int // rows, from which on those are looked for that are not needed any more
}

// lanes is how many statements for calls of different keys, and so how many connections,
// decide at a time. Calls for one limit and key share a lane.
const lanes = 2

// lane is a queue of calls that are decided together.
type lane struct {
	queue    *batch.Queue[*pending]
	refusing bool      // most of the last calls were refused, so that granting is not worth an attempt
	used     time.Time // of the queue of a row: when a call last needed it
	free     bool      // of the queue of a row: it was to be had when it was waited for last
	ahead    bool      // of the queue of a row: it was prefetched from
}

// pending is a call that waits for its decision.
type pending struct {
	call     decide.Call
	one      [1]decide.Demand // for those of call, if it is one
	check    bool
	prefetch bool // it wants more prefetched, for calls that come later, and no result

	entry   *escrow.Entry // of its key, if it asks for one row and that is remembered; else nil
	changes int           // of the entry, before a statement was sent

	result ratelimit.Result
	err    error
	tokens *escrow.Tokens // of a call for a transaction, which may put them back; else nil

	row   decide.Row // from which it takes, as one of a group
	floor float64    // the lowest value that it may leave behind there
	place int        // in the order of arrival

	locked atomic.Pointer[decide.Row] // that it waits for

	began  time.Time // if the Store is observed
	effort watch.Effort
}

type ticket = batch.Ticket[*pending]

// finish answers a call. If its caller has left, the tokens of a transaction that will not begin
// are put back.
func finish(t *ticket) {
	if !t.Finish() && t.Value.tokens != nil {
		t.Value.tokens.PutBack()
	}
}

// awaiting is a row that calls wait for in PostgreSQL, by a connection that may.
type awaiting struct {
	row  decide.Row
	seat *conn.Seat // nil on a distributed table, on which every statement waits
}

// of returns the row; nil of none.
func (a *awaiting) of() *decide.Row {
	if a == nil {
		return nil
	}
	return &a.row
}

// manyRows is how many queues there are before it is looked which are not needed any more.
const manyRows = 64

// markLocked notes that a row was just found locked by another transaction.
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

// idle reports whether a row's queue is not needed any more. Prefetching asks a row now and then
// only, and each time that it finds it locked it has asked in vain, by a statement that it would not
// need in the queue.
func (l *lane) idle() bool {
	needed := contended
	if l.ahead {
		needed = prefetched
	}
	return time.Since(l.used) > needed && (l.queue == nil || l.queue.Idle())
}
