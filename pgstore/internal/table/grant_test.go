package table

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

var quarterPast = time.Date(2026, 3, 14, 15, 9, 26, 535897000, time.UTC)

// randomGrants are grants of a row each, and the states in which these are to be.
func randomGrants(t *testing.T, random *rand.Rand, limits []ratelimit.Limit, n int) ([]Grant, []bucket.State) {
	t.Helper()
	grants, before := make([]Grant, n), make([]bucket.State, n)
	for i := range grants {
		limit, count := limits[random.IntN(len(limits))], float64(random.IntN(12))
		sliding := limit.Definition().Kind == bucket.SlidingWindow
		if sliding {
			count = min(count, limit.Definition().Rate)
		}
		call, err := decide.New(random.IntN(2) == 0 && !sliding, limit.ForN(fmt.Sprint(i), count))
		noError(t, err)
		a := &call.Demands[0]
		grants[i] = Grant{Change: a.Change(0, 0, count), Need: count + a.Floor}
		before[i] = bucket.State{
			Value: float64(random.IntN(20)) - 6,
			TS:    quarterPast.Add(time.Minute - time.Duration(random.IntN(300))*time.Second),
		}
		switch {
		case sliding:
			before[i] = randomSlots(random, a.Definition)
		case a.Definition.Every != 0: // on an edge or, mostly, on none
			before[i].TS = quarterPast.Add(24*time.Hour - time.Duration(random.IntN(200))*time.Hour)
		}
	}
	return grants, before
}

// randomSlots is the state of a sliding window that was taken from, now and then ahead
// of its time.
func randomSlots(random *rand.Rand, d bucket.Definition) bucket.State {
	at := quarterPast.Add(-time.Duration(random.IntN(180)) * time.Second)
	state := d.Fresh("k", at)
	for range random.IntN(6) {
		state, _ = d.Take(state, at, float64(random.IntN(8)), -float64(random.IntN(2)*10))
		at = at.Add(time.Duration(random.IntN(30)) * time.Second)
	}
	return state
}

// grantOf is a grant to one call.
func grantOf(r ratelimit.Request) Grant {
	d := bucket.Definition(r.Limit.Definition())
	return Grant{Change: decide.Change{Row: decide.Row{Key: decide.Key{Name: d.Name, Key: r.Key}}, Definition: d, Count: r.Count}, Need: r.Count}
}

// putAll writes the rows of grants.
func putAll(t *testing.T, db *pgtest.DB, table *Table, grants []Grant, states []bucket.State) {
	t.Helper()
	var batch pgx.Batch
	for i, g := range grants {
		table.QueuePut(&batch, g.Row, states[i])
	}
	noError(t, db.Pool.SendBatch(t.Context(), &batch).Close())
}

// TestGrantAgrees: what groups take in one statement, or one group in one of its own, is what the
// algebra takes, for each kind and for several at once. A paused row grants nothing. A grant prefetches
// what it said, or half of what is left if that is less. Only rows of those that prefetch are marked.
func TestGrantAgrees(t *testing.T) {
	t.Parallel()
	db, now := pgtest.New(t), quarterPast
	tokens := ratelimit.TokenBucket{Name: "bucket", Rate: 7, Period: time.Minute, Capacity: 20, MaxReserved: 15}
	window := ratelimit.FixedWindow{Name: "window", Rate: 7, Period: time.Minute, Capacity: 20, MaxReserved: 15}
	sliding := ratelimit.SlidingWindow{Name: "sliding", Rate: 20, Period: time.Minute, Slots: 6}
	quota := ratelimit.FixedWindow{Name: "quota", Rate: 7, Every: ratelimit.Day, Zone: "Asia/Tokyo", Capacity: 20, MaxReserved: 15}
	random := rand.New(rand.NewPCG(3, 14))
	outcomes := make(map[string]int)
	plain, distributed := New(db.Schema, false, time.Second), New(db.Schema, true, time.Second)
	for _, test := range []struct {
		table  *Table
		rows   int
		limits []ratelimit.Limit
	}{
		{plain, 5, []ratelimit.Limit{tokens}},
		{plain, 5, []ratelimit.Limit{window}},
		{plain, 5, []ratelimit.Limit{sliding}},
		{plain, 5, []ratelimit.Limit{quota}},
		{plain, 5, []ratelimit.Limit{tokens, window}},
		{plain, 5, []ratelimit.Limit{tokens, window, sliding, quota}},
		{distributed, 1, []ratelimit.Limit{tokens, window, quota}},
	} {
		for n := range 100 {
			grants, before := randomGrants(t, random, test.limits, 1+n%test.rows)
			for i := range grants {
				if random.IntN(4) == 0 { // a pause that is over now, or a microsecond later
					before[i].Paused = now.Add(time.Duration(random.IntN(2)) * time.Microsecond)
				}
				g := &grants[i]
				if g.Before, g.Past = before[i], now; random.IntN(2) > 0 {
					g.Lasts, g.Lowered, g.Prefetch = time.Second, g.Definition.Capacity, float64(random.IntN(8))
				}
			}
			noError(t, errOf(db.Pool.Exec(t.Context(), "DELETE FROM "+db.Schema+".rate_limits"))) // of which something is out
			putAll(t, db, test.table, grants, before)
			noError(t, test.table.Decider().Grant(t.Context(), db.Pool, grants, false, &now))
			marked, ahead := 0, 0
			noError(t, db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".rate_limits WHERE ahead IS NOT NULL").Scan(&marked))
			for i := range grants {
				g := &grants[i]
				want, ok := g.Definition.Take(before[i], now, g.Count, g.Floor)
				ok = ok && !before[i].Paused.After(now)
				more := max(0, min(g.Prefetch, want.Value/2, g.Definition.Capacity/2))
				want = g.Definition.Spend(want, now, more)
				if got := g.Taken; got.OK != ok || ok && (got.Extra != more || got.After.Value != want.Value || !got.After.TS.Equal(want.TS) || !reflect.DeepEqual(got.After.Slots, want.Slots)) {
					t.Fatalf("%v and %v besides of a %s with %v: got %+v, want %v, %v and %v", g.Count, g.Prefetch, g.Name, before[i], got, want, more, ok)
				}
				if waited := grantInTurnTo(t, db, test.table, g, before[i], now); waited.OK != ok || ok && waited.After.Value != want.Value+more {
					t.Fatalf("%v of a %s with %v, in turn: got %v, want %v %v", g.Count, g.Name, before[i], waited, want, ok)
				}
				outcomes[fmt.Sprint(ok, ok && g.Lasts > 0, ok && more > 0, ok && more == g.Prefetch)]++
				if ok && g.Lasts > 0 {
					ahead++
				}
			}
			if marked != ahead {
				t.Fatalf("%d rows are marked, want %d", marked, ahead)
			}
		}
	}
	if len(outcomes) != 6 || slices.Min(slices.Collect(maps.Values(outcomes))) < 20 {
		t.Errorf("%v, so this test tells little", outcomes)
	}
}

