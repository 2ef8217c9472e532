package tx

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/memory"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// attempt is one run of a transaction.
type attempt struct {
	taker      *Taker
	contention *table.Lately
	call       *decide.Call
	shards     []int         // the shard of each limit that is reserved for this transaction
	claim      *memory.Claim // the tokens that are not taken from rows
	held       bool          // the claim covers all tokens, so no row is taken from
	do         Func
	queued     *Queued // the takes that travel with COMMIT; nil for an attempt that takes before the function
	level      pgx.TxIsoLevel

	conn        *pgxpool.Conn
	incarnation string // of the server; "" if it could not be read
	lockAll     bool   // decide on all rows of the limits, locked
	turn        turn
	work        *work // of an attempt whose takes travel with COMMIT
	result      ratelimit.Result
	taken       try
	met         bool // other transactions were at its rows
	failed      bool // the function returned an error
	ended       bool // the function has ended the transaction itself
}

// outcome returns the attempt's outcome where the error alone does not say.
func (a *attempt) outcome(err error) ratelimit.Outcome {
	switch {
	case errors.Is(err, conn.ErrCommitted) && !a.untaken():
		return ratelimit.OutcomeGranted
	case a.failed && a.result.OK && !conn.Retriable(err) && !conn.Done(err):
		return ratelimit.OutcomeRolledBack
	}
	return ""
}

// run takes, runs the function, and commits. It returns nil if and only if the function returned
// nil and the server has reported the commit.
func (a *attempt) run(ctx context.Context) error {
	lost, err := a.transact(ctx)
	if !lost {
		return err
	}
	if a.held {
		return fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, err)
	}
	if rolledBack := a.resolve(ctx, err); rolledBack != nil {
		return rolledBack
	}
	if a.work != nil {
		a.work.took = true
	}
	if a.failed {
		return fmt.Errorf("%w: %w", conn.ErrCommitted, err)
	}
	return nil
}

// transact runs the transaction on a connection. It gives the connection back before it returns,
// since reading the outcome may need the only one of the pool. lost reports that the connection was
// closed with the outcome unknown.
func (a *attempt) transact(ctx context.Context) (lost bool, err error) {
	pooled, err := a.taker.Pool.Acquire(ctx)
	if err != nil {
		return false, a.taker.Fault("acquire", err)
	}
	defer pooled.Release() // also when the function panics or ends its goroutine
	a.conn = pooled
	if !a.held { // the outcome of a held attempt cannot be read anyway
		if a.incarnation, err = incarnation(ctx, pooled); err != nil && pooled.Conn().IsClosed() {
			return false, a.notBegun(ctx, a.taker.Fault("ask the server", err))
		}
	}
	a.turn = a.turnOf(ctx)
	tx, err := a.begin(ctx)
	if a.turn.missed(err) {
		conn.End(ctx, tx)
		tx, err = a.begin(ctx)
	}
	doing, closed := false, false
	defer func() {
		if doing { // it panicked, or ended its goroutine
			a.ended = a.over() || a.lost() != nil
		}
		if tx != nil && !closed { // also if a statement has ended it: the function may have kept it
			conn.End(ctx, tx)
		}
		a.turn.leave(ctx)
	}()
	if err != nil {
		return false, a.notBegun(ctx, err)
	}
	if err := a.result.Err(); err != nil {
		return false, err
	}
	doing = true
	err = a.do(tx, a.result)
	doing, a.failed, a.ended = false, err != nil, a.over()
	switch {
	case a.lost() != nil:
		return true, cmp.Or(err, a.lost())
	case a.failed:
		return a.again(ctx, tx, err)
	case a.conn.Conn().IsClosed():
		return false, fmt.Errorf("pgstore: the connection was lost before commit: %w", pgx.ErrTxClosed)
	case a.ended:
		return false, a.became(ctx)
	}
	if err := ctx.Err(); err != nil { // pgx would close the connection, which looks like a lost COMMIT
		return false, a.taker.Fault("commit", err)
	}
	if err = tx.Commit(ctx); err == nil || errors.Is(err, ratelimit.ErrRefused) {
		closed = true
		return false, err
	}
	if err = a.taker.Fault("commit", err); a.conn.Conn().IsClosed() && !intx.Answered(err) && !a.unbegun() {
		return true, err
	}
	return a.again(ctx, tx, err)
}

