package table

import (
	"context"
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
