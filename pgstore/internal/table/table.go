// Package table is the statements on the table that holds the limits, each
// beside its arguments and the reading of its answer. It knows no Store: the
// instant that decides, nil for the database's clock, is an argument.
//
// The statements are for PostgreSQL 14 and later. Every parameter is cast, so that they run in
// all of pgx's query exec modes and through PgBouncer. Those for callers' transactions also run
// where PostgreSQL is distributed by key (Citus): one row, the clock in VALUES only, nothing
// volatile or stable and no sub-select in SET and in the conflict's WHERE.
package table

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Querier is implemented by pools, connections and transactions.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Table is the statements for one table.
type Table struct {
	common, maintenance texts
	inflight            texts // of limits of how many at once
	kinds               map[string]*kind
	schema              string // of the table; none is the search_path's
	distributed         bool
	silence             time.Duration
	noTurns             atomic.Bool          // the role may not use advisory locks
	missed              Lately               // the rows in whose lines a turn has not come in time
	early               atomic.Pointer[bool] // a transaction can free its row before it is on disk; nil if that is not known
	kept                keeper
}

// New reads the statements for the table in a schema, "" for the search_path's. The server
// releases the locks of a transaction after hearing nothing of the client for silence.
func New(schema string, distributed bool, silence time.Duration) *Table {
	name := pgx.Identifier{conn.Table}
	if schema != "" {
		name = pgx.Identifier{schema, conn.Table}
	}
	in := textsFor(name.Sanitize(), distributed)
	return &Table{
		common: in("common"), maintenance: in("maintenance"), inflight: in("inflight"), kinds: kinds(in),
		schema: schema, distributed: distributed, silence: silence,
	}
}

// Close gives back the connection that the table keeps, and has it keep none any more.
func (t *Table) Close() { t.kept.close() }

// of returns the statements for limits of such a kind.
func (t *Table) of(d *bucket.Definition) *kind { return t.kinds[d.Statements()] }
