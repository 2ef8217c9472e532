package table

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/fnv"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Sessions stand in line for a row by an advisory lock, which a session can have before its
// transaction begins.

// Lock returns the ID of the advisory lock of a row in a schema.
func Lock(schema string, row decide.Row) int64 {
	h := fnv.New64a()
	for _, part := range []string{conn.Table, schema, row.Name, row.Key.Key, strconv.Itoa(row.Shard)} {
		_, _ = h.Write(binary.AppendUvarint(nil, uint64(len(part)))) // a Hash never fails
		_, _ = h.Write([]byte(part))
	}
	return int64(h.Sum64())
}

// lockSessionSQL takes an advisory lock in turn, and tells whether others had it.
const lockSessionSQL = `SELECT CASE WHEN pg_try_advisory_lock($1::int8) THEN false ELSE pg_advisory_lock($1::int8) IS NOT NULL END`

// QueueLock puts into a batch the taking of an advisory lock, which the session has until it
// unlocks it. taken is called when it has it, with whether it had to wait.
func QueueLock(batch *pgx.Batch, id int64, taken func(waited bool)) {
	batch.Queue(lockSessionSQL, id).QueryRow(func(row pgx.Row) error {
		var waited bool
		err := row.Scan(&waited)
		if err == nil {
			taken(waited)
		}
		return err
	})
}

// takeOverSQL has a transaction take over an advisory lock from its session.
const takeOverSQL = `SELECT CASE WHEN pg_advisory_xact_lock($1::int8) IS NOT NULL THEN pg_advisory_unlock($1::int8) END`

// QueueTakeOver puts that into a batch. The session has the lock already, so the transaction does
// not wait for it. done is called when it is the transaction's, and the session's no more.
func QueueTakeOver(batch *pgx.Batch, id int64, done func()) {
	batch.Queue(takeOverSQL, id).Exec(func(pgconn.CommandTag) error {
		done()
		return nil
	})
}

// ownSessionSQL finds nothing where the role may not use the locks.
const ownSessionSQL = `SELECT pg_backend_pid() WHERE has_function_privilege('pg_catalog.pg_advisory_lock(int8)', 'EXECUTE')
	AND has_function_privilege('pg_catalog.pg_try_advisory_lock(int8)', 'EXECUTE')
	AND has_function_privilege('pg_catalog.pg_advisory_xact_lock(int8)', 'EXECUTE')
	AND has_function_privilege('pg_catalog.pg_advisory_unlock(int8)', 'EXECUTE')`

// OwnSession reports whether a connection is to a session of its own, which may take
// advisory locks. A pooler that hands sessions on between transactions has to tell its
// clients other process IDs than the server's, since it must find the session that they
// want canceled.
func OwnSession(ctx context.Context, pooled *pgxpool.Conn) (own bool, err error) {
	var pid uint32
	if err = pooled.QueryRow(ctx, ownSessionSQL).Scan(&pid); errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil && pid == pooled.Conn().PgConn().PID(), err
}
