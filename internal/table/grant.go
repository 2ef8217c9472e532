package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// The statements below are for decisions on their own, on plain PostgreSQL. None
// of them waits for a row that somebody has locked, but those that say so.
//
// The arrays of most statements are behind sub-selects to hide their
// lengths from the planner. It would otherwise find that it can do better for a short one,
// and plan each time, which costs more than the statement. The range of i is always true,
// and is there for the planner: it takes it for selective, and so goes to each row by the
// index rather than through the whole table, also while the table is young and the plan
// is kept that was made when it was small.

// Grant is what several calls take together from one row: all of it or nothing.
type Grant struct {
	decide.Change         // Count is what they take together
	Need          float64 // tokens that there must be to grant all of them

	// A grant that prefetches takes more, for a lease.
	Lasts    time.Duration // of the lease; 0 for a grant that does not prefetch
	Lowered  float64       // capacity to count with, lower by what is refilled while the lease lasts
	Prefetch float64       // tokens to take besides, but no more than half of what is left then
	Out      float64       // of Count, what may still come back to memory
	Spent                  // of earlier leases

	// Brisk has a grant that waits for its row committed in the round trip that takes, so that
	// those behind it, in other processes too, wait for no other one; but it waits for a moment
	// only. Who gives up then may have taken all the same, as with any statement that is under
	// way. It is for rows that others are known to have locked no longer than that takes.
	Brisk bool

	Taken Taken
}

// Prefetched is how much a grant, which was taken, took besides. It is told by what is left.
func (g *Grant) Prefetched() float64 { return max(0, min(g.Prefetch, g.Taken.After.Value)) }

// End is when the lease ends, on the database's clock, of a grant that was taken and
// prefetched.
func (g *Grant) End() time.Time {
	end := g.Taken.After.TS.Add(g.Lasts)
	switch g.Definition.Kind {
	case bucket.FixedWindow:
		end = g.Taken.After.TS.Add(g.Definition.Period)
	case bucket.SlidingWindow:
		end = g.Taken.After.TS.Add(g.Definition.SlotWidth())
	}
	if !g.Taken.Until.IsZero() && g.Taken.Until.Before(end) {
		return g.Taken.Until
	}
	return end
}

// capacity is what a grant counts with.
func (g *Grant) capacity() float64 {
	if g.Lasts > 0 {
		return g.Lowered
	}
	return g.Definition.Capacity
}

