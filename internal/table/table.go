// Package table is the statements on the table that holds the limits, each
// beside its arguments and the reading of its answer. It knows no Store: the
// instant that decides, nil for the database's clock, is an argument.
//
// The statements are for PostgreSQL 14 and later. Every parameter is cast, so that
// they run in all of pgx's query exec modes and through PgBouncer. Those that a
// caller's transaction needs are also for what distributes PostgreSQL by key
// (Citus): one row, the clock in VALUES only, nothing volatile or stable and no
// sub-select in SET and in the conflict's WHERE.
package table

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// Name is the table that holds the limits; package migrations makes it.
const Name = "rate_limits"

// Querier is what pools, connections and transactions have in common.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Table is the statements for one table.
type Table struct {
	Decider

	common, keep statements
	inflight     statements                      // of limits of how many at once
	kinds        map[string]map[string]statement // by the name of a kind's, and their own
	schema       string                          // of the table; none is the search_path's
	silence      time.Duration
	noTurns      atomic.Bool // the role may not use advisory locks
	statistics   statistics
}

// New makes the statements for the table in a schema, "" for the search_path's.
// The server keeps what a transaction has locked for no longer than silence while it
// hears nothing of the client.
func New(schema string, distributed bool, silence time.Duration) *Table {
	name := pgx.Identifier{Name}
	if schema != "" {
		name = pgx.Identifier{schema, Name}
	}
	in := func(file string) (statements, map[string][]string) {
		texts, parameters := load(file)
		s := texts.in(name.Sanitize())
		if s.inTurn(); distributed {
			s.distribute()
		}
		return s, parameters
	}
	t := &Table{kinds: make(map[string]map[string]statement), schema: schema, silence: silence}
	t.keep, _ = in("keep.sql")
	t.inflight, _ = in("inflight.sql")
	common, parameters := in("table.sql")
	for _, kind := range bucket.Statements() {
		own, its := in(kind + ".sql")
		t.kinds[kind] = merged(own.taking(its), common.taking(parameters))
	}
	t.kinds["calendar"]["give"] = t.kinds["window"]["give"] // which counts no edges
	t.common, t.statistics.sql = common, common["statistics"]
	t.Decider = plainTable{t}
	if distributed {
		t.Decider = distributedTable{t}
		t.inflight.apart()
	} else {
		t.inflight.guarded()
	}
	return t
}

// longAgo is before every instant that a limit is asked about. Edges are counted
// from there, so that nobody divides a negative time.
var longAgo = time.Date(300, 1, 1, 0, 0, 0, 0, time.UTC)

// never is a tick that does not come to an end, in microseconds.
const never = 1e17

// tick is the granularity of a limit's clock, in microseconds. Statements that know one do not
// count edges of the calendar.
func tick(d *bucket.Definition) float64 {
	if d.Every != 0 {
		return never
	}
	return float64(d.Tick())
}

func micros(d time.Duration) float64 { return float64(d.Microseconds()) }

// state is a state as it is read.
type state struct {
	value  *float64
	ts     *time.Time
	paused *time.Time
	slots  []float64
}

func (s *state) fields(more ...any) []any {
	return append([]any{&s.value, &s.ts, &s.paused, &s.slots}, more...)
}

// get returns the state; false when there was no row.
func (s *state) get() (bucket.State, bool) {
	if s.value == nil {
		return bucket.State{}, false
	}
	read := bucket.State{Value: *s.value, TS: *s.ts}
	if s.paused != nil {
		read.Paused = *s.paused
	}
	if s.slots != nil {
		read.Slots = slots.Read(s.slots, read.Value)
		s.slots = nil // of which it has a part
	}
	return read, true
}

// orNull is a time as an argument: NULL for the zero time.
func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// told is the instant that decided: the one that a statement was told, or else the clock that
// it has read.
func told(now *time.Time, read time.Time) time.Time {
	if now != nil {
		return *now
	}
	return read
}
