package engine

import (
	"context"
	"sync/atomic"
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
	atOnce bool      // the last wait got the row
	extra  bool      // and its grant took tokens for the Memory
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

// LockedRows returns the number of locked rows whose own queue is still needed. On a table that
// cannot pass over locked rows it returns 0.
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
	if e.Memory != nil && !p.Extra {
		e.Memory.Waits(p)
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

// parts holds the parts of a distributed table, which Citus calls shards. Calls for rows of one
// part share statements. Calls for a key that has moved to another part are only slower.
type parts struct {
	queues map[int64]*batch.Queue[*Pending]
	asking *batch.Queue[*Pending] // of calls for keys whose part is not known

	of    map[string]int64 // the parts of keys; nil if the table has none, or asking failed
	asked time.Time        // when of and queues were made

	underWay atomic.Int64 // the number of calls
	alone    int64        // up to this number, each goes to the queue of its row; half of the pool's connections
}

const (
	partsKnown = time.Minute // how long parts are remembered
	mostKnown  = 1 << 17     // the number of keys whose parts are remembered
	fewest     = 4           // calls share statements if more than this many for each part are under way
)

// queueOnNode returns the queue of a call for one row of a distributed table: that of its part, if
// the call can share statements there, otherwise that of the row. A few calls have a connection
// each, and go faster alone. While calls wait for a row, later ones join them. It needs mu.
func (e *Engine) queueOnNode(p *Pending, underWay int64) *batch.Queue[*Pending] {
	demand := &p.Call.Demands[0]
	row := decide.Row{Key: demand.KeyOf()}
	if !p.Call.Plain || p.Extra || !e.table.InParts(&demand.Definition) {
		return e.queueOf(row)
	}
	if q := e.rows[row]; q != nil && q.calls != nil && !q.calls.Idle() {
		return q.calls
	}
	if underWay <= max(e.parts.alone, fewest*int64(len(e.parts.queues))) {
		return e.queueOf(row)
	}
	if time.Since(e.parts.asked) > partsKnown {
		e.parts.asked, e.parts.of, e.parts.queues = time.Now(), make(map[string]int64), make(map[int64]*batch.Queue[*Pending])
	}
	if e.parts.of == nil {
		return e.queueOf(row)
	}
	if part, ok := e.parts.of[row.Key.Key]; ok {
		return e.queueOfPart(part)
	}
	if e.parts.asking == nil {
		e.parts.asking = e.newQueue(e.askParts)
	}
	return e.parts.asking
}

// queueOfPart returns the queue of a part, and makes it if it is missing. It needs mu.
func (e *Engine) queueOfPart(part int64) *batch.Queue[*Pending] {
	calls, ok := e.parts.queues[part]
	if !ok {
		q := new(queue)
		q.calls = e.newQueue(func(ctx context.Context, tickets []*Ticket) { e.serve(ctx, q, tickets, &awaited{part: true}) })
		calls = q.calls
		e.parts.queues[part] = calls
	}
	return calls
}

// askParts asks for the parts of calls' keys, and moves the calls to the queues of their parts. If
// the table has none, or asking failed, they move to the queues of their rows.
func (e *Engine) askParts(ctx context.Context, tickets []*Ticket) {
	keys := make([]string, len(tickets))
	for i, t := range tickets {
		keys[i] = t.Value.Call.Demands[0].Key
	}
	found, err := e.table.Parts(ctx, e.Pool, keys)
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case len(found) == len(keys):
		if e.parts.of == nil || len(e.parts.of)+len(keys) > mostKnown {
			e.parts.of = make(map[string]int64)
		}
	case err == nil || ctx.Err() == nil:
		e.parts.of, found = nil, nil
	}
	together := make(map[*batch.Queue[*Pending]][]*Ticket)
	for i, t := range tickets {
		var q *batch.Queue[*Pending]
		if found == nil {
			q = e.queueOf(decide.Row{Key: t.Value.Call.Demands[0].KeyOf()})
		} else {
			e.parts.of[keys[i]] = found[i]
			q = e.queueOfPart(found[i])
		}
		together[q] = append(together[q], t)
	}
	for q, tickets := range together {
		q.Join(tickets...)
	}
}
