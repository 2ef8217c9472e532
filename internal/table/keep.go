package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// ListFull reads rows of a definition's name, after a row, that are full by it at
// an instant; most of them at most.
func (t *Table) ListFull(ctx context.Context, q Querier, d *bucket.Definition, after decide.Row, now time.Time, most int) (*Rows, error) {
	after.Name = d.Name
	list, _ := t.of(d, "list_full")
	sql, args := list.with(values{row: after, definition: d, now: &now, limit: most})
	rows, err := q.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	listed, err := scanListed(rows, d.Name)
	listed.At = now
	return listed, err
}

// scanListed reads rows of a name, and more of each behind its key and shard.
func scanListed(rows pgx.Rows, name string, more ...any) (*Rows, error) {
	var (
		listed Rows
		s      state
		key    string
		shard  int
	)
	_, err := pgx.ForEachRow(rows, s.fields(append([]any{&key, &shard}, more...)...), func() error {
		read, _ := s.get()
		listed.Rows = append(listed.Rows, decide.Row{Key: decide.Key{Name: name, Key: key}, Shard: shard})
		listed.States = append(listed.States, read)
		return nil
	})
	return &listed, err
}

// Page reads rows of a row's name after it, most of them at most, in order.
func (t *Table) Page(ctx context.Context, q Querier, after decide.Row, most int, now *time.Time) (*Rows, error) {
	rows, err := q.Query(ctx, t.keep["page"], after.Name, after.Key.Key, int32(after.Shard), int64(most))
	if err != nil {
		return nil, err
	}
	var at time.Time
	page, err := scanListed(rows, after.Name, &at)
	page.At = told(now, at).UTC()
	return page, err
}

// DeleteSame deletes those rows of one name that are still as they were listed, but
// not those that somebody has locked. On a distributed table it waits for these.
func (t *Table) DeleteSame(ctx context.Context, q Querier, r *Rows) (int64, error) {
	if len(r.Rows) == 0 {
		return 0, nil
	}
	if t.distributed {
		return t.deleteSameEach(ctx, q, r)
	}
	_, keys, shards := r.columns()
	values, ts, paused := r.states()
	tag, err := q.Exec(ctx, t.keep["delete_listed"], r.Rows[0].Name, keys, shards, values, ts, paused)
	return tag.RowsAffected(), err
}

func (t *Table) deleteSameEach(ctx context.Context, q Querier, r *Rows) (deleted int64, err error) {
	for i, row := range r.Rows {
		tag, err := q.Exec(ctx, t.keep["delete_same"], row.Name, row.Key.Key, int32(row.Shard), r.States[i].Value, r.States[i].TS, orNull(r.States[i].Paused))
		if err != nil {
			return deleted, err
		}
		deleted += tag.RowsAffected()
	}
	return deleted, nil
}

// Names reads the names of limits that have rows, in order.
func (t *Table) Names(ctx context.Context, q Querier) ([]string, error) {
	rows, err := q.Query(ctx, t.keep["names"])
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// Forget deletes all rows of a name.
func (t *Table) Forget(ctx context.Context, q Querier, name string) (int64, error) {
	tag, err := q.Exec(ctx, t.keep["forget"], name)
	return tag.RowsAffected(), err
}

// Ready fails if the table is not there, or lacks a column.
func (t *Table) Ready(ctx context.Context, q Querier) error {
	_, err := q.Exec(ctx, t.keep["ready"])
	return err
}

// Now reads the clock, unless now is given.
func Now(ctx context.Context, q Querier, now *time.Time) (at time.Time, err error) {
	var batch pgx.Batch
	if QueueNow(&batch, now, &at); batch.Len() > 0 {
		err = q.SendBatch(ctx, &batch).Close()
	}
	return at, err
}

// QueueNow puts into a batch the reading of the clock, unless now is given.
func QueueNow(batch *pgx.Batch, now, at *time.Time) {
	if now != nil {
		*at = *now
		return
	}
	batch.Queue(keeping["now"]).QueryRow(func(row pgx.Row) error {
		err := row.Scan(at)
		*at = at.UTC()
		return err
	})
}
