package table

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/exact"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// The parameters of a take and of a give:
//
//	$1 name   $2 key   $3 shard
//	$4 count          tokens
//	$5 capacity       tokens
//	$6 now            the instant that decides; NULL for the database's clock
//
// of a fixed window
//
//	$7 tick           microseconds
//	$8 origin         an instant from which ticks are counted
//
// and then, so that their numbers differ between the kinds, of a take
//
//	{rate}            tokens per period
//	{period}          microseconds
//	{floor}           the lowest value to leave behind
//	{over}            to allow: the end of a pause that is known to be over; NULL for none
//
// and of a give
//
//	{most}            tokens, above which nothing is given
const (
	// settled is the row's value at excluded.ts: Definition.Settle, in the
	// same order of operations.
	//
	//	min(value + max(0, now − ts) · rate / period, capacity)
	//
	// date_part is several times faster than extract, which is numeric, and
	// with round as exact for the 71 years in which microseconds are below 2^51.
	settled = `least(l.value
		+ greatest(round(date_part('epoch', excluded.ts - l.ts) * 1000000), 0) * {rate} / {period},
		$5::float8)`

	// For a fixed window excluded.ts is the edge before now. A pause that has ended
	// since then must be known to be over; until it is, the row is turned away.
	notPausedSQL = `
	AND (l.paused IS NULL OR l.paused <= greatest(excluded.ts, {over}))`

	// takeSQL is Definition.Take. It returns a row if and only if it took. It
	// leaves no predicate lock under SERIALIZABLE, since it never reads but
	// through the row that it conflicts with, unless it is in a subtransaction.
	//
	// The clock is read before the wait for the row's lock, so another
	// transaction may have left a later ts behind; greatest and the 0 in
	// settled then count no time, rather than the same time twice.
	takeSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $5::float8 - $4::float8, {tick})
ON CONFLICT (name, key, shard) DO UPDATE
SET value = ` + settled + ` - $4::float8, ts = greatest(l.ts, excluded.ts)
WHERE ` + settled + ` - $4::float8
		>= {floor} - greatest(abs(l.value), $4::float8, $5::float8) * ` + exact.SQL + `{ticks agree}{allowed}
RETURNING value, ts, paused`

	// atMostSQL takes as many whole tokens as there are, up to the count. What it
	// leaves does not tell how many; what was in the row does.
	atMostSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $5::float8 - $4::float8, {tick})
ON CONFLICT (name, key, shard) DO UPDATE
SET value = ` + settled + ` - least($4::float8, floor(` + settled + ` + greatest(abs(l.value), 1, $5::float8) * ` + exact.SQL + `)),
	ts = greatest(l.ts, excluded.ts)
WHERE ` + settled + ` - 1 >= {floor} - greatest(abs(l.value), 1, $5::float8) * ` + exact.SQL + `{ticks agree}{allowed}
RETURNING value, ts, paused`
)

// Taken is what became of a take.
type Taken struct {
	OK    bool // false when there was too little, and nothing was taken
	After bucket.State
	At    time.Time
	Xid   string // of the transaction or savepoint that took, if it was asked for
	Made  bool   // there was no row, which a give has made; on a distributed table it is not told

	Ahead float64   // tokens that are out, in the memories of processes; told by gives
	Until time.Time // the latest end of them; zero when nothing is out; told by gives, and by grants that prefetch
}

// Take takes what a change says, if its row has enough and, unless it is to
// reserve, is not paused. The row stays locked when it has not, too.
func (t *Table) Take(ctx context.Context, q Querier, reserve bool, c *decide.Change, now *time.Time) (Taken, error) {
	return t.takes(reserve, c).take(ctx, q, &c.Definition, takeArguments(reserve, c, now), now)
}

