package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// inTurn runs a transaction that waits for its turn. It runs it again without a turn if the role
// may not use advisory locks, which it tries once, or if the turn came too late. If all callers
// gave up while the turn was waited for, it notes that the turn came too late.
func (t *Table) inTurn(ctx context.Context, g *Grant, run func() error) error {
	begun := time.Now()
	err := run()
	gaveUp := ctx.Err() != nil && time.Since(begun) > longestTurn/5
	switch {
	case conn.Code(err) == "42501" && !t.noTurns.Swap(true): // insufficient_privilege
		return run()
	case err == nil || g.turn || !conn.TimedOut(err) && !gaveUp:
		return err
	}
	t.Miss(Lock(t.schema, g.Row))
	if gaveUp {
		return err
	}
	return run()
}

// grantInTurn waits for the row of a grant, and takes turns with other processes.
func (t *Table) grantInTurn(ctx context.Context, pool *pgxpool.Pool, g *Grant, now *time.Time) error {
	if g.turn = true; g.never() {
		return nil
	}
	pooled, release, err := t.acquireFor(ctx, pool, g)
	if err != nil {
		return err
	}
	defer release()
	last := ctx // the context of the COMMIT
	if g.TakesExtra() {
		var stop context.CancelFunc
		last, stop = Outlast(ctx)
		defer stop()
	}
	wait := conn.Awaited
	if g.Pipelined && !g.TakesExtra() { // a transaction that gives up loses its place in the line
		wait = longestTurn
	}
	var (
		end   commit
		batch *pgx.Batch
	)
	if t.noTurns.Load() || t.missed.Has(Lock(t.schema, g.Row)) {
		batch = t.begin(wait)
	} else {
		if end.early, err = t.freesEarly(ctx, pooled); err != nil {
			return err
		}
		batch = t.beginTurn(g, LongestTurn(ctx), wait, end.early)
	}
	t.queueGrant(batch, g, now)
	if !g.Pipelined {
		// Without the COMMIT: the server would commit even after all callers have given up.
		if err := pooled.SendBatch(ctx, batch).Close(); err != nil {
			return err
		}
		batch = &pgx.Batch{}
	}
	end.queue(batch)
	return t.fault(last, pooled, &end, pooled.SendBatch(last, batch).Close())
}

// acquireFor returns a connection for a grant, and the function that releases it.
func (t *Table) acquireFor(ctx context.Context, pool *pgxpool.Pool, g *Grant) (pooled *pgxpool.Conn, release func(), err error) {
	if !g.TakesExtra() {
		pooled, err = acquire(ctx, pool)
		return pooled, func() { Release(ctx, pooled) }, err
	}
	s, err := t.kept.acquire(ctx, pool)
	return s.Conn, func() { t.kept.release(ctx, s) }, err
}

// turnSQL sets the bounds of boundsSQL, and then waits for an advisory lock, which the transaction
// has until it ends. It returns how long it waited, in nanoseconds, and sets another bound for the
// locks after it. The transaction's statements find one row by its key, so a generic plan is as
// good as any: otherwise each session would make five plans before that one.
const turnSQL = `SELECT set_config('lock_timeout', $1::text, true), set_config('idle_in_transaction_session_timeout', $2::text, true),
	set_config('plan_cache_mode', 'force_generic_plan', true),
	set_config('synchronous_commit', CASE WHEN $3::bool THEN 'off' ELSE current_setting('synchronous_commit') END, true),
	CASE WHEN pg_advisory_xact_lock($4::int8) IS NOT NULL THEN (date_part('epoch', clock_timestamp() - statement_timestamp()) * 1000000)::int8 * 1000 END,
	set_config('lock_timeout', $5::text, true)`

// beginTurn begins a batch with a transaction that waits for its turn at the row of a grant, before
// it waits for the row itself. PostgreSQL wakes all waiters for a row each time that it is free,
// and all but one find it locked again. Correctness does not depend on the turn. It sets g.Waited.
// With early, the transaction's COMMIT does not wait for the disk.
func (t *Table) beginTurn(g *Grant, turn, wait time.Duration, early bool) *pgx.Batch {
	var batch pgx.Batch
	g.turn = false
	batch.Queue(beginSQL)
	batch.Queue(turnSQL, milliseconds(turn), milliseconds(t.silence), early, Lock(t.schema, g.Row), milliseconds(wait)).QueryRow(func(row pgx.Row) error {
		err := row.Scan(nil, nil, nil, nil, &g.Waited, nil)
		g.turn = err == nil
		return err
	})
	return &batch
}

// queueGrant puts into a batch the statement for a grant that waits for its row.
func (t *Table) queueGrant(batch *pgx.Batch, g *Grant, now *time.Time) {
	k := t.of(&g.Definition)
	if g.TakesExtra() {
		queueMany(batch, &k.prefetchInTurn, manyOf([]*Grant{g}), true, now)
		return
	}
	batch.Queue(k.grantInTurn.sql, k.grantInTurn.args(g, now)...).QueryRow(func(row pgx.Row) error { return g.scan(row, now) })
}
