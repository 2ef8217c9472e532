package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Outcomes of a transaction, as the server reports them.
const (
	Committed  = "committed"
	Aborted    = "aborted"
	InProgress = "in progress"
	Forgotten  = "" // too long ago for the server to know
)

// QueueXid puts into a batch the reading of its transaction's ID.
func QueueXid(batch *pgx.Batch, xid *string) {
	batch.Queue("SELECT pg_current_xact_id()::text").QueryRow(func(row pgx.Row) error { return row.Scan(xid) })
}

// outcomeSQL reads the outcome of a transaction or savepoint. A row has the lower half of its ID only:
// it is the one that is nearest to the newest that is known here. One beyond that is not over, or of a
// server that has lost it in a crash. The server fails when it is asked for such an ID, so it is asked
// only if the ID is known to be its own.
const outcomeSQL = `SELECT CASE
	WHEN id > newest AND NOT $2::bool THEN 'in progress'
	WHEN id < 3 THEN ''
	ELSE coalesce(pg_xact_status(id::text::xid8), '')
	END
FROM (
	SELECT newest, newest + (($1::text::int8 - newest + 2147483648) & 4294967295) - 2147483648 AS id
	FROM (SELECT greatest(pg_current_xact_id()::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8 - 1) AS newest) AS n
) AS t`

// Outcome reads the outcome of a transaction or savepoint. own means that it was on this very
// connection.
func Outcome(ctx context.Context, q Querier, xid string, own bool) (outcome string, err error) {
	err = q.QueryRow(ctx, outcomeSQL, xid, own).Scan(&outcome)
	return outcome, err
}

// holdsSQL asks for the lock that a transaction has on its own ID, and on those of its savepoints that
// have not ended.
const holdsSQL = `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock'
	AND pid = pg_backend_pid() AND transactionid::text::int8 = $1::text::int8 & 4294967295)`

// Holds reports whether an ID is that of this very transaction or of one of its
// savepoints that have not ended.
func Holds(ctx context.Context, q Querier, xid string) (holds bool, err error) {
	err = q.QueryRow(ctx, holdsSQL, xid).Scan(&holds)
	return holds, err
}

// serverSQL reads what a crash, a restart or a promotion changes: when the server began, which time
// line it writes, and when its statistics were last thrown away, since a crash of one backend has the
// others begin anew without a restart.
const serverSQL = `SELECT concat_ws(' ', pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time(),
	CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END)`

// Server reads the incarnation of the server that a connection is to. A transaction ID that
// was told in another one may since have been given to somebody else.
func Server(ctx context.Context, q Querier) (incarnation string, err error) {
	err = q.QueryRow(ctx, serverSQL).Scan(&incarnation)
	return incarnation, err
}

const upSinceSQL = `SELECT coalesce(greatest(pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time()) < $1::timestamptz, false)`

// UpSince reports whether the server has neither crashed nor been started since an
// instant on its clock.
func UpSince(ctx context.Context, q Querier, at time.Time) (up bool, err error) {
	err = q.QueryRow(ctx, upSinceSQL, at).Scan(&up)
	return up, err
}

// Wrote reports whether a row is still the one that a take of a transaction left
// behind. That it is proves that the transaction was committed; that it is not
// proves nothing, since others may have written it since.
func (t *Table) Wrote(ctx context.Context, q Querier, c *decide.Change, xid string) (wrote bool, err error) {
	err = q.QueryRow(ctx, t.maintenance["wrote"], c.Name, c.Key.Key, int32(c.Shard), xid, c.After.Value, c.After.TS).Scan(&wrote)
	return wrote, err
}
