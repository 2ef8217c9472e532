package table

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
)

const beginSQL = "BEGIN ISOLATION LEVEL READ COMMITTED"

// Outlast returns a context for a statement that prefetches or returns. It ends five seconds after ctx
// has ended. The server completes the statement anyway. So tokens that it takes must be returned, and
// tokens that it may have returned are lost.
func Outlast(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(5*time.Second, cancel)
		context.AfterFunc(longer, func() { timer.Stop() })
	})
	return longer, func() { stop(); cancel() }
}

// Savepoint names the savepoint in a caller's transaction to which takes are rolled back.
const Savepoint = "ratelimit_take"

// ToSavepoint begins a batch that undoes everything since the savepoint.
func ToSavepoint() *pgx.Batch {
	var batch pgx.Batch
	batch.Queue("ROLLBACK TO SAVEPOINT " + Savepoint)
	batch.Queue("RELEASE SAVEPOINT " + Savepoint)
	return &batch
}

const boundsSQL = `SELECT set_config('lock_timeout', $1::text, true), set_config('idle_in_transaction_session_timeout', $2::text, true)`

// propagateSQL makes Citus, if it is there, send the settings of a transaction to its nodes.
const propagateSQL = `SELECT set_config('citus.propagate_set_commands', $1::text, true)
WHERE current_setting('citus.propagate_set_commands', true) IS NOT NULL`

// lockTimeoutSQL reads what queueLockTimeout sets.
const lockTimeoutSQL = `SELECT current_setting('lock_timeout'), coalesce(current_setting('citus.propagate_set_commands', true), '')`

// QueueBounds puts two bounds into a batch, after the BEGIN of a transaction. It waits for a lock
// no longer than wait, 0 for no bound. The server keeps its locks no longer than the Table's
// silence after it last heard from the client.
func (t *Table) QueueBounds(batch *pgx.Batch, wait time.Duration) {
	if wait > 0 {
		t.queueLockTimeout(batch, milliseconds(wait), "local")
	}
	batch.Queue(boundsSQL, milliseconds(wait), milliseconds(t.silence))
}

// queueLockTimeout puts into a batch the lock_timeout of the nodes of a distributed table. Citus
// sends them what SET LOCAL sets, not what set_config sets. On other tables it does nothing.
func (t *Table) queueLockTimeout(batch *pgx.Batch, timeout, propagate string) {
	if !t.distributed {
		return
	}
	batch.Queue(propagateSQL, "local")
	batch.Queue("SET LOCAL lock_timeout = '" + strings.ReplaceAll(timeout, "'", "''") + "'") // as the server printed it
	if propagate != "local" {
		batch.Queue(propagateSQL, propagate)
	}
}

// milliseconds returns the value of a setting.
func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// begin begins a batch with a transaction that waits for a lock no longer than wait, 0 for no
// bound.
func (t *Table) begin(wait time.Duration) *pgx.Batch {
	var batch pgx.Batch
	batch.Queue(beginSQL)
	t.QueueBounds(&batch, wait)
	return &batch
}

// The outcomes of a transaction, as the server reports them.
const (
	Committed  = "committed"
	Aborted    = "aborted"
	InProgress = "in progress"
	Forgotten  = "" // too long ago for the server to know
)

// QueueXid puts into a batch the reading of the ID of its transaction.
func QueueXid(batch *pgx.Batch, xid *string) {
	batch.Queue("SELECT pg_current_xact_id()::text").QueryRow(func(row pgx.Row) error { return row.Scan(xid) })
}

// outcomeSQL reads the outcome of a transaction or savepoint. A row has only the lower half of its
// ID, so the ID is the one nearest to the newest ID that the server knows. An ID beyond the newest
// is not over, or its server lost it in a crash. Asking for such an ID is an error, so it is done
// only if the ID is known to be the session's own.
const outcomeSQL = `SELECT CASE
	WHEN id > newest AND NOT $2::bool THEN 'in progress'
	WHEN id < 3 THEN ''
	ELSE coalesce(pg_xact_status(id::text::xid8), '')
	END
FROM (
	SELECT newest, newest + (($1::text::int8 - newest + 2147483648) & 4294967295) - 2147483648 AS id
	FROM (SELECT greatest(pg_current_xact_id()::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8 - 1) AS newest) AS n
) AS t`

// Outcome reads the outcome of a transaction or savepoint. own says that it ran on this connection.
func Outcome(ctx context.Context, q Querier, xid string, own bool) (outcome string, err error) {
	err = q.QueryRow(ctx, outcomeSQL, xid, own).Scan(&outcome)
	return outcome, err
}

// holdsSQL looks for the lock that a transaction holds on its own ID, and on the IDs of its open
// savepoints.
const holdsSQL = `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock'
	AND pid = pg_backend_pid() AND transactionid::text::int8 = $1::text::int8 & 4294967295)`

// Holds reports whether an ID is that of the present transaction, or of one of its open savepoints.
func Holds(ctx context.Context, q Querier, xid string) (holds bool, err error) {
	err = q.QueryRow(ctx, holdsSQL, xid).Scan(&holds)
	return holds, err
}

// serverSQL reads what a crash, a restart or a promotion changes: when the server began, its time
// line, and when its statistics were last reset. The last is for a crash of one backend, after
// which the others begin anew without a restart.
const serverSQL = `SELECT concat_ws(' ', pg_postmaster_start_time(), pg_stat_get_bgwriter_stat_reset_time(),
	CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END)`

// Server reads the incarnation of a connection's server. A transaction ID from another incarnation
// may since have been given to another transaction.
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

// Wrote reports whether a row is still as a take of a transaction left it. If so, the transaction
// was committed. If not, nothing is known, since others may have written the row since.
func (t *Table) Wrote(ctx context.Context, q Querier, c *decide.Change, xid string) (wrote bool, err error) {
	err = q.QueryRow(ctx, t.maintenance["wrote"], c.Name, c.Key.Key, int32(c.Shard), xid, c.After.Value, c.After.TS).Scan(&wrote)
	return wrote, err
}
