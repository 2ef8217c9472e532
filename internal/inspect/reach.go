package inspect

import (
	"context"
	"fmt"
	"iter"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
)

// A Reach counts the keys with rows that an edit of the catalog affects.
type Reach struct {
	Keys    int  // keys whose definition or mode changes
	Refused int  // those of them that would be refused a token or a permit now
	More    bool // there are more than [MostCounted] rows, and the others were not read
}

// String returns the reach in a sentence.
func (r Reach) String() string {
	text := fmt.Sprintf("it concerns %d keys that have rows, of which %d would be refused now", r.Keys, r.Refused)
	if r.More {
		text += fmt.Sprintf(" (of the first %d keys)", MostCounted)
	}
	return text
}

// ReachText returns the reach of an edit in a sentence, or why it cannot be told, which keeps nobody from a
// kill switch.
func (d *Inspector) ReachText(ctx context.Context, e *catalog.Edit) string {
	reach, err := d.Reach(ctx, e)
	if err != nil {
		return "how many keys it concerns cannot be told: " + err.Error()
	}
	return reach.String()
}

// Reach returns the reach of an edit, as the catalog's Preview returns it. It takes and locks
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
	var kept, asked []ratelimit.Request
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
		switch {
		case is.Capacity < 1 || after.Mode == ratelimit.ModeRefuse: // no whole token, or none at all
			reach.Refused++
		case after.Mode == ratelimit.ModeShadow:
		case e.LeftOf(&ratelimit.Status{Request: before}) != nil:
			kept = append(kept, ratelimit.Request{Limit: before.Limit, Key: before.Key, Overridden: before.Overridden})
		default:
			after.Overridden = true // of an edit that may never be made, so it binds no other key
			asked = append(asked, after)
		}
	}
	some := ratelimit.MaxChecks / limit.Definition().Shards
	if err := d.refused(ctx, &reach, slices.Chunk(asked, some), func(s *ratelimit.Status) bool { return !s.OK && !s.Shadowed }); err != nil {
		return Reach{}, err
	}
	err = d.refused(ctx, &reach, slices.Chunk(kept, some), func(s *ratelimit.Status) bool { return !s.PausedUntil.IsZero() || e.LeftOf(s).After < 1 })
	return reach, err
}

// refused returns the number of requests that a check of them refuses.
func (d *Inspector) refused(ctx context.Context, reach *Reach, asked iter.Seq[[]ratelimit.Request], refused func(*ratelimit.Status) bool) error {
	for some := range asked {
		statuses, err := d.Store.CheckEach(ctx, some...)
		if err != nil {
			return err
		}
		for i := range statuses {
			if refused(&statuses[i]) {
				reach.Refused++
			}
		}
	}
	return nil
}

func (d *Inspector) reachOfPermits(ctx context.Context, e *catalog.Edit, limit ratelimit.InFlight) (reach Reach, err error) {
	rows, _ := d.Pool.Query(ctx, `SELECT r.key, coalesce(array_agg(r.shard) FILTER (WHERE r.ts > clock_timestamp() AND r.shard < 10000), '{}') FROM `+d.Table()+` AS r
WHERE r.name = $1::text GROUP BY r.key ORDER BY r.key LIMIT $2::int4`, e.Name, MostCounted+1)
	var key string
	var held []int
	seen := 0
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
		within := len(slices.DeleteFunc(held, func(number int) bool { return number >= after.Limit }))
		if after.Mode == ratelimit.ModeRefuse || after.Mode != ratelimit.ModeShadow && within >= after.Limit {
			reach.Refused++
		}
		return nil
	})
	if err != nil {
		return reach, fmt.Errorf("count permits: %w", err)
	}
	return reach, nil
}
