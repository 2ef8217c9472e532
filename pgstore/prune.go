package pgstore

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// pruneBatch is how many rows Prune lists, and deletes in one transaction: few
// enough that nobody waits for it long.
const pruneBatch = 1000

// Prune deletes the rows of the given limits that are full, and so mean the
// same as no row, and says how many it deleted. It takes the limits'
// definitions from its caller, and does not touch rows of other limits, rows
// in debt or paused, nor rows that somebody has locked. It works in batches,
// each a transaction of its own, and is safe beside any traffic; run it now
// and then, from one process or several. What it deleted before an error stays
// deleted, and is counted.
//
// A row is also what remembers that the clock was later once. If the server's
// clock is set back after a Prune, a limit that was pruned grants its capacity
// again in the time that then passes twice.
func (s *Store) Prune(ctx context.Context, limits ...ratelimit.Limit) (deleted int64, err error) {
	if s.pool == nil {
		return 0, ErrNoPool
	}
	if len(limits) == 0 {
		return 0, &ratelimit.FieldError{Field: "Limits", Value: 0, Reason: "there must be at least one"}
	}
	for _, l := range limits {
		if l == nil {
			return 0, &ratelimit.FieldError{Field: "Limit", Value: l, Reason: "must not be nil"}
		}
		if err := l.Validate(); err != nil {
			return 0, err
		}
	}
	for _, l := range limits {
		n, err := s.pruneLimit(ctx, l.Definition().Shard())
		deleted += n
		if err != nil {
			return deleted, fault("prune", err)
		}
	}
	return deleted, nil
}

// fullRow is a row as it was listed.
type fullRow struct {
	key   string
	shard int32
	state ratelimit.State
}

func (s *Store) pruneLimit(ctx context.Context, d ratelimit.Definition) (deleted int64, err error) {
	from := fullRow{shard: -1} // before the first
	for {
		var listed []fullRow
		err := s.own(ctx, func(q querier) (err error) {
			var n int64
			listed, n, err = s.pruneFrom(ctx, q, d, from)
			deleted += n
			return err
		})
		if err != nil || len(listed) < pruneBatch {
			return deleted, err
		}
		from = listed[len(listed)-1]
	}
}

// pruneFrom lists full rows after from, and deletes those that are idle.
func (s *Store) pruneFrom(ctx context.Context, q querier, d ratelimit.Definition, from fullRow) (listed []fullRow, deleted int64, err error) {
	var now time.Time
	if err := q.QueryRow(ctx, clockSQL, s.clock()).Scan(&now, nil); err != nil {
		return nil, 0, err
	}
	rows, err := q.Query(ctx, s.sql.listFull, d.Name, from.key, from.shard,
		d.Capacity, d.Rate, micros(d.Period), micros(d.Tick()), now, int64(pruneBatch))
	if err != nil {
		return nil, 0, err
	}
	listed, err = pgx.CollectRows(rows, func(r pgx.CollectableRow) (row fullRow, err error) {
		err = r.Scan(&row.key, &row.shard, &row.state.Value, &row.state.TS)
		return row, err
	})
	if err != nil {
		return nil, 0, err
	}
	var idle []fullRow
	for _, row := range listed {
		if d.Idle(row.key, row.state, now) {
			idle = append(idle, row)
		}
	}
	if s.config.Portable {
		deleted, err = s.deleteEach(ctx, q, d.Name, idle)
	} else {
		deleted, err = s.deleteTogether(ctx, q, d.Name, idle)
	}
	return listed, deleted, err
}

func (s *Store) deleteTogether(ctx context.Context, q querier, name string, idle []fullRow) (int64, error) {
	if len(idle) == 0 {
		return 0, nil
	}
	keys, shards := make([]string, len(idle)), make([]int32, len(idle))
	values, instants := make([]float64, len(idle)), make([]time.Time, len(idle))
	for i, row := range idle {
		keys[i], shards[i], values[i], instants[i] = row.key, row.shard, row.state.Value, row.state.TS
	}
	tag, err := q.Exec(ctx, s.sql.deleteListed, name, keys, shards, values, instants)
	return tag.RowsAffected(), err
}

func (s *Store) deleteEach(ctx context.Context, q querier, name string, idle []fullRow) (deleted int64, err error) {
	for _, row := range idle {
		tag, err := q.Exec(ctx, s.sql.deleteSame, name, row.key, row.shard, row.state.Value, row.state.TS)
		if err != nil {
			return deleted, err
		}
		deleted += tag.RowsAffected()
	}
	return deleted, nil
}
