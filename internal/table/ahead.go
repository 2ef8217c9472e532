package table

import (
	"context"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/exact"
)

// The statements that take more than is asked, and give back what was not needed. Those of
// the portable form are single-row upserts, as all of its takes are, since nothing else may
// read the clock there.
const (
	// grantAheadSQL is grantSQL that takes ahead besides.
	grantAheadSQL = `UPDATE {table} AS r` + grantAheadSet + `
WHERE ` + grantWhere + `
RETURNING r.value, r.ts, {granted at}`

	// grantManyAheadSQL is grantManySQL that takes ahead besides.
	grantManyAheadSQL = `UPDATE {table} AS r` + grantAheadSet + grantManyFrom + `
RETURNING r.value, r.ts, {granted at}, u.i`

	// takeAheadSQL is takeSQL that takes ahead besides.
	takeAheadSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4,
	$5::float8 - $4::float8 - greatest(least({ahead}, ($5::float8 - $4::float8) / 2), 0), {tick})
ON CONFLICT (name, key, shard) DO UPDATE
SET value = ` + settled + ` - $4::float8 - greatest(least({ahead}, (` + settled + ` - $4::float8) / 2), 0),
	ts = greatest(l.ts, excluded.ts)
WHERE ` + settled + ` - $4::float8
		>= {floor} - greatest(abs(l.value), $4::float8, $5::float8) * ` + exact.SQL + `{ticks agree}{allowed}
RETURNING value, ts, paused`

	// What is taken ahead is no more than is left, so what is left tells how much it was.
	grantAheadSet = `
SET value = ` + grantSettled + ` - u.total - greatest(least(u.ahead, (` + grantSettled + ` - u.total) / 2), 0),
	ts = greatest(r.ts, {grant tick})`

	// grantManySlotsAheadSQL is grantManySlotsSQL that takes ahead besides; $9 is how much.
	grantManySlotsAheadSQL = `UPDATE {table} AS r` + grantSlotsSet + `
FROM (
	SELECT u.*, coalesce($8::timestamptz, statement_timestamp()) AS now
	FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::float8[]),
		(SELECT $6::float8[]), (SELECT $7::int4[]), (SELECT $9::float8[]))
		WITH ORDINALITY AS u (name, key, shard, total, rate, width, size, ahead, i)
	WHERE u.i BETWEEN 1 AND 1000000000
	OFFSET 0
) AS u
WHERE ` + grantSlotsWhere + `
RETURNING r.value, r.ts, ` + grantSlotsAt + `, r.slots, u.i`

	// withAhead is what a grant of a sliding window takes, with what it takes ahead: both
	// are counted in the slot of now.
	withAhead = `(u.total + greatest(least(u.ahead, ({rate} - (` + newestSQL + ` + u.total - {row}.slots[4 + {later}])) / 2), 0))`
)

// TakeGrant is Grant for one row in the portable form, of calls that all reserve or are to
// be allowed: it waits for its row, makes it if it is not there, and counts with the floor of
// the change rather than with what the grant needs. That must be what a full row has.
func (t *Table) TakeGrant(ctx context.Context, q Querier, reserve bool, g *Grant, now *time.Time) (err error) {
	if g.Ahead <= 0 {
		g.Taken, err = t.Take(ctx, q, reserve, &g.Change, now)
		return err
	}
	args := append(takeArguments(false, &g.Change, now), g.Ahead)
	g.Taken, err = t.of(&g.Definition).takeAhead.take(ctx, q, &g.Definition, args, now)
	return err
}

// TookAhead is how much a grant, which was taken, took ahead. It is told by what is left.
func (g *Grant) TookAhead() float64 { return max(0, min(g.Ahead, g.Taken.After.Value)) }

// either is one of two forms of a statement: the second if it is to take ahead.
func (g *Grant) either(grant, ahead *clocks) *clocks {
	if g.Ahead > 0 {
		return ahead
	}
	return grant
}

// many is the statement that grants from several rows that are no sliding windows.
func (t *Table) many(windows, ahead bool) *clocks {
	switch {
	case windows && ahead:
		return &t.windowsAhead
	case windows:
		return &t.grantWindows
	case ahead:
		return &t.bucketsAhead
	}
	return &t.grantMany
}

// takingAhead adds the statements of this file to those of a kind of limit.
func (x texts) takingAhead(in func(string) string, t ticks) texts {
	grant := newClocks(t.fill(grantAheadSQL), "$10::timestamptz",
		"u.name", "$1::text", "u.key", "$2::text", "u.shard", "$3::int4", "u.total", "$4::float8", "u.need", "$5::float8",
		"u.capacity", "$6::float8", "u.rate", "$7::float8", "u.period", "$8::float8",
		"u.tick", "$8::float8", // of a fixed window; a token bucket has none
		"u.ahead", "$9::float8",
	)
	x.ahead, x.aheadInTurn = grant(freeSQL(passOverSQL)).in(in), grant("").in(in)
	x.giveBack, x.bringBack = newGiveBack(in, t), in(t.fill(bringBackSQL))
	return x
}

// slidingAhead adds the statements of this file to those of sliding windows.
func (x texts) slidingAhead(in func(string) string) texts {
	grant := newGrantSlots(grantSlotsSQL, withAhead, "u.total", "$9::timestamptz", "u.ahead", "$8::float8")
	x.ahead, x.aheadInTurn = grant(freeSQL(passOverSQL)).in(in), grant("").in(in)
	x.giveBack = in(fillBackSlots())
	return x
}

// giveBackSQL gives back to a row what was taken ahead from it, less what it was refilled
// with since:
//
//	$1 name   $2 key   $3 shard
//	$4 count      $5 capacity   tokens
//	$6 taken      $7 end        instants of the row
//	$8 rate       $9 period     tokens, microseconds; of a token bucket
//	$9 tick                     microseconds; of a fixed window
//	$10 now
//
// Later than the end, in a pause, and if somebody has the row locked it does nothing.
const giveBackSQL = `UPDATE {table} AS r
SET value = least(r.value + greatest($4::float8 - {refilled}, 0), greatest(r.value, $5::float8))
WHERE {free}r.name = $1::text AND r.key = $2::text AND r.shard = $3::int4
	AND greatest(r.ts, {grant tick}) >= $6::timestamptz AND greatest(r.ts, {grant tick}) < $7::timestamptz
	AND (r.paused IS NULL OR r.paused <= u.now)
