package inspect

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
)

// A Reach is the keys for which an edit of the catalog holds, of those that have rows.
type Reach struct {
	Keys    int  // whose definition or mode it changes
	Refused int  // of these, those that would be refused a token or a permit now
	More    bool // there are more than [MostCounted] rows, and the rest was not looked at
}

// String returns the reach in a sentence.
func (r Reach) String() string {
	text := fmt.Sprintf("it concerns %d keys that have rows, of which %d would be refused now", r.Keys, r.Refused)
	if r.More {
		text += fmt.Sprintf(" (of the first %d keys)", MostCounted)
	}
	return text
}

// Reach returns the reach of an edit, which is of the catalog's Preview. It takes and locks
// nothing.
func (d *Inspector) Reach(ctx context.Context, e *catalog.Edit) (Reach, error) {
	if limit, err := d.InFlight(e.Name); err == nil {
		return d.reachOfPermits(ctx, e, limit)
	}
	limit, err := d.Limit(e.Name)
	if err != nil {
		return Reach{}, err
	}
	var reach Reach
	var asked []ratelimit.Request
	seen := 0
	for status, err := range d.Store.Rows(ctx, limit, ratelimit.Page{Most: MostCounted + 1}) {
		if err != nil {
			return Reach{}, err
		}
		if seen++; seen > MostCounted {
			reach.More = true
			break
		}
		before, after := e.Resolve(limit.For(status.Request.Key))
		was, is := before.Limit.Definition(), after.Limit.Definition()
		if was == is && before.Mode == after.Mode {
			continue
		}
		reach.Keys++
		if is.Capacity < 1 { // which grants no whole token
			reach.Refused++
			continue
		}
		asked = append(asked, after)
	}
	for some := range slices.Chunk(asked, max(1, ratelimit.MaxChecks/shards(asked))) {
		statuses, err := d.Store.CheckEach(ctx, some...)
		if err != nil {
			return Reach{}, err
		}
		for _, status := range statuses {
			if !status.OK && !status.Shadowed {
				reach.Refused++
			}
		}
	}
	return reach, nil
}

func (d *Inspector) reachOfPermits(ctx context.Context, e *catalog.Edit, limit ratelimit.InFlight) (reach Reach, err error) {
	rows, err := d.Pool.Query(ctx, `SELECT r.key, count(*) FILTER (WHERE r.ts > clock_timestamp() AND r.shard < 10000)::int4 FROM `+d.Table()+` AS r
WHERE r.name = $1::text GROUP BY r.key ORDER BY r.key LIMIT $2::int4`, e.Name, MostCounted+1)
	if err != nil {
		return reach, fmt.Errorf("count permits: %w", err)
	}
	var key string
	var held, seen int
	_, err = pgx.ForEachRow(rows, []any{&key, &held}, func() error {
		if seen++; seen > MostCounted {
			reach.More = true
			return nil
		}
		before, after := e.InFlight(limit, key)
		if before == after {
			return nil
		}
		reach.Keys++
		if after.Mode == ratelimit.ModeRefuse || after.Mode != ratelimit.ModeShadow && held >= after.Limit {
			reach.Refused++
		}
		return nil
	})
	if err != nil {
		return reach, fmt.Errorf("count permits: %w", err)
	}
	return reach, nil
}
