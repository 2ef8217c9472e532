package table

import (
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Grant is the tokens that several calls take together from one row: all of them or none.
type Grant struct {
	decide.Change         // Count is the sum of the calls
	Need          float64 // the tokens that the row must have to grant all calls

	// For a grant that prefetches, which takes more for a lease:
	Lasts        time.Duration // of a token bucket's lease; a window's ends with the window; 0 for a grant that does not prefetch
	Lowered      float64       // the capacity to count with: lower by the tokens refilled during the lease
	Prefetch     float64       // tokens to take for the lease; fewer if half of those left, or the bound on those out, is less
	Out          float64       // the part of Count that may still return to memory
	bucket.Spent               // of earlier leases

	// Pipelined sends a grant that waits for its row together with its COMMIT, in one round trip.
	// Calls behind it, also in other processes, then wait for one round trip only. A caller that
	// gives up may have taken all the same, as with any statement under way. So Pipelined is for
	// rows that others lock only briefly, and waits no longer than longestTurn. Grants that
	// prefetch are all pipelined; their answer is awaited even after their callers gave up.
	Pipelined bool

	Added any // what the layer that added to the grant keeps with it

	Taken  Taken
	Waited time.Duration // for its turn at the row
	turn   bool          // it has had its turn, or needs none
}

// End returns when the lease of a granted Grant ends, on the database's clock.
func (g *Grant) End() time.Time { return g.ends(g.Taken.After.TS) }

// ends returns when a lease ends whose row was left at ts.
func (g *Grant) ends(ts time.Time) time.Time { return g.Definition.End(ts, ts, g.Lasts) }

// TakesExtra reports whether a grant takes more than its calls want, for a lease.
func (g *Grant) TakesExtra() bool { return g.Lasts > 0 }

// prefetches reports whether one of the grants prefetches.
func prefetches(grants []Grant) bool {
	for i := range grants { // each is half a kilobyte
		if grants[i].TakesExtra() {
			return true
		}
	}
	return false
}

// capacity returns the capacity that a grant counts with.
func (g *Grant) capacity() float64 {
	if g.TakesExtra() {
		return g.Lowered
	}
	return g.Definition.Capacity
}

// never reports whether a grant needs more than a row can have. Statements do not check that.
func (g *Grant) never() bool { return g.Need > g.capacity() }

// leased returns how long a grant's lease lasts, in microseconds; nil without a lease.
func (g *Grant) leased() *float64 {
	if !g.TakesExtra() {
		return nil
	}
	lasts := micros(g.ends(epoch).Sub(epoch))
	return &lasts
}

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

// leases returns five columns: how long each lease lasts, the tokens to prefetch, the tokens of the
// count that may return to memory, the spent tokens of earlier leases, and the latest end of these.
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
