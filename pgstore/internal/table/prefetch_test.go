package table

import (
	"context"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// What a grant prefetches is what it said, or half of what is left if that is less; and what
// is left tells which, for each kind and for one row and several, of which some do not. Only rows
// of those that do are marked.
func TestPrefetch(t *testing.T) {
	db := pgtest.New(t)
	now := quarterPast
	tokens := ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: time.Minute, Capacity: 20}
	window := ratelimit.FixedWindow{Name: "window", Rate: 7, Period: time.Minute, Capacity: 20}
	sliding := ratelimit.SlidingWindow{Name: "sliding", Rate: 20, Period: time.Minute, Slots: 6}
	quota := ratelimit.FixedWindow{Name: "quota", Rate: 7, Every: 2 * ratelimit.Day, Capacity: 20}
	random := rand.New(rand.NewPCG(3, 14))
	halves, wholes, nothing := 0, 0, 0
	plain, distributed := New(db.Schema, false, time.Second), New(db.Schema, true, time.Second)
	for _, test := range []struct {
		table  *Table
		limits []ratelimit.Limit
		rows   int
	}{
		{plain, []ratelimit.Limit{tokens}, 3},
		{plain, []ratelimit.Limit{window}, 3},
		{plain, []ratelimit.Limit{sliding}, 3},
		{plain, []ratelimit.Limit{quota}, 3},
		{plain, []ratelimit.Limit{tokens, window}, 3},
		{plain, []ratelimit.Limit{tokens, window, sliding}, 3},
		{distributed, []ratelimit.Limit{tokens}, 1},
		{distributed, []ratelimit.Limit{window}, 1},
		{distributed, []ratelimit.Limit{quota}, 1},
	} {
		for n := range 60 {
			grants, before := randomGrants(t, random, test.limits, 1+n%test.rows)
			for i := range grants {
				g := &grants[i]
				g.Before, g.Past = before[i], now
				if random.IntN(3) > 0 {
					g.Lasts, g.Lowered, g.Prefetch = time.Second, g.Definition.Capacity, float64(random.IntN(8))
				}
			}
			if _, err := db.Pool.Exec(t.Context(), "DELETE FROM "+db.Schema+".rate_limits"); err != nil { // of which something is out
				t.Fatal(err)
			}
			putAll(t, db, test.table, grants, before)
			noError(t, test.table.Decider().Grant(t.Context(), db.Pool, grants, false, &now))
			marked, ahead := 0, 0
			noError(t, db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".rate_limits WHERE ahead IS NOT NULL").Scan(&marked))
			for i := range grants {
				g := &grants[i]
				left, ok := g.Definition.Take(before[i], now, g.Count, g.Floor)
				if g.Taken.OK != ok {
					t.Fatalf("%v of %v: got %v, want %v", g.Count, before[i], g.Taken.OK, ok)
				}
				if !ok {
					continue
				}
				want := max(0, min(g.Prefetch, left.Value/2, g.Definition.Capacity/2))
				after := g.Definition.Spend(left, now, want)
				if n := g.Taken.Prefetched; n != want || g.Taken.After.Value != left.Value-want || !g.Taken.After.TS.Equal(after.TS) || !reflect.DeepEqual(g.Taken.After.Slots, after.Slots) {
					t.Fatalf("%v and %v besides of %v: took %v and left %v, want %v and %v", g.Count, g.Prefetch, before[i], n, g.Taken.After, want, after)
				}
				if g.Lasts > 0 {
					ahead++
				}
				switch want {
				case 0:
					nothing++
				case g.Prefetch:
					wholes++
				default:
					halves++
				}
			}
			if marked != ahead {
				t.Fatalf("%d rows are marked, want %d", marked, ahead)
			}
		}
	}
	if min(halves, wholes, nothing) < 20 {
		t.Errorf("%d times half, %d times all and %d times nothing, so this tests little", halves, wholes, nothing)
	}
}

