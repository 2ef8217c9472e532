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
	"maps"
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
	common, maintenance statements
	inflight            statements                      // of limits of how many at once
	kinds               map[string]map[string]statement // by the name of a kind's, and their own
	schema              string                          // of the table; none is the search_path's
	distributed         bool
	silence             time.Duration
	noTurns             atomic.Bool          // the role may not use advisory locks
	missed              Lately               // the rows in whose lines a turn has not come in time
	early               atomic.Pointer[bool] // a transaction can free its row before it is on disk; nil if that is not known
	kept                keeper
}

// New makes the statements for the table in a schema, "" for the search_path's. The server
// releases the locks of a transaction after hearing nothing of the client for silence.
func New(schema string, distributed bool, silence time.Duration) *Table {
	name := pgx.Identifier{conn.Table}
	if schema != "" {
		name = pgx.Identifier{schema, conn.Table}
	}
	in := func(file string) (statements, map[string][]string) {
		texts, parameters := load(file)
		s := texts.in(name.Sanitize())
		if s.inTurn(); distributed {
			s.distribute()
		}
		return s, parameters
	}
	t := &Table{kinds: make(map[string]map[string]statement), schema: schema, distributed: distributed, silence: silence}
	t.maintenance, _ = in("maintenance.sql")
	t.inflight, _ = in("inflight.sql")
	common, parameters := in("table.sql")
	for _, kind := range bucket.Statements() {
		own, its := in(kind + ".sql")
		t.kinds[kind] = common.taking(parameters)
		maps.Copy(t.kinds[kind], own.taking(its))
	}
	t.kinds["calendar"]["give"] = t.kinds["window"]["give"] // which counts no edges
	t.common = common
	if distributed {
		t.inflight.apart()
	} else {
		t.inflight.guarded()
	}
	return t
}

// Close gives back the connection that the table keeps, and has it keep none any more.
func (t *Table) Close() { t.kept.close() }

// of returns a statement for limits of such a kind; false if it has no such.
func (t *Table) of(d *bucket.Definition, name string) (s statement, ok bool) {
	s, ok = t.kinds[d.Statements()][name]
	return s, ok
}
