package pgstore_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// eachTake runs test for each way to take.
func eachTake(t *testing.T, test func(t *testing.T, db *pgtest.DB, c *clock, store *pgstore.Store, allow allowing)) {
	t.Helper()
	db := pgtest.New(t)
	for _, form := range takeForms {
		t.Run(form.name, func(t *testing.T) {
			execIn(t, db, "TRUNCATE {schema}.rate_limits")
			c := newClock()
			store := newStore(t, db, onClock(c), form.change)
			test(t, db, c, store, func(requests ...ratelimit.Request) (ratelimit.Result, error) {
				return form.take(t.Context(), db.Pool, store, requests...)
			})
		})
	}
}

type allowing func(requests ...ratelimit.Request) (ratelimit.Result, error)

// perDay is a limit whose window begins at noon.
func perDay(name string, rate float64) ratelimit.FixedWindow {
	return ratelimit.FixedWindow{Name: name, Rate: rate, Period: 24 * time.Hour, Start: noon}
}

func TestSeveralAllOrNothing(t *testing.T) {
	t.Parallel()
	eachTake(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store, allow allowing) {
		// The one that is short comes first, last and between in the order of
		// the locks.
		for _, short := range []string{"a", "m", "z"} {
			requests := []ratelimit.Request{perDay("c", 10).ForN(short, 4), slow("b", 10).ForN(short, 4), perDay(short, 3).ForN(short, 3)}
			result, err := allow(requests...)
			mustTake(t, result, err)
			before := rowsOf(t, db, "b")
			result, err = allow(requests...)
			if err != nil || result.OK || result.Receipt != nil {
				t.Errorf("got OK %v, receipt %v, error %v", result.OK, result.Receipt, err)
			}
			if result.Request != requests[2] {
				t.Errorf("got %+v, want what was short", result.Request)
			}
			for i, want := range []struct {
				ok   bool
				left float64
			}{{true, 6}, {true, 6}, {false, 0}} {
				if got := result.Each()[i]; got.OK != want.ok || got.Value != want.left {
					t.Errorf("%d: got OK %v, %v left, want %v", i, got.OK, got.Value, want)
				}
			}
			if got := rowsOf(t, db, "b"); !slices.Equal(got, before) {
				t.Errorf("got  %q\nwant %q", got, before)
			}
			wantLeft(t, store, requests[0], 6)
		}
	})
}

func TestSeveralShardedAndNot(t *testing.T) {
	t.Parallel()
	eachTake(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store, allow allowing) {
		plain, sharded := slow("plain", 100), slow("sharded", 40)
		sharded.Shards = 4
		for range 3 { // the last takes from several shards
			result, err := allow(plain.ForN("k", 10), sharded.ForN("k", 10))
			mustTake(t, result, err)
		}
		before := rowsOf(t, db, "sharded")
		result, err := allow(sharded.ForN("k", 11), plain.For("k"))
		if err != nil || result.OK || !result.Each()[1].OK {
			t.Errorf("got OK %v, %+v, error %v", result.OK, result.Each(), err)
		}
		if got := rowsOf(t, db, "sharded"); !slices.Equal(got, before) {
			t.Errorf("got  %q\nwant %q", got, before)
		}
		result, err = allow(sharded.ForN("k", 10), plain.For("k"))
		mustTake(t, result, err)
		wantLeft(t, store, sharded.ForN("k", 0), 0)
		wantLeft(t, store, plain.ForN("k", 0), 69)
	})
}

// TestSeveralInSavepoints mixes calls with the caller's own savepoints.
func TestSeveralInSavepoints(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := newStore(t, db, onClock(newClock()))
	a, b, sharded := perDay("a", 100), slow("b", 100), slow("s", 40)
	sharded.Shards = 4
	requests := []ratelimit.Request{b.ForN("k", 10), a.ForN("k", 10), sharded.ForN("k", 4)}
	never := append(slices.Clone(requests), perDay("short", 1).For("k"))
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			ctx := t.Context()
			tx := begin(t, db, level)
			takes := func(tx pgx.Tx, ok bool, requests ...ratelimit.Request) {
				t.Helper()
				result, err := store.AllowTx(ctx, tx, requests...)
				if err != nil || result.OK != ok {
					t.Fatalf("got OK %v, error %v, want %v", result.OK, err, ok)
				}
			}
			takes(tx, true, requests...)
			takes(tx, true, requests...) // twice in one transaction
			takes(tx, true, perDay("short", 1).For("k"))
			inSavepoint(t, tx, pgx.Tx.Rollback, func(tx pgx.Tx) {
				takes(tx, true, requests...)
				takes(tx, false, never...)
				inSavepoint(t, tx, pgx.Tx.Commit, func(tx pgx.Tx) { takes(tx, true, requests...) })
			})
			inSavepoint(t, tx, pgx.Tx.Commit, func(tx pgx.Tx) {
				takes(tx, false, never...)
				takes(tx, true, requests...)
				inSavepoint(t, tx, pgx.Tx.Rollback, func(tx pgx.Tx) { takes(tx, true, requests...) })
				takes(tx, false, never...)
			})
			takes(tx, false, never...)
			must(t, tx.Commit(ctx))
			for _, r := range requests {
				wantLeft(t, store, r.Limit.ForN("k", 0), r.Limit.Definition().Capacity-3*r.Count)
				should(t, store.Reset(ctx, r.Limit, r.Key))
			}
			should(t, store.Reset(ctx, perDay("short", 1), "k"))
		})
	}
}

// TestSeveralReadTheClockEach: in the simple protocol all takes of a call are
// one message. The later ones must not count from the time before the wait of
// the first: their rows may have been taken from, filled up and deleted since.
func TestSeveralReadTheClockEach(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, mode := range queryModes {
		t.Run(mode.name, func(t *testing.T) {
			db, store := setUp(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode.mode }))
			first, second := slow("a", 10), ratelimit.TokenBucket{Name: "b", Rate: 10, Period: time.Millisecond}
			holder, waiter := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
			result, err := store.AllowTx(t.Context(), holder, first.For("k"))
			mustTake(t, result, err)
			later := allowLater(store, waiter, first.For("k"), second.ForN("k", 10))
			waitsForLock(t, db, waiter)
			mustAllow(t, store, second.ForN("k", 10))
			eventually(t, "the second is full again", func() bool {
				full, err := store.Check(t.Context(), second.ForN("k", 10))
				return err == nil && full.OK
			})
			must(t, store.Reset(t.Context(), second, "k"))
			var pruned time.Time
			must(t, db.Pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&pruned))
			must(t, holder.Rollback(t.Context()))
			taken := <-later
			mustTake(t, taken.Result, taken.err)
			must(t, waiter.Commit(t.Context()))
			var ts time.Time
			must(t, db.Pool.QueryRow(t.Context(), "SELECT ts FROM "+db.Schema+".rate_limits WHERE name = 'b'").Scan(&ts))
			if ts.Before(pruned) {
				t.Errorf("the second counts from %v before it was taken from", pruned.Sub(ts))
			}
		})
	}
}
