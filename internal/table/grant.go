package table

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/exact"
)

// The statements below are for decisions on their own, on plain PostgreSQL. None
// of them waits for a row that somebody has locked, but those that say so.
//
// The arrays are behind sub-selects to hide their lengths from the planner. It
// would otherwise find that it can do better for a short one, and plan each time,
// which costs more than the statement. The range of i is always true, and is there
// for the planner: it takes it for selective, and so goes to each row by the index
// rather than through the whole table, also while the table is young and the plan
// is kept that was made when it was small.

// Grant is what several calls take together from one row: all of it or nothing.
type Grant struct {
	decide.Change         // Count is what they take together
	Need          float64 // tokens that there must be to grant all of them
	Reserve       bool    // all of them reserve, so that a pause does not matter
	AtMost        bool    // it is one call that takes what there is, up to Count; alone, it does, and Count is then what it took
	Taken         Taken
}

const (
	// grantSQL takes from a row that is there, that nobody has locked, and that
	// has enough. It writes and locks nothing otherwise.
	//
	// The row is locked in its newest version before it is written, so that
	// version is the one at r.ctid.
	grantSQL = grantUpdate + `
	SELECT r.ctid, u.total AS total, u.tick AS tick, {grant tick} AS ticked, ` + grantSettled + ` AS settled
	FROM {table} AS r
	WHERE ` + grantWhere + `
	FOR UPDATE SKIP LOCKED
) AS w
WHERE l.ctid = w.ctid
RETURNING l.value, l.ts, l.paused, {granted at}`

	// grantAtMostSQL is grantSQL for as many whole tokens as there are, up to the
	// total, and tells how many.
	grantAtMostSQL = `UPDATE {table} AS l SET value = w.settled - w.taken, ts = greatest(l.ts, w.ticked)
FROM (
	SELECT r.ctid, u.tick AS tick, {grant tick} AS ticked, ` + grantSettled + ` AS settled,
		least(u.total, floor(` + grantSettled + ` + ` + grantSlack + `)) AS taken
	FROM {table} AS r
	WHERE ` + grantWhere + `
	FOR UPDATE SKIP LOCKED
) AS w
WHERE l.ctid = w.ctid
RETURNING l.value, l.ts, l.paused, {granted at}, w.taken`

	// grantManySQL is grantSQL for several rows, in the order given, of either
	// kind: $1 to $8, $10 and $11 are arrays.
	grantManySQL = grantUpdate + `
	SELECT r.ctid, u.i, u.total, u.tick, {grant tick} AS ticked, ` + grantSettled + ` AS settled
	FROM (
		SELECT u.*, ` + grantNow + ` AS now
		FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::float8[]),
			(SELECT $6::float8[]), (SELECT $7::float8[]), (SELECT $8::float8[]), (SELECT $10::float8[]), (SELECT $11::bool[]))
			WITH ORDINALITY AS u (name, key, shard, total, need, capacity, rate, period, tick, reserve, i)
		WHERE u.i BETWEEN 1 AND 1000000000
		OFFSET 0
	) AS u, {table} AS r
	WHERE ` + grantWhere + `
	FOR UPDATE OF r SKIP LOCKED
) AS w
WHERE l.ctid = w.ctid
RETURNING l.value, l.ts, l.paused, {granted at}, w.i`

	// grantInTurnSQL is grantSQL that waits for the row, and decides on what is in
	// it then. (A row that changed while it was waited for is not at the place any
	// more that the statement sees, so it is written as it is locked.)
	grantInTurnSQL = `UPDATE {table} AS r
SET value = ` + grantSettled + ` - u.total, ts = greatest(r.ts, {grant tick})
WHERE ` + grantWhere + `
RETURNING r.value, r.ts, r.paused, least(r.ts + (u.tick - 1) * interval '1 microsecond', coalesce($9::timestamptz, clock_timestamp()))`

	grantUpdate = `UPDATE {table} AS l SET value = w.settled - w.total, ts = greatest(l.ts, w.ticked)
FROM (`
	grantNow     = `coalesce($9::timestamptz, statement_timestamp())`
	grantSettled = `least(r.value
		+ greatest(round(date_part('epoch', {grant tick} - r.ts) * 1000000), 0) * u.rate / u.period,
		u.capacity)`
	grantWhere = `r.name = u.name AND r.key = u.key AND r.shard = u.shard
		AND (r.paused IS NULL OR r.paused <= u.now OR u.reserve)
		AND ` + grantSettled + ` - u.need >= -` + grantSlack + `
	`
	grantSlack = `greatest(abs(r.value), u.total, u.capacity) * ` + exact.SQL
)

