package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// stored is a receipt as another process has it.
func stored(t *testing.T, r *ratelimit.Receipt) *ratelimit.Receipt {
	t.Helper()
	text, err := r.MarshalText()
	must(t, err)
	again := new(ratelimit.Receipt)
	must(t, again.UnmarshalText(text))
	return again
}

// What is settled goes back to the rows that it came from, or is taken from them, over
// shards too, in the transaction and on its own.
func TestSettle(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, portable := range []bool{false, true} {
		for _, shards := range []int{1, 8} {
			for _, inTx := range []bool{false, true} {
				name := fmt.Sprintf("portable %v, %d shards, in tx %v", portable, shards, inTx)
				t.Run(name, func(t *testing.T) {
					store := newStore(t, db, isPortable(portable))
					settle := store.Settle
					if inTx {
						settle = func(ctx context.Context, r *ratelimit.Receipt, used ...float64) (result ratelimit.Result, err error) {
							err = pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
								result, err = store.SettleTx(ctx, tx, r, used...)
								return err
							})
							return result, err
						}
					}
					l := shardedSlow(name, 80, shards)
					left := 80.0
					for i, step := range []struct{ count, used float64 }{
						{10, 3}, {30, 0}, {30, 30}, {5, 25}, {40, 40.5}, {0, 7}, {20, 90}, {2, 1},
					} {
						taken, err := store.Reserve(t.Context(), l.ForN("k", step.count))
						mustTake(t, taken, err)
						result, err := settle(t.Context(), stored(t, taken.Receipt), step.used)
						left -= step.used
						if err != nil || !result.OK || math.Abs(result.Value-left) > 0.01 || result.Taken != step.used {
							t.Errorf("step %d: %v, %v, want %v left", i, result, err, left)
						}
						if result.OK && (result.Value < 0) != (result.RetryAfter > 0) && shards == 1 {
							t.Errorf("step %d: %v tokens after %v", i, result.Value, result.RetryAfter)
						}
						wantLeft(t, store, l.ForN("k", 0), left)
					}
				})
			}
		}
	}
}

func TestSettleInvalid(t *testing.T) {
	t.Parallel()
	_, store := setUp(t)
	a, b := slow("settle a", 10), slow("settle b", 10)
	taken, err := store.Allow(t.Context(), b.ForN("k", 5), a.ForN("k", 5))
	mustTake(t, taken, err)
	for name, settle := range map[string]func() (ratelimit.Result, error){
		"no receipt":     func() (ratelimit.Result, error) { return store.Settle(t.Context(), nil, 1) },
		"nothing taken":  func() (ratelimit.Result, error) { return store.Settle(t.Context(), new(ratelimit.Receipt), 1) },
		"no count":       func() (ratelimit.Result, error) { return store.Settle(t.Context(), taken.Receipt) },
		"too few counts": func() (ratelimit.Result, error) { return store.Settle(t.Context(), taken.Receipt, 1) },
		"too many":       func() (ratelimit.Result, error) { return store.Settle(t.Context(), taken.Receipt, 1, 1, 1) },
		"negative":       func() (ratelimit.Result, error) { return store.Settle(t.Context(), taken.Receipt, 1, -1) },
		"not a number":   func() (ratelimit.Result, error) { return store.Settle(t.Context(), taken.Receipt, 1, math.NaN()) },
		"no transaction": func() (ratelimit.Result, error) { return store.SettleTx(t.Context(), nil, taken.Receipt, 1, 1) },
		"no store": func() (ratelimit.Result, error) {
			return (*pgstore.Store)(nil).Settle(t.Context(), taken.Receipt, 1, 1)
		},
		"not its last one": func() (ratelimit.Result, error) { return store.Settle(t.Context(), taken.Receipt, 1, math.Inf(1)) },
	} {
		if result, err := settle(); !errors.Is(err, ratelimit.ErrInvalid) || result.OK {
			t.Errorf("%s: %v, %v, want ErrInvalid", name, result, err)
		}
	}
	// In the order of the call, and not of the names.
	result, err := store.Settle(t.Context(), taken.Receipt, 1, 2)
	if err != nil || math.Abs(result.Each()[0].Value-9) > 0.01 || math.Abs(result.Each()[1].Value-8) > 0.01 {
		t.Errorf("%v, %v, want 9 and 8 left", result.Each(), err)
	}
	if _, err := store.Settle(t.Context(), taken.Receipt, 1, 2); !errors.Is(err, ratelimit.ErrSettled) {
		t.Errorf("the second time: %v, want ErrSettled", err)
	}
	cancelled, err := store.Cancel(t.Context(), taken.Receipt)
	wantSaid(t, "cancel what was settled", cancelled, err, false)
}

