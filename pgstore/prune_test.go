package pgstore_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// pruneLimits hold 8 tokens and get one every hour, or eight in eight.
func pruneLimits() []ratelimit.Limit {
	const period = 8 * time.Hour
	return []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "b", Rate: 8, Period: period},
		ratelimit.FixedWindow{Name: "w", Rate: 8, Period: period, Start: noon},
		ratelimit.TokenBucket{Name: "sb", Rate: 8, Period: period, Shards: 4},
		ratelimit.FixedWindow{Name: "sw", Rate: 8, Period: period, Start: noon, Shards: 4},
	}
}

// bothForms runs test with both forms of Prune, in a schema of its own.
func bothForms(t *testing.T, test func(t *testing.T, db *pgtest.DB, c *clock, store *pgstore.Store)) {
	t.Helper()
	for name, portable := range map[string]bool{"plain": false, "portable": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, c := pgtest.New(t), newClock()
			test(t, db, c, newStore(t, db, onClock(c), isPortable(portable)))
		})
	}
}

func wantPruned(t *testing.T, store *pgstore.Store, want int64, limits ...ratelimit.Limit) {
	t.Helper()
	got, err := store.Prune(t.Context(), limits...)
	if err != nil || got != want {
		t.Errorf("pruned %d, error %v, want %d", got, err, want)
	}
}

// insert writes n rows of a limit, one a key.
func insert(t *testing.T, db *pgtest.DB, name string, n int, value float64, ts time.Time) {
	t.Helper()
	_, err := db.Pool.Exec(t.Context(), `INSERT INTO `+db.Schema+`.rate_limits (name, key, shard, value, ts)
		SELECT $1, $2 || i, 0, $3, $4 FROM generate_series(1, $5) AS i`,
		name, fmt.Sprintf("%v at %v ", value, ts.Sub(noon)), value, ts, n)
	must(t, err)
}

// TestPrune: rows that are full are deleted, in several batches, and no others.
func TestPrune(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	bothForms(t, func(t *testing.T, db *pgtest.DB, c *clock, store *pgstore.Store) {
		const many = 2500
		for _, l := range pruneLimits() {
			d := bucket.Definition(l.Definition())
			full := d.Shard().Capacity
			// Not full batches in between, as rows that stay are passed over.
			insert(t, db, d.Name, 1300, full, noon.Add(-8*time.Hour))
			insert(t, db, d.Name, 1200, full-8/float64(d.Shards), noon.Add(-16*time.Hour)) // full again by now
			insert(t, db, d.Name, 1100, -9, noon)                                          // in debt
			insert(t, db, d.Name, 3, full, noon.Add(time.Hour))                            // paused, or of a clock that went back
			insert(t, db, d.Name, 3, 0, noon.Add(8*time.Hour))
			insert(t, db, d.Name, 3, full-0.001, noon)
			insert(t, db, d.Name+" of another name", 3, full, noon.Add(-8*time.Hour))
			wantPruned(t, store, many, l)
			wantPruned(t, store, 0, l)
			if got := len(rowsOf(t, db, d.Name)); got != 1100+3*3 {
				t.Errorf("%s: %d rows stayed, want %d", d.Name, got, 1100+3*3)
			}
			if got := len(rowsOf(t, db, d.Name+" of another name")); got != 3 {
				t.Errorf("%d rows of another limit stayed, want 3", got)
			}
		}
		c.add(1000 * time.Hour)
		wantPruned(t, store, 4*(1100+3*3), pruneLimits()...)
	})
}

// TestPruneSkipsLocked: rows that somebody has locked are left for another
// time, without a wait.
func TestPruneSkipsLocked(t *testing.T) {
	t.Parallel()
	db, c := pgtest.New(t), newClock()
	store := newStore(t, db, onClock(c))
	for _, l := range pruneLimits() {
		d := bucket.Definition(l.Definition())
		insert(t, db, d.Name, 2100, d.Shard().Capacity, noon.Add(-9*time.Hour))
	}
	holder := begin(t, db, pgx.ReadCommitted)
	mustExec(t, holder, `SELECT FROM `+db.Schema+`.rate_limits WHERE key LIKE '%7' FOR UPDATE`)
	got, err := store.Prune(within(t, 30*time.Second), pruneLimits()...)
	if err != nil || got != 4*(2100-210) {
		t.Errorf("pruned %d, error %v, want %d", got, err, 4*(2100-210))
	}
	must(t, holder.Rollback(t.Context()))
	wantPruned(t, store, 4*210, pruneLimits()...)
}

// TestPruneLooksAgain: what is taken between the listing of a row and its
// deletion stays taken.
func TestPruneLooksAgain(t *testing.T) {
	t.Parallel()
	for name, portable := range map[string]bool{"plain": false, "portable": true} {
		t.Run(name, func(t *testing.T) {
			var take func()
			c, db := newClock(), pgtest.New(t, eachSQL(func(sql string) {
				if do := take; do != nil && strings.Contains(sql, "DELETE FROM") {
					take = nil
					do()
				}
			}))
			store := newStore(t, db, onClock(c), isPortable(portable))
			for _, l := range pruneLimits() {
				full := l.Definition().Capacity / float64(l.Definition().Shards)
				insert(t, db, l.Definition().Name, 3, full, noon.Add(-8*time.Hour))
				key := rowsKey(t, db)
				take = func() {
					result, err := store.Reserve(t.Context(), l.ForN(key, 11)) // all shards, into debt
					mustTake(t, result, err)
				}
				wantPruned(t, store, 2, l)
				wantLeft(t, store, l.ForN(key, 0), -3)
				should(t, store.Reset(t.Context(), l, key))
			}
		})
	}
}

func rowsKey(t *testing.T, db *pgtest.DB) (key string) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), "SELECT min(key) FROM "+db.Schema+".rate_limits").Scan(&key))
	return key
}

// What is wrong with one of several limits is an error, and no row is deleted.
func TestPruneErrors(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store) {
		sound := pruneLimits()[0]
		insert(t, db, "b", 5, 8, noon.Add(-time.Hour))
		before := tableOf(t, db)
		for _, limits := range [][]ratelimit.Limit{{}, {sound, nil}, {sound, ratelimit.TokenBucket{Name: "x", Period: time.Hour}}, {sound, slow("", 1)}} {
			if n, err := store.Prune(t.Context(), limits...); n != 0 || !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%v: pruned %d, error %v, want %v", limits, n, err, ratelimit.ErrInvalid)
			}
		}
		if got := tableOf(t, db); !slices.Equal(got, before) {
			t.Errorf("got  %q\nwant %q", got, before)
		}
	})
}
