package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Take makes a change, if its row has enough tokens and, unless reserve, is not paused. The row
// stays locked when it has not, too. A sliding window's reservations do not use it.
func (t *Table) Take(ctx context.Context, q Querier, reserve bool, c *decide.Change, now *time.Time) (taken Taken, err error) {
	name, fields := "take"+bare, []any(nil)
	if _, ok := t.of(&c.Definition, name); !ok || reserve || c.Definition.Stands() {
		name, fields = "take", []any{&taken.At, &taken.Xid}
	}
	sql, args := t.forTake(name, reserve, c, now)
	err = taken.scan(q.QueryRow(ctx, sql, args...), &c.Definition, fields...)
	if fields == nil {
		taken.At = taken.After.TS // it is that, but after the clock went back
	}
	taken.charge(&c.Definition, now)
	return taken, err
}

// QueueTake puts a take into a batch.
func (t *Table) QueueTake(batch *pgx.Batch, reserve bool, c *decide.Change, now *time.Time, taken *Taken) {
	sql, args := t.forTake("take", reserve, c, now)
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error {
		err := taken.scan(row, &c.Definition, &taken.At, &taken.Xid)
		taken.charge(&c.Definition, now)
		return err
	})
}

// whatever is an instant by which every pause is over.
var whatever = pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}

// forTake is a statement that takes, with its arguments.
func (t *Table) forTake(name string, reserve bool, c *decide.Change, now *time.Time) (sql string, args []any) {
	v := values{row: c.Row, definition: &c.Definition, count: c.Count, floor: c.Floor, ts: c.Before.TS, now: now, over: whatever}
	if !c.At.IsZero() {
		v.now = &c.At
	}
	if !reserve {
		v.over = orNull(c.Over)
	}
	s, _ := t.of(&c.Definition, name)
	return s.with(v)
}

// QueueTouch puts into a batch the locking of a change's row, which is returned as it is. One
// that is missing is made, full. It leaves no predicate lock under SERIALIZABLE.
func (t *Table) QueueTouch(batch *pgx.Batch, c *decide.Change, now *time.Time, taken *Taken) {
	d := &c.Definition
	fresh := d.Fresh(c.Key.Key, longAgo)
	args := []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, tick(d), now, origin(d, c.Key.Key, c.Before.TS, now), numbers(&fresh)}
	batch.Queue(t.common["touch"], args...).QueryRow(func(row pgx.Row) error { return taken.scanGive(row, now) })
}

// QueueGive queues the giving of n tokens to a change's row: beside tokens that are out no more
// than leaves room for them, and otherwise no further than to most. It reports spent tokens,
// too. It always returns a row, as it is before it is settled, and locks it. A missing row is
// inserted, full. To give and report nothing, and to give to a sliding window, use
// [Table.QueueTouch]. It leaves no predicate lock under SERIALIZABLE.
func (t *Table) QueueGive(batch *pgx.Batch, c *decide.Change, n, most float64, spent Spent, now *time.Time, taken *Taken) {
	s, ok := t.of(&c.Definition, "give")
	if !ok || n == 0 && spent.Spent == 0 {
		t.QueueTouch(batch, c, now, taken)
		return
	}
	sql, args := s.with(values{row: c.Row, definition: &c.Definition, count: n, most: most, ts: c.Before.TS, now: now, spent: &spent})
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return taken.scanGive(row, now) })
}

// FindEach looks which rows are there, and reads them, by a statement for each.
func (t *Table) FindEach(ctx context.Context, q Querier, r *Rows) error {
	var batch pgx.Batch
	t.queueFind(&batch, r)
	return q.SendBatch(ctx, &batch).Close()
}

// queueFind puts into a batch the reading of rows.
func (t *Table) queueFind(batch *pgx.Batch, r *Rows) {
	r.States, r.Found = make([]bucket.State, len(r.Rows)), make([]bool, len(r.Rows))
	for i, row := range r.Rows {
		batch.Queue(t.common["find"], row.Name, row.Key.Key, int32(row.Shard)).Query(func(rows pgx.Rows) error {
			var s state
			_, err := pgx.ForEachRow(rows, s.fields(), func() error {
				r.States[i], r.Found[i] = s.get()
				return nil
			})
			return err
		})
	}
}

// QueueRemove puts into a batch the deletion of a row, which then is full.
func (t *Table) QueueRemove(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.common["remove"], row.Name, row.Key.Key, int32(row.Shard))
}

// QueuePut queues the writing of a row, replacing any stored one.
func (t *Table) QueuePut(batch *pgx.Batch, row decide.Row, s bucket.State) {
	batch.Queue(t.common["put"], row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, orNull(s.Paused), numbers(&s))
}

// QueueRenew puts into a batch the writing of a sliding window's row as its definition writes it,
// unless it has changed since it was seen. It means the same afterwards.
func (t *Table) QueueRenew(batch *pgx.Batch, row decide.Row, seen, as bucket.State) {
	var newest *float64
	if seen.Slots != nil {
		newest = &seen.Slots.Totals[len(seen.Slots.Totals)-1]
	}
	batch.Queue(t.common["renew"], row.Name, row.Key.Key, int32(row.Shard), as.Value, as.TS, numbers(&as), seen.TS, seen.Value, newest)
}

// Reset deletes the rows of a key, which then is full, but for those from which somebody may
// have prefetched, if long ago. Their shards are left; they are locked, and as they were.
func (t *Table) Reset(ctx context.Context, q Querier, key decide.Key) (left []int32, err error) {
	var batch pgx.Batch
	batch.Queue(t.common["reset"], key.Name, key.Key)
	batch.Queue(t.common["reset_left"], key.Name, key.Key).Query(func(rows pgx.Rows) error {
		left, err = pgx.CollectRows(rows, pgx.RowTo[int32])
		return err
	})
	return left, q.SendBatch(ctx, &batch).Close()
}

// Look reads the states of a call's limits, queued after the statements that are in batch
// already, or of those for which at is true; the others' states are nil.
func (t *Table) Look(ctx context.Context, q Querier, batch *pgx.Batch, call *decide.Call, at func(a *decide.Ask) bool, now *time.Time) (decide.View, error) {
	view := decide.View{States: make([][]bucket.State, len(call.Asks))}
	rows := make([]shardRows, len(call.Asks))
	for i := range call.Asks {
		if a := &call.Asks[i]; at(a) {
			r := &rows[i]
			batch.Queue(t.common["states"], a.Definition.Name, a.Key).QueryRow(func(row pgx.Row) error {
				return row.Scan(&r.shards, &r.values, &r.ts, &r.paused, &r.slots, &view.At)
			})
		}
	}
	if err := q.SendBatch(ctx, batch).Close(); err != nil {
		return decide.View{}, err
	}
	view.At = told(now, view.At).UTC()
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
			states[shard].Slots = readSlots(r.slots[i], r.values[i])
		}
	}
	return states
}
