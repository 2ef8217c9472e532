package pgstore

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// group is turns, in the order of arrival, that each take from the same one
// row. It is granted as a whole or not at all: to grant all of them, the row
// needs to have no more than the most that any of them needs after those
// before it.
type group struct {
	turns []*turn
	parts []part  // what each turn takes
	total float64 // tokens that all of them take
	need  float64 // tokens that there must be to grant all

	after outcome
}

// row identifies a row of the table.
type row struct {
	limitKey
	shard int
}

// groups sorts out turns by the row that they would take from, and the groups
// in the one order of rows. Those that check or take from several rows are in
// none.
func (s *Store) groups(turns []*turn) []*group {
	var groups []*group
	byRow := make(map[row]*group, len(turns))
	for _, t := range turns {
		if t.check || len(t.call.Asks) > 1 {
			continue
		}
		parts, ok := s.guess(t.call, nil)
		if !ok {
			continue
		}
		p := parts[0]
		at := row{limitKey{p.definition.Name, p.key}, p.shard}
		g := byRow[at]
		if g == nil {
			g = &group{}
			byRow[at] = g
			groups = append(groups, g)
		}
		g.add(t, p)
	}
	slices.SortFunc(groups, func(a, b *group) int {
		p, q := &a.parts[0], &b.parts[0]
		return cmp.Or(cmp.Compare(p.definition.Name, q.definition.Name), cmp.Compare(p.key, q.key), cmp.Compare(p.shard, q.shard))
	})
	return groups
}

// add leaves a turn out whose definition is not that of the others: one of two
// is being rolled out.
func (g *group) add(t *turn, p part) {
	if len(g.parts) > 0 && g.parts[0].definition != p.definition {
		return
	}
	g.turns = append(g.turns, t)
	g.parts = append(g.parts, p)
	g.total += p.count
	need := g.total + p.floor
	if len(g.parts) == 1 || need > g.need {
		g.need = need
	}
}

// roundQuick finishes the turns of the groups whose rows have enough for all
// of them. Nothing is written or locked for the others.
func (s *Store) roundQuick(ctx context.Context, turns []*turn) error {
	groups := s.groups(turns)
	var (
		at  time.Time
		err error
	)
	switch len(groups) {
	case 0:
		return nil
	case 1:
		at, err = s.takeQuick(ctx, groups[0])
	default:
		at, err = s.takeQuickly(ctx, groups)
	}
	if err != nil {
		return fault("take", err)
	}
	for _, g := range groups {
		if g.after.taken {
			s.grant(g, at)
		}
	}
	return nil
}

// grant finishes the turns of a group that was taken. Each is told what it
// left behind.
func (s *Store) grant(g *group, at time.Time) {
	left := g.total
	for i, t := range g.turns {
		left -= g.parts[i].count
		o := g.after
		o.after.Value += left
		t.finish(s.granted(t.call, g.parts[i:i+1], []outcome{o}, at), nil)
	}
}

func (s *Store) takeQuick(ctx context.Context, g *group) (at time.Time, err error) {
	p := &g.parts[0]
	d := &p.definition
	err = s.pool.QueryRow(ctx, s.sql.takeQuick,
		d.Name, p.key, int32(p.shard), g.total, g.need, d.Capacity, d.Rate, micros(d.Period), micros(d.Tick()), s.clock(),
	).Scan(&g.after.after.Value, &g.after.after.TS, &at)
	if errors.Is(err, pgx.ErrNoRows) {
		return at, nil
	}
	g.after.taken = err == nil
	return at, err
}

func (s *Store) takeQuickly(ctx context.Context, groups []*group) (at time.Time, err error) {
	n := len(groups)
	names, keys, shards := make([]string, n), make([]string, n), make([]int32, n)
	figures := make([]float64, 6*n)
	column := func(i int) []float64 { return figures[i*n : (i+1)*n : (i+1)*n] }
	totals, needs, capacities, rates, periods, ticks := column(0), column(1), column(2), column(3), column(4), column(5)
	for i, g := range groups {
		p := &g.parts[0]
		d := &p.definition
		names[i], keys[i], shards[i] = d.Name, p.key, int32(p.shard)
		totals[i], needs[i] = g.total, g.need
		capacities[i], rates[i], periods[i], ticks[i] = d.Capacity, d.Rate, micros(d.Period), micros(d.Tick())
	}
	rows, err := s.pool.Query(ctx, s.sql.takeQuickly, names, keys, shards, totals, needs, capacities, rates, periods, ticks, s.clock())
	if err != nil {
		return at, err
	}
	var (
		i     int64
		after ratelimit.State
	)
	_, err = pgx.ForEachRow(rows, []any{&i, &after.Value, &after.TS, &at}, func() error {
		groups[i-1].after = outcome{after: after, taken: true}
		return nil
	})
	return at, err
}
