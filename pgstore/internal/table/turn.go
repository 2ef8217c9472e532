package table

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Sessions take turns at a row by an advisory lock, which a session can have before its transaction
// begins.

// Lock returns the ID of the advisory lock of a row in a schema.
func Lock(schema string, row decide.Row) int64 {
	var all []byte
	for _, part := range [...]string{conn.Table, schema, row.Name, row.Key.Key, strconv.Itoa(row.Shard)} {
		all = append(binary.AppendUvarint(all, uint64(len(part))), part...)
	}
	h := fnv.New64a()
	_, _ = h.Write(all) // a Hash never fails
	return int64(h.Sum64())
}

// A turn only orders transactions: correctness does not depend on it. Its lock's ID is no secret,
// so any role may hold the lock. A transaction whose turn comes too late goes on without it. For
// missedFor no other transaction takes turns at that row.
const (
	longestTurn = 500 * time.Millisecond // enough for a line of a hundred processes
	missedFor   = 10 * time.Second
)

// LongestTurn returns how long a transaction waits for its turns: at most half of the time that ctx
// leaves.
func LongestTurn(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(min(longestTurn, time.Until(deadline)/2), conn.PassOver)
	}
	return longestTurn
}

// Miss notes that a turn at some rows came too late.
func (t *Table) Miss(locks ...int64) {
	for _, lock := range locks {
		t.missed.Note(lock, missedFor)
	}
}

// Lines removes the locks of rows at which a turn came too late within missedFor.
func (t *Table) Lines(locks []int64) []int64 { return slices.DeleteFunc(locks, t.missed.Has) }

// lockSessionSQL takes an advisory lock, and returns whether others had it.
const lockSessionSQL = `SELECT CASE WHEN pg_try_advisory_lock($1::int8) THEN false
	WHEN set_config('lock_timeout', $2::text, true) IS NOT NULL THEN pg_advisory_lock($1::int8) IS NOT NULL END`

// QueueLock puts into a batch the taking of an advisory lock for the session, which waits no longer
// than longest. When the session has the lock, taken is called, and learns whether the session had
// to wait.
func QueueLock(batch *pgx.Batch, id int64, longest time.Duration, taken func(waited bool)) {
	batch.Queue(lockSessionSQL, id, milliseconds(longest)).QueryRow(func(row pgx.Row) error {
		var waited bool
		err := row.Scan(&waited)
		if err == nil {
			taken(waited)
		}
		return err
	})
}

// takeOverSQL moves an advisory lock from a session to its transaction.
const takeOverSQL = `SELECT CASE WHEN pg_advisory_xact_lock($1::int8) IS NOT NULL THEN pg_advisory_unlock($1::int8) END`

// QueueTakeOver puts takeOverSQL into a batch. It does not wait, since the session has the lock.
// done is called when only the transaction has it.
func QueueTakeOver(batch *pgx.Batch, id int64, done func()) {
	batch.Queue(takeOverSQL, id).Exec(func(pgconn.CommandTag) error {
		done()
		return nil
	})
}

// ownSessionSQL returns no row if the role may not use the locks.
const ownSessionSQL = `SELECT pg_backend_pid() WHERE has_function_privilege('pg_catalog.pg_advisory_lock(int8)', 'EXECUTE')
	AND has_function_privilege('pg_catalog.pg_try_advisory_lock(int8)', 'EXECUTE')
	AND has_function_privilege('pg_catalog.pg_advisory_xact_lock(int8)', 'EXECUTE')
	AND has_function_privilege('pg_catalog.pg_advisory_unlock(int8)', 'EXECUTE')`

// OwnSession reports whether a connection has a session of its own, which may take advisory locks.
// A pooler that hands on sessions between transactions gives its clients other process IDs than the
// server's, since it must find the session that a client wants to cancel.
func OwnSession(ctx context.Context, pooled *pgxpool.Conn) (own bool, err error) {
	var pid uint32
	if err = pooled.QueryRow(ctx, ownSessionSQL).Scan(&pid); errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil && pid == pooled.Conn().PgConn().PID(), err
}

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
// good as any, and saves each session five plans before it.
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
	k := t.kinds[g.Definition.Form()]
	if g.TakesExtra() {
		queueMany(batch, &k.prefetchInTurn, manyOf([]*Grant{g}), true, now)
		return
	}
	batch.Queue(k.grantInTurn.sql, k.grantInTurn.args(g, now)...).QueryRow(func(row pgx.Row) error { return g.scan(row, now) })
}

// A transaction that has had its turn frees its row before it is on disk. Afterwards the commit of
// an empty message in the log waits for the disk, and no call is answered before that. A
// transaction that takes the row meanwhile comes later in the log. A crash, or a standby, only
// loses the end of the log.
const awaitDiskSQL = conn.AwaitDisk

// freesEarly reports whether transactions can free their rows early: the server has the function
// for messages, and the role may call it. It remembers that answer. It does not remember other
// errors.
func (t *Table) freesEarly(ctx context.Context, pooled *pgxpool.Conn) (bool, error) {
	if known := t.early.Load(); known != nil {
		return *known, nil
	}
	_, err := pooled.Exec(ctx, awaitDiskSQL)
	may := err == nil
	denied := slices.Contains([]string{"42501", "42883", "0A000"}, conn.Code(err)) // insufficient_privilege, undefined_function, feature_not_supported
	switch {
	case may || denied:
		t.early.Store(&may)
	case !intx.Answered(err):
		return false, err
	}
	return may, nil
}

// commit is the COMMIT of a batch.
type commit struct {
	early bool // the transaction frees its row before it is on disk
	done  bool // COMMIT was answered; with early, it may not be on disk
}

func (c *commit) queue(batch *pgx.Batch) {
	batch.Queue("COMMIT").Exec(func(pgconn.CommandTag) error {
		c.done = true
		return nil
	})
	if c.early {
		batch.Queue(awaitDiskSQL)
	}
}

// fault returns the error of a batch that was sent on conn. An error of the server after COMMIT is
// about the message. The connection may have forgotten its statement, as after DEALLOCATE ALL, so
// the message is sent again, unprepared. If that is refused too, it is unknown whether the
// transaction is on disk. The error then hides the server's error from errors.As, so that callers
// do not take it for one of a transaction that did nothing. Whether rows can be freed early is
// asked again then.
func (t *Table) fault(ctx context.Context, conn *pgxpool.Conn, c *commit, err error) error {
	var refused *pgconn.PgError
	if !c.done || !errors.As(err, &refused) {
		return err
	}
	if _, err = conn.Exec(ctx, awaitDiskSQL, pgx.QueryExecModeSimpleProtocol); err == nil {
		return nil
	}
	if !conn.Conn().IsClosed() { // otherwise the server went away, and answers as before when it is back
		t.early.Store(nil)
	}
	return fmt.Errorf("committed, and perhaps not on disk: %v", err)
}
