package table

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Run runs a transaction of the Store's own. READ COMMITTED is enough, since a take is right at
// every isolation level. Like decisions on their own, it waits for locked rows. do locks rows,
// given in any order, and may run several times. rolledBack is called after each attempt that was
// rolled back.
func (t *Table) Run(ctx context.Context, c *conn.Conn, rows []decide.Row, do func(context.Context, pgx.Tx) error, rolledBack func()) error {
	ctx, done, err := c.Bounded(ctx)
	if err != nil {
		return err
	}
	defer done()
	attempt := func(wait time.Duration) error {
		return c.Retry(ctx, func() error { return t.transact(ctx, c, wait, do, rolledBack) })
	}
	err = attempt(conn.PassOver)
	for w := c.LockWait(conn.Poll); conn.TimedOut(err); {
		waited := err // the error of a wait for a row, or for another lock in do
		ctxErr := w.Attempt(ctx, func(s *conn.Seat) error {
			wait := conn.PassOver
			if s != nil && len(rows) == 1 && errors.Is(waited, conn.ErrLocked) {
				wait = conn.Awaited
			} else if s != nil {
				if err = c.Retry(ctx, func() error { return t.awaitOne(ctx, c, rows) }); conn.TimedOut(err) {
					waited = err
				}
			}
			if err == nil || conn.TimedOut(err) {
				err = attempt(wait)
			}
			return err
		})
		if ctx.Err() != nil && errors.Is(ctxErr, ctx.Err()) && !errors.Is(err, conn.ErrOutcomeUnknown) {
			return fmt.Errorf("%w: %w", waited, ctx.Err())
		}
	}
	return err
}

// errAwaited rolls back a transaction that only waited: a COMMIT might have no answer, and a caller would
// be told that its edit may be done.
var errAwaited = errors.New("pgstore: waited for a row")

// awaitOne waits for the first row that another transaction has locked, and keeps no row locked. It
// moves that row to the front.
func (t *Table) awaitOne(ctx context.Context, c *conn.Conn, rows []decide.Row) error {
	await := func(row decide.Row, wait time.Duration) error {
		err := t.transact(ctx, c, wait, func(ctx context.Context, tx pgx.Tx) error {
			var batch pgx.Batch
			t.QueueAwait(&batch, row)
			return cmp.Or(tx.SendBatch(ctx, &batch).Close(), errAwaited)
		}, func() {})
		if errors.Is(err, errAwaited) {
			return nil
		}
		return err
	}
	for i, row := range rows {
		if err := await(row, conn.PassOver); !conn.TimedOut(err) {
			if err != nil {
				return err
			}
			continue
		}
		rows[0], rows[i] = rows[i], rows[0]
		if err := await(row, conn.Awaited); err != nil {
			return c.FaultOf("wait for", []string{row.Name}, err)
		}
		return nil
	}
	return nil
}

// transact runs do in a transaction that waits no longer than wait for a lock. If COMMIT gets no
// answer, the error is ErrOutcomeUnknown, also if ctx ended first.
func (t *Table) transact(ctx context.Context, c *conn.Conn, wait time.Duration, do func(context.Context, pgx.Tx) error, rolledBack func()) error {
	pooled, err := c.Pool.Acquire(ctx)
	if err != nil {
		return c.Fault("acquire", err)
	}
	defer Release(ctx, pooled)
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	t.QueueBounds(&batch, wait)
	results := pooled.SendBatch(ctx, &batch)
	if err := results.Close(); err != nil {
		return c.Fault("begin", err)
	}
	if err := do(ctx, results.Tx()); err != nil {
		rolledBack()
		return err
	}
	if err = intx.Commit(ctx, results.Tx()); err == nil {
		return nil
	}
	if !errors.Is(err, conn.ErrOutcomeUnknown) {
		rolledBack()
	}
	return c.Fault("commit", err)
}
