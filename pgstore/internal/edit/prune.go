package edit

import (
	"context"
	"math"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Prune deletes, in batches, the rows of a name that mean the same as no row by all known
// definitions of the name and all overrides of their key.
func (e *Editor) Prune(ctx context.Context, name string, overrides decide.Overrides) (deleted int64, err error) {
	return e.pruneBy(ctx, name, overrides, e.table.DeleteSame)
}

// Prunable returns how many rows Prune would delete.
func (e *Editor) Prunable(ctx context.Context, name string, overrides decide.Overrides) (n int64, err error) {
	return e.pruneBy(ctx, name, overrides, func(_ context.Context, _ table.Querier, idle *table.Rows) (int64, error) {
		return int64(len(idle.Rows)), nil
	})
}

// pruneBy calls do with the rows of a name that mean the same as no row, in batches.
func (e *Editor) pruneBy(ctx context.Context, name string, overrides decide.Overrides, do deletion) (done int64, err error) {
	after := decide.Row{Key: decide.Key{Name: name}, Shard: math.MinInt32}
	for {
		var listed int
		err := e.Standalone(ctx, "prune", func(ctx context.Context) (err error) {
			var n int64
			listed, n, err = e.pruneAfter(ctx, overrides, &after, do)
			done += n
			return err
		})
		if err != nil || listed < e.table.Batch() {
			return done, err
		}
	}
}

// A deletion deletes rows that are idle, or counts them.
type deletion func(ctx context.Context, q table.Querier, idle *table.Rows) (int64, error)

// pruneAfter lists the rows that follow after, calls do with those that are idle by all
// definitions, and moves after to the last listed row.
func (e *Editor) pruneAfter(ctx context.Context, overrides decide.Overrides, after *decide.Row, do deletion) (listed int, deleted int64, err error) {
	now, err := table.Now(ctx, e.Pool, e.Clock())
	if err != nil {
		return 0, 0, err
	}
	rows, err := e.table.Page(ctx, e.Pool, *after, e.table.Batch(), &now, nil)
	if err != nil || len(rows.Rows) == 0 {
		return 0, 0, err
	}
	var idle table.Rows
	for i, row := range rows.Rows {
		if e.known.Definitions.Idle(row.Key, overrides, rows.States[i], now) {
			idle.Rows, idle.States = append(idle.Rows, row), append(idle.States, rows.States[i])
		}
	}
	if deleted, err = do(ctx, e.Pool, &idle); err == nil {
		*after = rows.Rows[len(rows.Rows)-1]
	}
	return len(rows.Rows), deleted, err
}

// Forget deletes all rows of a name.
func (e *Editor) Forget(ctx context.Context, name string) (deleted int64, err error) {
	err = e.Standalone(ctx, "forget", func(ctx context.Context) error {
		deleted, err = e.table.Forget(ctx, e.Pool, name)
		e.known.Shards.Clear()
		e.memory.EvictAll()
		return err
	})
	return deleted, err
}
