package table

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
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

// Savepoint is the name of the savepoint before what may be undone in a caller's transaction.
const Savepoint = "ratelimit_take"

// ToSavepoint begins a batch that undoes everything since the savepoint.
func ToSavepoint() *pgx.Batch {
	var batch pgx.Batch
	batch.Queue("ROLLBACK TO SAVEPOINT " + Savepoint)
	batch.Queue("RELEASE SAVEPOINT " + Savepoint)
	return &batch
}

const boundsSQL = `SELECT set_config('lock_timeout', $1::text, true), set_config('idle_in_transaction_session_timeout', $2::text, true)`

// propagateSQL has Citus send the settings of a transaction to its nodes, where there is Citus.
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

// queueLockTimeout puts into a batch the lock_timeout of the nodes of a distributed table. Citus sends
// them what SET LOCAL sets, and not what set_config does. On other tables it does nothing.
func (t *Table) queueLockTimeout(batch *pgx.Batch, timeout, propagate string) {
	if !t.distributed {
		return
	}
	batch.Queue(propagateSQL, "local")
	batch.Queue("SET LOCAL lock_timeout = " + quoted(timeout))
	if propagate != "local" {
		batch.Queue(propagateSQL, propagate)
	}
}

// quoted returns a literal of a text that comes from the server.
func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

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