func (f *forms) take(ctx context.Context, q Querier, d *bucket.Definition, args []any, now *time.Time) (taken Taken, err error) {
	if f.bare == "" {
		err = taken.scan(q.QueryRow(ctx, f.full, args...), d, &taken.At, &taken.Xid)
		return taken, err
	}
	err = taken.scan(q.QueryRow(ctx, f.bare, args...), d)
	taken.At = taken.After.TS // it is that, but after the clock went back
	if now != nil {
		taken.At = *now
	}
	return taken, err
}

// QueueTake puts a take into a batch.
func (t *Table) QueueTake(batch *pgx.Batch, reserve bool, c *decide.Change, now *time.Time, taken *Taken) {
	batch.Queue(t.takes(reserve, c).full, takeArguments(reserve, c, now)...).QueryRow(func(row pgx.Row) error {
		return taken.scan(row, &c.Definition, &taken.At, &taken.Xid)
	})
}

func (t *Table) takes(reserve bool, c *decide.Change) *forms {
	if reserve {
		return &t.of(&c.Definition).reserve
	}
	return &t.of(&c.Definition).allow
}

func takeArguments(reserve bool, c *decide.Change, now *time.Time) []any {
	if !c.At.IsZero() {
		now = &c.At
	}
	if c.Definition.Kind == bucket.SlidingWindow {
		return append(arguments(c, c.Count, now), slotArguments(reserve, c)...)
	}
	args := append(arguments(c, c.Count, now), c.Definition.Rate, micros(c.Definition.Period), c.Floor)
	if reserve {
		return args
	}
	return append(args, instant(c.Over))
}

// scan reads a row of such a definition that a take returned, if it did.
func (t *Taken) scan(row pgx.Row, d *bucket.Definition, more ...any) error {
	var (
		paused  *time.Time
		numbers []float64
	)
	fields := []any{&t.After.Value, &t.After.TS, &paused}
	if d.Kind == bucket.SlidingWindow {
		fields = append(fields, &numbers)
	}
	err := row.Scan(append(fields, more...)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err == nil {
		t.take(paused)
		t.After.Slots = slots.Read(numbers, t.After.Value)
	}
	return err
}

func (t *Taken) take(paused *time.Time) {
	t.OK = true
	if paused != nil {
		t.After.Paused = *paused
	}
}

// giveSQL gives back. It needs no clock, since giving what comes in before or after
// what is given makes no difference once the row is settled.
const giveSQL = `INSERT INTO {table} AS l (name, key, shard, value, ts)
VALUES ($1::text, $2::text, $3::int4, $5::float8, {tick})
ON CONFLICT (name, key, shard) DO UPDATE SET value = least(l.value + $4::float8, greatest(l.value, {most}))
RETURNING value, ts, paused`

// QueueGive puts into a batch the giving of n tokens to a change's row, which fills
// it no further than to most. Whatever is there, a row is returned, as it is before
// it is settled, and is locked. One that is missing is made, full; giving nothing so
// is a way to lock it, and all that is done to a sliding window. It leaves no predicate
// lock under SERIALIZABLE.
func (t *Table) QueueGive(batch *pgx.Batch, c *decide.Change, n, most float64, now *time.Time, taken *Taken) {
	args := append(arguments(c, n, now), most)
	if c.Definition.Kind == bucket.SlidingWindow {
		args[len(args)-1] = int32(c.Definition.Slots + 2)
	}
	batch.Queue(t.of(&c.Definition).give, args...).QueryRow(func(row pgx.Row) error {
		return taken.scan(row, &c.Definition, &taken.At, &taken.Made)
	})
}

const thereSQL = `SELECT 1 FROM {table} WHERE name = $1::text AND key = $2::text AND shard = $3::int4`

// FindEach looks which rows are there.
func (t *Table) FindEach(ctx context.Context, q Querier, r *Rows) error {
	r.Found = make([]bool, len(r.Rows))
	var batch pgx.Batch
	for i, row := range r.Rows {
		batch.Queue(t.there, row.Name, row.Key.Key, int32(row.Shard)).Query(func(rows pgx.Rows) error {
			r.Found[i] = rows.Next()
			rows.Close()
			return rows.Err()
		})
	}
	return q.SendBatch(ctx, &batch).Close()
}

const removeSQL = `DELETE FROM {table} WHERE name = $1::text AND key = $2::text AND shard = $3::int4`

// QueueRemove puts into a batch the deletion of a row, which then is full.
func (t *Table) QueueRemove(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.remove, row.Name, row.Key.Key, int32(row.Shard))
}