// A grant is made as short as it can be, since an executor that starts looks at each
// part of its statement, which costs more than the decision. So it turns away what the
// algebra would grant in a pause, or by its tolerance: that is left to the statements
// that lock and write.
const (
	// grantSQL takes from a row that is there and has enough. It writes and locks
	// nothing otherwise.
	grantSQL = `UPDATE {table} AS r` + grantSet + `
WHERE ` + grantWhere + `
RETURNING r.value, r.ts, {granted at}`

	// grantAtMostSQL is grantSQL for as many whole tokens as there are, up to the
	// total, and tells how many. What there was must be read for that, and so the row
	// is locked first.
	grantAtMostSQL = `UPDATE {table} AS r
SET value = w.settled - w.taken, ts = greatest(r.ts, w.ticked)
FROM (
	SELECT r.ctid, {grant tick} AS ticked, ` + grantSettled + ` AS settled, least(u.total, floor(` + grantSettled + `)) AS taken
	FROM {table} AS r
	WHERE ` + grantWhere + `
	FOR UPDATE SKIP LOCKED
) AS w
WHERE r.ctid = w.ctid
RETURNING r.value, r.ts, {granted at}, w.taken`

	// grantAlikeSQL is grantSQL for several rows of one limit, from each of which the same
	// is taken: $2 is an array of keys. One scan of the index looks all of them up, which
	// costs the server a sixth less than to join rows of what is to be taken. PassOver is
	// set where the keys come from, before the first row.
	grantAlikeSQL = `UPDATE {table} AS r` + grantSet + `
WHERE ` + grantRow + `
	AND ` + grantEnough + `
RETURNING r.value, r.ts, {granted at}, r.key`

	// grantManySQL is grantSQL for several rows, in the order given, of either kind:
	// $1 to $5 are arrays of what is to be taken, and $6 to $9 of the definitions that $2
	// counts from 1. $3 is NULL if no limit has shards, $5 if each needs what it takes. An
	// array that is subscripted costs less than one that is unnested.
	grantManySQL = `UPDATE {table} AS r` + grantSet + grantManyFrom + `
RETURNING r.value, r.ts, {granted at}, u.i`

	grantManyFrom = `
FROM unnest($1::text[], $2::int4[]) WITH ORDINALITY AS u (key, definition, i)
WHERE u.i BETWEEN 1 AND 1000000000 AND ` + grantRow + `
	AND ` + grantEnough

	grantSet = `
SET value = ` + grantSettled + ` - u.total, ts = greatest(r.ts, {grant tick})`
	grantSettled = `least(r.value
		+ greatest(round(tstzrange_subdiff({grant tick}, r.ts) * 1000000), 0) * u.rate / u.period,
		u.capacity)`
	grantWhere = grantRow + `
	AND ` + grantSettled + ` >= u.need`
	// Of most rows what is in them is enough, and what was refilled need not be counted twice.
	grantEnough = `(least(r.value, u.capacity) >= u.need OR ` + grantSettled + ` >= u.need)`
	grantRow    = `{free}r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused IS NULL OR r.paused <= u.now)`

	// passOverSQL is PassOver. Behind a sub-select it is set once, not for each
	// row; but a statement that has a sub-select is walked through each time that
	// it is executed, which costs more for one row.
	passOverSQL = `set_config('lock_timeout', '1', true)`

	// unlockedSQL passes over rows that somebody has locked: xmax is who did so last, and a
	// transaction that the snapshot does not see may not have ended. That can be wrong,
	// as xmax may be a savepoint, or an ID of another epoch; and a row can be locked
	// between the reading of xmax and the writing. Then there is an error after PassOver,
	// and nothing has happened. Locking the rows with SKIP LOCKED before they are written
	// needs neither, but makes a statement for many rows slower by a sixth.
	unlockedSQL = `(r.xmax = '0'::xid OR pg_visible_in_snapshot(r.xmax::text::xid8, pg_current_snapshot()))
	AND `
)

// freeSQL sets PassOver and passes over rows that somebody has locked.
func freeSQL(passOver string) string {
	return passOver + ` IS NOT NULL
	AND ` + unlockedSQL
}

// clocks are a statement that reads the clock, and one that is told the instant by
// its last parameter: what need not be asked about is not in its text.
type clocks struct{ read, told string }

// in returns them with in made of each.
func (c clocks) in(in func(string) string) clocks { return clocks{in(c.read), in(c.told)} }

func (c *clocks) of(now *time.Time) string {
	if now == nil {
		return c.read
	}
	return c.told
}

// newGrant makes a statement for one row.
func newGrant(t ticks, sql string) func(free string) clocks { return newGrantOf(t, sql, "$2::text") }

// newGrantAlike makes a statement for several rows from which the same is taken.
func newGrantAlike(t ticks) clocks {
	return newGrantOf(t, grantAlikeSQL, "ANY ((SELECT $2::text[] WHERE "+passOverSQL+" IS NOT NULL)::text[])")(unlockedSQL)
}

func newGrantOf(t ticks, sql, key string) func(free string) clocks {
	return newClocks(t.fill(sql), "$9::timestamptz",
		"u.name", "$1::text", "u.key", key, "u.shard", "$3::int4", "u.total", "$4::float8", "u.need", "$5::float8",
		"u.capacity", "$6::float8", "u.rate", "$7::float8", "u.period", "$8::float8",
		"u.tick", "$8::float8", // of a fixed window; a token bucket has none
	)
}

// newClocks makes the statements of a grant of one row, whose parameters are named; told
// is the last.
func newClocks(sql, told string, parameters ...string) func(free string) clocks {
	return func(free string) clocks {
		of := func(now, clock string) string {
			return strings.NewReplacer(append(parameters[:len(parameters):len(parameters)], "u.now", now, "{clock}", clock, "{free}", free)...).Replace(sql)
		}
		return clocks{read: of("statement_timestamp()", "clock_timestamp()"), told: of(told, told)}
	}
}

