package pgstore

import (
	"cmp"
	"context"
	"math"
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
	part  part    // what they take together
	need  float64 // tokens that there must be to grant all
	turns []*turn
	after outcome
}

// groups sorts turns by the row that they would take from, in the one order of
// rows. Those that check or take from several rows are in none.
func (s *Store) groups(turns []*turn) []group {
	sorted := make([]*turn, 0, len(turns))
	for i, t := range turns {
		if t.check || len(t.call.Asks) > 1 {
			continue
		}
		if p, ok := s.guessPart(0, t.call.Asks[0], nil); ok {
			t.place, t.shard, t.floor = i, p.shard, p.floor
			sorted = append(sorted, t)
		}
	}
	slices.SortFunc(sorted, func(t, u *turn) int {
		if c := t.row().compare(u.row()); c != 0 {
			return c
		}
		return cmp.Compare(t.place, u.place)
	})
	var groups []group
	for i, t := range sorted {
		if i == 0 || t.row() != sorted[i-1].row() {
			groups = append(groups, group{part: newPart(0, t.call.Asks[0], t.shard, 0), need: math.Inf(-1), turns: sorted[i:i]})
		}
		groups[len(groups)-1].add(t)
	}
	return groups
}

// row is the one row that a turn of a group takes from.
func (t *turn) row() row {
	a := &t.call.Asks[0]
	return row{a.Definition.Name, a.Key, t.shard}
}

// add leaves a turn out whose definition is not that of the others, while a
// new one is being rolled out.
func (g *group) add(t *turn) {
	a := &t.call.Asks[0]
	if len(g.turns) > 0 && a.Definition != g.turns[0].call.Asks[0].Definition {
		return
	}
	g.turns = append(g.turns, t)
	g.part.count += a.Count
	g.need = max(g.need, g.part.count+t.floor)
}

// roundQuick finishes the turns of the groups whose rows have enough for all
// of them. Nothing is written or locked for the others.
func (s *Store) roundQuick(ctx context.Context, turns []*turn) error {
	groups := s.groups(turns)
	at, err := s.takeGroups(ctx, groups)
	if err != nil {
		return fault("take", err)
	}
	for i := range groups {
		if groups[i].after.taken {
			s.grant(&groups[i], at)
		}
	}
	return nil
}

// grant finishes the turns of a group that was taken. Each is told what it
// left behind.
func (s *Store) grant(g *group, at time.Time) {
	p, o := g.part, g.after
	left := g.part.count
	for _, t := range g.turns {
		p.count = t.call.Asks[0].Count
		left -= p.count
		o.after.Value = g.after.after.Value + left
		t.finish(s.granted(t.call, []part{p}, []outcome{o}, at), nil)
	}
}

func (s *Store) takeGroups(ctx context.Context, groups []group) (at time.Time, err error) {
	switch len(groups) {
	case 0:
		return at, nil
	case 1:
		return s.takeQuick(ctx, &groups[0])
	default:
		return s.takeQuickly(ctx, groups)
	}
}

func (s *Store) takeQuick(ctx context.Context, g *group) (at time.Time, err error) {
	p, d := &g.part, &g.part.definition
	args := []any{d.Name, p.key, int32(p.shard), p.count, g.need, d.Capacity, d.Rate, micros(d.Period), s.clock()}
	if d.Kind == ratelimit.KindFixedWindow {
		args = append(args, micros(d.Tick()))
	}
	err = g.after.scan(s.pool.QueryRow(ctx, s.sql.of(d).quick, args...), &at)
	return at, err
}

func (s *Store) takeQuickly(ctx context.Context, groups []group) (at time.Time, err error) {
	n := len(groups)
	names, keys, shards := make([]string, n), make([]string, n), make([]int32, n)
	totals, needs := make([]float64, n), make([]float64, n)
	capacities, rates, periods, ticks := make([]float64, n), make([]float64, n), make([]float64, n), make([]float64, n)
	sql := s.sql.bucket.quickly
	for i := range groups {
		p, d := &groups[i].part, &groups[i].part.definition
		names[i], keys[i], shards[i] = d.Name, p.key, int32(p.shard)
		totals[i], needs[i] = p.count, groups[i].need
		capacities[i], rates[i], periods[i], ticks[i] = d.Capacity, d.Rate, micros(d.Period), micros(d.Tick())
		if d.Kind == ratelimit.KindFixedWindow {
			sql = s.sql.window.quickly // a token bucket's ticks are microseconds
		}
	}
	rows, err := s.pool.Query(ctx, sql, names, keys, shards, totals, needs, capacities, rates, periods, s.clock(), ticks)
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
