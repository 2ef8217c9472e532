package pgstore

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// transaction is a pgx.Tx on a connection whose BEGIN was sent with something
// else. pgx's own begins with a round trip of its own, which here would be a
// fourth beside the take, the work and the COMMIT.
type transaction struct {
	conn   *pgx.Conn
	closed bool
}

var _ pgx.Tx = (*transaction)(nil)

func (tx *transaction) Commit(ctx context.Context) error {
	if tx.closed {
		return pgx.ErrTxClosed
	}
	tx.closed = true
	return committed(tx.conn.Exec(ctx, commitSQL))
}

// committed is what became of a COMMIT. That of a failed transaction is answered
// with ROLLBACK, which is no error to the server.
func committed(tag pgconn.CommandTag, err error) error {
	if err == nil && tag.String() == "ROLLBACK" {
		return pgx.ErrTxCommitRollback
	}
	return err
}

func (tx *transaction) Rollback(ctx context.Context) error {
	if tx.closed {
		return pgx.ErrTxClosed
	}
	tx.closed = true
	_, err := tx.conn.Exec(ctx, "ROLLBACK")
	return err
}

// end is rollback without a timer for what has ended.
func (tx *transaction) end(ctx context.Context) {
	if !tx.closed {
		rollback(ctx, tx)
	}
}

// within is pgx's own transaction on the same connection, for what only that
// can do. What begins it does nothing.
func (tx *transaction) within(ctx context.Context) (pgx.Tx, error) {
	if tx.closed {
		return nil, pgx.ErrTxClosed
	}
	return tx.conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: "SELECT"})
}

// Begin starts a nested transaction, which is a savepoint.
func (tx *transaction) Begin(ctx context.Context) (pgx.Tx, error) {
	within, err := tx.within(ctx)
	if err != nil {
		return nil, err
	}
	return within.Begin(ctx)
}

func (tx *transaction) LargeObjects() pgx.LargeObjects {
	within, err := tx.within(context.Background())
	if err != nil {
		return pgx.LargeObjects{} // as pgx's own, it is of no use on a dead connection
	}
	return within.LargeObjects()
}

func (tx *transaction) Conn() *pgx.Conn { return tx.conn }

func (tx *transaction) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if tx.closed {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	return tx.conn.Exec(ctx, sql, args...)
}

func (tx *transaction) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if tx.closed {
		return closedRows{}, pgx.ErrTxClosed
	}
	return tx.conn.Query(ctx, sql, args...)
}

func (tx *transaction) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if tx.closed {
		return closedRows{}
	}
	return tx.conn.QueryRow(ctx, sql, args...)
}

func (tx *transaction) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if tx.closed {
		return closedBatch{}
	}
	return tx.conn.SendBatch(ctx, b)
}

func (tx *transaction) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if tx.closed {
		return nil, pgx.ErrTxClosed
	}
	return tx.conn.Prepare(ctx, name, sql)
}

func (tx *transaction) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, source pgx.CopyFromSource) (int64, error) {
	if tx.closed {
		return 0, pgx.ErrTxClosed
	}
	return tx.conn.CopyFrom(ctx, table, columns, source)
}

// closedRows and closedBatch are what a closed transaction answers.
type closedRows struct{ pgx.Rows }

func (closedRows) Close()            {}
func (closedRows) Err() error        { return pgx.ErrTxClosed }
func (closedRows) Next() bool        { return false }
func (closedRows) Scan(...any) error { return pgx.ErrTxClosed }

type closedBatch struct{ pgx.BatchResults }

func (closedBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, pgx.ErrTxClosed }
func (closedBatch) Query() (pgx.Rows, error)         { return closedRows{}, pgx.ErrTxClosed }
func (closedBatch) QueryRow() pgx.Row                { return closedRows{} }
func (closedBatch) Close() error                     { return pgx.ErrTxClosed }
