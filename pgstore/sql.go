package pgstore

import (
	"cmp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// The statements, for PostgreSQL 14 and later. The take is also for what
// distributes it by key, so its upsert keeps to what Citus accepts: one row, the
// clock in VALUES only, nothing volatile or stable, and no sub-select, in SET and
// in the conflict's WHERE. What RETURNING may not tell there either, a CTE around
// it tells in the portable form. Every parameter is cast, so that they run in all
// of pgx's query exec modes and through PgBouncer.
//
// The parameters of the take, which also credits and locks:
//
//	$1 name   $2 key   $3 shard
//	$4 count          tokens to take; negative to give back
//	$5 capacity       tokens
//	$6 rate           tokens per period
//	$7 period         microseconds
//	$8 floor          the lowest value to leave behind
//	$9 now            the instant that decides; NULL for the database's clock
//
// and of a fixed window
//
//	$10 tick          microseconds
//	$11 origin        an instant from which ticks are counted
//
// An executor that starts looks up each function of a statement, which costs
// more than calling it. So what a token bucket does not need is not in its text.
const (
	// settled is the row's value at excluded.ts: Definition.Settle, in the
	// same order of operations.
	//
	//	min(value + max(0, now − ts) · rate / period, capacity)
	//
	// date_part is several times faster than extract, which is numeric, and
	// with round as exact for the 71 years in which microseconds are below 2^51.
	settled = `least(l.value
		+ greatest(round(date_part('epoch', excluded.ts - l.ts) * 1000000), 0) * $6::float8 / $7::float8,
		$5::float8)`

	// tolerance is 64 units in the last place, as in Go: 2^-46.
	tolerance = `greatest(abs(l.value), $4::float8, $5::float8) * ` + units64
	units64   = `1.4210854715202004e-14`

	// takeSQL is Definition.Take and Definition.Credit. It returns a row if
	// and only if it took. It takes no predicate lock under SERIALIZABLE,
	// since it never reads but through the row that it conflicts with.
	//
	// The clock is read before the wait for the row's lock, so another
	// transaction may have left a later ts behind; greatest and the 0 in
	// settled then count no time, rather than the same time twice.
	takeSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, least($5::float8 - $4::float8, $5::float8), {tick})
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(` + settled + ` - $4::float8, $5::float8),
	ts = greatest(l.ts, excluded.ts)
WHERE ` + settled + ` - $4::float8 >= $8::float8 - ` + tolerance + `{ticks agree}
RETURNING value, ts`

	nowSQL = `coalesce($9::timestamptz, clock_timestamp())`

	// windowTick is the edge of the current window, where a token bucket has
	// now itself: Definition.lastTick.
	windowTick = `date_bin($10::float8 * interval '1 microsecond', ` + nowSQL + `, $11::timestamptz)`

	// windowAgrees turns away a row whose ticks are not those of $11: a fixed
	// window that was paused, or had another Start. excluded.ts says nothing
	// about such a row; the caller reads it and comes again with its ts as the
	// origin.
	windowAgrees = `
	AND date_bin($10::float8 * interval '1 microsecond', l.ts, $11::timestamptz) = l.ts`

	xidSQL = `pg_current_xact_id()::text`

	// clockSQL reads the clock after a batch of takes, and the ID of the
	// transaction if it wrote anything.
	clockSQL = `SELECT coalesce($1::timestamptz, clock_timestamp()), pg_current_xact_id_if_assigned()::text`

	// statesSQL reads all rows of a limit and key; the aggregates make it one
	// row always.
	statesSQL = `SELECT array_agg(shard), array_agg(value), array_agg(ts), coalesce($3::timestamptz, clock_timestamp())
FROM {table} WHERE name = $1::text AND key = $2::text`

	// ticksSQL reads an instant at which tokens came in to a row.
	ticksSQL = `SELECT ts FROM {table} WHERE name = $1::text AND key = $2::text AND shard = $3::int4`

	// pauseSQL is Definition.Pause on a row that was settled just before.
	pauseSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, 0, $4::timestamptz)
ON CONFLICT (name, key, shard) DO UPDATE
SET value = least(l.value, 0), ts = greatest(l.ts, excluded.ts)`

	resetSQL     = `DELETE FROM {table} WHERE name = $1::text AND key = $2::text`
	resetFromSQL = resetSQL + ` AND shard >= $3::int4`

	// putSQL is Reshard's.
	putSQL = `INSERT INTO {table} (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz)
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts`
)

