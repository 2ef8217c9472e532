package pgstore

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// The second way: rows are read, calls are decided on a sheet in memory, and what has
// changed is written. Without locks that answers checks, and refuses.

// read reads the calls' rows, answers checks, and refuses what cannot be granted.
// It returns the others, and what it has read.
func (o *own) read(ctx context.Context, tickets []*ticket) (left []*ticket, sheet *decide.Sheet, err error) {
	sheet = newSheet(tickets)
	sent := o.asking(tickets)
	rows := table.Rows{Rows: sheet.Rows}
	if err := o.table.Read(ctx, o.pool, &rows, o.clock()); err != nil {
		return tickets, nil, o.fault("read", err)
	}
	sheet.States, sheet.Found, sheet.At = rows.States, rows.Found, rows.At
	for _, t := range tickets {
		p := t.Value
		view := sheet.View(&p.call)
		o.hints.saw(&p.call, view)
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

// asking notes what is known of the keys of calls for which a statement is about to be
// sent, and returns when that is.
func (o *own) asking(tickets []*ticket) time.Time {
	if o.hints.memory == nil {
		return time.Time{}
	}
	for _, t := range tickets {
		t.Value.changes = t.Value.holder.Changes()
	}
	return o.hints.memory.Now()
}

// refused remembers what refused a call that was asked in a statement sent then.
func (p *pending) refused(view decide.View, sent time.Time) {
	if p.holder != nil {
		p.holder.Refused(view.States[0][0], view.At, sent, p.changes)
	}
}

func newSheet(tickets []*ticket) *decide.Sheet {
	calls := make([]*decide.Call, len(tickets))
	for i, t := range tickets {
		calls[i] = &t.Value.call
	}
	return decide.NewSheet(calls)
}

// settle decides calls with their rows locked, from the reading to the writing. It
// returns those whose rows are locked by somebody else. Rows that are missing
// cannot be locked, so they are made first: full, which means the same.
func (o *own) settle(ctx context.Context, tickets []*ticket, seen *decide.Sheet, await *decide.Row) (left []*ticket, err error) {
	conn, err := o.pool.Acquire(ctx)
	if err != nil {
		return tickets, o.fault("acquire", err)
	}
	defer release(ctx, conn)
	sheet := newSheet(tickets)
	sent := o.asking(tickets)
	if err := o.hold(ctx, conn, sheet, seen, await); err != nil {
		if code(err) == lockNotAvailable && await != nil {
			for _, t := range tickets {
				t.Value.locked.Store(await)
			}
		}
		return tickets, o.fault("lock", err)
	}
	var decided []*ticket
	for _, t := range tickets {
		p := t.Value
		changes, ok := p.call.Plan(sheet.Free(&p.call))
		if ok && !sheet.Passes(&p.call, changes) {
			sheet.Make(changes)
			p.result = p.call.Receipted(changes, sheet.View(&p.call), "", nil)
		} else if missing := sheet.MissingOf(&p.call); missing != nil {
			p.locked.Store(&missing[0])
			left = append(left, t)
			continue
		} else {
			p.result = p.call.Refused(sheet.View(&p.call))
		}
		decided = append(decided, t)
	}
	if err := o.write(ctx, conn, sheet); err != nil {
		return tickets, o.fault("write", err)
	}
	for _, t := range decided { // it is in the database now
		o.tell(t, sheet, sent)
	}
	return left, nil
}

// tell answers a call that was decided on a sheet that has been written.
func (o *own) tell(t *ticket, sheet *decide.Sheet, sent time.Time) {
	p, view := t.Value, sheet.View(&t.Value.call)
	o.hints.saw(&p.call, view)
	if p.result.OK {
		for i := range p.call.Asks {
			o.hints.memory.Changed(p.call.Asks[i].Of())
		}
	} else {
		p.refused(view, sent)
	}
	t.Finish()
}

// hold begins a transaction that has a sheet's rows locked, and reads them, but for
// those that somebody else has locked, which are not found. If that fails because
// somebody has made one of the missing rows and not committed, the others are made
// apart. They are in any case before a row is waited for, so that nothing else is
// locked meanwhile.
func (o *own) hold(ctx context.Context, conn *pgxpool.Conn, sheet, seen *decide.Sheet, await *decide.Row) error {
	missing := o.missing(sheet, seen, await)
	if await == nil {
		err := o.lock(ctx, conn, sheet, seen, missing, nil)
		if code(err) != lockNotAvailable {
			return err
		}
		rollBack(ctx, conn)
	}
	if err := o.fill(ctx, conn, sheet, missing); err != nil {
		return err
	}
	return o.lock(ctx, conn, sheet, seen, nil, await)
}

// missing returns the rows of a sheet that were not found on the one that was read, but
// for the awaited one and those that somebody is known to have made.
func (o *own) missing(sheet, seen *decide.Sheet, await *decide.Row) (rows []decide.Row) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, row := range seen.Missing(sheet) {
		l, known := o.locked[row]
		if (!known || time.Since(l.used) > contended) && (await == nil || row != *await) {
			rows = append(rows, row)
		}
	}
	return rows
}

// fill makes rows, half by half where somebody has made one of them and not committed;
// that is noted as locked.
func (o *own) fill(ctx context.Context, conn *pgxpool.Conn, sheet *decide.Sheet, rows []decide.Row) error {
	if len(rows) == 0 {
		return nil
	}
	var b pgx.Batch
	b.Queue(beginSQL)
	o.bounds(&b, passOver)
	o.table.QueueFill(&b, rows, sheet.DefinitionsOf(rows), o.clock())
	b.Queue("COMMIT")
	err := conn.SendBatch(ctx, &b).Close()
	if code(err) != lockNotAvailable {
		return err
	}
	rollBack(ctx, conn)
	if len(rows) == 1 {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.mark(rows[0])
		return nil
	}
	half := len(rows) / 2
	if err := o.fill(ctx, conn, sheet, rows[:half]); err != nil {
		return err
	}
	return o.fill(ctx, conn, sheet, rows[half:])
}

// lock begins a transaction that makes missing rows, waits for the awaited one, and
// locks and reads what nobody else has locked of a sheet.
func (o *own) lock(ctx context.Context, conn *pgxpool.Conn, sheet, seen *decide.Sheet, missing []decide.Row, await *decide.Row) error {
	t, now := o.table, o.clock()
	var b pgx.Batch
	b.Queue(beginSQL)
	if await != nil {
		missing = []decide.Row{*await}
		o.bounds(&b, awaited)
	} else if len(missing) > 0 {
		o.bounds(&b, passOver)
	}
	if len(missing) > 0 {
		t.QueueFill(&b, missing, sheet.DefinitionsOf(missing), now)
	}
	if await != nil {
		t.QueueAwait(&b, *await)
	}
	o.bounds(&b, 0) // nothing waits any more but for what others have put on the table
	rows := table.Rows{Rows: sheet.Rows}
	t.QueueLock(&b, &rows, now)
	if err := conn.SendBatch(ctx, &b).Close(); err != nil {
		return err
	}
	sheet.States, sheet.Found, sheet.At = rows.States, rows.Found, rows.At
	sheet.Assume(seen)
	return nil
}

// write writes a sheet's changed rows, and commits.
func (o *own) write(ctx context.Context, conn *pgxpool.Conn, sheet *decide.Sheet) error {
	var changed table.Rows
	for i, row := range sheet.Rows {
		if sheet.Changed[i] {
			if !sheet.Found[i] {
				return fmt.Errorf("row %v is to be written and was not locked", row)
			}
			changed.Rows = append(changed.Rows, row)
			changed.States = append(changed.States, sheet.States[i])
		}
	}
	var b pgx.Batch
	if len(changed.Rows) > 0 {
		o.table.QueueWrite(&b, &changed)
	}
	b.Queue("COMMIT")
	return conn.SendBatch(ctx, &b).Close()
}
