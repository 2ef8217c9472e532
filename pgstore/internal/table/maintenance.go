package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Page reads rows of a row's name after it, most of them at most, in order; with idle only those
// that may be full at that instant.
func (t *Table) Page(ctx context.Context, q Querier, after decide.Row, most int, idle, now *time.Time) (*Rows, error) {
	rows, err := q.Query(ctx, t.maintenance["page"], after.Name, after.Key.Key, int32(after.Shard), int64(most), idle)
	if err != nil {
		return nil, err
	}
	var (
		page  Rows
		s     state
		key   string
		shard int
	)
	_, err = pgx.ForEachRow(rows, s.fields(&key, &shard, &page.At), func() error {
		read, _ := s.get()
		page.Rows = append(page.Rows, decide.Row{Key: decide.Key{Name: after.Name, Key: key}, Shard: shard})
		page.States = append(page.States, read)
		return nil
	})
	page.At = instant(now, page.At).UTC()
	return &page, err
}

// DeleteSame deletes those rows of one name that are still as they were listed, but
// not those that another transaction has locked. On a distributed table it waits for these. A
// connection may write values as text with 15 digits, so they are compared up to that.
func (t *Table) DeleteSame(ctx context.Context, q Querier, r *Rows) (int64, error) {
	if len(r.Rows) == 0 {
		return 0, nil
	}
	if t.distributed {
		return t.deleteSameEach(ctx, q, r)
	}
	_, keys, shards := r.columns()
	values, ts, paused := r.states()
	tag, err := q.Exec(ctx, t.maintenance["delete_listed"], r.Rows[0].Name, keys, shards, values, ts, paused)
	return tag.RowsAffected(), err
}

func (t *Table) deleteSameEach(ctx context.Context, q Querier, r *Rows) (deleted int64, err error) {
	for i, row := range r.Rows {
		tag, err := q.Exec(ctx, t.maintenance["delete_same"], row.Name, row.Key.Key, int32(row.Shard), r.States[i].Value, r.States[i].TS, orNull(r.States[i].Paused))
		if err != nil {
			return deleted, err
		}
		deleted += tag.RowsAffected()
	}
	return deleted, nil
}

// Names reads the names of limits that have rows, in order.
func (t *Table) Names(ctx context.Context, q Querier) ([]string, error) {
	rows, err := q.Query(ctx, t.maintenance["names"])
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// Forget deletes all rows of a name.
func (t *Table) Forget(ctx context.Context, q Querier, name string) (int64, error) {
	tag, err := q.Exec(ctx, t.maintenance["forget"], name)
	return tag.RowsAffected(), err
}

// Ready fails if the table is not there, or lacks a column.
func (t *Table) Ready(ctx context.Context, q Querier) error {
	_, err := q.Exec(ctx, t.maintenance["ready"])
	return err
}
