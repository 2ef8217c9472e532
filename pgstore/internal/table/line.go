package table

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/decide"
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
// since all our processes take it, so any role may hold the lock. A transaction whose turn comes
// too late goes on without it. For missedFor no other transaction takes turns at that row.
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

// Lines returns the locks at whose rows no turn came too late lately.
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