// grantParameters are the parameters of grantSQL.
var grantParameters = strings.NewReplacer(
	"u.name", "$1::text", "u.key", "$2::text", "u.shard", "$3::int4", "u.total", "$4::float8", "u.need", "$5::float8",
	"u.capacity", "$6::float8", "u.rate", "$7::float8", "u.period", "$8::float8", "u.tick", "$10::float8", "u.reserve", "$11::bool", "u.now", grantNow,
)

// Grant takes what grants say from the rows that have enough for all of it.
func (t *Table) Grant(ctx context.Context, q Querier, grants []Grant, now *time.Time) error {
	if len(grants) == 1 {
		return t.grantOne(ctx, q, &grants[0], now)
	}
	return t.grantSeveral(ctx, q, grants, now)
}

func (t *Table) grantOne(ctx context.Context, q Querier, g *Grant, now *time.Time) error {
	if g.AtMost {
		one := *g
		one.Need = 1
		return g.Taken.scan(q.QueryRow(ctx, t.of(&g.Definition).grantAtMost, one.arguments(now)...), &g.Taken.At, &g.Count)
	}
	return g.Taken.scan(q.QueryRow(ctx, t.of(&g.Definition).grant, g.arguments(now)...), &g.Taken.At)
}

// QueueGrant puts into a batch a grant that waits for its row if somebody has locked
// it.
func (t *Table) QueueGrant(batch *pgx.Batch, g *Grant, now *time.Time) {
	batch.Queue(t.of(&g.Definition).grantInTurn, g.arguments(now)...).QueryRow(func(row pgx.Row) error {
		return g.Taken.scan(row, &g.Taken.At)
	})
}

func (g *Grant) arguments(now *time.Time) []any {
	d := &g.Definition
	return []any{
		g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need,
		d.Capacity, d.Rate, micros(d.Period), now, tick(d), g.Reserve,
	}
}

func (t *Table) grantSeveral(ctx context.Context, q Querier, grants []Grant, now *time.Time) error {
	n := len(grants)
	names, keys, shards := make([]string, n), make([]string, n), make([]int32, n)
	totals, needs, reserves := make([]float64, n), make([]float64, n), make([]bool, n)
	capacities, rates, periods, ticks := make([]float64, n), make([]float64, n), make([]float64, n), make([]float64, n)
	sql := t.grantMany
	for i := range grants {
		g, d := &grants[i], &grants[i].Definition
		names[i], keys[i], shards[i] = g.Name, g.Key.Key, int32(g.Shard)
		totals[i], needs[i], reserves[i] = g.Count, g.Need, g.Reserve
		capacities[i], rates[i], periods[i], ticks[i] = d.Capacity, d.Rate, micros(d.Period), tick(d)
		if d.Kind == ratelimit.KindFixedWindow {
			sql = t.grantWindows // a token bucket's ticks are microseconds
		}
	}
	rows, err := q.Query(ctx, sql, names, keys, shards, totals, needs, capacities, rates, periods, now, ticks, reserves)
	if err != nil {
		return err
	}
	var (
		taken  Taken
		paused *time.Time
		i      int64
	)
	_, err = pgx.ForEachRow(rows, []any{&taken.After.Value, &taken.After.TS, &paused, &taken.At, &i}, func() error {
		grants[i-1].Taken = taken
		grants[i-1].Taken.take(paused)
		return nil
	})
	return err
}

// tick is the granularity of a limit's clock, in microseconds.
func tick(d *ratelimit.Definition) float64 {
	if d.Kind == ratelimit.KindFixedWindow {
		return micros(d.Period)
	}
	return 1
}

// Rows are rows to read, lock, make or write.
type Rows struct {
	Rows   []decide.Row
	States []ratelimit.State // as read, or to write
	Found  []bool            // that were read
	At     time.Time         // of the reading
}

func (r *Rows) columns() (names, keys []string, shards []int32) {
	names, keys, shards = make([]string, len(r.Rows)), make([]string, len(r.Rows)), make([]int32, len(r.Rows))
	for i, row := range r.Rows {
		names[i], keys[i], shards[i] = row.Name, row.Key.Key, int32(row.Shard)
	}
	return names, keys, shards
}

func (r *Rows) states() (values []float64, ts []time.Time, paused []*time.Time) {
	values, ts, paused = make([]float64, len(r.Rows)), make([]time.Time, len(r.Rows)), make([]*time.Time, len(r.Rows))
	for i, s := range r.States {
		values[i], ts[i], paused[i] = s.Value, s.TS, instant(s.Paused)
	}
	return values, ts, paused
}

