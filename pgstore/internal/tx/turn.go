package tx

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Processes that meet on a row stand in one line for it, as the transactions of one process do
// (Runner.queue). The line is an advisory lock of the session, since a transaction must have
// its turn before it begins: one that waits for the row itself has a snapshot that is out of
// date by the time it has it, and is run again (40001). PostgreSQL serves the line first come,
// first served. It is taken in the round trip of BEGIN, and COMMIT gives it back, so that the
// next transaction begins on the server as soon as the one before has committed.
//
// A line is taken for rows on which the process has met others lately, and only on a connection
// to a session of its own. Correctness does not depend on it: a transaction that does not stand
// in line is run again.

// turn is a connection's place in the lines of some rows. The session has the locks before the
// transaction begins, which then takes them over: its end gives them back, however it ends.
type turn struct {
	table      *table.Table
	conn       *pgxpool.Conn
	contention *table.Lately // the rows at which others were met
	locks      []int64       // ascending; none for a transaction that stands in no line
	had        int           // of them, those that the session has had
	owed       int           // how many the session may have, and the transaction has not
	left       bool          // a turn has not come in time
}

// begin returns a batch that begins a transaction, after it has had its turn in all lines.
func (l *turn) begin(ctx context.Context) *pgx.Batch {
	var batch pgx.Batch
	if len(l.locks) == 0 {
		batch.BeginTx(pgx.TxOptions{IsoLevel: l.table.Level()})
		return &batch
	}
	// A statement outside of a transaction would become part of the one that is begun behind
	// it in the same round trip, and the lock is to be had before the snapshot.
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

// missed reports whether a transaction did not begin since its turn has not come in time. Then it
// stands in no line any more, and neither do later ones in the one that it waited in.
func (l *turn) missed(err error) bool {
	if l.had == len(l.locks) || !conn.TimedOut(err) {
		return false
	}
	l.table.Miss(l.locks[l.had])
	l.locks, l.had, l.left = nil, 0, true
	return true
}

// leave closes a connection whose session may have kept a lock, which the server then gives back.
func (l *turn) leave(ctx context.Context) {
	if l.owed > 0 && !l.conn.Conn().IsClosed() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.RollbackTime)
		defer cancel()
		_ = l.conn.Conn().Close(ctx)
	}
}

// sessionKey is where a connection keeps whether it has a session of its own.
const sessionKey = "ratelimit.session"

// ownSession reports that, which is asked once for each connection.
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
