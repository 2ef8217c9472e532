package table

import (
	"context"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// The statements that take more than is asked, and give back what was not needed.
const (
	// grantAheadSQL is grantSQL that takes ahead besides.
	grantAheadSQL = `UPDATE {table} AS r` + grantAheadSet + `
WHERE ` + grantWhere + `
RETURNING r.value, r.ts, {granted at}`

	// grantManyAheadSQL is grantManySQL that takes ahead besides.
	grantManyAheadSQL = `UPDATE {table} AS r` + grantAheadSet + grantManyFrom + `
RETURNING r.value, r.ts, {granted at}, u.i`

	// What is taken ahead is no more than is left, so what is left tells how much it was.
	grantAheadSet = `
SET value = ` + grantSettled + ` - u.total - greatest(least(u.ahead, (` + grantSettled + ` - u.total) / 2), 0),
	ts = greatest(r.ts, {grant tick})`
)

// TookAhead is how much a grant, which was taken, took ahead. It is told by what is left.
func (g *Grant) TookAhead() float64 { return max(0, min(g.Ahead, g.Taken.After.Value)) }

// either is one of two forms of a statement: the second if it is to take ahead.
func (g *Grant) either(grant, ahead *clocks) *clocks {
	if g.Ahead > 0 {
		return ahead
	}
	return grant
}

// many is the statement that grants from several rows.
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
	x.giveBack = newGiveBack(in, t)
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

// GiveBack gives back to a row what was taken ahead from it at an instant of the row, and
// must be back before its end. given is false if it is too late, or somebody has the row
// locked; if that is only found when it is too late to pass over it, the error is
// lock_not_available.
func (t *Table) GiveBack(ctx context.Context, q Querier, row decide.Row, d *ratelimit.Definition, n float64, taken, end time.Time, now *time.Time) (given bool, err error) {
	tag, err := q.Exec(ctx, t.of(d).giveBack, row.Name, row.Key.Key, int32(row.Shard), n, d.Capacity, taken, end, d.Rate, micros(d.Period), now)
	return tag.RowsAffected() > 0, err
}