// newGrantMany makes a grant of several rows, which may have more to count with than nine
// arrays: "u.tick", if fixed windows are among them, and "u.ahead".
func newGrantMany(t ticks, sql string, more ...string) clocks {
	parameters := []string{
		"u.name", "($6::text[])[u.definition]", "u.shard", "coalesce(($3::int4[])[u.i], 0)",
		"u.total", "($4::float8[])[u.i]", "u.need", "coalesce(($5::float8[])[u.i], ($4::float8[])[u.i])",
		"u.capacity", "($7::float8[])[u.definition]", "u.rate", "($8::float8[])[u.definition]", "u.period", "($9::float8[])[u.definition]",
	}
	last := 9
	for _, name := range more {
		of := "u.definition"
		if name == "u.ahead" {
			of = "u.i"
		}
		last++
		parameters = append(parameters, name, fmt.Sprintf("($%d::float8[])[%s]", last, of))
	}
	return newClocks(t.fill(sql), fmt.Sprintf("$%d::timestamptz", last+1), parameters...)(freeSQL("(SELECT " + passOverSQL + ")"))
}

// grant takes what grants say, in the order of their rows, from rows that nobody has locked.
func (t plain) grant(ctx context.Context, q Querier, grants []Grant, now *time.Time) error {
	if len(grants) == 1 {
		return t.grantOne(ctx, q, &grants[0], now)
	}
	var batch pgx.Batch // of one statement mostly, and one transaction in any case
	alike, others, sliding := sorts(grants, t.statistics.known(&batch))
	if len(alike) > 0 {
		t.queueAlike(&batch, alike, now)
	}
	if len(others) > 0 {
		t.queueOthers(&batch, others, now)
	}
	if len(sliding) > 0 {
		t.queueSliding(&batch, sliding, now)
	}
	err := q.SendBatch(ctx, &batch).Close()
	if err != nil { // nothing is taken, whatever has been read
		for i := range grants {
			grants[i].Taken = Taken{}
		}
	}
	return err
}

// fewAlike is how many rows that are alike, with others, are not worth a statement of their
// own: beginning another costs the server what so many of them save.
const fewAlike = 24

// sorts divides grants into those that take the same from rows of one limit, if that is
// wanted, others, and those of sliding windows; each in the order given.
func sorts(grants []Grant, scan bool) (alike, others, sliding []*Grant) {
	var common *Grant
	if scan {
		common, alike = usual(grants), make([]*Grant, 0, len(grants))
	} else {
		others = make([]*Grant, 0, len(grants))
	}
	for i := range grants {
		switch g := &grants[i]; {
		case g.sliding():
			sliding = append(sliding, g)
		case scan && g.alike(common):
			alike = append(alike, g)
		default:
			others = append(others, g)
		}
	}
	if len(others) > 0 && len(alike) > 0 && len(alike) <= fewAlike {
		others = append(others, alike...)
		slices.SortFunc(others, func(g, h *Grant) int { return g.Row.Compare(h.Row) })
		alike = nil
	}
	return alike, others, sliding
}

// usual is the grant that most of grants are like; any, if there is no such majority.
func usual(grants []Grant) (usual *Grant) {
	votes := 0
	for i := range grants {
		switch g := &grants[i]; {
		case votes == 0:
			usual, votes = g, 1
		case g.alike(usual):
			votes++
		default:
			votes--
		}
	}
	return usual
}

// alike reports whether two grants are the same but for the key.
func (g *Grant) alike(h *Grant) bool {
	return g.Count == h.Count && g.Need == h.Need && g.Shard == h.Shard && g.Prefetch == 0 && h.Prefetch == 0 && g.Definition == h.Definition
}

// queueAlike puts into a batch grants that are alike.
func (t *Table) queueAlike(batch *pgx.Batch, grants []*Grant, now *time.Time) {
	args := grants[0].arguments(now)
	args[1] = column(grants, func(g *Grant) string { return g.Key.Key })
	batch.Queue(t.of(&grants[0].Definition).grantAlike.of(now), args...).Query(scanAlike(grants))
}

// scanAlike reads the rows that a statement for grants that are alike returned: those of an
// index, mostly in its order.
func scanAlike(grants []*Grant) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var (
			r    returned
			key  pgtype.DriverBytes
			next int
		)
		fields := r.fields(&key)
		for rows.Next() {
			if err := rows.Scan(fields...); err != nil {
				return err
			}
			if next == len(grants) || grants[next].Key.Key != string(key) {
				i, ok := slices.BinarySearchFunc(grants, string(key), func(g *Grant, key string) int { return strings.Compare(g.Key.Key, key) })
				if !ok {
					return fmt.Errorf("key %q was not asked for", key)
				}
				next = i
			}
			grants[next].Taken = r.taken()
			next++
		}
		return rows.Err()
	}
}

