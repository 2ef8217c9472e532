package pgstore

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// enter begins a decision on its own, which must end.
func (b *base) enter(ctx context.Context) (end func(), err error) {
	if err := b.usable(); err != nil {
		return nil, err
	}
	if b.pool == nil {
		return nil, ErrNoPool
	}
	return b.work.end, b.work.begin(ctx)
}

// bounded is a context for a decision on its own: with the Store's time-out if ctx
// has no deadline. The decision is counted until end is called.
func (b *base) bounded(ctx context.Context) (_ context.Context, end func(), err error) {
	leave, err := b.enter(ctx)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := b.timed(ctx)
	return ctx, func() { cancel(); leave() }, nil
}

// alone runs do on the pool, each statement a transaction of its own.
func (b *base) alone(ctx context.Context, doing string, do func(context.Context) error) error {
	ctx, end, err := b.bounded(ctx)
	if err != nil {
		return err
	}
	defer end()
	if err := b.retry(ctx, func() error { return do(ctx) }); err != nil {
		return b.fault(doing, err)
	}
	return nil
}

// timed is a context with the Store's time-out, if ctx has no deadline.
func (b *base) timed(ctx context.Context) (context.Context, context.CancelFunc) {
	return b.timedFrom(ctx, time.Now())
}

// timedFrom is timed for an operation that began at an instant.
func (b *base) timedFrom(ctx context.Context, begun time.Time) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok || b.config.Timeout == NoTimeout {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, begun.Add(b.config.Timeout))
}

// ownTx runs do, which locks rows, in a transaction of its own. READ
// COMMITTED is enough: a take is right at every isolation level, and here nobody asks
// it again. It waits for rows that are locked as decisions on their own do.
func (b *base) ownTx(ctx context.Context, rows []decide.Row, do func(context.Context, pgx.Tx) error) error {
	ctx, done, err := b.bounded(ctx)
	if err != nil {
		return err
	}
	defer done()
	err = b.retry(ctx, func() error { return b.transact(ctx, passOver, do) })
	for w := b.lockWait(poll); code(err) == lockNotAvailable; {
		ctxErr := w.attempt(ctx, func(p *permit) error {
			wait := passOver
			if p != nil && len(rows) == 1 {
				wait = awaited
			} else if p != nil {
				err = b.retry(ctx, func() error { return b.awaitOne(ctx, rows) })
			}
			if err == nil || code(err) == lockNotAvailable {
				err = b.retry(ctx, func() error { return b.transact(ctx, wait, do) })
			}
			return err
		})
		if ctx.Err() != nil && errors.Is(ctxErr, ctx.Err()) {
			return locked(rows[0].Key, ctx.Err())
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
		if err := await(row, passOver); code(err) != lockNotAvailable {
			if err != nil {
				return err
			}
			continue
		}
		rows[0], rows[i] = rows[i], rows[0]
		return await(row, awaited)
	}
	return nil
}

// transact runs do in a transaction that waits for a lock no longer than wait.
func (b *base) transact(ctx context.Context, wait time.Duration, do func(context.Context, pgx.Tx) error) error {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return b.fault("acquire", err)
	}
	defer table.Release(ctx, conn)
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	b.table.QueueBounds(&batch, wait)
	results := conn.SendBatch(ctx, &batch)
	if err := results.Close(); err != nil {
		return b.fault("begin", err)
	}
	told := make(map[decide.Key]bucket.Spent)
	if err := do(context.WithValue(ctx, b, told), results.Tx()); err != nil {
		b.unsaid(told)
		return err
	}
	if err := results.Tx().Commit(ctx); err != nil {
		if answered(err) {
			b.unsaid(told)
		}
		return b.fault("commit", err)
	}
	return nil
}

// lockWait is a wait for a row that another transaction has locked. A few connections may wait in
// PostgreSQL, where it is first come, first served: so few that however many rows are
// locked, the pool has some for the rest. Without one, the row is looked at now and
// then.
type lockWait struct {
	base  *base
	pause time.Duration
	quick bool // the last attempt did not wait in PostgreSQL, though it might
}

func (b *base) lockWait(pause time.Duration) *lockWait { return &lockWait{base: b, pause: pause} }

// attempt runs do once more: with a permit, if a connection may wait in PostgreSQL, and else after a
// pause. If ctx is over by then it returns the error of that.
func (w *lockWait) attempt(ctx context.Context, do func(*permit) error) error {
	if !w.quick {
		if p := w.base.permit(); p != nil {
			defer p.leave()
			begun := time.Now()
			defer func() { w.quick = time.Since(begun) < poll }()
			return do(p)
		}
	}
	w.quick = false
	if err := sleep(ctx, w.pause); err != nil {
		return err
	}
	w.pause = min(max(2*w.pause, poll), slowPoll)
	return do(nil)
}

// permit is that of one connection to wait in PostgreSQL. It is given back when all have left that
// share it: a statement that is heard to its end waits on when its callers have gone.
type permit struct {
	blocking chan struct{}
	users    atomic.Int32
}

// permit returns one, or nil if as many connections wait as may.
func (b *base) permit() *permit {
	select {
	case b.blocking <- struct{}{}:
		p := &permit{blocking: b.blocking}
		p.share()
		return p
	default:
		return nil
	}
}

func (p *permit) share() {
	if p != nil {
		p.users.Add(1)
	}
}

func (p *permit) leave() {
	if p != nil && p.users.Add(-1) == 0 {
		<-p.blocking
	}
}

const (
	passOver = table.PassOver        // how long a statement waits for a lock, without a connection that may wait
	awaited  = table.Awaited         // how long one waits at a time, with such a connection
	poll     = 5 * time.Millisecond  // how often a locked row is looked at without one, at first
	slowPoll = 50 * time.Millisecond // and later

	contended  = time.Second      // for how long a row that was found locked keeps a queue of its own,
	prefetched = 10 * time.Second // and one that is prefetched from
)

// end ends tx, if it has not ended, even when ctx is over. It is deferred, so that
// it also happens when a caller's function panics or ends its goroutine. Its error
// is of no use: a transaction that cannot be rolled back has lost its connection,
// and with it all that it did.
func end(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
	defer cancel()
	_ = tx.Rollback(ctx)
}

const rollbackTime = 5 * time.Second