// The statements of Prune.
const (
	// listFullSQL lists full rows of a limit from a place on:
	//
	//	$1 name   $2 key and $3 shard after which to go on
	//	$4 capacity   $5 rate   $6 period   $7 tick   $8 now   $9 rows at most
	listFullSQL = `SELECT key, shard, value, ts FROM {table}
WHERE name = $1::text AND (key, shard) > ($2::text, $3::int4) AND ts <= $8::timestamptz
	AND least(value
		+ round(date_part('epoch', date_bin($7::float8 * interval '1 microsecond', $8::timestamptz, ts) - ts) * 1000000)
			* $5::float8 / $6::float8,
		$4::float8) >= $4::float8
ORDER BY key, shard
LIMIT $9::int8`

	// deleteListedSQL deletes those of the listed rows that have not changed
	// and that nobody has locked.
	deleteListedSQL = `WITH same AS (
	SELECT r.key, r.shard FROM unnest($2::text[], $3::int4[], $4::float8[], $5::timestamptz[]) AS w (key, shard, value, ts)
	JOIN {table} AS r ON r.name = $1::text AND r.key = w.key AND r.shard = w.shard AND r.value = w.value AND r.ts = w.ts
	FOR UPDATE OF r SKIP LOCKED
)
DELETE FROM {table} AS l USING same
WHERE l.name = $1::text AND l.key = same.key AND l.shard = same.shard`

	// deleteSameSQL is its portable form, for one row.
	deleteSameSQL = `DELETE FROM {table}
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND value = $4::float8 AND ts = $5::timestamptz`
)

// The statements below are for decisions on their own, on plain PostgreSQL.
//
// The arrays are behind sub-selects to hide their lengths from the planner. It
// would otherwise find that it can do better for a short one, and plan each
// time, which costs more than the statement.
const (
	// takeQuickSQL takes from a row that is there what one call wants, or
	// several together, if there is enough for all. It writes and locks nothing
	// when it refuses. As it may read the row it counts ticks from the row's own.
	// What w is said to have are its parameters, those of quickParameters.
	//
	// It names the instant more than once, so that must be one.
	takeQuickSQL = quickUpdate + `
WHERE ` + quickWhere + `
RETURNING l.value, l.ts, ` + nowSQL

	// takeQuicklySQL is takeQuickSQL for several rows, in the order given, of
	// either kind: $1 to $8 and $10 are arrays. See updateRowsSQL for the range
	// of i.
	takeQuicklySQL = quickUpdate + `
FROM (
	SELECT u.*, ` + quickNow + ` AS now
	FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::float8[]),
		(SELECT $6::float8[]), (SELECT $7::float8[]), (SELECT $8::float8[]), (SELECT $10::float8[]))
		WITH ORDINALITY AS u (name, key, shard, total, need, capacity, rate, period, tick, i)
	WHERE u.i BETWEEN 1 AND 1000000000
	OFFSET 0
) AS w
WHERE ` + quickWhere + `
RETURNING w.i, l.value, l.ts, ` + nowSQL

	quickNow = `coalesce($9::timestamptz, statement_timestamp())`

	quickUpdate = `UPDATE {table} AS l
SET value = ` + quickSettled + ` - w.total, ts = greatest(l.ts, {tick})`

	quickSettled = `least(l.value
		+ greatest(round(date_part('epoch', {tick} - l.ts) * 1000000), 0) * w.rate / w.period,
		w.capacity)`
	quickWhere = `l.name = w.name AND l.key = w.key AND l.shard = w.shard
	AND ` + quickSettled + ` - w.need >= -greatest(abs(l.value), w.total, w.capacity) * ` + units64

	// quickWindowTick is windowTick by the row's own ticks.
	quickWindowTick = `date_bin(w.tick * interval '1 microsecond', w.now, l.ts)`

	// readRowsSQL reads rows in the order given, one index look-up each, and
	// one clock for all.
	readRowsSQL = `SELECT w.i, l.ctid::text, l.value, l.ts, (SELECT coalesce($4::timestamptz, clock_timestamp()))
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.ctid, r.value, r.ts FROM {table} AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1 {lock}
) AS l ON true`

	// insertRowsSQL writes rows that are not there.
	insertRowsSQL = `INSERT INTO {table} (name, key, shard, value, ts)
SELECT * FROM unnest($1::text[], $2::text[], $3::int4[], $4::float8[], $5::timestamptz[])
ON CONFLICT (name, key, shard) DO NOTHING
RETURNING name, key, shard`

	// updateRowsSQL writes rows that are still what was read: the same version
	// in the same place. The ctid alone would find them, but a place can have
	// been used again. The range of i is always true, and is there for the
	// planner: it takes it for selective, and so goes to each place rather than
	// through the whole table, also while the table is young and the plan is
	// kept that was made when it was small.
	updateRowsSQL = `UPDATE {table} AS l
SET value = w.value, ts = w.ts
FROM unnest((SELECT $1::text[]::tid[]), (SELECT $2::text[]), (SELECT $3::text[]), (SELECT $4::int4[]),
	(SELECT $5::float8[]), (SELECT $6::timestamptz[]), (SELECT $7::float8[]), (SELECT $8::timestamptz[]))
	WITH ORDINALITY AS w (ctid, name, key, shard, read_value, read_ts, value, ts, i)
WHERE l.ctid = w.ctid AND l.name = w.name AND l.key = w.key AND l.shard = w.shard
	AND l.value = w.read_value AND l.ts = w.read_ts
	AND w.i BETWEEN 1 AND 1000000000
RETURNING w.i`
)