// grantInTurnTo is what became of a grant to a row in a state, that waits for the row.
func grantInTurnTo(t *testing.T, db *pgtest.DB, table *Table, g *Grant, before bucket.State, now time.Time) Taken {
	t.Helper()
	again := []Grant{{Change: g.Change, Need: g.Need}}
	putAll(t, db, table, again, []bucket.State{before})
	noError(t, table.Decider().Grant(t.Context(), db.Pool, again, true, &now))
	return again[0].Taken
}

// TestGrantPassesOver: a row that another transaction has locked grants nothing, and the others
// grant theirs. A lock behind a savepoint may not be seen: then nothing is granted.
func TestGrantPassesOver(t *testing.T) {
	db := pgtest.New(t)
	table, now := New(db.Schema, false, time.Second), quarterPast
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "l", Rate: 7, Period: time.Minute},
		ratelimit.SlidingWindow{Name: "l", Rate: 7, Period: time.Minute},
	}
	for savepoint, want := range map[string]struct {
		first bool
		code  string
	}{"": {true, ""}, "; SAVEPOINT s": {false, "55P03"}} {
		for kinds := range 8 { // one row or two, of one kind or both
			n := 1 + kinds/4
			grants, states := make([]Grant, n), make([]bucket.State, n)
			for i := range grants {
				grants[i] = grantOf(limits[kinds>>i&1].For(fmt.Sprint(i)))
				states[i] = grants[i].Definition.Fresh("k", now)
			}
			putAll(t, db, table, grants, states)
			tx, err := db.Pool.Begin(t.Context())
			noError(t, err)
			noError(t, errOf(tx.Exec(t.Context(), "SELECT 1"+savepoint, pgx.QueryExecModeSimpleProtocol)))
			last := len(grants) - 1
			noError(t, errOf(tx.Exec(t.Context(), table.common["await"], "l", fmt.Sprint(last), 0)))
			later, err := db.Pool.Exec(t.Context(), table.common["put"], "l", "later", 0, 1.0, now, nil, nil) // so that the snapshot ends behind the savepoint
			if err != nil || later.RowsAffected() != 1 {
				t.Fatal(err)
			}
			err = table.Decider().Grant(t.Context(), db.Pool, grants, false, &now)
			var pgErr *pgconn.PgError
			errors.As(err, &pgErr)
			if pgErr == nil && want.code != "" || pgErr != nil && pgErr.Code != want.code {
				t.Errorf("%d rows%s: error %v, want %q", n, savepoint, err, want.code)
			}
			for i := range grants {
				if ok := want.first && i != last; grants[i].Taken.OK != ok {
					t.Errorf("%d rows%s: row %d: got OK %v, want %v", n, savepoint, i, grants[i].Taken.OK, ok)
				}
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}
