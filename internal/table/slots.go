package table

import (
	"context"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/exact"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// The statements of a sliding window. A row's slots are an array: the length of a slot,
// how many slots the newest is after that of ts, the value, and then the running
// totals T (package slots), so that what is decided and written are subscripts of it. In
// the order of the Go (Definition.slide, takeSlot; Slots.First, Add):
//
//	passed  how many slots the one of now is after the newest; below 0 if that is ahead
//	over    the newest total + n − rate − tolerance: n fits where T is more than that
//	later   how many slots after the newest the one is that is given
//	after   T from later on, filled up with the newest total, which n is added to
//
// Parameters: $1 to $8 are those of the other kinds, and then
//
//	$9 totals         how many, two more than slots
//	$10 over          an instant that is known to be over; NULL for none
//	$11 floor         the lowest value to leave behind
//
// and to reserve
//
//	$12 period        microseconds
//	$13 from          where the first slot begins that may be given, because of a pause; NULL for any
const (
	takeSlotsSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, {rate} - {n}, {tick}, ` + freshSlots + ` || {n})
ON CONFLICT (name, key, shard) DO UPDATE
SET value = {value}, ts = greatest(l.ts, excluded.ts), slots = {after}
WHERE ` + plainSlots + `
	AND date_bin({width} * interval '1 microsecond', l.ts, $8::timestamptz) = l.ts
	AND (l.paused IS NULL OR l.paused <= greatest(excluded.ts, $10::timestamptz{from}))
	AND {enough}
RETURNING value, ts, paused, slots`

	// freshSlots is the array of a row that holds nothing, without the newest total.
	freshSlots = `array[{width}, 0, {rate} - {n}] || array_fill(0::float8, array[{totals} - 1])`

	// plainSlots asks whether the row is as this definition writes it: Definition.Plain. One
	// that is not is turned away, read, and written anew before it is asked again. If the
	// value is another than in the array, a limit of another kind has written the row.
	plainSlots = `{row}.slots[1] = {width} AND cardinality({row}.slots) = {totals} + 3 AND {row}.slots[3] = {row}.value
	AND {row}.slots[4] <= 8 * {rate}`

	// In the conflict's clauses excluded.ts is where the slot of now begins, and
	// excluded.ts − l.ts so many whole slots.
	passedSQL = `(greatest(round(date_part('epoch', {now} - {row}.ts) * 1000000), 0) / {width} - {row}.slots[2])`
	newestSQL = `{row}.slots[{totals} + 3]`
	overSQL   = `(` + newestSQL + ` + {n} - {rate} - greatest(` + newestSQL + `, {n}, {rate}) * ` + exact.SQL + `)`

	// To allow, the slot of now is given: later is passed.
	atOnceSQL    = passedSQL + ` >= 0 AND {row}.slots[4 + {later}] > ` + overSQL + ` + {floor}`
	atOnceLater  = `least(greatest(` + passedSQL + `, 0), {totals} - 1)::int4`
	atOnceValue  = `{rate} - (` + newestSQL + ` + {n} - {row}.slots[4 + {later}])`
	atOnceHeader = `array[{width}, 0, {value}]`

	// To reserve, it is the first slot in which n fits.
	firstSQL = `greatest(` + passedSQL + `, width_bucket(` + overSQL + `, {row}.slots[4:{totals} + 3]),
		round(date_part('epoch', $13::timestamptz - {row}.ts) * 1000000) / {width} - {row}.slots[2])`
	aheadSQL = `(` + firstSQL + ` - ` + passedSQL + `)`
	soonSQL  = `(` + firstSQL + ` <= ` + passedSQL + ` OR (round(date_part('epoch', {row}.ts - greatest({now}, $10::timestamptz)) * 1000000)
		+ (` + firstSQL + ` + {row}.slots[2]) * {width}) * {rate} / $12::float8 <= -{floor})`
	laterSQL  = `least(` + firstSQL + `, {totals} - 1)::int4`
	soonValue = `CASE WHEN ` + aheadSQL + ` > 0 THEN -(` + aheadSQL + ` * {width} * {rate} / $12::float8)
		ELSE ` + atOnceValue + ` END`
	soonHeader = `array[{width}, ` + aheadSQL + `, {value}]`

	// To take at most so many, it is the whole tokens that the slots do not hold.
	someSQL    = `least($4::float8, floor({rate} - (` + newestSQL + ` - {row}.slots[4 + {later}]) + greatest({rate} - (` + newestSQL + ` - {row}.slots[4 + {later}]), 1, {rate}) * ` + exact.SQL + ` / 2))`
	someEnough = passedSQL + ` >= 0 AND ` + someSQL + ` >= 1 + {floor}`

	afterSQL = `{header} || ({row}.slots || array_fill(` + newestSQL + `, array[{totals}]))[4 + {later} : {totals} + 2 + {later}] || (` + newestSQL + ` + {n})`
)

// takeParameters name the parameters of a take, in its conflict's clauses.
var takeParameters = strings.NewReplacer(
	"{row}", "l", "{now}", "excluded.ts",
	"{n}", "$4::float8", "{rate}", "$5::float8", "{width}", "$7::float8", "{totals}", "$9::int4", "{floor}", "$11::float8",
)

// takeSlots are the takes of a sliding window: to allow, to reserve, and to take at most
// so many.
func takeSlots() (allow, reserve, atMost string) {
	at := func(from, enough string) string {
		return strings.NewReplacer("{from}", from, "{enough}", enough).Replace(takeSlotsSQL)
	}
	allow = nest(at("", atOnceSQL), "{after}", afterSQL, "{header}", atOnceHeader, "{value}", atOnceValue, "{later}", atOnceLater)
	reserve = nest(at(", $13::timestamptz", soonSQL), "{after}", afterSQL, "{header}", soonHeader, "{value}", soonValue, "{later}", laterSQL)
	insert, conflict, _ := strings.Cut(at("", someEnough), "ON CONFLICT")
	conflict = nest(conflict, "{after}", afterSQL, "{header}", atOnceHeader, "{value}", atOnceValue, "{n}", someSQL, "{later}", atOnceLater)
	return takeParameters.Replace(allow), takeParameters.Replace(reserve), takeParameters.Replace(insert + "ON CONFLICT" + conflict)
}

// nest replaces names by expressions that have later ones in them.
func nest(sql string, pairs ...string) string {
	for i := 0; i < len(pairs); i += 2 {
		sql = strings.ReplaceAll(sql, pairs[i], pairs[i+1])
	}
	return sql
}

// listEmpty is the listing of empty rows.
func listEmpty() string {
	return strings.NewReplacer("{row}", "l", "{now}", "date_bin($5::float8 * interval '1 microsecond', $6::timestamptz, l.ts)", "{width}", "$5::float8", "{totals}", "$4::int4").
		Replace(nest(listEmptySQL, "{later}", atOnceLater))
}

// slotArguments are the arguments of a take after the first eight.
func slotArguments(reserve bool, c *decide.Change) []any {
	d := &c.Definition
	args := []any{int32(d.Slots + 2), instant(c.Over), c.Floor}
	if reserve {
		args = append(args, micros(d.Period), instant(c.From))
	}
	return args
}

// giveSlotsSQL makes a row that is not there, and locks and returns it. What is to be
// given is taken out of slots, which the caller does.
const giveSlotsSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts, slots)
VALUES ($1::text, $2::text, $3::int4, $5::float8, {tick}, array[$7::float8, 0, $5::float8] || array_fill(0::float8, array[$9::int4]))
ON CONFLICT (name, key, shard) DO UPDATE SET value = l.value + $4::float8 * 0
RETURNING value, ts, paused, slots`

const (
	// grantSlotsSQL is grantSQL for a sliding window.
	grantSlotsSQL = `UPDATE {table} AS r` + grantSlotsSet + `
WHERE ` + grantSlotsWhere + `
RETURNING r.value, r.ts, ` + grantSlotsAt + `, r.slots`

	// grantAtMostSlotsSQL is grantAtMostSQL for a sliding window.
	grantAtMostSlotsSQL = `UPDATE {table} AS r
SET value = w.value, ts = greatest(r.ts, w.ticked), slots = w.slots
FROM (
	SELECT r.ctid, {now} AS ticked, {value} AS value, {after} AS slots, {n} AS taken
	FROM {table} AS r
	WHERE ` + grantSlotsWhere + `
	FOR UPDATE SKIP LOCKED
) AS w
WHERE r.ctid = w.ctid
RETURNING r.value, r.ts, ` + grantSlotsAt + `, r.slots, w.taken`

	// grantManySlotsSQL is grantManySQL for sliding windows: $1 to $7 are arrays.
	grantManySlotsSQL = `UPDATE {table} AS r` + grantSlotsSet + `
FROM (
	SELECT u.*, coalesce($8::timestamptz, statement_timestamp()) AS now
	FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]), (SELECT $4::float8[]), (SELECT $5::float8[]),
		(SELECT $6::float8[]), (SELECT $7::int4[]))
		WITH ORDINALITY AS u (name, key, shard, total, rate, width, size, i)
	WHERE u.i BETWEEN 1 AND 1000000000
	OFFSET 0
) AS u
WHERE ` + grantSlotsWhere + `
RETURNING r.value, r.ts, ` + grantSlotsAt + `, r.slots, u.i`

	grantSlotsSet = `
SET value = {value}, ts = greatest(r.ts, {now}), slots = {after}`
	grantSlotsWhere = `{free}r.name = u.name AND r.key = u.key AND r.shard = u.shard
	AND (r.paused IS NULL OR r.paused <= u.now)
	AND ` + plainSlots + `
	AND ` + passedSQL + ` >= 0 AND {row}.slots[4 + {later}] >= ` + newestSQL + ` + {need} - {rate}`
	grantSlotsAt = `least(r.ts + (u.width - 1) * interval '1 microsecond', {clock})`
)

// fillGrantSlots names what a grant of a sliding window has to do with, which takes n
// tokens if there are as many as it needs.
func fillGrantSlots(sql, n, need string) string {
	sql = nest(sql, "{after}", afterSQL, "{header}", atOnceHeader, "{value}", atOnceValue, "{n}", n, "{need}", need, "{later}", atOnceLater)
	return strings.NewReplacer("{row}", "r", "{rate}", "u.rate", "{width}", "u.width", "{totals}", "u.size",
		"{now}", "date_bin(u.width * interval '1 microsecond', u.now, r.ts)").Replace(sql)
}

// wholeSlots is what a grant takes that takes what there is.
const wholeSlots = `least(u.total, floor({rate} - (` + newestSQL + ` - {row}.slots[4 + {later}])))`

// newGrantSlots makes a statement for one row; told is the last parameter, after more.
func newGrantSlots(sql, n, need, told string, more ...string) func(free string) clocks {
	parameters := []string{
		"u.name", "$1::text", "u.key", "$2::text", "u.shard", "$3::int4", "u.total", "$4::float8",
		"u.rate", "$5::float8", "u.width", "$6::float8", "u.size", "$7::int4",
	}
	return newClocks(fillGrantSlots(sql, n, need), told, append(parameters, more...)...)
}

// newGrantManySlots makes a statement for several rows, which takes n tokens from each.
func newGrantManySlots(sql, n string) string {
	return strings.NewReplacer("{clock}", "coalesce($8::timestamptz, clock_timestamp())", "{free}", freeSQL("(SELECT "+passOverSQL+")")).
		Replace(fillGrantSlots(sql, n, "u.total"))
}

// queueSliding puts into a batch grants of sliding windows.
func (t *Table) queueSliding(batch *pgx.Batch, grants []*Grant, now *time.Time) {
	n := len(grants)
	names, keys, shards := make([]string, n), make([]string, n), make([]int32, n)
	counts, rates, widths, totals := make([]float64, n), make([]float64, n), make([]float64, n), make([]int32, n)
	aheads, ahead := make([]float64, n), false
	for i, g := range grants {
		d := &g.Definition
		names[i], keys[i], shards[i] = g.Name, g.Key.Key, int32(g.Shard)
		counts[i], rates[i], widths[i], totals[i] = g.Count, d.Rate, tick(d), int32(d.Slots+2)
		aheads[i], ahead = g.Prefetch, ahead || g.Prefetch > 0
	}
	sql, args := t.grantSlotted, []any{names, keys, shards, counts, rates, widths, totals, now}
	if ahead {
		sql, args = t.slottedAhead, append(args, aheads)
	}
	batch.Queue(sql, args...).Query(scanGrants(grants))
}

const (
	// statesSlotsSQL is statesSQL for a sliding window. PostgreSQL does not aggregate
	// arrays that may be missing, so they are texts.
	statesSlotsSQL = `SELECT array_agg(shard), array_agg(value), array_agg(ts), array_agg(paused),
	coalesce($3::timestamptz, clock_timestamp()), array_agg(slots::text)
FROM {table} WHERE name = $1::text AND key = $2::text`

	// listEmptySQL is listFullSQL for a sliding window: rows whose slots hold nothing any
	// more, and those that another definition has written.
	//
	//	$1 name   $2 key and $3 shard after which to go on
	//	$4 totals   $5 width   $6 now   $7 rows at most
	listEmptySQL = `SELECT value, ts, paused, slots, key, shard FROM {table} AS l
WHERE name = $1::text AND (key, shard) > ($2::text, $3::int4) AND ts <= $6::timestamptz
	AND (slots IS NULL OR slots[1] <> $5::float8 OR cardinality(slots) <> $4::int4 + 3 OR slots[4 + {later}] = slots[$4::int4 + 3])
ORDER BY key, shard
LIMIT $7::int8`

	// putSlotsSQL is putSQL for a sliding window.
	putSlotsSQL = `INSERT INTO {table} (name, key, shard, value, ts, paused, slots)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz, $6::timestamptz, $7::float8[])
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, paused = excluded.paused, slots = excluded.slots`

	// writeSlotsSQL is writeSQL for rows of which some are those of sliding windows.
	writeSlotsSQL = `UPDATE {table} AS l
SET value = w.value, ts = w.ts, paused = w.paused, slots = coalesce(w.slots::float8[], l.slots)
FROM unnest((SELECT $1::text[]), (SELECT $2::text[]), (SELECT $3::int4[]),
	(SELECT $4::float8[]), (SELECT $5::timestamptz[]), (SELECT $6::timestamptz[]), (SELECT $7::text[]))
	WITH ORDINALITY AS w (name, key, shard, value, ts, paused, slots, i)
WHERE l.name = w.name AND l.key = w.key AND l.shard = w.shard AND w.i BETWEEN 1 AND 1000000000`

	// renewSQL writes a row anew that has not changed since it was read. The value does
	// not tell whether a slot that is ahead has been given more, but the newest total
	// does. A connection may write numbers as text with 15 digits; no count that can be
	// taken is as small as that.
	renewSQL = `UPDATE {table} SET value = $4::float8, ts = $5::timestamptz, slots = $6::float8[]
WHERE name = $1::text AND key = $2::text AND shard = $3::int4 AND ts = $7::timestamptz AND abs(value - $8::float8) <= abs(value) * 1e-14
	AND ($9::float8 IS NULL OR abs(slots[cardinality(slots)] - $9::float8) <= $9::float8 * 1e-15)`
)

// Renew writes a sliding window's row, which means the same afterwards, as its
// definition does, unless it has changed since it was seen.
func (t *Table) Renew(ctx context.Context, q Querier, row decide.Row, seen, as bucket.State) error {
	_, err := q.Exec(ctx, t.renew, renewArguments(row, seen, as)...)
	return err
}

// QueueRenew puts a Renew into a batch.
func (t *Table) QueueRenew(batch *pgx.Batch, row decide.Row, seen, as bucket.State) {
	batch.Queue(t.renew, renewArguments(row, seen, as)...)
}

func renewArguments(row decide.Row, seen, as bucket.State) []any {
	var newest *float64
	if seen.Slots != nil {
		newest = &seen.Slots.Totals[len(seen.Slots.Totals)-1]
	}
	return []any{row.Name, row.Key.Key, int32(row.Shard), as.Value, as.TS, as.Slots.Numbers(as.Value), seen.TS, seen.Value, newest}
}

// slotsText is the array of a state's slots as PostgreSQL reads it, nil without any.
func slotsText(s *bucket.State) *string {
	if s.Slots == nil {
		return nil
	}
	text := []byte{'{'}
	for i, v := range s.Slots.Numbers(s.Value) {
		if i > 0 {
			text = append(text, ',')
		}
		text = strconv.AppendFloat(text, v, 'g', -1, 64)
	}
	written := string(append(text, '}'))
	return &written
}

// readSlots is the slots in an array as PostgreSQL writes it, nil if there are none.
func readSlots(text *string, value float64) *slots.Slots {
	if text == nil {
		return nil
	}
	fields := strings.Split(strings.Trim(*text, "{}"), ",")
	numbers := make([]float64, len(fields))
	for i, f := range fields {
		v, err := strconv.ParseFloat(f, 64)
		if err != nil || math.IsNaN(v) {
			return nil
		}
		numbers[i] = v
	}
	return slots.Read(numbers, value)
}