func (t *Table) grantOne(ctx context.Context, q Querier, g *Grant, now *time.Time) error {
	texts := t.of(&g.Definition)
	return g.scan(q.QueryRow(ctx, g.either(&texts.grant, &texts.ahead).of(now), g.arguments(now)...))
}

func (g *Grant) sliding() bool { return g.Definition.Kind == bucket.SlidingWindow }

// queueInTurn puts into a batch a grant that waits for its row if somebody has locked
// it. (It is written by one statement that need not lock it first, since a row that has
// changed while it was waited for is read again.)
func (t *Table) queueInTurn(batch *pgx.Batch, g *Grant, now *time.Time) {
	texts := t.of(&g.Definition)
	batch.Queue(g.either(&texts.grantInTurn, &texts.aheadInTurn).of(now), g.arguments(now)...).QueryRow(func(row pgx.Row) error { return g.scan(row) })
}

func (g *Grant) arguments(now *time.Time) []any {
	d := &g.Definition
	args := []any{g.Name, g.Key.Key, int32(g.Shard), g.Count}
	if g.sliding() {
		args = append(args, d.Rate, tick(d), int32(d.Slots+2))
	} else {
		args = append(args, g.Need, g.capacity(), d.Rate, micros(d.Period))
	}
	if g.Prefetch > 0 {
		args = append(args, g.Prefetch)
	}
	if now != nil {
		args = append(args, *now)
	}
	return args
}

// scan reads a row that a grant returned, if it did.
func (g *Grant) scan(row pgx.Row, more ...any) error {
	r := returned{sliding: g.sliding()}
	err := row.Scan(r.fields(more...)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err == nil {
		g.Taken = r.taken()
	}
	return err
}

// returned is a row that a grant returned.
type returned struct {
	value   float64
	ts, at  time.Time
	sliding bool
	slots   []float64
}

func (r *returned) fields(more ...any) []any {
	fields := append(make([]any, 0, 5), &r.value, &r.ts, &r.at)
	if r.sliding {
		fields = append(fields, &r.slots)
	}
	return append(fields, more...)
}

func (r *returned) taken() Taken {
	t := Taken{OK: true, After: bucket.State{Value: r.value, TS: r.ts}, At: r.at}
	if r.sliding {
		t.After.Slots = slots.Read(r.slots, r.value)
		r.slots = nil // of which it has a part
	}
	return t
}

// scanGrants reads the rows that a statement for several grants returned.
func scanGrants(grants []*Grant) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var i int64
		r := returned{sliding: grants[0].sliding()}
		fields := r.fields(&i)
		for rows.Next() {
			if err := rows.Scan(fields...); err != nil {
				return err
			}
			grants[i-1].Taken = r.taken()
		}
		return rows.Err()
	}
}

// queueOthers puts into a batch grants of limits that are no sliding windows.
func (t *Table) queueOthers(batch *pgx.Batch, grants []*Grant, now *time.Time) {
	n := len(grants)
	keys, places, totals := make([]string, n), make([]int32, n), make([]float64, n)
	var of definitions
	sharded, less, ahead := false, false, false
	for i, g := range grants {
		keys[i], places[i], totals[i] = g.Key.Key, of.place(&g.Definition), g.Count
		sharded, less, ahead = sharded || g.Shard != 0, less || g.Need != g.Count, ahead || g.Prefetch > 0
	}
	var shards []int32
	if sharded {
		shards = column(grants, func(g *Grant) int32 { return int32(g.Shard) })
	}
	var needs []float64
	if less {
		needs = column(grants, func(g *Grant) float64 { return g.Need })
	}
	args := append(make([]any, 0, 12), keys, places, shards, totals, needs, of.names, of.capacities, of.rates, of.periods)
	if of.windows {
		args = append(args, of.ticks)
	}
	if ahead {
		args = append(args, column(grants, func(g *Grant) float64 { return g.Prefetch }))
	}
	if now != nil {
		args = append(args, *now)
	}
	batch.Queue(t.many(of.windows, ahead).of(now), args...).Query(scanGrants(grants))
}