RETURNING 1`

func newGiveBack(in func(string) string, t ticks) string {
	return in(strings.NewReplacer(
		"u.now", "coalesce($10::timestamptz, statement_timestamp())", "u.tick", "$9::float8", "{free}", freeSQL(passOverSQL),
	).Replace(t.fill(giveBackSQL)))
}

// giveBackSlotsSQL gives back to a slot of a sliding window what was taken ahead from it,
// or what of it is there:
//
//	$1 name   $2 key   $3 shard
//	$4 count          tokens
//	$5 totals         how many, two more than slots
//	$6 taken          where the slot begins
//	$7 end            an instant of the row
//	$8 width          of a slot, microseconds
//	$9 now
//
// Later than the end, when the slot is not among those of the row, when another definition
// has written that, and if somebody has it locked it does nothing. A pause leaves the slots
// as they are, and so does not matter.
const giveBackSlotsSQL = `UPDATE {table} AS r
SET value = r.value + CASE WHEN r.slots[2] = 0 THEN {back} ELSE 0 END,
	slots = r.slots[1:2] || (r.value + CASE WHEN r.slots[2] = 0 THEN {back} ELSE 0 END)
		|| r.slots[4:{place} - 1] || ARRAY(SELECT total - {back} FROM unnest(r.slots[{place}:$5::int4 + 3]) AS total)
WHERE {free}r.name = $1::text AND r.key = $2::text AND r.shard = $3::int4
	AND coalesce($9::timestamptz, statement_timestamp()) < $7::timestamptz
	AND r.slots[1] = $8::float8 AND cardinality(r.slots) = $5::int4 + 3 AND r.slots[3] = r.value
	AND {ago} BETWEEN 0 AND $5::int4 - 2
RETURNING 1`

// fillBackSlots names how many slots ago the slot is, before the newest; where the totals
// begin that have what it holds; and what it can give back.
func fillBackSlots() string {
	const (
		ago   = `(floor(round(date_part('epoch', r.ts - $6::timestamptz) * 1000000) / $8::float8) + r.slots[2])`
		place = `($5::int4 + 3 - {ago})::int4`
		back  = `least($4::float8, r.slots[{place}] - r.slots[{place} - 1])`
	)
	return strings.ReplaceAll(nest(giveBackSlotsSQL, "{back}", back, "{place}", place, "{ago}", ago), "{free}", freeSQL(passOverSQL))
}

// GiveBack gives back to a row what was taken ahead from it at an instant of the row, and
// must be back before its end. given is false if it is too late, or somebody has the row
// locked; if that is only found when it is too late to pass over it, the error is
// lock_not_available.
func (t *Table) GiveBack(ctx context.Context, q Querier, row decide.Row, d *bucket.Definition, n float64, taken, end time.Time, now *time.Time) (given bool, err error) {
	args := []any{row.Name, row.Key.Key, int32(row.Shard), n, d.Capacity, taken, end, d.Rate, micros(d.Period), now}
	if d.Kind == ratelimit.KindSlidingWindow {
		args = []any{row.Name, row.Key.Key, int32(row.Shard), n, int32(d.Slots + 2), taken, end, tick(d), now}
	}
	tag, err := q.Exec(ctx, t.of(d).giveBack, args...)
	return tag.RowsAffected() > 0, err
}

// bringBackSQL is giveBackSQL in the portable form, with the first parameters of a take. It
// waits for its row; its clock is read before that, and the row counts with the later of
// the two instants. A row that is not there is full, and is made so.
const bringBackSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $5::float8, {tick})
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(l.value + greatest($4::float8 - {brought refilled}, 0), greatest(l.value, $5::float8))
WHERE greatest(l.ts, excluded.ts) >= {taken} AND greatest(l.ts, excluded.ts) < {end}
	AND (l.paused IS NULL OR l.paused <= excluded.ts){ticks agree}`

// BringBack is GiveBack in the portable form.
func (t *Table) BringBack(ctx context.Context, q Querier, row decide.Row, d *bucket.Definition, n float64, taken, end time.Time, now *time.Time) (given bool, err error) {
	c := decide.Change{Row: row, Definition: *d, Seen: bucket.State{TS: taken}} // with its ticks
	args := append(arguments(&c, n, now), taken, end)
	if d.Kind == ratelimit.KindTokenBucket {
		args = append(args, d.Rate, micros(d.Period))
	}
	tag, err := q.Exec(ctx, t.of(d).bringBack, args...)
	return tag.RowsAffected() > 0, err
}
