package pgstore

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// alone runs do on the pool, each statement a transaction of its own.
func (b *base) alone(ctx context.Context, doing string, do func(context.Context) error) error {
	if err := b.usable(); err != nil {
		return err
	}
	return b.Standalone(ctx, doing, do)
}

// ownTx runs do, which locks rows, in a transaction of its own. READ
// COMMITTED is enough: a take is right at every isolation level, and here nobody asks
// it again. It waits for rows that are locked as decisions on their own do.
func (b *base) ownTx(ctx context.Context, rows []decide.Row, do func(context.Context, pgx.Tx) error) error {
	ctx, done, err := b.Bounded(ctx)
	if err != nil {
		return err
	}
	defer done()
	err = b.Retry(ctx, func() error { return b.transact(ctx, conn.PassOver, do) })
	for w := b.LockWait(conn.Poll); conn.Code(err) == conn.LockNotAvailable; {
		ctxErr := w.Attempt(ctx, func(p *conn.Seat) error {
			wait := conn.PassOver
			if p != nil && len(rows) == 1 {
				wait = conn.Awaited
			} else if p != nil {
				err = b.Retry(ctx, func() error { return b.awaitOne(ctx, rows) })
			}
			if err == nil || conn.Code(err) == conn.LockNotAvailable {
				err = b.Retry(ctx, func() error { return b.transact(ctx, wait, do) })
			}
			return err
		})
		if ctx.Err() != nil && errors.Is(ctxErr, ctx.Err()) {
			return conn.Locked(rows[0].Name, ctx.Err())
		}
	}
	return err
}

// awaitOne waits until the one of several rows that another transaction has locked is free, and
// keeps none of them locked meanwhile. It is the first that cannot be locked at once,
// and moves to the front.
func (b *base) awaitOne(ctx context.Context, rows []decide.Row) error {
	await := func(row decide.Row, wait time.Duration) error {
		return b.transact(ctx, wait, func(ctx context.Context, tx pgx.Tx) error {
			var batch pgx.Batch
			b.table.QueueAwait(&batch, row)
			return tx.SendBatch(ctx, &batch).Close()
		})
	}
	for i, row := range rows {
		if err := await(row, conn.PassOver); conn.Code(err) != conn.LockNotAvailable {
			if err != nil {
				return err
			}
			continue
		}
		rows[0], rows[i] = rows[i], rows[0]
		return await(row, conn.Awaited)
	}
	return nil
}

// transact runs do in a transaction that waits for a lock no longer than wait.
func (b *base) transact(ctx context.Context, wait time.Duration, do func(context.Context, pgx.Tx) error) error {
	c, err := b.Pool.Acquire(ctx)
	if err != nil {
		return b.Fault("acquire", err)
	}
	defer table.Release(ctx, c)
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	b.table.QueueBounds(&batch, wait)
	results := c.SendBatch(ctx, &batch)
	if err := results.Close(); err != nil {
		return b.Fault("begin", err)
	}
	told := make(map[decide.Key]bucket.Spent)
	if err := do(context.WithValue(ctx, b, told), results.Tx()); err != nil {
		b.unsaid(told)
		return err
	}
	if err := results.Tx().Commit(ctx); err != nil {
		if conn.Answered(err) {
			b.unsaid(told)
		}
		return b.Fault("commit", err)
	}
	return nil
}

const (
	contended  = time.Second      // for how long a row that was found locked keeps a queue of its own,
	prefetched = 10 * time.Second // and one that is prefetched from
)