// notBegun returns the error of a BEGIN. If the end of the context closed the connection, the error
// includes the context's.
func (a *attempt) notBegun(ctx context.Context, err error) error {
	if conn.Retriable(err) {
		a.meet()
	}
	if over := ctx.Err(); over != nil && a.conn.Conn().IsClosed() && !errors.Is(err, over) {
		return fmt.Errorf("%w: %w", err, over) // the context ended during an earlier statement, which closed the connection
	}
	return err
}

// over reports whether the attempt's connection is in no transaction any more.
func (a *attempt) over() bool {
	if a.work != nil {
		return a.work.over()
	}
	return a.conn.Conn().PgConn().TxStatus() == 'I'
}

// lost returns the error of a COMMIT without an answer that the function sent by Commit.
func (a *attempt) lost() error {
	if a.work == nil {
		return nil
	}
	return a.work.lost
}

// unbegun reports whether the function has sent nothing that began its transaction.
func (a *attempt) unbegun() bool { return a.work != nil && !a.work.begun }

// untaken reports whether a transaction ended without its takes.
func (a *attempt) untaken() bool { return a.work != nil && !a.work.took && len(a.call.Demands) > 0 }

// again returns the results of transact for an error of the function or of COMMIT. If the function
// has committed the take itself, no error may lead to another attempt, even if the function has
// begun another transaction since: its work would be done twice.
func (a *attempt) again(ctx context.Context, tx pgx.Tx, err error) (lost bool, _ error) {
	switch {
	case intx.InPart(err) && a.over():
		return false, fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, err)
	case !conn.Retriable(err) && !conn.Forgotten(err):
		if a.ended && !a.held && a.claim != nil && a.work == nil {
			_, _ = a.committed(ctx) // for memory
		}
		return false, err
	case a.held && a.ended:
		return false, fmt.Errorf("%w: the function ended the transaction itself: %w", conn.ErrOutcomeUnknown, err)
	case a.held: // nothing tells the outcome, nor whether the function has begun another transaction
		return false, err
	case a.unbegun():
		return false, err
	case !a.over():
		conn.End(ctx, tx)
	}
	if a.conn.Conn().IsClosed() {
		return true, err
	}
	committed, unknown := a.committed(ctx)
	switch {
	case unknown != nil:
		return false, fmt.Errorf("%w: %w", unknown, err)
	case committed:
		return false, fmt.Errorf("%w: %w", conn.ErrCommitted, err)
	}
	return false, err
}

// became returns the error of a function that has ended the transaction itself: nil if it committed
// with its takes.
func (a *attempt) became(ctx context.Context) error {
	if a.held {
		return fmt.Errorf("%w: the function ended the transaction itself: %w", conn.ErrOutcomeUnknown, pgx.ErrTxClosed)
	}
	committed, err := a.committed(ctx)
	switch {
	case err != nil:
		return err
	case !committed:
		return fmt.Errorf("pgstore: the function rolled the transaction back itself: %w", pgx.ErrTxClosed)
	case a.untaken():
		return fmt.Errorf("%w, and nothing was taken: %w", conn.ErrCommitted, pgx.ErrTxClosed)
	}
	return nil
}

// committed reports whether a transaction was committed. It asks on the transaction's connection,
// even after ctx has ended. If the function has rolled it back, what memory gave for it goes back.
func (a *attempt) committed(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.RollbackTime)
	defer cancel()
	ask := func() (string, error) { return table.Outcome(ctx, a.conn, a.taken.taken[0].Xid, true) }
	became, err := ask()
	if conn.Forgotten(err) { // pgx prepares it again
		became, err = ask()
	}
	if err != nil {
		return false, fmt.Errorf("%w: %w", conn.ErrOutcomeUnknown, err)
	}
	a.ended = a.ended && became == table.Committed
	return became == table.Committed, nil
}
