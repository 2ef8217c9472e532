package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/decide"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// plainTable decides by statements that pass over locked rows, unless they await one.
type plainTable struct{ *Table }

func (t plainTable) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, await bool, now *time.Time) error {
	if await {
		return t.inTurn(ctx, &grants[0], func() error { return t.grantInTurn(ctx, pool, &grants[0], now) })
	}
	if !prefetches(grants) {
		return t.grant(ctx, pool, grants, now)
	}
	pooled, err := acquire(ctx, pool)
	if err != nil {
		return err
	}
	defer pooled.Release()
	ctx, stop := Outlast(ctx)
	defer stop()
	return t.grant(ctx, pooled, grants, now)
}

func (t plainTable) Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error {
	lock := func(pooled *pgxpool.Conn) (*Rows, error) { return t.lockAll(ctx, pooled, d, now) }
	return d.run(ctx, pool, lock, t.queueWrite)
}

// lockAll begins a transaction that locks and reads a decision's rows. It does not find rows that
// another transaction has locked. If another transaction is making one of the missing rows, lockAll
// makes the others in transactions of their own. It does so too before it waits for a row, so that
// it locks nothing else meanwhile.
func (t plainTable) lockAll(ctx context.Context, pooled *pgxpool.Conn, d *Decision, now *time.Time) (*Rows, error) {
	if d.Await == nil {
		rows, err := t.lockRows(ctx, pooled, d, d.Missing, now)
		if !conn.TimedOut(err) {
			return rows, err
		}
		rollBack(ctx, pooled)
	}
	if err := t.fillApart(ctx, pooled, d, d.Missing, now); err != nil {
		return nil, err
	}
	return t.lockRows(ctx, pooled, d, nil, now)
}

// fillApart makes rows in a transaction of its own. If another transaction is making one of them,
// it makes each half by itself.
func (t plainTable) fillApart(ctx context.Context, pooled *pgxpool.Conn, d *Decision, rows []decide.Row, now *time.Time) error {
	if len(rows) == 0 {
		return nil
	}
	batch := t.begin(conn.PassOver)
	t.queueFill(batch, rows, d.definitionsOf(rows), now)
	batch.Queue("COMMIT")
	err := pooled.SendBatch(ctx, batch).Close()
	if !conn.TimedOut(err) {
		return err
	}
	rollBack(ctx, pooled)
	if len(rows) == 1 {
		if d.OnLocked != nil {
			d.OnLocked(rows[0])
		}
		return nil
	}
	half := len(rows) / 2
	if err := t.fillApart(ctx, pooled, d, rows[:half], now); err != nil {
		return err
	}
	return t.fillApart(ctx, pooled, d, rows[half:], now)
}

// lockRows begins a transaction that makes missing rows, waits for the awaited one, and locks
// and reads the rows that no other transaction has locked.
func (t plainTable) lockRows(ctx context.Context, pooled *pgxpool.Conn, d *Decision, missing []decide.Row, now *time.Time) (*Rows, error) {
	wait := conn.PassOver
	if d.Await != nil {
		missing, wait = []decide.Row{*d.Await}, conn.Awaited
	}
	batch := t.begin(wait)
	if len(missing) > 0 {
		t.queueFill(batch, missing, d.definitionsOf(missing), now)
	}
	if d.Await != nil {
		t.QueueAwait(batch, *d.Await)
	}
	t.QueueBounds(batch, 0) // from here on the transaction waits only for locks of the whole table
	rows := &Rows{Rows: d.Rows}
	t.queueLock(batch, rows, now)
	return rows, pooled.SendBatch(ctx, batch).Close()
}
