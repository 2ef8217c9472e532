package pgstore

import (
	"context"
	"fmt"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/edit"
)

// Prune deletes the rows of the given limits that mean the same as no row, and returns their number.
// Such a row has been full for a minute, and is not paused, by every definition of its name that
// Prune gets or this Store has seen. A row does not name its plan. So pass all plans of a limit
// (copies with other numbers) and, while a changed definition is rolled out, the old one as well.
// An edit, such as a Pause, shows the Store the definition of its key only.
//
// Prune leaves locked rows and rows of other limits alone. It is safe beside callers that wait for a
// row no longer than a minute. Run it now and then, in one process or several. Each batch is a
// transaction of its own, bounded by Config.Timeout; rows deleted before an error stay deleted and
// are counted.
//
// A row also remembers the latest time of the clock. If the server's clock is set back after a Prune,
// a pruned limit grants its capacity again in the time that passes twice.
func (s *Store) Prune(ctx context.Context, limits ...ratelimit.Limit) (deleted int64, err error) {
	return s.PruneOverridden(ctx, nil, limits...)
}

// PruneOverridden is Prune that measures the rows of each override's key by the override as well. A
// catalog's Prune passes all overrides that it knows. Those that this Store has seen
// ([ratelimit.Request.Overridden]) need not be passed.
func (s *Store) PruneOverridden(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (deleted int64, err error) {
	return s.prune(ctx, overrides, limits, (*edit.Editor).Prune)
}

// Prunable returns how many rows PruneOverridden would delete at this moment, and deletes none.
func (s *Store) Prunable(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (rows int64, err error) {
	return s.prune(ctx, overrides, limits, (*edit.Editor).Prunable)
}

// prune prunes each name, or counts what that would delete.
func (s *Store) prune(ctx context.Context, overrides []ratelimit.Request, limits []ratelimit.Limit, each func(*edit.Editor, context.Context, string, decide.Overrides) (int64, error)) (rows int64, err error) {
	if err := s.usable(); err != nil {
		return 0, err
	}
	names, err := s.known.Definitions.NoteAll(overrides, limits)
	if err != nil {
		return 0, err
	}
	for name, of := range names {
		n, err := each(s.editor, ctx, name, of)
		rows += n
		if err != nil {
			return rows, err
		}
	}
	return rows, nil
}

// Names returns the names of limits that have rows in the table, in order: also of
// those that the program does not define any more. See [Store.Forget].
func (s *Store) Names(ctx context.Context) (names []string, err error) {
	err = s.alone(ctx, "read names", func(ctx context.Context) error {
		names, err = s.table.Names(ctx, s.conn.Pool)
		return err
	})
	return names, err
}

// Forget deletes all rows of a limit's name, in any state, and returns how many it deleted. It
// is for a limit that has left the program; for one that is in use it is a reset of all its
// keys.
func (s *Store) Forget(ctx context.Context, name string) (deleted int64, err error) {
	if err := s.usable(); err != nil {
		return 0, err
	}
	return s.editor.Forget(ctx, name)
}

// Ready returns an error if the database does not answer or is older than PostgreSQL 14. The error
// is [ErrNotMigrated] if the table is not where the Store looks for it, or lacks a column. It is
// for readiness probes, and reads no row.
func (s *Store) Ready(ctx context.Context) error {
	return s.alone(ctx, "look for the table", func(ctx context.Context) error {
		var version int
		if err := s.conn.Pool.QueryRow(ctx, "SELECT current_setting('server_version_num')::int4").Scan(&version); err != nil {
			return err
		}
		if version < oldestServer {
			return fmt.Errorf("the server is PostgreSQL %d, and the oldest that the statements run on is %d", version/10_000, oldestServer/10_000)
		}
		return s.table.Ready(ctx, s.conn.Pool)
	})
}

// oldestServer is the oldest server_version_num: before it there is no date_bin.
const oldestServer = 14_00_00
