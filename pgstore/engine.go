package pgstore

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
	"github.com/pgratelimit/ratelimit/internal/escrow"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// engine decides calls on their own. They share statements: while one is under way, the
// calls that arrive gather, and the next one decides all of them (package batch). There
// are three steps, and the table has a verb for each:
//
//   - Grant takes from each row what its calls want together, if it has enough for all
//     of them. The row need not be read first.
//   - Read answers checks, and refuses what cannot be granted: that writes and locks
//     nothing.
//   - Decide locks the rows of the others, which are decided in memory, in the order of
//     arrival, and writes them.
//
// On plain PostgreSQL none of them waits for a row that somebody else has locked: such
// rows are passed over, and their calls go on in a queue for that row alone, which waits
// for it. Where tables are distributed nothing can be passed over, so each row has such a
// queue from the beginning.
type engine struct {
	*base
	memory *memory // nil without Config.Escrow
	seed   maphash.Seed
	lanes  [lanes]lane

	mu   sync.Mutex
	rows map[decide.Row]*lane
	many int // rows, from which on those are looked for that are not needed any more
}

// lanes is how many statements for calls of different keys, and so how many connections,
// decide at a time. Calls for one limit and key share a lane.
const lanes = 2

// mostTogether bounds the calls that one statement decides.
const mostTogether = 1024

// lane is a queue of calls that are decided together.
type lane struct {
	queue    *batch.Queue[*pending]
	refusing bool      // most of the last calls were refused, so that granting is not worth an attempt
	used     time.Time // of the queue of a row: when a call last needed it
}

// pending is a call that waits for its decision.
type pending struct {
	call     decide.Call
	one      [1]decide.Ask // for those of call, if it is one
	check    bool
	prefetch bool // it wants more prefetched, for calls that come later, and no result
	hold     bool // it is for a transaction, which may put its tokens back

	entry   *escrow.Entry // of its key, if it asks for one row and that is remembered; else nil
	changes int           // of the entry, before a statement was sent

	result ratelimit.Result
	tokens escrow.Tokens // of a call that holds
	err    error

	row   decide.Row // from which it takes, as one of a group
	floor float64    // the lowest value that it may leave behind there
	place int        // in the order of arrival

	locked atomic.Pointer[decide.Row] // that it waits for
}

type ticket = batch.Ticket[*pending]

func newEngine(b *base) *engine {
	e := &engine{base: b, seed: maphash.MakeSeed(), rows: make(map[decide.Row]*lane), many: manyRows}
	for i := range e.lanes {
		l := &e.lanes[i]
		l.queue = e.newQueue(b.config.Timeout, func(ctx context.Context, tickets []*ticket) { e.serve(ctx, l, tickets, nil) })
	}
	return e
}

func (e *engine) newQueue(patience time.Duration, serve func(context.Context, []*ticket)) *batch.Queue[*pending] {
	return batch.New(mostTogether, patience, serve, e.work.spawn)
}