// A settlement is of its transaction; and what was rolled back is not settled, also by
// a receipt that knows no more than its text.
func TestSettleAndRollback(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	l := slow("settle rollback", 10)
	for _, read := range []bool{false, true} {
		key := fmt.Sprint(read)
		copied := func(r *ratelimit.Receipt) *ratelimit.Receipt {
			if read {
				return stored(t, r)
			}
			return r
		}
		tx := begin(t, db, pgx.ReadCommitted)
		taken := takeIn(t, store, tx, l.ForN(key, 5))
		if _, err := store.Settle(t.Context(), copied(taken.Receipt), 3); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("read %v, while it is open: %v, want ErrInvalid", read, err)
		}
		end(t, tx.Rollback)
		if _, err := store.Settle(t.Context(), copied(taken.Receipt), 3); !errors.Is(err, ratelimit.ErrSettled) {
			t.Errorf("read %v, rolled back: %v, want ErrSettled", read, err)
		}
		wantLeft(t, store, l.ForN(key, 0), 10)

		tx = begin(t, db, pgx.ReadCommitted)
		taken = takeIn(t, store, tx, l.ForN(key, 5))
		end(t, tx.Commit)
		receipt := copied(taken.Receipt)
		tx = begin(t, db, pgx.Serializable)
		result, err := store.SettleTx(t.Context(), tx, receipt, 3)
		mustTake(t, result, err)
		end(t, tx.Rollback)
		wantLeft(t, store, l.ForN(key, 0), 5)
		result, err = store.Settle(t.Context(), receipt, 8)
		mustTake(t, result, err)
		wantLeft(t, store, l.ForN(key, 0), 2)
	}
}

// A receipt that was stored and read in the transaction that took, such as a test's that
// is rolled back at the end, is settled there as any other.
func TestSettleInTheSameTransaction(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, portable := range []bool{false, true} {
		store := newStore(t, db, isPortable(portable))
		l := slow(fmt.Sprint("settle same", portable), 10)
		tx := begin(t, db, pgx.ReadCommitted)
		taken := takeIn(t, store, tx, l.ForN("k", 5))
		settled, err := store.SettleTx(t.Context(), tx, stored(t, taken.Receipt), 3)
		if mustTake(t, settled, err); math.Abs(settled.Value-7) > 0.01 {
			t.Errorf("%v left, want 7", settled.Value)
		}
		savepoint, err := tx.Begin(t.Context())
		must(t, err)
		taken = takeIn(t, store, savepoint, l.ForN("k", 2))
		settled, err = store.SettleTx(t.Context(), savepoint, stored(t, taken.Receipt), 1)
		if mustTake(t, settled, err); math.Abs(settled.Value-6) > 0.01 {
			t.Errorf("%v left, want 6", settled.Value)
		}
		must(t, savepoint.Rollback(t.Context()))
		if _, err := store.SettleTx(t.Context(), tx, stored(t, taken.Receipt), 1); !portable && !errors.Is(err, ratelimit.ErrSettled) {
			t.Errorf("rolled back to a savepoint: %v, want ErrSettled", err)
		}
	}
}

// Settling is one round trip when it gives back, two when it takes more or the limit is a
// sliding window, and one more when the server is asked what became of the transaction that
// took.
func TestSettleRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	store := newStore(t, c.DB)
	l, sliding := slow("settle trips", 1000), slowSliding("settle slots", 1000)
	for _, test := range []struct {
		name  string
		limit ratelimit.Limit
		used  float64
		inTx  bool // was it taken
		trips int
	}{
		{"less", l, 3, false, 1},
		{"more", l, 7, false, 2},
		{"less, from another transaction", l, 3, true, 2},
		{"less of a sliding window", sliding, 3, false, 2},
		{"more of a sliding window", sliding, 7, false, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, what := range []string{"prepares", "later"} {
				var taken ratelimit.Result
				if test.inTx {
					tx := begin(t, c.DB, pgx.ReadCommitted)
					taken = takeIn(t, store, tx, test.limit.ForN("k", 5))
					end(t, tx.Commit)
				} else {
					res, err := store.Allow(t.Context(), test.limit.ForN("k", 5))
					taken = mustTake(t, res, err)
				}
				receipt := stored(t, taken.Receipt)
				tx := begin(t, c.DB, pgx.ReadCommitted)
				c.reset()
				_, err := store.SettleTx(t.Context(), tx, receipt, test.used)
				if got := c.sent().trips; err != nil || what == "later" && got != test.trips {
					t.Errorf("%d round trips, %v, want %d", got, err, test.trips)
				}
				end(t, tx.Commit)
			}
		})
	}
}

// What was used besides is taken from all shards, so that none of them grants it again.
func TestSettleForMoreWithShards(t *testing.T) {
	t.Parallel()
	for _, l := range []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "bucket", Rate: 8, Period: 24 * time.Hour, Shards: 2},
		ratelimit.FixedWindow{Name: "window", Rate: 8, Period: 24 * time.Hour, Shards: 2},
		ratelimit.SlidingWindow{Name: "slots", Rate: 8, Period: 24 * time.Hour, Shards: 2},
	} {
		for _, portable := range []bool{false, true} {
			t.Run(fmt.Sprint(ratelimit.NameOf(l), " ", portable), func(t *testing.T) {
				c := newClock()
				store := newStore(t, pgtest.New(t), onClock(c), func(c *pgstore.Config) { c.Portable = portable })
				taken, err := store.Allow(t.Context(), l.ForN("k", 4))
				mustTake(t, taken, err)
				settled, err := store.Settle(t.Context(), taken.Receipt, 7)
				if err != nil || settled.Value != 1 {
					t.Errorf("settled: got %v left, error %v, want 1", settled.Value, err)
				}
				if got, err := store.Allow(t.Context(), l.For("k")); err != nil || !got.OK {
					t.Errorf("the last: got OK %v, error %v, want it granted", got.OK, err)
				}
				if got, err := store.Allow(t.Context(), l.For("k")); err != nil || got.OK {
					t.Errorf("one more: got OK %v, error %v, want a refusal", got.OK, err)
				}
			})
		}
	}
}
