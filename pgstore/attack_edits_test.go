package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Attacks on the verbs that change rows.

// leftOf is how many tokens there are.
func leftOf(t *testing.T, store *pgstore.Store, l ratelimit.Limit, key string) float64 {
	t.Helper()
	result, err := store.Check(t.Context(), l.ForN(key, 0))
	must(t, err)
	return result.Value
}

// family is definitions of one name: what a plan and what a roll-out make.
type family struct {
	name         string
	spent, other ratelimit.Limit // of the key that is asked, and another
	count        float64         // all but some of it
}

// families are such that the spent rows look full by the other definition.
func families() []family {
	const day = 24 * time.Hour
	b := func(name string, rate, capacity float64, shards int) ratelimit.TokenBucket {
		return ratelimit.TokenBucket{Name: name, Rate: rate, Period: day, Capacity: capacity, Shards: shards}
	}
	w := func(name string, rate float64, shards int) ratelimit.FixedWindow {
		return ratelimit.FixedWindow{Name: name, Rate: rate, Period: day, Start: noon, Shards: shards}
	}
	return []family{
		{"a plan with a larger capacity", b("capacity", 100, 200, 1), b("capacity", 10, 20, 1), 180},
		{"a plan that is slower", b("rate", 20, 20, 1), b("rate", 1e9, 20, 1), 20},
		{"a plan with larger windows", w("windows", 200, 1), w("windows", 20, 1), 180},
		{"fewer shards than before", b("shards", 80, 80, 1), b("shards", 80, 80, 8), 70},
		{"windows of fewer shards than before", w("windows' shards", 80, 1), w("windows' shards", 80, 8), 70},
	}
}

// A plan or a roll-out has two definitions of one name. Prune deletes what is
// full by every definition of the name that it is given, in whatever order, or that its store
// has seen.
func TestPruneHeedsEveryDefinitionNamed(t *testing.T) {
	t.Parallel()
	bothForms(t, func(t *testing.T, db *pgtest.DB, c *clock, pruner *pgstore.Store) {
		store := newStore(t, db, onClock(c)) // so that the pruner sees nothing
		for _, f := range families() {
			for i, limits := range [][]ratelimit.Limit{{f.spent, f.other}, {f.other, f.spent}, {f.other, slow("another", 1), f.spent, f.other}, {f.other}} {
				t.Run(fmt.Sprintf("%s/%d", f.name, i), func(t *testing.T) {
					mustReset(t, store, f.spent, "k")
					asked, d, granted := store, bucket.Definition(f.spent.Definition()), 0.0
					if len(limits) == 1 {
						asked = pruner // so that it sees the other
					}
					for range 10 { // within a minute
						c.add(6 * time.Second)
						result, err := asked.Allow(t.Context(), f.spent.ForN("k", f.count))
						must(t, err)
						granted += result.Taken
						must(t, errOf(pruner.Prune(t.Context(), limits...)))
					}
					if most := d.Capacity + d.Rate*float64(time.Minute)/float64(d.Period); granted > most {
						t.Errorf("granted %v in a minute, want at most %v", granted, most)
					}
					c.add(1000 * time.Hour) // full by all
					if _, err := pruner.Prune(t.Context(), limits...); err != nil || len(rowsOf(t, db, d.Name)) != 0 {
						t.Errorf("full by all: error %v, %q stayed", err, rowsOf(t, db, d.Name))
					}
				})
			}
		}
	})
}

// ofShards is a limit with so many shards: a bucket, or a window.
func ofShards(n int) []ratelimit.Limit {
	const day = 24 * time.Hour
	return []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "b", Rate: 80, Period: day, Shards: n, MaxReserved: ratelimit.None},
		ratelimit.FixedWindow{Name: "w", Rate: 80, Period: day, Start: noon, Shards: n, MaxReserved: ratelimit.None},
	}
}

