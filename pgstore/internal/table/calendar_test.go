package table

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Edges that are not those around the database's clock, since the machine's is years away, grant
// nothing that they cannot count: of a row that is there nothing, and one that is made begins
// now.
func TestCalendarOfAnotherTime(t *testing.T) {
	db := pgtest.New(t)
	table, ctx := New(db.Schema, false, time.Second), t.Context()
	limit := ratelimit.FixedWindow{Name: "quota", Rate: 10, Every: ratelimit.Month}
	d := bucket.Definition(limit.Definition())
	for name, around := range map[string]time.Time{"behind": time.Now().AddDate(-5, 0, 0), "ahead": time.Now().AddDate(5, 0, 0)} {
		edges, had := d.Edges(around)
		call, err := decide.New(false, limit.For(name))
		if err != nil {
			t.Fatal(err)
		}
		change := call.Demands[0].Change(0, 0, 4)
		take := func() (taken Taken) {
			t.Helper()
			args := []any{change.Name, change.Key.Key, int32(0), d.Capacity, change.Count, nil, edges, had, d.Rate, 0.0, nil}
			if err := taken.scan(db.Pool.QueryRow(ctx, table.kinds["calendar"]["take"].sql, args...), &d, &taken.At, &taken.Xid); err != nil {
				t.Fatal(err)
			}
			return taken
		}
		if made := take(); !made.OK || made.After.Value != 6 || made.At.Sub(made.After.TS).Abs() > time.Minute {
			t.Errorf("%s: made %+v, want 6 left now", name, made)
		}
		if again := take(); again.OK {
			t.Errorf("%s: took %+v by edges of another time", name, again)
		}
		g := Grant{Change: change, Need: 4}
		g.Count = 4
		args := []any{g.Name, g.Key.Key, int32(0), g.Count, g.Need, d.Capacity, d.Rate, nil, edges, had}
		if err := g.scan(db.Pool.QueryRow(ctx, table.kinds["calendar"]["grant"].sql, args...), nil); err != nil || g.Taken.OK {
			t.Errorf("%s: granted %+v, %v by edges of another time", name, g.Taken, err)
		}
		if taken, err := takeIn(ctx, db, table, &change); err != nil || !taken.OK || taken.After.Value != 2 {
			t.Errorf("%s: then got %+v, %v, want 2 left", name, taken, err)
		}
	}
}

func takeIn(ctx context.Context, db *pgtest.DB, table *Table, c *decide.Change) (taken Taken, err error) {
	err = pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		taken, err = table.Take(ctx, tx, false, c, nil)
		return err
	})
	return taken, err
}