// decide decides a call. An error is that of a caller who gave up, or of the database.
func (e *engine) decide(ctx context.Context, p *pending) (ratelimit.Result, error) {
	if e.pool == nil {
		return ratelimit.Result{}, ErrNoPool
	}
	if err := e.work.begin(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	defer e.work.end()
	if _, err := e.queueFor(p).Do(ctx, p); err != nil {
		if row := p.locked.Load(); row != nil {
			return ratelimit.Result{}, locked(row.Key, err)
		}
		return ratelimit.Result{}, e.fault("decide", err)
	}
	return p.result, p.err
}

// queueFor returns the queue in which a call is decided: of a table that is distributed,
// that of its row, or one of its own.
func (e *engine) queueFor(p *pending) *batch.Queue[*pending] {
	call := &p.call
	switch {
	case !e.config.Portable:
		return e.lanes[maphash.Comparable(e.seed, call.Asks[0].Of())%lanes].queue
	case p.check || len(call.Asks) > 1 || call.Sharded():
		return e.newQueue(e.config.Timeout, func(ctx context.Context, tickets []*ticket) { e.serve(ctx, new(lane), tickets, nil) })
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.queueOf(decide.Row{Key: call.Asks[0].Of()})
}

// serve decides the calls of a lane, but for those that go on in the queue of a locked row.
// That of a row that is waited for is await.
func (e *engine) serve(ctx context.Context, l *lane, tickets []*ticket, await *decide.Row) {
	e.noteAll(tickets)
	tickets = e.memory.answer(tickets)
	if await == nil {
		tickets = e.redirect(tickets)
	}
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
func (e *engine) prefetchAlone(ctx context.Context, tickets []*ticket, await *decide.Row) (others []*ticket) {
	var more []*ticket
	for _, t := range tickets {
		if t.Value.prefetch {
			more = append(more, t)
		} else {
			others = append(others, t)
		}
	}
	if len(more) > 0 {
		e.decideAll(ctx, more, true, await)
	}
	return others
}

// decideAll decides calls, and returns those whose rows are locked by somebody else.
// If the database finds fault with a statement for many, each half of them is
// decided by itself, so that only the one at fault fails. A row that is to be
// waited for is await.
func (e *engine) decideAll(ctx context.Context, tickets []*ticket, granting bool, await *decide.Row) (locked []*ticket) {
	left := tickets
	err := e.retry(ctx, func() (err error) {
		if granting {
			if left, err = e.grant(ctx, left, await); err != nil {
				return err
			}
			granting = false
		}
		if left = withoutPrefetching(left); len(left) == 0 {
			return nil
		}
		var sheet *decide.Sheet
		if left, sheet, err = e.read(ctx, left); err != nil || len(left) == 0 {
			return err
		}
		left, err = e.lock(ctx, left, sheet, await)
		return err
	})
	switch {
	case err == nil:
		return left
	case code(err) == lockNotAvailable && allWait(left):
		return left
	case isOfValues(err) && len(left) > 1:
		half := len(left) / 2
		return append(e.decideAll(ctx, left[:half:half], granting, await), e.decideAll(ctx, left[half:], granting, await)...)
	}
	for _, t := range left {
		t.Value.result, t.Value.err = ratelimit.Result{}, err
		t.Finish()
	}
	return nil
}

// read answers checks, and refuses what cannot be granted. It returns the others, and the
// rows as it has read them.
func (e *engine) read(ctx context.Context, tickets []*ticket) (left []*ticket, sheet *decide.Sheet, err error) {
	if tickets = slices.DeleteFunc(tickets, (*ticket).Gone); len(tickets) == 0 {
		return nil, nil, nil
	}
	sheet = newSheet(tickets)
	sent := e.memory.sending(tickets)
	rows := table.Rows{Rows: sheet.Rows}
	if err := e.table.Read(ctx, e.pool, &rows, e.clock()); err != nil {
		return tickets, nil, e.fault("read", err)
	}
	sheet.States, sheet.Found, sheet.At = rows.States, rows.Found, rows.At
	for _, t := range tickets {
		p := t.Value
		view := sheet.View(&p.call)
		e.saw(&p.call, view)
		if !p.check {
			if changes, ok := p.call.Plan(view); ok {
				sheet.Need(&p.call, changes)
				left = append(left, t)
				continue
			}
			p.refused(view, sent)
		}
		p.result = p.call.Checked(view)
		t.Finish()
	}
	return left, sheet, nil
}

// lock decides calls with their rows locked, from the reading to the writing. It returns
// those whose rows are locked by somebody else.
func (e *engine) lock(ctx context.Context, tickets []*ticket, seen *decide.Sheet, await *decide.Row) (left []*ticket, err error) {
	if tickets = slices.DeleteFunc(tickets, (*ticket).Gone); len(tickets) == 0 {
		return nil, nil
	}
	sheet := newSheet(tickets)
	sent := e.memory.sending(tickets)
	var decided []*ticket
	d := table.Decision{
		Rows: sheet.Rows, Definitions: sheet.Definitions, Missing: e.missing(sheet, seen, await), Await: await,
		OnLocked: e.markLocked,
		Decide: func(rows *table.Rows) ([]int, error) {
			sheet.States, sheet.Found, sheet.At = rows.States, rows.Found, rows.At
			sheet.Assume(seen)
			left, decided = e.decideLocked(tickets, sheet)
			return sheet.Changes(), nil
		},
	}
	if err := e.table.Decide(ctx, e.pool, &d, e.clock()); err != nil {
		if code(err) == lockNotAvailable && await != nil {
			for _, t := range tickets {
				t.Value.locked.Store(await)
			}
		}
		return tickets, e.fault("decide", err)
	}
	for _, t := range decided { // it is in the database now
		e.tell(t, sheet, sent)
	}
	return left, nil
}

// decideLocked decides calls on a sheet of locked rows. Those are left of which somebody
// else has locked a row that they need.
func (e *engine) decideLocked(tickets []*ticket, sheet *decide.Sheet) (left, decided []*ticket) {
	for _, t := range tickets {
		p := t.Value
		changes, ok := p.call.Plan(sheet.Free(&p.call))
		if ok && !sheet.Passes(&p.call, changes) {
			sheet.Make(changes)
			p.result = p.call.Receipted(changes, sheet.View(&p.call), "", nil)
			if p.hold {
				p.tokens = p.entry.Granted(changes[0].Count, changes[0].After, sheet.At)
			}
		} else if missing := sheet.MissingOf(&p.call); missing != nil {
			p.locked.Store(&missing[0])
			left = append(left, t)
			continue
		} else {
			p.result = p.call.Refused(sheet.View(&p.call))
		}
		decided = append(decided, t)
	}
	return left, decided
}

// tell answers a call that was decided on a sheet that has been written.
func (e *engine) tell(t *ticket, sheet *decide.Sheet, sent time.Time) {
	p, view := t.Value, sheet.View(&t.Value.call)
	e.saw(&p.call, view)
	if p.result.OK {
		for i := range p.call.Asks {
			e.cache.Changed(p.call.Asks[i].Of())
		}
	} else {
		p.refused(view, sent)
	}
	t.Finish()
}

// refused remembers the row that refused a call which was asked in a statement sent then.
func (p *pending) refused(view decide.View, sent time.Time) {
	if p.entry != nil {
		p.entry.Refused(view.States[0][0], view.At, sent, p.changes)
	}
}

func newSheet(tickets []*ticket) *decide.Sheet {
	calls := make([]*decide.Call, len(tickets))
	for i, t := range tickets {
		calls[i] = &t.Value.call
	}
	return decide.NewSheet(calls)
}

// missing returns the rows of a sheet that were not found on the one that was read, but
// for the awaited one and those that somebody is known to have made.
func (e *engine) missing(sheet, seen *decide.Sheet, await *decide.Row) (rows []decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, row := range seen.Missing(sheet) {
		l, known := e.rows[row]
		if (!known || time.Since(l.used) > contended) && (await == nil || row != *await) {
			rows = append(rows, row)
		}
	}
	return rows
}

// noteAll remembers the definitions of calls, most of which are the same.
func (e *engine) noteAll(tickets []*ticket) {
	var last bucket.Definition
	for _, t := range tickets {
		for i := range t.Value.call.Asks {
			if a := &t.Value.call.Asks[i]; a.Definition != last {
				last = a.Definition
				e.seen.Note(last)
			}
		}
	}
}

// withoutPrefetching returns the calls that want a result. Of what a grant did not prefetch
// there is nothing to be had in another way.
func withoutPrefetching(tickets []*ticket) []*ticket {
	return slices.DeleteFunc(slices.Clone(tickets), func(t *ticket) bool {
		if t.Value.prefetch {
			t.Finish()
		}
		return t.Value.prefetch
	})
}

// allWait reports whether of each call the row is known that it waits for.
func allWait(tickets []*ticket) bool {
	return !slices.ContainsFunc(tickets, func(t *ticket) bool { return t.Value.locked.Load() == nil })
}

// mostRefused reports whether most of the calls were refused that wanted a result.
func mostRefused(tickets []*ticket) bool {
	refused := 0
	for _, t := range tickets {
		if t.Finished() && !t.Value.prefetch && !t.Value.result.OK {
			refused++
		}
	}
	return 2*refused > len(tickets)
}
