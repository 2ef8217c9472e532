package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/slots"
)

// grant takes the tokens of grants, in the order of their rows, from rows that are not locked.
func (t *Table) grant(ctx context.Context, q Querier, grants []Grant, now *time.Time) error {
	if g := &grants[0]; len(grants) == 1 && !g.prefetches() {
		if g.never() {
			return nil
		}
		sql, args := t.forGrant("grant", g, now)
		return g.scan(q.QueryRow(ctx, sql, args...), now)
	}
	var batch pgx.Batch // of one statement mostly, and one transaction in any case
	t.queue(&batch, grants, now)
	err := q.SendBatch(ctx, &batch).Close()
	if err != nil { // nothing is taken, even if rows were read
		for i := range grants {
			grants[i].Taken = Taken{}
		}
	}
	return err
}

// forGrant is a statement for a grant of one row, with its arguments.
func (t *Table) forGrant(name string, g *Grant, now *time.Time) (sql string, args []any) {
	s, _ := t.of(&g.Definition, name)
	return s.with(values{row: g.Row, definition: &g.Definition, count: g.Count, need: g.Need, now: now})
}

// queue puts into a batch the statements for several grants.
func (t *Table) queue(batch *pgx.Batch, grants []Grant, now *time.Time) {
	alike, others := t.sorts(grants, t.statistics.known(batch))
	if len(alike) > 0 {
		g := alike[0]
		s, _ := t.of(&g.Definition, "grant_alike")
		sql, args := s.with(values{row: g.Row, definition: &g.Definition, count: g.Count, need: g.Need, now: now, many: &many{grants: alike}})
		batch.Queue(sql, args...).Query(scanAlike(alike, now))
	}
	for _, grants := range others {
		t.queueMany(batch, grants, "", now)
	}
}

// fewAlike is the number of rows that are alike, beside others, below which they are not worth
// a statement of their own: beginning one costs the server as much as they save.
const fewAlike = 24

// sorts divides grants into those that take the same from rows of one limit, if that is
// wanted and has a statement, and the others of each kind; each in the order given.
func (t *Table) sorts(grants []Grant, scan bool) (alike []*Grant, others [][]*Grant) {
	var common *Grant
	if scan {
		common = usual(grants)
		if _, scan = t.of(&common.Definition, "grant_alike"); scan {
			alike = make([]*Grant, 0, len(grants))
		}
	}
	ofKind := func(g *Grant) int {
		return slices.IndexFunc(others, func(same []*Grant) bool { return same[0].Definition.Statements() == g.Definition.Statements() })
	}
	for i := range grants {
		switch g := &grants[i]; {
		case g.never():
		case scan && g.alike(common):
			alike = append(alike, g)
		default:
			n := ofKind(g)
			if n < 0 {
				n, others = len(others), append(others, make([]*Grant, 0, len(grants)-len(alike)))
			}
			others[n] = append(others[n], g)
		}
	}
	if len(alike) == 0 || len(alike) > fewAlike {
		return alike, others
	}
	if n := ofKind(common); n >= 0 {
		others[n] = append(others[n], alike...)
		slices.SortFunc(others[n], func(g, h *Grant) int { return g.Row.Compare(h.Row) })
		alike = nil
	}
	return alike, others
}

// usual is the grant that most of grants are like; any, if there is no such majority.
func usual(grants []Grant) (usual *Grant) {
	votes := 0
	for i := range grants {
		switch g := &grants[i]; {
		case votes == 0:
			usual, votes = g, 1
		case g.alike(usual):
			votes++
		default:
			votes--
		}
	}
	return usual
}

// scan reads the row that a grant returned, if it did.
func (g *Grant) scan(row pgx.Row, now *time.Time) error {
	var r returned
	err := row.Scan(r.fields(g)...)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err == nil {
		r.tell(g, now)
	}
	return err
}

// returned is a row that a grant returned.
type returned struct {
	value  float64
	ts, at time.Time
	slots  []float64
	more   *float64 // that was prefetched
	into   [6]any   // room for the fields
}

// fields are where a row of such a grant is read to.
func (r *returned) fields(g *Grant, more ...any) []any {
	fields := append(r.into[:0], &r.value, &r.ts, &r.at)
	if g.Definition.Slotted() {
		fields = append(fields, &r.slots)
	}
	return append(fields, more...)
}

// tell tells a grant that it was taken.
func (r *returned) tell(g *Grant, now *time.Time) {
	g.Taken = Taken{OK: true, After: bucket.State{Value: r.value, TS: r.ts}, At: r.at}
	if r.slots != nil {
		g.Taken.After.Slots = slots.Read(r.slots, r.value)
		r.slots = nil // of which it has a part
	}
	if g.prefetches() && r.more != nil {
		g.Taken.prefetched = *r.more
	}
	g.Taken.charge(&g.Definition, now)
}

// scanAlike reads the rows that a statement for grants that are alike returned: those of an
// index, mostly in its order.
func scanAlike(grants []*Grant, now *time.Time) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var (
			r    returned
			key  pgtype.DriverBytes
			next int
		)
		fields := r.fields(grants[0], &key)
		for rows.Next() {
			if err := rows.Scan(fields...); err != nil {
				return err
			}
			if next == len(grants) || grants[next].Key.Key != string(key) {
				i, ok := slices.BinarySearchFunc(grants, string(key), func(g *Grant, key string) int { return strings.Compare(g.Key.Key, key) })
				if !ok {
					return fmt.Errorf("key %q was not asked for", key)
				}
				next = i
			}
			r.tell(grants[next], now)
			next++
		}
		return rows.Err()
	}
}

// scanGrants reads the rows that a statement for several grants of like kinds returned, which
// may have prefetched.
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
			r.tell(grants[i-1], now)
		}
		return rows.Err()
	}
}

// queueMany puts into a batch grants of several rows, of limits of one kind; in turn or not.
func (t *Table) queueMany(batch *pgx.Batch, grants []*Grant, turn string, now *time.Time) {
	all, d := manyOf(grants), &grants[0].Definition
	s, ok := t.of(d, "grant_many"+turn)
	prefetch := all.prefetch || !ok
	if prefetch {
		s, _ = t.of(d, "prefetch_many"+turn)
	}
	sql, args := s.with(values{many: all, now: now})
	batch.Queue(sql, args...).Query(scanGrants(grants, prefetch, now))
}
