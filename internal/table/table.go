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
	"strings"
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

	silence               time.Duration
	bucket, window, slots texts // of one kind of limit

	put, putSlots, reset, remove, there string
	grantMany, grantWindows             clocks
	bucketsAhead, windowsAhead          clocks
	grantSlotted, slottedAhead          string
	read, readOne, lock, await, fill    string
	write, writeSlots, renew            string
	listFull, listEmpty                 string
	deleteListed, deleteSame            string
	names, page, forget, ready, wrote   string

	statistics statistics
}

// texts are the statements that differ between the kinds of limits.
type texts struct {
	allow, reserve                  forms
	give, states, atMost            string
	grant, grantInTurn, grantAtMost clocks
	grantAlike                      clocks // nothing of a sliding window
	ahead, aheadInTurn              clocks
	giveBack                        string
	takeAhead                       forms  // in the portable form; nothing of a sliding window
	bringBack                       string // likewise
}

// forms are a take that tells the row, when and by which transaction; and, if that is
// faster and enough, one that tells the row alone.
type forms struct{ full, bare string }

// New makes the statements for the table in a schema, "" for the search_path's.
// The portable ones are for a PostgreSQL that distributes tables. That takes no
// clock in RETURNING; a CTE around the upsert reads it, several times slower there,
// so a token bucket that is asked to allow does without: its row tells when.
//
// What a transaction has locked the server keeps for no longer than silence while it hears
// nothing of the client.
func New(schema string, portable bool, silence time.Duration) *Table {
	name := pgx.Identifier{Name}
	if schema != "" {
		name = pgx.Identifier{schema, Name}
	}
	in := func(sql string) string { return strings.ReplaceAll(sql, "{table}", name.Sanitize()) }
	bucket := kind{
		ticks: bucketTicks, allow: allowed(takeSQL, notPausedSQL), reserve: allowed(takeSQL, ""), atMost: allowed(atMostSQL, notPausedSQL), ahead: allowed(takeAheadSQL, notPausedSQL),
		give: giveSQL, states: statesSQL, grant: newGrant(bucketTicks, grantSQL), grantAtMost: newGrant(bucketTicks, grantAtMostSQL), grantAlike: newGrantAlike(bucketTicks), returned: "value, ts, paused",
	}
	window := bucket
	window.ticks, window.grant, window.grantAtMost = windowTicks, newGrant(windowTicks, grantSQL), newGrant(windowTicks, grantAtMostSQL)
	window.grantAlike = newGrantAlike(windowTicks)
	sliding := kind{
		ticks: windowTicks, give: giveSlotsSQL, states: statesSlotsSQL,
		grant:       newGrantSlots(grantSlotsSQL, "u.total", "u.total", "$8::timestamptz"),
		grantAtMost: newGrantSlots(grantAtMostSlotsSQL, wholeSlots, "1", "$8::timestamptz"), returned: "value, ts, paused, slots",
	}
	sliding.allow, sliding.reserve, sliding.atMost = takeSlots()
	t := &Table{
		silence: silence,
		bucket:  bucket.texts(in, portable).takingAhead(in, bucketTicks),
		window:  window.texts(in, portable).takingAhead(in, windowTicks),
		slots:   sliding.texts(in, portable).slidingAhead(in),
		put:     in(putSQL), putSlots: in(putSlotsSQL), reset: in(resetSQL), remove: in(removeSQL), there: in(thereSQL),
		grantMany:    newGrantMany(bucketTicks, grantManySQL).in(in),
		grantWindows: newGrantMany(windowTicks, grantManySQL, "u.tick").in(in),
		bucketsAhead: newGrantMany(bucketTicks, grantManyAheadSQL, "u.ahead").in(in),
		windowsAhead: newGrantMany(windowTicks, grantManyAheadSQL, "u.tick", "u.ahead").in(in),
		grantSlotted: in(newGrantManySlots(grantManySlotsSQL, "u.total")),
		slottedAhead: in(newGrantManySlots(grantManySlotsAheadSQL, withAhead)),
		read:         in(readSQL), lock: in(lockSQL), await: in(awaitSQL), fill: in(fillSQL),
		write: in(writeSQL), writeSlots: in(writeSlotsSQL), renew: in(renewSQL),
		listFull: in(listFullSQL), listEmpty: in(listEmpty()), deleteListed: in(deleteListedSQL), deleteSame: in(deleteSameSQL),
		names: in(namesSQL), page: in(pageSQL), forget: in(forgetSQL), ready: in(readySQL), wrote: in(wroteSQL),
		readOne:    in(readOneSQL),
		statistics: statistics{sql: in(statisticsSQL)},
	}
	t.Decider = plain{t}
	if portable {
		t.Decider = distributed{t}
	}
	return t
}

// kind is what the statements of a kind of limit are made of.
type kind struct {
	ticks
	allow, reserve, atMost string // the take
	ahead                  string // "" of a kind of which nothing is taken ahead
	give, states           string
	grant, grantAtMost     func(free string) clocks
	grantAlike             clocks // nothing of a sliding window
	returned               string // by takes and gives
}

func allowed(take, condition string) string { return strings.ReplaceAll(take, "{allowed}", condition) }