// Processes ask by both definitions while a limit is changed. During the pause
// in which it is given another number of shards, processes that have the old
// definition get as little as those that have the new one; after it there is what
// there was to be, and no row is left for good.
func TestChangeGrantsNothingDuringItsPause(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, to := range []int{1, 2, 5, 8, 16} {
		for i, old := range ofShards(8) {
			t.Run(fmt.Sprintf("%d shards of a %s", to, old.Definition().Name), func(t *testing.T) {
				t.Parallel()
				db, c := pgtest.New(t), newClock()
				store, newer := newStore(t, db, onClock(c)), ofShards(to)[i]
				mustAllow(t, store, old.ForN("k", 40))
				must(t, errOf(store.Pause(t.Context(), old, "k", time.Hour)))
				must(t, errOf(store.Change(t.Context(), old, newer, "k")))
				c.add(59 * time.Minute)
				for name, l := range map[string]ratelimit.Limit{"old": old, "new": newer} {
					others := newStore(t, db, onClock(c)) // of a process that knows of nothing
					for i, take := range slices.Repeat([]takes{allowOwn, allowAt(pgx.ReadCommitted), allowFunc, reserveOwn}, 10) {
						if result, err := take(t.Context(), db.Pool, others, l.For("k")); err != nil || result.OK {
							t.Fatalf("by the %s definition call %d got OK %v, error %v", name, i, result.OK, err)
						}
					}
				}
				c.add(time.Minute + 24*time.Hour)
				if got := leftOf(t, store, newer, "k"); math.Abs(got-80) > 1e-6 {
					t.Errorf("a period after the pause: got %v left, want 80", got)
				}
				c.add(24 * time.Hour)
				if _, err := store.Prune(t.Context(), old, newer); err != nil || len(tableOf(t, db)) != 0 {
					t.Errorf("%d rows are left by Prune, error %v, want none", len(tableOf(t, db)), err)
				}
			})
		}
	}
}

// cancelLimits are of 10 tokens, of which 2 are left before a test takes.
var cancelLimits = []ratelimit.Limit{slow("bucket", 10), slowWindow("window", 10), shardedSlow("shards", 10, 2)}

// undone are ways in which what was taken came to nothing. Each is the result
// that was kept of it.
var undone = []struct {
	name string
	take func(t *testing.T, db *pgtest.DB, store *pgstore.Store, r ratelimit.Request) ratelimit.Result
}{
	{"a transaction", func(t *testing.T, db *pgtest.DB, store *pgstore.Store, r ratelimit.Request) ratelimit.Result {
		tx := begin(t, db, pgx.ReadCommitted)
		kept := takeIn(t, store, tx, r)
		end(t, tx.Rollback)
		return kept
	}},
	{"a transaction that was cut", func(t *testing.T, db *pgtest.DB, store *pgstore.Store, r ratelimit.Request) ratelimit.Result {
		tx := begin(t, db, pgx.ReadCommitted)
		kept := takeIn(t, store, tx, r)
		terminate(t, db, tx.Conn().PgConn().PID())
		return kept
	}},
	{"a savepoint, after other writes", func(t *testing.T, db *pgtest.DB, store *pgstore.Store, r ratelimit.Request) (kept ratelimit.Result) {
		tx := begin(t, db, pgx.ReadCommitted)
		takeIn(t, store, tx, r.Limit.For("another"))
		inSavepoint(t, tx, pgx.Tx.Rollback, func(tx pgx.Tx) {
			takeIn(t, store, tx, r.Limit.For("another"))
			inSavepoint(t, tx, pgx.Tx.Commit, func(tx pgx.Tx) { kept = takeIn(t, store, tx, r) })
		})
		end(t, tx.Commit)
		return kept
	}},
	{"an AllowFunc whose function failed", func(t *testing.T, _ *pgtest.DB, store *pgstore.Store, r ratelimit.Request) (kept ratelimit.Result) {
		_, err := store.AllowFunc(t.Context(), []ratelimit.Request{r}, func(_ pgx.Tx, result ratelimit.Result) error {
			kept = result
			return errTest
		})
		if !errors.Is(err, errTest) {
			t.Errorf("got %v, want %v", err, errTest)
		}
		return kept
	}},
	{"a ReserveFunc that ran again", func(t *testing.T, _ *pgtest.DB, store *pgstore.Store, r ratelimit.Request) ratelimit.Result {
		var all []ratelimit.Result
		last, err := store.ReserveFunc(t.Context(), []ratelimit.Request{r}, func(tx pgx.Tx, result ratelimit.Result) error {
			if all = append(all, result); len(all) == 1 {
				return raise(t.Context(), serializationFailure)(tx)
			}
			return nil
		})
		mustTake(t, last, err)
		cancelled, err := store.Cancel(t.Context(), last.Receipt)
		wantSaid(t, "cancel what was committed", cancelled, err, true)
		return all[0]
	}},
}

