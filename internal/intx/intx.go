// Package intx runs and ends transactions. It tells whether a COMMIT that failed may have been done.
package intx

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrUnknown reports a COMMIT that was sent and not answered, also since its context ended, or that
// some nodes of a distributed database may have done. Packages pgstore and catalog export it.
var ErrUnknown = errors.New("ratelimit: whether the transaction was committed is not known")

// Beginner is implemented by pools and connections.
type Beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Do runs do in a transaction, and commits it unless do fails. Its other errors say that nothing was
// committed.
func Do(ctx context.Context, db Beginner, options pgx.TxOptions, do func(pgx.Tx) error) error {
	tx, err := db.BeginTx(ctx, options)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }() // does nothing after COMMIT
	if err := do(tx); err != nil {
		return err
	}
	return Commit(ctx, tx)
}

// Commit commits tx. Its errors are those of Do.
func Commit(ctx context.Context, tx pgx.Tx) error {
	if err := ctx.Err(); err != nil {
		return err // pgx would close the connection, and send nothing
	}
	err := tx.Commit(ctx)
	if err == nil || errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, pgx.ErrTxClosed) || Answered(err) && !InPart(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknown, err)
}

// Answered reports whether the server has said by err that it did nothing. An error of class 08, or one
// that ends the connection, says no such thing: a pooler reports a lost connection by it. Of a COMMIT see
// also InPart.
func Answered(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && pgErr.Code[:min(2, len(pgErr.Code))] != "08"
}

// InPart reports whether a COMMIT with this error may have committed on some nodes of a distributed
// database. Citus reports so that one node failed after another had committed.
func InPart(err error) bool {
	return Code(err) == "XX000"
}

// SQLSTATEs of statements that were ended before they did anything.
const (
	LockNotAvailable = "55P03" // waited for a lock longer than lock_timeout
	QueryCanceled    = "57014" // by a statement_timeout or a cancel request
)

// Code returns the SQLSTATE of an error of any driver; "" if it has none.
func Code(err error) string {
	var state interface{ SQLState() string }
	if errors.As(err, &state) {
		return state.SQLState()
	}
	return ""
}