// column is what grants have one of each.
func column[T any](grants []*Grant, of func(*Grant) T) []T {
	values := make([]T, len(grants))
	for i, g := range grants {
		values[i] = of(g)
	}
	return values
}

// definitions are those of several grants, one after another: of most they are the same.
type definitions struct {
	last                              *bucket.Definition
	names                             []string
	capacities, rates, periods, ticks []float64
	windows                           bool // is there a fixed window? A token bucket's ticks are microseconds
}

// place is where a definition is, from 1.
func (s *definitions) place(d *bucket.Definition) int32 {
	if s.last == nil || *s.last != *d {
		s.last = d
		s.names = append(s.names, d.Name)
		s.capacities, s.rates = append(s.capacities, d.Capacity), append(s.rates, d.Rate)
		s.periods, s.ticks = append(s.periods, micros(d.Period)), append(s.ticks, tick(d))
		s.windows = s.windows || d.Kind == bucket.FixedWindow
	}
	return int32(len(s.names))
}

// tick is the granularity of a limit's clock, in microseconds.
func tick(d *bucket.Definition) float64 {
	switch d.Kind {
	case bucket.FixedWindow:
		return micros(d.Period)
	case bucket.SlidingWindow:
		return micros(d.SlotWidth())
	}
	return 1
}

// Rows are rows to read, lock, make or write.
type Rows struct {
	Rows   []decide.Row
	States []bucket.State // as read, or to write
	Found  []bool         // that were read
	At     time.Time      // of the reading
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
	readSQL = `SELECT l.value, l.ts, l.paused, l.slots, w.i, (SELECT coalesce($4::timestamptz, clock_timestamp()))
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused, r.slots FROM {table} AS r
	WHERE r.name = w.name AND r.key = w.key AND r.shard = w.shard
	LIMIT 1
) AS l ON true`

	readOneSQL = `SELECT value, ts, paused, slots FROM {table} WHERE name = $1::text AND key = $2::text AND shard = $3::int4`

	// lockSQL is readSQL with the rows locked, but for those that somebody else
	// has locked.
	lockSQL = `SELECT l.value, l.ts, l.paused, l.slots, w.i, (SELECT coalesce($4::timestamptz, clock_timestamp()))
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[])) WITH ORDINALITY AS w (name, key, shard, i)
LEFT JOIN LATERAL (
	SELECT r.value, r.ts, r.paused, r.slots FROM {table} AS r
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

func (r *Rows) scan(rows pgx.Rows) error {
	r.States, r.Found = make([]bucket.State, len(r.Rows)), make([]bool, len(r.Rows))
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
func (t *Table) QueueBounds(batch *pgx.Batch, lock time.Duration) {
	batch.Queue(boundsSQL, strconv.FormatInt(lock.Milliseconds(), 10), strconv.FormatInt(t.silence.Milliseconds(), 10))
}

// QueueAwait puts into a batch the wait for a row that somebody has locked.
func (t *Table) QueueAwait(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.await, row.Name, row.Key.Key, int32(row.Shard))
}

// queueFill puts into a batch the making of rows that are not there, with one
// definition for each.
func (t *Table) queueFill(batch *pgx.Batch, rows []decide.Row, definitions []bucket.Definition, now *time.Time) {
	n, r := len(rows), Rows{Rows: rows}
	names, keys, shards := r.columns()
	capacities, ticks, origins := make([]float64, n), make([]float64, n), make([]time.Time, n)
	for i := range definitions {
		d := &definitions[i]
		capacities[i], ticks[i], origins[i] = d.Capacity, tick(d), d.Fresh(rows[i].Key.Key, longAgo).TS
	}
	batch.Queue(t.fill, names, keys, shards, capacities, ticks, origins, now)
}

// queueWrite puts into a batch the writing of rows that are locked.
func (t *Table) queueWrite(batch *pgx.Batch, r *Rows) {
	names, keys, shards := r.columns()
	values, ts, paused := r.states()
	if !slices.ContainsFunc(r.States, func(s bucket.State) bool { return s.Slots != nil }) {
		batch.Queue(t.write, names, keys, shards, values, ts, paused)
		return
	}
	texts := make([]*string, len(r.States))
	for i := range r.States {
		texts[i] = slotsText(&r.States[i])
	}
	batch.Queue(t.writeSlots, names, keys, shards, values, ts, paused, texts)
}