// A result is kept of what was rolled back, and cancelled. What came to nothing
// took nothing, so there is nothing to give back.
func TestCancelGivesNothingBackThatWasUndone(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	for _, l := range cancelLimits {
		for _, undone := range undone {
			t.Run(l.Definition().Name+"/"+undone.name, func(t *testing.T) {
				mustReset(t, store, l, "k")
				mustAllow(t, store, l.ForN("k", 8))
				kept := undone.take(t, db, store, l.For("k"))
				for range 2 {
					cancelled, err := store.Cancel(t.Context(), kept.Receipt)
					wantSaid(t, "cancel", cancelled, err, false)
				}
				wantLeft(t, store, l.ForN("k", 0), 2)
			})
		}
	}
}

// A result is cancelled whose limit has changed since. Cancel never takes tokens
// away, whatever has become of the limit since: neither those of another number
// of shards nor those of a larger capacity.
func TestCancelTakesNothingAway(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	b := func(capacity float64, shards int) ratelimit.Limit {
		return ratelimit.TokenBucket{Name: "b", Rate: capacity, Period: day, Shards: shards}
	}
	w := func(capacity float64, shards int) ratelimit.Limit {
		return ratelimit.FixedWindow{Name: "w", Rate: capacity, Period: day, Shards: shards, Start: noon}
	}
	for kind, l := range map[string]func(float64, int) ratelimit.Limit{"bucket": b, "window": w} {
		for _, test := range []struct {
			name       string
			old, newer ratelimit.Limit
			count      float64 // by the old definition, to be cancelled
			between    func(*testing.T, *clock, *pgstore.Store, ratelimit.Limit, ratelimit.Limit)
			before     float64 // Cancel
		}{
			{"one shard of eight", l(80, 8), l(80, 1), 40, reshard, 40},
			{"two shards of eight", l(80, 8), l(80, 2), 40, reshard, 40},
			{"eight shards of one", l(80, 1), l(80, 8), 40, reshard, 40},
			{"a larger capacity", l(10, 1), l(100, 1), 1, refill, 90},
			{"a larger capacity of shards", l(16, 4), l(160, 4), 1, refill, 150},
			{"a smaller capacity", l(100, 1), l(10, 1), 50, refill, 0},
		} {
			t.Run(kind+"/"+test.name, func(t *testing.T) {
				db, c := pgtest.New(t), newClock()
				store := newStore(t, db, onClock(c))
				taken, err := store.Allow(t.Context(), test.old.ForN("k", test.count))
				mustTake(t, taken, err)
				test.between(t, c, store, test.old, test.newer)
				before := leftOf(t, store, test.newer, "k")
				if math.Abs(before-test.before) > 1e-6 {
					t.Fatalf("got %v left before, want %v", before, test.before)
				}
				cancelled, err := store.Cancel(t.Context(), taken.Receipt)
				wantSaid(t, "cancel", cancelled, err, true)
				got, most := leftOf(t, store, test.newer, "k"), min(before+test.count, test.newer.Definition().Capacity)
				if got < before-1e-6 || got > most+1e-6 {
					t.Errorf("got %v left after giving %v back, want from %v to %v", got, test.count, before, most)
				}
			})
		}
	}
}