// Nothing is given back to a row that is not there, or whose slots another definition has
// written, and neither is tried again; to one that another transaction has locked it is.
func TestReturnElsewhere(t *testing.T) {
	db := pgtest.New(t)
	table, now := New(db.Schema, false, time.Second), quarterPast
	limit := ratelimit.SlidingWindow{Name: "sliding", Rate: 20, Period: time.Minute, Slots: 6}
	other := limit
	other.Slots = 7
	d, otherwise := bucket.Definition(limit.Definition()), bucket.Definition(other.Definition())
	for _, test := range []struct {
		key    string
		change func(*bucket.State)
		given  bool
	}{
		{"by the same", func(*bucket.State) {}, true},
		{"by another", func(s *bucket.State) { *s = otherwise.Refill(*s, now) }, false},
		{"by one without them", func(s *bucket.State) { s.Slots = nil }, false},
	} {
		row := decide.Row{Key: decide.Key{Name: "sliding", Key: test.key}}
		state := d.Spend(d.Fresh("", now), now, 9)
		r := bucket.Return{Count: 5, Taken: state.TS, End: state.TS.Add(d.SlotWidth())}
		test.change(&state)
		putAll(t, db, table, []Grant{{Change: decide.Change{Row: row, Definition: d}}}, []bucket.State{state})
		if done, err := table.Return(t.Context(), db.Pool, row, &d, &r, false, &now); !done || err != nil {
			t.Fatal(done, err)
		}
		want := state
		if test.given {
			want = d.Spend(state, now, -5)
		}
		if got := read(t, db, table, row); got.Value != want.Value || !reflect.DeepEqual(got.Slots, want.Slots) {
			t.Errorf("written %s: %v, want %v", test.key, got, want)
		}
	}
	for _, limit := range []ratelimit.Limit{
		limit,
		ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: time.Minute},
		ratelimit.FixedWindow{Name: "window", Rate: 10, Period: time.Minute},
	} {
		d := bucket.Definition(limit.Definition())
		row := decide.Row{Key: decide.Key{Name: d.Name, Key: "k"}}
		state := d.Spend(d.Fresh("k", now), now, 9)
		r := bucket.Return{Count: 5, Taken: state.TS, End: state.TS.Add(time.Second)}
		if done, err := table.Return(t.Context(), db.Pool, row, &d, &r, false, &now); !done || err != nil {
			t.Errorf("%s: to a row that is not there: %v, %v", d.Name, done, err)
		}
		putAll(t, db, table, []Grant{{Change: decide.Change{Row: row, Definition: d}}}, []bucket.State{state})
		unlock := lockRow(t, db, table, row)
		if done, err := table.Return(t.Context(), db.Pool, row, &d, &r, false, &now); done || err != nil {
			t.Errorf("%s: to a row that is locked: %v, %v", d.Name, done, err)
		}
		unlock()
	}
}

// read returns the state of a row.
func read(t *testing.T, db *pgtest.DB, table *Table, row decide.Row) bucket.State {
	t.Helper()
	rows, now := Rows{Rows: []decide.Row{row}}, quarterPast
	noError(t, table.Read(t.Context(), db.Pool, &rows, &now))
	return rows.States[0]
}

// lockRow has somebody lock a row.
func lockRow(t *testing.T, db *pgtest.DB, table *Table, row decide.Row) (unlock func()) {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	noError(t, err)
	var tag pgconn.CommandTag
	if tag, err = tx.Exec(t.Context(), table.common["await"], row.Name, row.Key.Key, row.Shard); err != nil || tag.RowsAffected() != 1 {
		t.Fatal(tag, err)
	}
	return func() { noError(t, tx.Rollback(t.Context())) }
}

// A return that is under way is heard to its end, however long it took to get there.
func TestReturnIsHeard(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	sends := 0
	late := &onBatch{do: func(*pgx.Conn) {
		if sends++; sends == 2 { // the row is locked
			cancel()
		}
	}}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = late }))
	table, now := New(db.Schema, false, time.Second), quarterPast
	d := bucket.Definition(ratelimit.FixedWindow{Name: "window", Rate: 20, Period: time.Hour}.Definition())
	row := decide.Row{Key: decide.Key{Name: d.Name, Key: "k"}}
	state := d.Spend(d.Fresh("k", now), now, 15)
	putAll(t, db, table, []Grant{{Change: decide.Change{Row: row, Definition: d}}}, []bucket.State{state})
	sends = 0
	r := bucket.Return{Count: 5, Taken: state.TS, End: now.Add(time.Hour)}
	if done, err := table.Return(ctx, db.Pool, row, &d, &r, false, &now); !done || err != nil || ctx.Err() == nil {
		t.Fatal(done, err, ctx.Err())
	}
	if got := d.Refill(read(t, db, table, row), now).Value; got != 10 {
		t.Errorf("there are %v, want 10", got)
	}
}