func (k kind) texts(in func(string) string, portable bool) texts {
	bare := func(take string) string { return in(k.fill(take)) }
	full := func(take string) string {
		if portable {
			return "WITH taken AS (" + bare(take) + ")\n" + k.fill("SELECT "+k.returned+", {at}, pg_current_xact_id()::text FROM taken")
		}
		return bare(take) + k.fill(", {at}, xmin::text")
	}
	both := func(take string) (f forms) {
		if take != "" {
			f.full = full(take)
		}
		if portable && k.ticks == bucketTicks {
			f.bare = bare(take)
		}
		return f
	}
	give := k.fill(k.give) + ", " + nowSQL + ", xmax = 0"
	if portable {
		give = "WITH given AS (" + k.fill(k.give) + ")\nSELECT " + k.returned + ", " + nowSQL + ", false FROM given"
	}
	return texts{
		allow: both(k.allow), reserve: forms{full: full(k.reserve)}, takeAhead: both(k.ahead),
		give: in(give), states: in(k.states), atMost: full(k.atMost),
		grant: k.grant(freeSQL(passOverSQL)).in(in), grantInTurn: k.grant("").in(in), grantAtMost: k.grantAtMost("").in(in),
		grantAlike: k.grantAlike.in(in),
	}
}

// of is the texts for limits of such a kind.
func (t *Table) of(d *bucket.Definition) *texts {
	switch d.Kind {
	case bucket.FixedWindow:
		return &t.window
	case bucket.SlidingWindow:
		return &t.slots
	}
	return &t.bucket
}

// ticks are the parts of a statement in which a fixed window, whose clock stands
// still between edges, differs from a token bucket. An executor that starts looks
// up each function of a statement, which costs more than calling it; so what a
// token bucket does not need is not in its text.
type ticks struct{ parts *strings.Replacer }

func (t ticks) fill(sql string) string { return t.parts.Replace(sql) }

var (
	bucketTicks = ticks{strings.NewReplacer(
		"{rate}", "$7::float8", "{period}", "$8::float8", "{floor}", "$9::float8", "{over}", "$10::timestamptz",
		"{ahead}", "$11::float8", "{most}", "$7::float8",
		"{taken}", "$7::timestamptz", "{end}", "$8::timestamptz",
		"{tick}", nowSQL,
		"{grant tick}", "u.now",
		"{ticks agree}", "",
		// When the row was waited for, the clock was read before that, and ts
		// tells when.
		"{at}", "least(ts, "+nowSQL+")",
		"{granted at}", "least(r.ts, {clock})",
		"{refilled}", "round(date_part('epoch', greatest(r.ts, u.now) - $6::timestamptz) * 1000000) * $8::float8 / $9::float8",
		"{brought refilled}", "round(date_part('epoch', greatest(l.ts, excluded.ts) - $7::timestamptz) * 1000000) * $9::float8 / $10::float8",
	)}
	windowTicks = ticks{strings.NewReplacer(
		"{rate}", "$9::float8", "{period}", "$10::float8", "{floor}", "$11::float8", "{over}", "$12::timestamptz",
		"{ahead}", "$13::float8", "{most}", "$9::float8",
		"{taken}", "$9::timestamptz", "{end}", "$10::timestamptz",
		"{tick}", "date_bin($7::float8 * interval '1 microsecond', "+nowSQL+", $8::timestamptz)",
		"{grant tick}", "date_bin(u.tick * interval '1 microsecond', u.now, r.ts)",
		// A row whose ticks are not those of $8, a fixed window that was paused
		// or had another Start, is turned away: excluded.ts says nothing about
		// it. The caller reads it and sends its ts as $8.
		"{ticks agree}", `
	AND date_bin($7::float8 * interval '1 microsecond', l.ts, $8::timestamptz) = l.ts`,
		// An instant of the window that decided, also when the row was waited
		// for until that was over.
		"{at}", "least(ts + ($7::float8 - 1) * interval '1 microsecond', "+nowSQL+")",
		"{granted at}", "least(r.ts + (u.tick - 1) * interval '1 microsecond', {clock})",
		"{refilled}", "0 * $8::float8",
		"{brought refilled}", "0",
	)}
)

const nowSQL = `coalesce($6::timestamptz, clock_timestamp())`

// longAgo is before every instant that a limit is asked about. Edges are counted
// from there, so that nobody divides a negative time.
var longAgo = time.Date(300, 1, 1, 0, 0, 0, 0, time.UTC)

// arguments are those that takes and gives have in common.
func arguments(c *decide.Change, count float64, now *time.Time) []any {
	d := &c.Definition
	args := []any{c.Name, c.Key.Key, int32(c.Shard), count, d.Capacity, now}
	if d.Kind != bucket.TokenBucket {
		origin := c.Seen.TS
		if origin.IsZero() {
			origin = d.Fresh(c.Key.Key, longAgo).TS
		}
		args = append(args, tick(d), origin)
	}
	return args
}

func micros(d time.Duration) float64 { return float64(d.Microseconds()) }

// state is a state as it is read.
type state struct {
	value  *float64
	ts     *time.Time
	paused *time.Time
	slots  []float64
}

func (s *state) fields() []any { return []any{&s.value, &s.ts, &s.paused, &s.slots} }

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

// instant is a time as an argument: NULL for the zero time.
func instant(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
