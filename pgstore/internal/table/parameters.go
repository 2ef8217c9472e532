package table

import (
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// statement is one of a kind of limit. Its comment names the parameters that it takes, so that
// each kind has those that it needs.
type statement struct {
	sql   string
	takes []func(*values) any
}

// taking returns statements with the parameters that are named for them.
func (s statements) taking(parameters map[string][]string) map[string]statement {
	all := make(map[string]statement, len(s))
	for name, sql := range s {
		names := parameters[strings.TrimSuffix(strings.TrimSuffix(name, inTurn), bare)]
		takes := make([]func(*values) any, len(names))
		for i := range names {
			takes[i] = parameterValues[names[i]]
		}
		all[name] = statement{sql, takes}
	}
	return all
}

// with returns the statement with arguments.
func (s *statement) with(v values) (sql string, args []any) {
	args = v.args[:0]
	for _, value := range s.takes {
		args = append(args, value(&v))
	}
	return s.sql, args
}

// values are those that the parameters of statements stand for.
type values struct {
	row               decide.Row
	definition        *bucket.Definition
	count             float64   // tokens to take or give
	floor, need, most float64   // tokens: to be left, to be there before, to be there after
	ts                time.Time // of the row as it was seen; zero if it was not
	now               *time.Time
	over              any // an instant
	spent             *bucket.Spent
	many              *many
	args              [12]any // room for those of one row
}

// parameterValues has the parameters by their names in the comments of statements.
var parameterValues = map[string]func(*values) any{
	"name":     func(v *values) any { return v.row.Name },
	"key":      func(v *values) any { return v.row.Key.Key },
	"shard":    func(v *values) any { return int32(v.row.Shard) },
	"capacity": func(v *values) any { return v.definition.Capacity },
	"rate":     func(v *values) any { return v.definition.Rate },
	"period":   func(v *values) any { return micros(v.definition.Period) },
	"tick":     func(v *values) any { return tick(v.definition) },
	"size":     func(v *values) any { return size(v.definition) },
	"origin":   func(v *values) any { return origin(v.definition, v.row.Key.Key, v.ts, v.now) },
	"edges":    func(v *values) any { edges, _ := v.definition.Edges(v.around()); return edges },
	"long_ago": func(v *values) any { return v.definition.Fresh("", longAgo).TS },
	"had":      func(v *values) any { _, had := v.definition.Edges(v.around()); return had },
	"now":      func(v *values) any { return v.now },
	"count":    func(v *values) any { return v.count },
	"floor":    func(v *values) any { return v.floor },
	"need":     func(v *values) any { return v.need },
	"most":     func(v *values) any { return v.most },
	"over":     func(v *values) any { return v.over },

	"spent":     func(v *values) any { return v.spent.Spent },
	"spent_end": func(v *values) any { return orNull(v.definition.Counted(v.spent.SpentEnd)) },

	// Of many rows,
	"keys":       func(v *values) any { return column(v.many.grants, func(g *Grant) string { return g.Key.Key }) },
	"shards":     func(v *values) any { return v.many.shards() },
	"counts":     func(v *values) any { return column(v.many.grants, func(g *Grant) float64 { return g.Count }) },
	"needs":      func(v *values) any { return v.many.needs() },
	"lasts":      func(v *values) any { return prefetched(v.many, (*Grant).leased) },
	"prefetches": func(v *values) any { return prefetched(v.many, func(g *Grant) float64 { return g.Prefetch }) },
	"outs":       func(v *values) any { return prefetched(v.many, func(g *Grant) float64 { return g.Out }) },
	"spents":     func(v *values) any { return prefetched(v.many, func(g *Grant) float64 { return g.Spent.Spent }) },
	"spent_ends": func(v *values) any {
		return prefetched(v.many, func(g *Grant) *time.Time { return orNull(g.Definition.Counted(g.SpentEnd)) })
	},

	// the place of each one's definition among these.
	"definitions": func(v *values) any { return v.many.places },
	"names":       func(v *values) any { return column(v.many.definitions, func(g *Grant) string { return g.Name }) },
	"capacities":  func(v *values) any { return column(v.many.definitions, (*Grant).capacity) },
	"rates": func(v *values) any {
		return column(v.many.definitions, func(g *Grant) float64 { return g.Definition.Rate })
	},
	"periods": func(v *values) any {
		return column(v.many.definitions, func(g *Grant) float64 { return micros(g.Definition.Period) })
	},
	"ticks": func(v *values) any {
		return column(v.many.definitions, func(g *Grant) float64 { return tick(&g.Definition) })
	},
	"all_edges": func(v *values) any { edges, _ := v.many.edges(v.around()); return edges },
	"all_had":   func(v *values) any { _, had := v.many.edges(v.around()); return had },
	"each":      func(v *values) any { return int32(v.many.sent()) },
	"sizes": func(v *values) any {
		return column(v.many.definitions, func(g *Grant) int32 { return size(&g.Definition) })
	},
}

// origin is an instant from which the ticks of a row are counted that had one at ts. By the
// calendar it is that of a row which is made, full: an edge, and if the clocks differ, not the
// newest, which makes no difference.
func origin(d *bucket.Definition, key string, ts time.Time, now *time.Time) time.Time {
	switch {
	case d.Every != 0:
		return d.Fresh(key, around(now)).TS
	case ts.IsZero():
		return d.Fresh(key, longAgo).TS
	}
	return ts
}

// around is an instant that the database's clock is likely to show: the one that decides, if
// it is known.
func around(now *time.Time) time.Time {
	if now != nil {
		return *now
	}
	return time.Now()
}

// around is the instant around which edges are sent: one that the database's clock has shown,
// if a row was seen.
func (v *values) around() time.Time {
	if over, ok := v.over.(*time.Time); ok && over != nil && v.now == nil {
		return *over
	}
	return around(v.now)
}

// size is how many totals a row with slots has.
func size(d *bucket.Definition) int32 { return int32(d.Slots + 2) }

// many are the grants of one statement.
type many struct {
	grants      []*Grant
	definitions []*Grant // with each definition one, of those that follow another
	places      []int32  // in definitions, from 1
	prefetch    bool     // one of them does
}

func manyOf(grants []*Grant) *many {
	m := &many{grants: grants, places: make([]int32, len(grants))}
	for i, g := range grants {
		m.prefetch = m.prefetch || g.TakesExtra()
		if n := len(m.definitions); n == 0 || m.definitions[n-1].Definition != g.Definition || m.definitions[n-1].capacity() != g.capacity() {
			m.definitions = append(m.definitions, g)
		}
		m.places[i] = int32(len(m.definitions))
	}
	return m
}

// sent is the number of edges that a statement receives for each definition.
func (m *many) sent() (most int) {
	for _, g := range m.definitions {
		most = max(most, g.Definition.Sent())
	}
	return most
}

// edges are those of all definitions, one after another.
func (m *many) edges(around time.Time) (edges, had []time.Time) {
	for _, g := range m.definitions {
		e, h := g.Definition.EdgesFrom(around, m.sent())
		edges, had = append(edges, e...), append(had, h...)
	}
	return edges, had
}

// shards is nil if no limit has several.
func (m *many) shards() []int32 {
	return columnIf(m.grants, func(g *Grant) bool { return g.Shard != 0 }, func(g *Grant) int32 { return int32(g.Shard) })
}

// needs returns the tokens that each grant needs; nil if each needs its count.
func (m *many) needs() []float64 {
	return columnIf(m.grants, func(g *Grant) bool { return g.Need != g.Count }, func(g *Grant) float64 { return g.Need })
}

// prefetched is a column for grants that prefetch, nil if none does.
func prefetched[T any](m *many, of func(*Grant) T) []T {
	return columnIf(m.grants, func(*Grant) bool { return m.prefetch }, of)
}

// columnIf is a column that is of use if it is for one of the grants; else nil.
func columnIf[T any](grants []*Grant, use func(*Grant) bool, of func(*Grant) T) []T {
	if !slices.ContainsFunc(grants, use) {
		return nil
	}
	return column(grants, of)
}

// column returns one value of each grant.
func column[T any](grants []*Grant, of func(*Grant) T) []T {
	values := make([]T, len(grants))
	for i, g := range grants {
		values[i] = of(g)
	}
	return values
}

// never is a tick that does not come to an end, in microseconds.
const never = 1e17

// tick is the granularity of a limit's clock, in microseconds. Statements that know one do not
// count edges of the calendar.
func tick(d *bucket.Definition) float64 {
	if d.Every != 0 {
		return never
	}
	return float64(d.Tick())
}
