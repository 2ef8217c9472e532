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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
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

	common, keep                       statements
	buckets, windows, calendars, slots statements // of one kind of limit
	silence                            time.Duration
	statistics                         statistics
}

// New makes the statements for the table in a schema, "" for the search_path's.
// The server keeps what a transaction has locked for no longer than silence while it
// hears nothing of the client.
func New(schema string, distributed bool, silence time.Duration) *Table {
	name := pgx.Identifier{Name}
	if schema != "" {
		name = pgx.Identifier{schema, Name}
	}
	in := func(file string) statements {
		s := load(file).in(name.Sanitize())
		if distributed {
			s.distribute()
		}
		return s
	}
	t := &Table{
		common: in("table.sql"), keep: in("keep.sql"),
		buckets: in("bucket.sql"), windows: in("window.sql"), calendars: in("calendar.sql"), slots: in("slots.sql"),
		silence: silence,
	}
	t.buckets.inTurn("grant")
	t.windows.inTurn("grant", "prefetch_many")
	t.calendars.inTurn("grant", "grant_many")
	t.calendars["give"] = t.windows["give"]
	t.slots.inTurn("grant", "grant_many")
	t.statistics.sql = t.common["statistics"]
	t.Decider = plainTable{t}
	if distributed {
		t.Decider = distributedTable{t}
	}
	return t
}

// of is the statements for limits of such a kind.
func (t *Table) of(d *bucket.Definition) statements {
	switch {
	case d.Every != 0:
		return t.calendars
	case d.Kind == bucket.FixedWindow:
		return t.windows
	case d.Kind == bucket.SlidingWindow:
		return t.slots
	}
	return t.buckets
}

// longAgo is before every instant that a limit is asked about. Edges are counted
// from there, so that nobody divides a negative time.
var longAgo = time.Date(300, 1, 1, 0, 0, 0, 0, time.UTC)

// arguments are those with which upserts of a kind begin: the row, what it holds when it is
// full, what is taken or given, and the clock.
func arguments(row decide.Row, d *bucket.Definition, capacity, count float64, origin time.Time, now *time.Time) []any {
	args := make([]any, 0, 16)
	args = append(args, row.Name, row.Key.Key, int32(row.Shard), capacity, count)
	if d.Kind == bucket.TokenBucket {
		return append(args, now)
	}
	return append(args, tick(d), now, origin)
}

// origin is an instant from which the ticks of a row are counted that was seen in a state. By
// the calendar it is that of a row which is made, full: an edge, and if the clocks differ, not
// the newest, which makes no difference.
func origin(d *bucket.Definition, key string, seen bucket.State, now *time.Time) time.Time {
	switch {
	case d.Every != 0:
		return d.Fresh(key, around(now)).TS
	case seen.TS.IsZero():
		return d.Fresh(key, longAgo).TS
	}
	return seen.TS
}

// refill is the arguments that tell how tokens come in, after those of the clock.
func refill(d *bucket.Definition) []any {
	switch d.Kind {
	case bucket.FixedWindow:
		return []any{d.Rate}
	case bucket.SlidingWindow:
		return []any{int32(d.Slots + 2)}
	}
	return []any{d.Rate, micros(d.Period)}
}

// never is a tick that does not come to an end, in microseconds.
const never = 1e17

// tick is the granularity of a limit's clock, in microseconds. Statements that know one do not
// count edges of the calendar.
func tick(d *bucket.Definition) float64 {
	switch {
	case d.Every != 0:
		return never
	case d.Kind == bucket.FixedWindow:
		return micros(d.Period)
	case d.Kind == bucket.SlidingWindow:
		return micros(d.SlotWidth())
	}
	return 1
}

// around is an instant that the database's clock is likely to show: the one that decides, if
// it is known.
func around(now *time.Time) time.Time {
	if now != nil {
		return *now
	}
	return time.Now()
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
