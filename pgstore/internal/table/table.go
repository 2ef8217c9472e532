// Package table has the statements on the table that holds the limits. Each stands beside its
// arguments and the reading of its answer. The package knows no Store: the instant that decides is
// an argument, nil for the database's clock.
//
// The statements are for PostgreSQL 14 and later. Every parameter is cast, so that they run in all
// of pgx's query exec modes and through PgBouncer. Those for callers' transactions on a distributed
// table (Citus) concern one row. Their INSERT reads the clock in VALUES only, and has nothing
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

// Table holds the statements for one table.
type Table struct {
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

// New reads the statements for the table in a schema, "" for the search_path's. The server releases
// a transaction's locks after it has heard nothing from the client for silence.
func New(schema string, distributed bool, silence time.Duration) *Table {
	name := pgx.Identifier{conn.Table}
	if schema != "" {
		name = pgx.Identifier{schema, conn.Table}
	}
	in := textsFor(name.Sanitize(), distributed)
	return &Table{
		common: in("common"), maintenance: in("maintenance"), inflight: in("inflight"), kinds: kindsOf(in),
		name: name.Sanitize(), schema: schema, distributed: distributed, silence: silence,
	}
}

// Close gives the kept connection back. From then on the table keeps none.
func (t *Table) Close() { t.kept.close() }

// of returns the statements for limits of d's kind.
func (t *Table) of(d *bucket.Definition) *kind { return t.kinds[d.Form()] }
