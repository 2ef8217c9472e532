// Package table has the statements on the table that holds the limits. Each stands beside its
// arguments and the reading of its answer. The package knows no Store: the instant that decides is
// an argument, nil for the database's clock.
//
// The statements are for PostgreSQL 14 and later. Every parameter is cast, so that they run in all
// of pgx's query exec modes and through PgBouncer. On a distributed table (Citus), a statement for
// a caller's transaction concerns one row. Its INSERT reads the clock in VALUES only. Its SET and
// the conflict's WHERE call only immutable functions, and have no sub-select.
package table

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Table holds the statements for one table.
type Table struct {
	// Level is the isolation level of transactions that take for a caller's function. Nodes of a
	// distributed database do not serialize with each other: at SERIALIZABLE one of them may fail at
	// COMMIT when another has committed. A take is right at READ COMMITTED.
	Level pgx.TxIsoLevel

	common, maintenance texts
	inflight            texts                 // of limits of how many at once
	kinds               map[bucket.Kind]*kind // by Form
	name, schema        string                // of the table; the schema is "" for the search_path's
	distributed         bool
	silence             time.Duration
	noTurns             atomic.Bool          // the role may not use advisory locks
	missed              Lately               // the rows where a turn came too late
	early               atomic.Pointer[bool] // whether a transaction can free its row before it is on disk; nil if unknown
	kept                keeper
}

// Querier is implemented by pools, connections and transactions.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// each returns the function that reads rows: it scans each into some fields, and calls do.
func each(into []any, do func()) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, into, func() error { do(); return nil })
		return err
	}
}

// texts holds the statements of a folder by the names of their files.
type texts map[string]string

// statement is a statement's text, and the function that returns its arguments in the order of the
// text.
type statement[T any] struct {
	sql  string
	args func(of T, now *time.Time) []any
}

func with[T any](sql string, args func(T, *time.Time) []any) statement[T] {
	return statement[T]{sql, args}
}

// kind holds the statements that differ by the kind of limit. A statement that a kind lacks has no
// text.
type kind struct {
	must                                statement[must]
	take, takeBare, takeLean            statement[taking] // takeBare returns the state only, which makes it several times faster on a distributed table; takeLean: see bucketLean
	give                                statement[*Give]
	grant, grantInTurn                  statement[*Grant]
	grantMany, prefetch, prefetchInTurn statement[*many]
	parts                               map[int]string // grants of several rows of one part of a distributed table, by the number of rows
}

// Batch returns how many rows are pruned within one timeout, and on a plain table in one
// transaction: few, so that no caller waits for it long. On a distributed table each row is a round
// trip.
func (t *Table) Batch() int {
	if t.distributed {
		return 100
	}
	return 1000
}

// ReportsMade reports whether statements return which rows they made. On a distributed table they
// do not.
func (t *Table) ReportsMade() bool { return !t.distributed }