// reshard gives a limit another number of shards.
func reshard(t *testing.T, _ *clock, store *pgstore.Store, old, newer ratelimit.Limit) {
	t.Helper()
	must(t, errOf(store.Change(t.Context(), old, newer, "k")))
}

// refill waits until the limit is full by its new definition, and takes 10.
func refill(t *testing.T, c *clock, store *pgstore.Store, _, newer ratelimit.Limit) {
	t.Helper()
	c.add(48 * time.Hour)
	mustAllow(t, store, newer.ForN("k", 10))
}

// An own pause holds: what is given back while it lasts is there when it is over,
// and not before, in whichever form; what is reserved meanwhile is due then.
func TestPauseHolds(t *testing.T) {
	t.Parallel()
	check := func(ctx context.Context, _ *pgxpool.Pool, s *pgstore.Store, r ...ratelimit.Request) (ratelimit.Result, error) {
		return s.Check(ctx, r...)
	}
	for name, giveBack := range map[string]func(*testing.T, verbs, ratelimit.Request, *ratelimit.Receipt) error{
		"Credit": func(t *testing.T, s verbs, r ratelimit.Request, _ *ratelimit.Receipt) error {
			return errOf(s.Credit(t.Context(), r))
		},
		"Cancel": func(t *testing.T, s verbs, _ ratelimit.Request, taken *ratelimit.Receipt) error {
			cancelled, err := s.Cancel(t.Context(), taken)
			wantSaid(t, "cancel", cancelled, err, true)
			return nil
		},
	} {
		for _, inTx := range []bool{false, true} {
			t.Run(fmt.Sprint(name, inTx), func(t *testing.T) {
				eachKind(t, func(t *testing.T, db *pgtest.DB, c *clock, store *pgstore.Store, l ratelimit.Limit) {
					until := noon.Add(90 * time.Minute)
					wantWhilePaused := func() {
						t.Helper()
						for _, count := range []float64{1, 0} {
							for i, ask := range []takes{allowOwn, allowAt(pgx.ReadCommitted), allowFunc, check} {
								result, err := ask(t.Context(), db.Pool, store, l.ForN("k", count))
								if err != nil || result.OK || !result.RetryAt.Equal(until) {
									t.Fatalf("form %d of %v: got OK %v until %v, error %v; want a refusal until %v", i, count, result.OK, result.RetryAt, err, until)
								}
							}
						}
					}
					taken, err := store.Allow(t.Context(), l.ForN("k", 4))
					mustTake(t, taken, err)
					wantPaused(t, store, l, "k", noon, until)
					if result, err := store.Allow(t.Context(), l.For("k")); err != nil || result.OK || result.RetryAt.Before(until) {
						t.Errorf("got OK %v until %v, error %v; want a refusal until %v or later", result.OK, result.RetryAt, err, until)
					}
					c.add(time.Hour)
					if inTx {
						must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error { return giveBack(t, txVerbs{store, tx}, l.ForN("k", 4), taken.Receipt) }))
					} else {
						must(t, giveBack(t, store, l.ForN("k", 4), taken.Receipt))
					}
					wantWhilePaused()
					reserved, err := store.Reserve(t.Context(), l.ForN("k", 1))
					if mustTake(t, reserved, err); !reserved.RetryAt.Equal(until) {
						t.Errorf("reserved for %v, want %v", reserved.RetryAt, until)
					}
					c.set(until.Add(-time.Microsecond))
					wantWhilePaused()
					c.set(until)
					mustAllow(t, store, l.ForN("k", 3))
				})
			})
		}
	}
}
