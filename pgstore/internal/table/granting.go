package table

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// grant takes the tokens of grants, in the order of their rows, from rows that are not locked.
func (t *Table) grant(ctx context.Context, q Querier, grants []Grant, now *time.Time) error {
	if g := &grants[0]; len(grants) == 1 && !g.TakesExtra() {
		if g.never() {
			return nil
		}
		s := &t.kinds[g.Definition.Form()].grant
		return g.scan(q.QueryRow(ctx, s.sql, s.args(g, now)...), now)
	}
	var batch pgx.Batch // of one statement mostly, and always one transaction
	t.queue(&batch, grants, now)
	err := q.SendBatch(ctx, &batch).Close()
	if err != nil { // nothing is taken, even if rows were read
		for i := range grants {
			grants[i].Taken = Taken{}
		}
	}
	return err
}

// queue puts into a batch the statements for several grants: one for each kind.
func (t *Table) queue(batch *pgx.Batch, grants []Grant, now *time.Time) {
	for _, same := range byKind(grants) {
		all, k := manyOf(same), t.kinds[same[0].Definition.Form()]
		if all.prefetch || k.grantMany.sql == "" {
			queueMany(batch, &k.prefetch, all, true, now)
		} else {
			queueMany(batch, &k.grantMany, all, false, now)
		}
	}
}

// queueMany puts into a batch a statement for grants of one kind. With prefetch its rows have the
// number of prefetched tokens.
func queueMany(batch *pgx.Batch, s *statement[*many], all *many, prefetch bool, now *time.Time) {
	batch.Queue(s.sql, s.args(all, now)...).Query(scanGrants(all.grants, prefetch, now))
}

// byKind divides grants by their kinds of limits, each in the order given.
func byKind(grants []Grant) (kinds [][]*Grant) {
	for i := range grants {
		g := &grants[i]
		if g.never() {
			continue
		}
		n := slices.IndexFunc(kinds, func(same []*Grant) bool { return same[0].Definition.Form() == g.Definition.Form() })
		if n < 0 {
			n, kinds = len(kinds), append(kinds, make([]*Grant, 0, len(grants)))
		}
		kinds[n] = append(kinds[n], g)
	}
	return kinds
}

// scan reads the row that a grant returned, if there is one.
func (g *Grant) scan(row pgx.Row, now *time.Time) error {
	var r returned
	err := row.Scan(r.fields(g)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err == nil {
		r.report(g, now)
	}
	return err
}

// returned is a row that a grant returned. It has no pause.
type returned struct {
	state
	at   moment
	more *float64 // tokens prefetched
}

// fields returns where to scan a row of a grant like g.
func (r *returned) fields(g *Grant) []any {
	fields := append(r.room[:0], &r.value, &r.ts, &r.at)
	if g.Definition.Slotted() {
		fields = append(fields, &r.slots)
	}
	return fields
}

// report sets the outcome of a grant to taken.
func (r *returned) report(g *Grant, now *time.Time) {
	g.Taken = Taken{At: r.at.Time}
	g.Taken.After, g.Taken.OK = r.get()
	if g.TakesExtra() && r.more != nil {
		g.Taken.Extra = *r.more
	}
	g.Taken.charge(&g.Definition, now)
}

// scanGrants returns the function that reads the rows of a statement for several grants of one
// kind. With prefetch, they have the number of prefetched tokens.
func scanGrants(grants []*Grant, prefetch bool, now *time.Time) func(pgx.Rows) error {
	var (
		r returned
		i int64
	)
	fields := r.fields(grants[0])
	if prefetch {
		fields = append(fields, &r.more)
	}
	return each(append(fields, &i), func() { r.report(grants[i-1], now) })
}

// bucketGrant returns the arguments of a grant, which takes a count from a row with enough tokens.
func bucketGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Capacity, d.Rate, d.Micros(), now}
}

// bucketMany returns the arguments of a grant for several rows, in the order given. The statement
// unnests two arrays and subscripts the others, which costs less. Its condition on i always holds.
// It makes the planner expect few rows and find each by the index, even in a plan made while the
// table was small.
func bucketMany(m *many, now *time.Time) []any {
	periods := column(m.definitions, func(g *Grant) float64 { return g.Definition.Micros() })
	return append(m.args(), m.capacities(), m.rates(), periods, now)
}

// bucketPrefetch returns the arguments of a grant for several rows without slots. Where lasts is
// not NULL it takes more for a lease, at most half of the tokens that are left. Row and leases
// together never exceed the capacity: a bucket counts with a capacity lower by the refill during
// the lease, and a window's lease ends with the window.
//
// A row above the whole capacity has been raised meanwhile. A prefetch that no call shares takes
// nothing from it, since it would cut the row.
//
// Afterwards ahead has the tokens that were out less those spent since, the tokens of calls that
// may still put them back, and the new lease. That is at most half of the capacity, so the tokens
// of killed processes do not add up. ahead begins from 0 once nothing is out and nothing can be
// subtracted any more: for a bucket, when its tokens have faded and their end is a second past. The
// sub-select in SET names a value that is used twice; OFFSET 0 keeps the planner from computing it
// twice.
func bucketPrefetch(m *many, now *time.Time) []any {
	whole := column(m.definitions, func(g *Grant) float64 { return g.Definition.Capacity })
	return append(append(append(bucketMany(m, now), m.ticks()), m.leases()...), whole)
}

// calendarGrant returns the arguments of a grant by the calendar.
func calendarGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	edges, had := d.Edges(around(now))
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Capacity, d.Rate, now, edges, had}
}

// calendarPrefetch returns the arguments of a grant by the calendar for several rows. Where lasts
// is not NULL it prefetches, for a lease to the next edge. The edges are those of all definitions,
// as many for each.
func calendarPrefetch(m *many, now *time.Time) []any {
	edges, had := m.edges(around(now))
	return append(append(m.args(), m.capacities(), m.rates(), edges, had, int32(m.sent()), now), m.leases()...)
}

// slotsGrant returns the arguments of a sliding window's grant, for the slot of now.
func slotsGrant(g *Grant, now *time.Time) []any {
	d := &g.Definition
	return []any{g.Name, g.Key.Key, int32(g.Shard), g.Count, g.Need, d.Rate, tick(d), size(d), now}
}

// slotsPrefetch returns the arguments of a sliding window's grant for several rows. Where lasts is
// not NULL it prefetches, for a lease that ends with the slot of now.
func slotsPrefetch(m *many, now *time.Time) []any {
	sizes := column(m.definitions, func(g *Grant) int32 { return size(&g.Definition) })
	return append(append(m.args(), m.rates(), m.ticks(), sizes, now), m.leases()...)
}
