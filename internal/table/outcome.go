package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
)

// What became of a transaction, as the server tells.
const (
	Committed  = "committed"
	Aborted    = "aborted"
	InProgress = "in progress"
	Forgotten  = "" // so long ago that the server does not know any more
)

// outcomeSQL asks what became of a transaction or savepoint. A row tells the lower
// half of its ID only: it is the one that is nearest to the newest that is known here.
// One beyond that is not over, or of a server that has lost it in a crash; the server
// is asked for it only if it is known to be its own, since it fails otherwise.
const outcomeSQL = `SELECT CASE
	WHEN id > newest AND NOT $2::bool THEN 'in progress'
	WHEN id < 3 THEN ''
	ELSE coalesce(pg_xact_status(id::text::xid8), '')
	END
FROM (
	SELECT newest, newest + (($1::text::int8 - newest + 2147483648) & 4294967295) - 2147483648 AS id
	FROM (SELECT greatest(pg_current_xact_id()::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8 - 1) AS newest) AS n
) AS t`

// QueueXid puts into a batch the reading of its transaction's ID.
func QueueXid(batch *pgx.Batch, xid *string) {
	batch.Queue(`SELECT pg_current_xact_id()::text`).QueryRow(func(row pgx.Row) error { return row.Scan(xid) })
}

// Outcome reads what became of a transaction or savepoint. own says that it was on this
// very connection.
func Outcome(ctx context.Context, q Querier, xid string, own bool) (outcome string, err error) {
	err = q.QueryRow(ctx, outcomeSQL, xid, own).Scan(&outcome)
	return outcome, err
}

// serverSQL is what a crash, a restart or a promotion changes: when the server
// began, which time line it writes, and, as a crash of one backend has the others
// begin anew without a restart, when its statistics were last thrown away.
const serverSQL = `SELECT concat_ws(' ', pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time(),
	CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END)`

// Server reads which life of which server a connection is to. A transaction ID that
// was told in another life may since have been given to somebody else.
func Server(ctx context.Context, q Querier) (life string, err error) {
	err = q.QueryRow(ctx, serverSQL).Scan(&life)
	return life, err
}

// UpSince reports whether the server has neither crashed nor been started since an
// instant on its clock.
func UpSince(ctx context.Context, q Querier, at time.Time) (up bool, err error) {
	err = q.QueryRow(ctx, `SELECT coalesce(greatest(pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time()) < $1::timestamptz, false)`, at).Scan(&up)
	return up, err
}

// wroteSQL asks whether a row is the very version that a transaction left behind.
const wroteSQL = `SELECT EXISTS (SELECT FROM {table}
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND xmin::text = $4::text
	AND value = $5::float8 AND ts = $6::timestamptz)`

// Wrote reports whether a row is still the one that a take of a transaction left
// behind. That it is proves that the transaction was committed; that it is not
// proves nothing, since others may have written it since.
func (t *Table) Wrote(ctx context.Context, q Querier, c *decide.Change, xid string) (wrote bool, err error) {
	err = q.QueryRow(ctx, t.wrote, c.Name, c.Key.Key, int32(c.Shard), xid, c.After.Value, c.After.TS).Scan(&wrote)
	return wrote, err
}