const (
	// readSQL reads rows in the order given, one index look-up each, and one
	// clock for all.
	readSQL = `SELECT l.value, l.ts, l.paused, w.i, (SELECT coalesce($4::timestamptz, clock_timestamp()))
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused FROM {table} AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1
) AS l ON true`

	// lockSQL is readSQL with the rows locked, but for those that somebody else
	// has locked.
	lockSQL = `SELECT l.value, l.ts, l.paused, w.i, (SELECT coalesce($4::timestamptz, clock_timestamp()))
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused FROM {table} AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1 FOR UPDATE SKIP LOCKED
) AS l ON true`

	// awaitSQL waits for one row, and locks it.
	awaitSQL = `SELECT 1 FROM {table} WHERE name = $1::text AND key = $2::text AND shard = $3::int4 FOR UPDATE`

	// fillSQL makes the rows that are not there: full, which means the same. It
	// waits for a transaction that has made one of them and has not ended.
	fillSQL = `INSERT INTO {table} (name, key, shard, value, ts)
SELECT u.name, u.key, u.shard, u.capacity, date_bin(u.tick * interval '1 microsecond', n.now, u.origin)
FROM (SELECT coalesce($7::timestamptz, clock_timestamp()) AS now OFFSET 0) AS n,
	unnest($1::text[], $2::text[], $3::int4[], $4::float8[], $5::float8[], $6::timestamptz[])
		AS u (name, key, shard, capacity, tick, origin)
ON CONFLICT (name, key, shard) DO NOTHING`

	// writeSQL writes rows that are locked.
	writeSQL = `UPDATE {table} AS l
SET value = w.value, ts = w.ts, paused = w.paused
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]),
	(SELECT $4::float8[]), (SELECT $5::timestamptz[]), (SELECT $6::timestamptz[]))
	WITH ORDINALITY AS w (name, key, shard, value, ts, paused, i)
WHERE l.name = w.name AND l.key = w.key AND l.shard = w.shard AND w.i BETWEEN 1 AND 1000000000`

	// boundsSQL bounds, in milliseconds and for this transaction, a wait for a
	// lock, and the time that the server keeps what is locked while it hears
	// nothing of the client.
	boundsSQL = `SELECT set_config('lock_timeout', $1::text, true), set_config('idle_in_transaction_session_timeout', $2::text, true)`
)

// Read reads rows.
func (t *Table) Read(ctx context.Context, q Querier, r *Rows, now *time.Time) error {
	names, keys, shards := r.columns()
	rows, err := q.Query(ctx, t.read, names, keys, shards, now)
	if err != nil {
		return err
	}
	return r.scan(rows)
}

// QueueLock puts into a batch the locking and reading of the rows that are there
// and that nobody else has locked.
func (t *Table) QueueLock(batch *pgx.Batch, r *Rows, now *time.Time) {
	names, keys, shards := r.columns()
	batch.Queue(t.lock, names, keys, shards, now).Query(r.scan)
}

func (r *Rows) scan(rows pgx.Rows) error {
	r.States, r.Found = make([]ratelimit.State, len(r.Rows)), make([]bool, len(r.Rows))
	var (
		s state
		i int64
	)
	_, err := pgx.ForEachRow(rows, append(s.fields(), &i, &r.At), func() error {
		r.States[i-1], r.Found[i-1] = s.get()
		return nil
	})
	r.At = r.At.UTC()
	return err
}

// QueueBounds puts into a batch, after the BEGIN of a transaction, the longest that
// it waits for a lock, and the longest that it keeps its own while the client is
// silent.
func (t *Table) QueueBounds(batch *pgx.Batch, lock, idle time.Duration) {
	batch.Queue(boundsSQL, strconv.FormatInt(lock.Milliseconds(), 10), strconv.FormatInt(idle.Milliseconds(), 10))
}

// QueueAwait puts into a batch the wait for a row that somebody has locked.
func (t *Table) QueueAwait(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.await, row.Name, row.Key.Key, int32(row.Shard))
}

// QueueFill puts into a batch the making of rows that are not there, with one
// definition for each.
func (t *Table) QueueFill(batch *pgx.Batch, rows []decide.Row, definitions []ratelimit.Definition, now *time.Time) {
	n, r := len(rows), Rows{Rows: rows}
	names, keys, shards := r.columns()
	capacities, ticks, origins := make([]float64, n), make([]float64, n), make([]time.Time, n)
	for i := range definitions {
		d := &definitions[i]
		capacities[i], ticks[i], origins[i] = d.Capacity, tick(d), d.Fresh(rows[i].Key.Key, longAgo).TS
	}
	batch.Queue(t.fill, names, keys, shards, capacities, ticks, origins, now)
}

// QueueWrite puts into a batch the writing of rows that are locked.
func (t *Table) QueueWrite(batch *pgx.Batch, r *Rows) {
	names, keys, shards := r.columns()
	values, ts, paused := r.states()
	batch.Queue(t.write, names, keys, shards, values, ts, paused)
}
