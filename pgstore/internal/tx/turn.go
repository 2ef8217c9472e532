package tx

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Processes that meet at a row take turns at it, like the transactions of one process in
// Runner.queue. A turn is an advisory lock of the session, since a transaction must have its turn
// before it begins. A transaction that waits for the row itself has an outdated snapshot by the
// time it gets the row, and runs again (40001). PostgreSQL serves the lock first come, first
// served. The lock is taken in the round trip of BEGIN, and COMMIT releases it. So the next
// transaction begins on the server as soon as the one before has committed.
//
// Turns are taken only at rows where the process has met others lately, and only on a connection
// with a session of its own. Correctness does not depend on them: a transaction without a turn is
// run again.

// turn holds a connection's locks for its turn at some rows. The session gets the locks before the
// transaction begins. Then the transaction takes them over, so its end releases them, however it
// ends.
type turn struct {
	table      *table.Table
	conn       *pgxpool.Conn
	contention *table.Lately // the rows where others were met
	locks      []int64       // ascending; empty for a transaction without turns
	had        int           // how many of locks the session has got
	owed       int           // how many locks the session may have that the transaction has not taken over
	left       bool          // a turn came too late
}

// begin returns a batch that begins a transaction after its turn at all rows.
func (l *turn) begin(ctx context.Context) *pgx.Batch {
	var batch pgx.Batch
	if len(l.locks) == 0 {
		batch.BeginTx(pgx.TxOptions{IsoLevel: l.table.Level})
		return &batch
	}
	// Outside of a transaction, the statement that locks would become part of the transaction that
	// begins behind it in the same round trip. The lock must come before the snapshot.
	batch.BeginTx(pgx.TxOptions{})
	l.had = 0
	for _, lock := range l.locks {
		table.QueueLock(&batch, lock, table.LongestTurn(ctx), func(waited bool) {
			if l.had++; waited {
				l.contention.Note(lock, engine.Contended)
			}
		})
	}
	batch.Queue("COMMIT")
	batch.Queue("BEGIN ISOLATION LEVEL SERIALIZABLE")
	for _, lock := range l.locks {
		table.QueueTakeOver(&batch, lock, func() { l.owed-- })
	}
	l.owed += len(l.locks)
	return &batch
}

// missed reports whether a transaction did not begin because its turn came too late. Then the
// attempt begins again without turns, and for a while no transaction takes turns at that row.
func (l *turn) missed(err error) bool {
	if l.had == len(l.locks) || !conn.TimedOut(err) {
		return false
	}
	l.table.Miss(l.locks[l.had])
	l.locks, l.had, l.left = nil, 0, true
	return true
}

// leave closes a connection whose session may have kept a lock. The server then releases the lock.
func (l *turn) leave(ctx context.Context) {
	if l.owed > 0 && !l.conn.Conn().IsClosed() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.RollbackTime)
		defer cancel()
		_ = l.conn.Conn().Close(ctx)
	}
}

// sessionKey is the key under which a connection keeps whether it has a session of its own.
const sessionKey = "ratelimit.session"

// ownSession reports whether a connection has a session of its own. It asks once for each
// connection.
func ownSession(ctx context.Context, conn *pgxpool.Conn) bool {
	data := conn.Conn().PgConn().CustomData()
	own, known := data[sessionKey].(bool)
	if !known {
		var err error
		if own, err = table.OwnSession(ctx, conn); err == nil {
			data[sessionKey] = own
		}
	}
	return own
}
