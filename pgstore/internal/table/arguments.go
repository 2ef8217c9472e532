package table

import (
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// taking is a change that takes.
type taking struct {
	*decide.Change
	reserve bool
}

// over returns an instant by which the pause that was read is over; NULL for none.
func (c *taking) over() any {
	if c.reserve { // a pause does not stop a reservation
		return pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}
	}
	return orNull(c.Past)
}

// Give gives tokens to a change's row.
type Give struct {
	*decide.Change
	Tokens, Most float64 // the row gets up to Most tokens; if tokens are out, it gets no more than leaves room for them
	Spent        bucket.Spent

	Taken Taken // the row as the statement left it, not refilled
	Given bool  // Tokens are in the row; false for a row with slots, to which the caller adds them
}

// A must is a take whose refusal is an error, so that no later statement of the round trip runs.
//
// The error is that of a cast, 22P02. Its text has the mark of the take, and the state that
// decided: value, ts, now and the end of a pause. They are in binary, since a session may write
// numbers with fewer digits (extra_float_digits). (A NULL in a NOT NULL column would write the key
// into the server's log.)
//
// Unlike a take it turns nothing away, because nobody would read the row then. A pause that is over
// by its clock is over, and a window counts from the edges of its row.
type must struct {
	taking
	mark string
}

// origin returns an instant from which to count the ticks of a row whose ts is known; zero for
// none. By the calendar it is the ts for a full row that is made now. That is an edge; if the
// clocks differ it may not be the newest, which makes no difference.
func origin(d *bucket.Definition, key string, ts time.Time, now *time.Time) time.Time {
	switch {
	case d.Every != 0:
		return d.Fresh(key, around(now)).TS
	case ts.IsZero():
		return d.Fresh(key, longAgo).TS
	}
	return ts
}

// around returns an instant near the database's clock: the instant that decides if it is given,
// otherwise this machine's.
func around(now *time.Time) time.Time {
	if now != nil {
		return *now
	}
	return time.Now()
}

// never is a tick that does not end, in microseconds.
const never = 1e17

// tick returns the time between two ticks of a limit's clock, in microseconds. Statements that get
// it do not count edges of the calendar.
func tick(d *bucket.Definition) float64 {
	if d.Every != 0 {
		return never
	}
	return float64(d.Tick())
}

// size returns how many totals a row with slots has.
func size(d *bucket.Definition) int32 { return int32(d.Slots + 2) }

// spentEnd returns until when ahead counts spent tokens.
func spentEnd(d *bucket.Definition, s *bucket.Spent) *time.Time { return orNull(d.Counted(s.SpentEnd)) }

// many holds the grants of one statement.
type many struct {
	grants      []*Grant
	definitions []*Grant // the first grant of each run with the same definition
	places      []int32  // of each grant's definition in definitions, from 1
	prefetch    bool     // a grant prefetches
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

// sent returns the number of edges that a statement receives for each definition.
func (m *many) sent() (most int) {
	for _, g := range m.definitions {
		most = max(most, g.Definition.Sent())
	}
	return most
}

// edges returns the edges of all definitions, one definition after another.
func (m *many) edges(around time.Time) (edges, had []time.Time) {
	for _, g := range m.definitions {
		e, h := g.Definition.EdgesFrom(around, m.sent())
		edges, had = append(edges, e...), append(had, h...)
	}
	return edges, had
}

// args returns the arguments with which each statement for several rows begins: the key of each
// row, the place of its definition, its shard, its count and its need; then the names of the
// definitions. Shards are NULL if all are 0. Needs are NULL if each row needs its count.
func (m *many) args() []any {
	return append(make([]any, 0, 17), // 17 is the most that any statement has
		column(m.grants, func(g *Grant) string { return g.Key.Key }), m.places,
		columnIf(m.grants, func(g *Grant) bool { return g.Shard != 0 }, func(g *Grant) int32 { return int32(g.Shard) }),
		column(m.grants, func(g *Grant) float64 { return g.Count }),
		columnIf(m.grants, func(g *Grant) bool { return g.Need != g.Count }, func(g *Grant) float64 { return g.Need }),
		column(m.definitions, func(g *Grant) string { return g.Name }))
}

func (m *many) capacities() []float64 { return column(m.definitions, (*Grant).capacity) }

func (m *many) rates() []float64 {
	return column(m.definitions, func(g *Grant) float64 { return g.Definition.Rate })
}

func (m *many) ticks() []float64 {
	return column(m.definitions, func(g *Grant) float64 { return tick(&g.Definition) })
}

// leases returns of each row: the duration of its lease, the tokens to prefetch, the tokens of its
// count that may return to memory, the tokens spent of earlier leases, and the latest end of these.
// All are NULL if no grant prefetches.
func (m *many) leases() []any {
	return []any{
		prefetched(m, (*Grant).leased),
		prefetched(m, func(g *Grant) float64 { return g.Prefetch }),
		prefetched(m, func(g *Grant) float64 { return g.Out }),
		prefetched(m, func(g *Grant) float64 { return g.Spent.Spent }),
		prefetched(m, func(g *Grant) *time.Time { return spentEnd(&g.Definition, &g.Spent) }),
	}
}

// prefetched returns a column for grants that prefetch; nil if none does.
func prefetched[T any](m *many, of func(*Grant) T) []T {
	return columnIf(m.grants, func(*Grant) bool { return m.prefetch }, of)
}

// columnIf returns a column if a grant uses it, otherwise nil.
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
