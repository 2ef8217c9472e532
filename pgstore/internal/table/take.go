package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Take makes a change if its row has enough tokens and, unless reserve, is not paused. Even if not,
// the row stays locked. A sliding window's reservations do not use it.
func (t *Table) Take(ctx context.Context, q Querier, reserve bool, c *decide.Change, now *time.Time) (taken Taken, err error) {
	k := t.of(&c.Definition)
	s, read := k.taking(reserve, c)
	if !reserve && k.takeBare.sql != "" {
		s, read = &k.takeBare, bare
	}
	err = taken.scan(q.QueryRow(ctx, s.sql, s.args(taking{c, reserve}, now)...), &c.Definition, read, now)
	return taken, err
}

// QueueTake puts a take into a batch.
func (t *Table) QueueTake(batch *pgx.Batch, reserve bool, c *decide.Change, now *time.Time, taken *Taken) {
	s, read := t.of(&c.Definition).taking(reserve, c)
	batch.Queue(s.sql, s.args(taking{c, reserve}, now)...).QueryRow(func(row pgx.Row) error {
		return taken.scan(row, &c.Definition, read, now)
	})
}

// taking returns the statement for a take, and the columns that it returns. It is the lean one if
// the kind has one, unless the take reserves or the lean one has turned it away.
func (k *kind) taking(reserve bool, c *decide.Change) (*statement[taking], columns) {
	if reserve || k.takeLean.sql == "" || !c.Past.IsZero() {
		return &k.take, all
	}
	return &k.takeLean, lean
}

// QueueTouch puts into a batch the locking of a change's row, which it returns unchanged. It makes
// a missing row, full. It leaves no predicate lock under SERIALIZABLE.
func (t *Table) QueueTouch(batch *pgx.Batch, c *decide.Change, now *time.Time, taken *Taken) {
	d := &c.Definition
	fresh := d.Fresh(c.Key.Key, longAgo)
	args := []any{c.Name, c.Key.Key, int32(c.Shard), d.Capacity, tick(d), now, origin(d, c.Key.Key, c.Before.TS, now), numbers(&fresh)}
	batch.Queue(t.common["touch"], args...).QueryRow(func(row pgx.Row) error { return taken.scanGive(row, now) })
}

// Give gives tokens to rows and reports spent ones, after the statements in batch. It locks each
// row. A missing row is Made, full. A give of nothing, or to a row with slots, only locks and reads
// it. It leaves no predicate lock under SERIALIZABLE. On a distributed table statements do not
// return which rows they made, so Give reads the rows first.
func (t *Table) Give(ctx context.Context, q Querier, batch *pgx.Batch, gives []Give, now *time.Time) (at time.Time, err error) {
	var rows Rows
	if t.distributed {
		for i := range gives {
			rows.Rows = append(rows.Rows, gives[i].Row)
		}
		t.QueueRead(batch, &rows, now)
		if err := q.SendBatch(ctx, batch).Close(); err != nil {
			return at, err
		}
		batch = &pgx.Batch{}
	}
	for i := range gives {
		t.queueGive(batch, &gives[i], now)
	}
	QueueNow(batch, now, &at)
	err = q.SendBatch(ctx, batch).Close()
	for i := range rows.Rows { // another definition may have made a row after the read
		g := &gives[i]
		g.Taken.Made = !rows.Found[i] && g.Definition.Plain(g.Taken.After, at) && g.Definition.Missing(g.Taken.After) == 0
	}
	return at, err
}

// queueGive puts into a batch the giving of tokens to a row.
func (t *Table) queueGive(batch *pgx.Batch, g *Give, now *time.Time) {
	s := &t.of(&g.Definition).give
	if g.Given = s.sql != ""; !g.Given || g.Tokens == 0 && g.Spent.Spent == 0 {
		t.QueueTouch(batch, g.Change, now, &g.Taken)
		return
	}
	batch.Queue(s.sql, s.args(g, now)...).QueryRow(func(row pgx.Row) error { return g.Taken.scanGive(row, now) })
}

// QueueRemove puts into a batch the deletion of a row, so it counts as full.
func (t *Table) QueueRemove(batch *pgx.Batch, row decide.Row) {
	batch.Queue(t.common["remove"], row.Name, row.Key.Key, int32(row.Shard))
}

// QueuePut queues the writing of a row, replacing any stored one.
func (t *Table) QueuePut(batch *pgx.Batch, row decide.Row, s bucket.State) {
	batch.Queue(t.common["put"], row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, orNull(s.Paused), numbers(&s))
}

// QueueRenew puts into a batch the rewriting of a sliding window's row as its definition writes it,
// unless it has changed since it was seen. Its meaning stays the same. The value alone does not
// show whether a slot ahead was given more, but the newest total does. Both are compared with a
// tolerance, since a connection may write numbers as text with 15 digits; no count that can be
// taken is smaller than that.
func (t *Table) QueueRenew(batch *pgx.Batch, row decide.Row, seen, as bucket.State) {
	var newest *float64
	if seen.Slots != nil {
		newest = &seen.Slots.Totals[len(seen.Slots.Totals)-1]
	}
	batch.Queue(t.common["renew"], row.Name, row.Key.Key, int32(row.Shard), as.Value, as.TS, numbers(&as), seen.TS, seen.Value, newest)
}

// Reset deletes the rows of a key, so it is full, except rows from which tokens were ever
// prefetched. It returns the shards of these rows, which are locked and unchanged.
func (t *Table) Reset(ctx context.Context, q Querier, key decide.Key) (left []int32, err error) {
	var batch pgx.Batch
	batch.Queue(t.common["reset"], key.Name, key.Key)
	batch.Queue(t.common["reset_left"], key.Name, key.Key).Query(func(rows pgx.Rows) error {
		left, err = pgx.CollectRows(rows, pgx.RowTo[int32])
		return err
	})
	return left, q.SendBatch(ctx, &batch).Close()
}
