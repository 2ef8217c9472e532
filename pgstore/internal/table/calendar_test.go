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
// nothing, of a row that is there and of a key that has none. The row that is made is full, as no
// row is, and stands on an edge once it was taken from by edges of now.
func TestCalendarOfAnotherTime(t *testing.T) {
	db := pgtest.New(t)
	table, ctx := New(db.Schema, false, time.Second), t.Context()
	limit := ratelimit.FixedWindow{Name: "quota", Rate: 10, Every: ratelimit.Month}
	d := bucket.Definition(limit.Definition())
	for name, around := range map[string]time.Time{"behind": time.Now().AddDate(-5, 0, 0), "ahead": time.Now().AddDate(5, 0, 0)} {
		edges, had := d.Edges(around)
		change := grantOf(limit.ForN(name, 4)).Change
		refused := func(what string) {
			t.Helper()
			var taken Taken
			args := []any{change.Name, change.Key.Key, int32(0), d.Capacity, change.Count, nil, edges, had, d.Rate, 0.0, nil, d.Fresh("", longAgo).TS}
			if err := taken.scan(db.Pool.QueryRow(ctx, table.kinds[bucket.CalendarWindow].take.sql, args...), &d, all, nil); err != nil || taken.OK {
				t.Errorf("%s, %s: took %+v, %v by edges of another time", name, what, taken, err)
			}
			g := Grant{Change: change, Need: 4}
			g.Count = 4
			args = []any{g.Name, g.Key.Key, int32(0), g.Count, g.Need, d.Capacity, d.Rate, nil, edges, had}
			if err := g.scan(db.Pool.QueryRow(ctx, table.kinds[bucket.CalendarWindow].grant.sql, args...), nil); err != nil || g.Taken.OK {
				t.Errorf("%s, %s: granted %+v, %v by edges of another time", name, what, g.Taken, err)
			}
		}
		refused("a new key")
		for left := 6.0; left >= 2; left -= 4 {
			taken, err := takeIn(ctx, db, table, &change)
			if want := d.Fresh("", time.Now()).TS; err != nil || !taken.OK || taken.After.Value != left || !taken.After.TS.Equal(want) {
				t.Errorf("%s: then got %+v, %v, want %v left since %v", name, taken, err, left, want)
			}
			refused("its row")
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
