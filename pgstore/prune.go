package pgstore

import (
	"context"
	"fmt"
	"math"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Prune deletes the rows of the given limits that mean the same as no row, and returns how many
// it deleted: those that are full, have been for a minute, and are not paused, by every
// definition of their name that it is given or that this Store has seen. A row does not name
// its plan, so pass all plans of a limit, which are copies with other numbers, and while a
// changed definition is rolled out the old one as well.
//
// It does not touch rows of other limits, nor locked rows. It works in batches, each a
// transaction of its own, and is safe beside any traffic of callers that wait for a row no
// longer than a minute; run it now and then, from one process or several. Rows deleted before
// an error stay deleted, and are counted. Config.Timeout bounds each batch.
//
// A row also remembers that the clock was later once. If the server's clock is set back after a
// Prune, a limit that was pruned grants its capacity again in the time that then passes twice.
func (s *Store) Prune(ctx context.Context, limits ...ratelimit.Limit) (deleted int64, err error) {
	if err := s.usable(); err != nil {
		return 0, err
	}
	names, err := s.seen.NoteAll(limits)
	if err != nil {
		return 0, err
	}
	for name := range names {
		n, err := s.pruneName(ctx, name)
		deleted += n
		if err != nil {
			return deleted, err
		}
	}
	return deleted, nil
}

func (s *Store) pruneName(ctx context.Context, name string) (deleted int64, err error) {
	after := decide.Row{Key: decide.Key{Name: name}, Shard: math.MinInt32}
	for {
		var listed int
		err := s.alone(ctx, "prune", func(ctx context.Context) (err error) {
			var n int64
			listed, n, err = s.pruneAfter(ctx, name, &after)
			deleted += n
			return err
		})
		if err != nil || listed < s.table.Batch() {
			return deleted, err
		}
	}
}

// pruneAfter lists rows of a name after a row, which it moves to the last of them, and deletes
// those that are idle by all definitions.
func (s *Store) pruneAfter(ctx context.Context, name string, after *decide.Row) (listed int, deleted int64, err error) {
	definitions := s.seen.Of(name)
	now, err := table.Now(ctx, s.Pool, s.Clock())
	if err != nil {
		return 0, 0, err
	}
	rows, err := s.table.Page(ctx, s.Pool, *after, s.table.Batch(), &now, nil)
	if err != nil || len(rows.Rows) == 0 {
		return 0, 0, err
	}
	var idle table.Rows
	for i, row := range rows.Rows {
		if decide.Idle(definitions, row.Key.Key, rows.States[i], now) {
			idle.Rows, idle.States = append(idle.Rows, row), append(idle.States, rows.States[i])
		}
	}
	if deleted, err = s.table.DeleteSame(ctx, s.Pool, &idle); err == nil {
		*after = rows.Rows[len(rows.Rows)-1]
	}
	return len(rows.Rows), deleted, err
}

// Names returns the names of limits that have rows in the table, in order: also of
// those that the program does not define any more. See [Store.Forget].
func (s *Store) Names(ctx context.Context) (names []string, err error) {
	err = s.parts().alone(ctx, "read names", func(ctx context.Context) error {
		names, err = s.table.Names(ctx, s.Pool)
		return err
	})
	return names, err
}

// Forget deletes all rows of a limit's name, in any state, and returns how many it deleted. It
// is for a limit that has left the program; for one that is in use it is a reset of all its
// keys.
func (s *Store) Forget(ctx context.Context, name string) (deleted int64, err error) {
	err = s.parts().alone(ctx, "forget", func(ctx context.Context) error {
		deleted, err = s.table.Forget(ctx, s.Pool, name)
		s.shards.Clear()
		s.memory.evictAll()
		return err
	})
	return deleted, err
}

// Ready fails if the database does not answer, with the error of that, if it is older than
// PostgreSQL 14, or if the table is not where the Store looks for it or lacks a column,
// with [ErrNotMigrated]. It is for readiness probes, and reads no row.
func (s *Store) Ready(ctx context.Context) error {
	return s.parts().alone(ctx, "look for the table", func(ctx context.Context) error {
		var version int
		if err := s.Pool.QueryRow(ctx, "SELECT current_setting('server_version_num')::int4").Scan(&version); err != nil {
			return err
		}
		if version < oldestServer {
			return fmt.Errorf("the server is PostgreSQL %d, and the oldest that the statements run on is %d", version/10_000, oldestServer/10_000)
		}
		return s.table.Ready(ctx, s.Pool)
	})
}

// oldestServer is the oldest server_version_num: before it there is no date_bin.
const oldestServer = 14_00_00
