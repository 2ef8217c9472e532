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
		s := &t.of(&g.Definition).grant
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
		all, k := manyOf(same), t.of(&same[0].Definition)
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
		g.Taken.Prefetched = *r.more
	}
	g.Taken.charge(&g.Definition, now)
}

// scanGrants returns the function that reads the rows of a statement for several grants of one
// kind. With prefetch, they have the number of prefetched tokens.
func scanGrants(grants []*Grant, prefetch bool, now *time.Time) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var (
			r returned
			i int64
		)
		fields := r.fields(grants[0])
		if prefetch {
			fields = append(fields, &r.more)
		}
		fields = append(fields, &i)
		for rows.Next() {
			if err := rows.Scan(fields...); err != nil {
				return err
			}
			r.report(grants[i-1], now)
		}
		return rows.Err()
	}
}