// putSQL writes a row whatever is there.
const putSQL = `INSERT INTO {table} (name, key, shard, value, ts, paused)
VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz, $6::timestamptz)
ON CONFLICT (name, key, shard) DO UPDATE SET value = excluded.value, ts = excluded.ts, paused = excluded.paused`

// QueuePut puts into a batch the writing of a row whatever is there.
func (t *Table) QueuePut(batch *pgx.Batch, row decide.Row, s bucket.State) {
	if s.Slots != nil {
		batch.Queue(t.putSlots, row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, instant(s.Paused), s.Slots.Numbers(s.Value))
		return
	}
	batch.Queue(t.put, row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, instant(s.Paused))
}

const resetSQL = `DELETE FROM {table} WHERE name = $1::text AND key = $2::text`

// Reset deletes the rows of a key, which then is full, but for those from which something
// may be out. Their shards are left: they are locked, and as they were.
func (t *Table) Reset(ctx context.Context, q Querier, key decide.Key) (left []int32, err error) {
	_, err = q.Exec(ctx, t.reset, key.Name, key.Key)
	return nil, err
}

// statesSQL reads all rows of a limit and key; the aggregates make it one row
// always.
const statesSQL = `SELECT array_agg(shard), array_agg(value), array_agg(ts), array_agg(paused),
	coalesce($3::timestamptz, clock_timestamp())
FROM {table} WHERE name = $1::text AND key = $2::text`

// Look reads the states of a call's limits, which are in a batch after what it has
// already, or of those of them that it is to look at; the others' states are nil.
func (t *Table) Look(ctx context.Context, q Querier, batch *pgx.Batch, call *decide.Call, at func(a *decide.Ask) bool, now *time.Time) (decide.View, error) {
	view := decide.View{States: make([][]bucket.State, len(call.Asks))}
	rows := make([]shardRows, len(call.Asks))
	for i := range call.Asks {
		if a := &call.Asks[i]; at(a) {
			batch.Queue(t.of(&a.Definition).states, a.Definition.Name, a.Key, now).QueryRow(func(row pgx.Row) error {
				return rows[i].scan(row, &a.Definition, &view.At)
			})
		}
	}
	if err := q.SendBatch(ctx, batch).Close(); err != nil {
		return decide.View{}, err
	}
	view.At = view.At.UTC()
	for i := range call.Asks {
		if a := &call.Asks[i]; at(a) {
			view.States[i] = rows[i].states(a, view.At)
		}
	}
	return view, nil
}

// shardRows are the rows of one limit and key.
type shardRows struct {
	shards []int32
	values []float64
	ts     []time.Time
	paused []*time.Time
	slots  []*string
}

func (r *shardRows) scan(row pgx.Row, d *bucket.Definition, at *time.Time) error {
	fields := []any{&r.shards, &r.values, &r.ts, &r.paused, at}
	if d.Kind == bucket.SlidingWindow {
		fields = append(fields, &r.slots)
	}
	return row.Scan(fields...)
}

// states is the states of all of an ask's shards.
func (r *shardRows) states(a *decide.Ask, now time.Time) []bucket.State {
	states := make([]bucket.State, a.Definition.Shards)
	each := a.Definition.Shard()
	fresh := each.Fresh(a.Key, now)
	for shard := range states {
		states[shard] = fresh
	}
	for i, shard := range r.shards {
		if int(shard) < len(states) {
			s := state{value: &r.values[i], ts: &r.ts[i], paused: r.paused[i]}
			states[shard], _ = s.get()
			if r.slots != nil {
				states[shard].Slots = readSlots(r.slots[i], r.values[i])
			}
		}
	}
	return states
}