// quickParameters are the parameters of takeQuickSQL: w.total is to be taken,
// and w.need must be there.
var quickParameters = strings.NewReplacer(
	"w.name", "$1::text", "w.key", "$2::text", "w.shard", "$3::int4", "w.total", "$4::float8", "w.need", "$5::float8",
	"w.capacity", "$6::float8", "w.rate", "$7::float8", "w.period", "$8::float8", "w.now", quickNow, "w.tick", "$10::float8",
)

// statements are the texts above for one table.
type statements struct {
	bucket, window takes

	states, ticks, pause, reset, resetFrom, put, listFull, deleteListed, deleteSame string
	readRows, lockRows, insertRows, updateRows                                      string
}

// takes are those for one kind of limit.
type takes struct {
	bare           string // tells the row
	at             string // the row and the instant that decided
	first          string // and the transaction's ID, for the runner
	quick, quickly string
}

func newStatements(schema string, portable bool) statements {
	table := pgx.Identifier{Table}
	if schema != "" {
		table = pgx.Identifier{schema, Table}
	}
	in := func(sql string) string { return strings.ReplaceAll(sql, "{table}", table.Sanitize()) }
	read := func(lock string) string { return in(strings.Replace(readRowsSQL, " {lock}", lock, 1)) }
	return statements{
		bucket: newTakes(in, portable, nowSQL, "", "w.now"),
		window: newTakes(in, portable, windowTick, windowAgrees, quickWindowTick),
		states: in(statesSQL), ticks: in(ticksSQL), pause: in(pauseSQL),
		reset: in(resetSQL), resetFrom: in(resetFromSQL), put: in(putSQL),
		listFull: in(listFullSQL), deleteListed: in(deleteListedSQL), deleteSame: in(deleteSameSQL),
		readRows: read(""), lockRows: read(" FOR UPDATE"),
		insertRows: in(insertRowsSQL), updateRows: in(updateRowsSQL),
	}
}

// newTakes makes the texts for a kind of limit. They tell the instant after they
// waited for the row, so that RetryAfter is what is left to wait.
func newTakes(in func(string) string, portable bool, tick, agrees, quickTick string) takes {
	bare := strings.NewReplacer("{tick}", tick, "{ticks agree}", agrees).Replace(takeSQL)
	telling := func(more string) string { return bare + ", " + more }
	if portable {
		telling = func(more string) string {
			return "WITH taken AS (" + bare + ")\nSELECT value, ts, " + more + " FROM taken"
		}
	}
	quick := func(sql string) string { return strings.ReplaceAll(sql, "{tick}", quickTick) }
	return takes{
		bare: in(bare), at: in(telling(nowSQL)), first: in(telling(nowSQL + ", " + xidSQL)),
		quick: in(quickParameters.Replace(quick(takeQuickSQL))), quickly: in(quick(takeQuicklySQL)),
	}
}

// row identifies a row of the table.
type row struct {
	name, key string
	shard     int
}

// compare is the one order in which rows are locked.
func (r row) compare(other row) int {
	if c := strings.Compare(r.name, other.name); c != 0 {
		return c
	}
	if c := strings.Compare(r.key, other.key); c != 0 {
		return c
	}
	return cmp.Compare(r.shard, other.shard)
}

// part is what a call does to one row.
type part struct {
	ask        int                  // whose it is, in the call
	definition ratelimit.Definition // of the shard
	key        string
	shard      int
	count      float64
	floor      float64
	origin     time.Time
}

// of is the texts that take from such a limit.
func (s *statements) of(d *ratelimit.Definition) *takes {
	if d.Kind == ratelimit.KindFixedWindow {
		return &s.window
	}
	return &s.bucket
}

// takeArgs are the parameters of take.
func (p *part) takeArgs(now *time.Time) []any {
	d := &p.definition
	args := []any{d.Name, p.key, int32(p.shard), p.count, d.Capacity, d.Rate, micros(d.Period), p.floor, now}
	if d.Kind == ratelimit.KindFixedWindow {
		args = append(args, micros(d.Tick()), p.origin)
	}
	return args
}

func micros(d time.Duration) float64 { return float64(d.Microseconds()) }
