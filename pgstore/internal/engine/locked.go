package engine

import (
	"context"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// read answers checks, and refuses calls that cannot be granted. It returns the other calls, and the
// rows as read.
func (e *Engine) read(ctx context.Context, tickets []*Ticket) (left []*Ticket, snapshot *decide.Snapshot, err error) {
	tickets = e.answerFromMemory(slices.DeleteFunc(tickets, (*Ticket).Gone))
	if len(tickets) == 0 {
		return nil, nil, nil
	}
	snapshot = newSnapshot(tickets)
	rows := table.Rows{Rows: snapshot.Rows}
	if err := e.table.Read(ctx, e.Pool, &rows, e.Clock()); err != nil {
		return tickets, nil, e.Fault("read", err)
	}
	snapshot.States, snapshot.Found, snapshot.At = rows.States, rows.Found, rows.At
	for _, t := range tickets {
		p := t.Value
		view := snapshot.View(&p.Call)
		e.known.Observe(&p.Call, view)
		if !p.Check {
			if changes, ok := p.Call.Plan(view); ok {
				snapshot.Need(&p.Call, changes)
				left = append(left, t)
				continue
			}
			e.refused(p, view)
		}
		p.Result = p.Call.Checked(view)
		finish(t)
	}
	return left, snapshot, nil
}

// refused reports the first row of a refused call to the Memory.
func (e *Engine) refused(p *Pending, view decide.View) {
	if e.Memory != nil {
		e.Memory.Refused(p, view.States[0][0], view.At)
	}
}

// lock locks the rows of calls, decides the calls and writes the rows. It returns the calls whose rows
// another transaction has locked.
func (e *Engine) lock(ctx context.Context, tickets []*Ticket, before *decide.Snapshot, await *awaited) (left []*Ticket, err error) {
	tickets = e.answerFromMemory(slices.DeleteFunc(tickets, (*Ticket).Gone))
	if len(tickets) == 0 {
		return nil, nil
	}
	snapshot := newSnapshot(tickets)
	var decided []*Ticket
	d := table.Decision{
		Rows: snapshot.Rows, Definitions: snapshot.Definitions, Missing: e.missing(snapshot, before, await), Await: await.rowOrNil(),
		OnLocked: e.MarkLocked,
		Decide: func(rows *table.Rows) ([]int, error) {
			snapshot.States, snapshot.Found, snapshot.At = rows.States, rows.Found, rows.At
			snapshot.Assume(before)
			left, decided = e.decideLocked(tickets, snapshot)
			return snapshot.Changes(), nil
		},
	}
	if err := e.decider(await).Decide(ctx, e.Pool, &d, e.Clock()); err != nil {
		if conn.TimedOut(err) && await != nil {
			for _, t := range tickets {
				t.Value.locked.Store(await.rowOrNil())
			}
		}
		return tickets, e.Fault("decide", err)
	}
	for _, t := range decided { // it is in the database now
		e.answer(t, snapshot)
	}
	return left, nil
}

// decideLocked decides calls on a snapshot of locked rows. left holds the calls whose rows another
// transaction has locked.
func (e *Engine) decideLocked(tickets []*Ticket, snapshot *decide.Snapshot) (left, decided []*Ticket) {
	for _, t := range tickets {
		p := t.Value
		changes, ok := p.Call.Plan(snapshot.Unlocked(&p.Call))
		if ok && !snapshot.Passes(&p.Call, changes) {
			snapshot.Apply(changes)
			p.Result = p.Call.Receipted(changes, snapshot.View(&p.Call), "", nil)
			if p.Granted != nil {
				p.Granted(changes[0].Count, changes[0].After, snapshot.At)
			}
		} else if missing := snapshot.MissingOf(&p.Call); len(missing) > 0 {
			p.locked.Store(&missing[0])
			left = append(left, t)
			continue
		} else {
			p.Result = p.Call.Refused(snapshot.View(&p.Call))
		}
		decided = append(decided, t)
	}
	return left, decided
}

// answer answers a call that was decided on a snapshot that has been written.
func (e *Engine) answer(t *Ticket, snapshot *decide.Snapshot) {
	p, view := t.Value, snapshot.View(&t.Value.Call)
	e.known.Observe(&p.Call, view)
	if p.Result.OK {
		for i := range p.Call.Demands {
			e.known.Changed(p.Call.Demands[i].KeyOf())
		}
	} else {
		e.refused(p, view)
	}
	Finish(t)
}

func newSnapshot(tickets []*Ticket) *decide.Snapshot {
	calls := make([]*decide.Call, len(tickets))
	for i, t := range tickets {
		calls[i] = &t.Value.Call
	}
	return decide.NewSnapshot(calls)
}

// missing returns the rows of a snapshot that the one read before did not find. It leaves out the
// awaited row and rows that another transaction has locked lately: they exist by now.
func (e *Engine) missing(snapshot, before *decide.Snapshot, await *awaited) (rows []decide.Row) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, row := range before.Missing(snapshot) {
		q, locked := e.rows[row]
		locked = locked && e.table.PassesOver() && time.Since(q.used) <= Contended
		if !locked && (await == nil || row != await.row) {
			rows = append(rows, row)
		}
	}
	return rows
}
