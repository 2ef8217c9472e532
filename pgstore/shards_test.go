package pgstore_test

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// TestShardsPromise: a refused call is accepted at its RetryAt, and not long
// before, whatever the shards hold.
func TestShardsPromise(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	eachTake(t, func(t *testing.T, _ *pgtest.DB, c *clock, store *pgstore.Store, allow allowing) {
		refused := 0
		for seed := range uint64(20) {
			random := rand.New(rand.NewPCG(seed, 4))
			l := shardedLimit(random, fmt.Sprint("l", seed))
			d := bucket.Definition(l.Definition())
			for range 12 {
				c.add(time.Duration(random.Float64() * float64(d.Period) / 4))
				r := l.ForN("k", pick(random, d.Capacity*random.Float64(), d.Capacity/float64(d.Shards), d.Capacity))
				if share := random.Float64(); random.IntN(3) == 0 && r.Count <= d.Capacity*(1-share) {
					r = r.Above(share)
				}
				result, err := allow(r)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				if result.OK {
					continue
				}
				refused++
				c.set(result.RetryAt.Add(-tickOf(d))) // an edge or a microsecond early
				if early, err := store.Check(t.Context(), r); err != nil || early.OK && result.RetryAfter > tickOf(d) {
					t.Fatalf("seed %d: %+v: too early: got OK %v, error %v", seed, r, early.OK, err)
				}
				c.set(result.RetryAt)
				if again, err := allow(r); err != nil || !again.OK {
					t.Fatalf("seed %d: %+v: promised for %v, got OK %v, %v left, error %v", seed, r, result.RetryAt, again.OK, again.Value, err)
				}
			}
		}
		if refused < 50 {
			t.Errorf("%d were refused, want more", refused)
		}
	})
}

func shardedLimit(random *rand.Rand, name string) ratelimit.Limit {
	for {
		rate, shards := pick(random, 3, 10, 4.0/3, 27.77, 1e5), pick(random, 2, 3, 7)
		capacity := rate * pick(random, 1, 2.5, 0.3)
		var l ratelimit.Limit = ratelimit.TokenBucket{Name: name, Rate: rate, Period: time.Minute, Capacity: capacity, Shards: shards}
		switch random.IntN(3) {
		case 0:
			l = ratelimit.FixedWindow{Name: name, Rate: rate, Period: time.Minute, Capacity: capacity, Shards: shards}
		case 1:
			l = ratelimit.SlidingWindow{Name: name, Rate: rate, Period: time.Minute, Slots: pick(random, 1, 6, 16), Shards: shards}
		}
		if l.Validate() == nil {
			return l
		}
	}
}

func storeMax(to *atomic.Int64, v int64) {
	for {
		old := to.Load()
		if v <= old || to.CompareAndSwap(old, v) {
			return
		}
	}
}

// Tokens that several shards have only together are taken from all of them at the instant that
// the caller is told: a limit holds by that.
func TestShardsTogetherAtOneInstant(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour, Shards: 2}
	for _, form := range takeForms {
		t.Run(form.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			store := newStore(t, db, form.change)
			for i, counts := range [][]float64{{10}, {1, 9}, {4, 4, 2}} {
				key := fmt.Sprint("k", i)
				var last ratelimit.Result
				for _, n := range counts {
					result, err := form.take(t.Context(), db.Pool, store, limit.ForN(key, n))
					mustTake(t, result, err)
					last = result
				}
				var first, second time.Time
				err := db.Pool.QueryRow(t.Context(), `SELECT min(ts), max(ts) FROM `+db.Schema+`.rate_limits WHERE key = $1 HAVING count(*) = 2`, key).Scan(&first, &second)
				must(t, err)
				if !first.Equal(last.At) || !second.Equal(last.At) {
					t.Errorf("%v: taken at %v and %v, told %v", counts, first, second, last.At)
				}
			}
		})
	}
}

// What was seen by another definition says nothing of how full shards are.
func TestShardMemoryByDefinition(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 8, Period: 24 * time.Hour, Shards: 8}
	tx := begin(t, db, pgx.ReadCommitted) // which makes the row of one shard only
	takeIn(t, store, tx, limit.For("k"))
	must(t, tx.Commit(t.Context()))
	limit.Rate = 800
	result, err := store.Allow(t.Context(), limit.For("k"))
	if err != nil || result.Remaining < 600 {
		t.Errorf("got %d left, error %v, want what seven shards and more hold", result.Remaining, err)
	}
}

// TestShardsWithoutPool: with no connection to look on, a transaction looks in
// itself.
func TestShardsWithoutPool(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := newClock()
	store, err := pgstore.New(nil, &pgstore.Config{Schema: db.Schema, Clock: c.now})
	must(t, err)
	l := ratelimit.TokenBucket{Name: "l", Rate: 24, Period: 24 * time.Hour, Shards: 4}
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			ctx := t.Context()
			tx := begin(t, db, level)
			for i, n := range []float64{1, 1, 6, 10, 6} {
				result, err := store.AllowTx(ctx, tx, l.ForN("k", n))
				if err != nil || !result.OK {
					t.Errorf("%d: got OK %v, error %v", i, result.OK, err)
				}
			}
			result, err := store.AllowTx(ctx, tx, l.For("k"))
			if err != nil || result.OK {
				t.Errorf("got OK %v, error %v, want a refusal", result.OK, err)
			}
			reserved, err := store.ReserveTx(ctx, tx, l.ForN("k", 8))
			mustTake(t, reserved, err)
			if got, want := reserved.RetryAfter, 8*time.Hour; got != want {
				t.Errorf("reserved for %v, want %v", got, want)
			}
			cancelled, err := store.CancelTx(ctx, tx, reserved.Receipt)
			wantSaid(t, "cancel", cancelled, err, true)
			if until, err := store.PauseTx(ctx, tx, l, "k", time.Hour); err != nil || !until.Equal(c.now().Add(time.Hour)) {
				t.Errorf("paused until %v, error %v, want an hour", until, err)
			}
			if status, err := store.CreditTx(ctx, tx, l.ForN("k", 2)); err != nil || status.Value != 2 {
				t.Errorf("got %v, error %v, want 2", status.Value, err)
			}
			should(t, store.ResetTx(ctx, tx, l, "k"))
			checked, err := store.CheckTx(ctx, tx, l.ForN("k", 24))
			mustTake(t, checked, err)
		})
	}
}

// tickOf is how long a limit's clock stands still at a time.
func tickOf(d bucket.Definition) time.Duration {
	if d.Kind == ratelimit.KindFixedWindow {
		return d.Period
	}
	return time.Microsecond
}

// What this process remembers of a refusal guides it only: a limit that another one
// has reset grants at once, and so does one in which tokens have come in.
func TestShardsRefusedLately(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c := newClock()
	store, other := newStore(t, db, onClock(c)), newStore(t, db)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 8, Period: time.Hour, Shards: 4}
	allow := func(n float64, want bool) {
		t.Helper()
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			result, err := store.AllowTx(t.Context(), tx, limit.ForN("k", n))
			if err == nil && result.OK != want {
				t.Errorf("%v at %v: got OK %v, want %v", n, c.now(), result.OK, want)
			}
			return err
		})
		must(t, err)
	}
	allow(8, true)
	allow(1, false)
	allow(1, false)
	c.add(time.Hour/8 - time.Microsecond)
	allow(1, false)
	c.add(time.Microsecond)
	allow(1, true)
	allow(1, false)
	must(t, other.Reset(t.Context(), limit, "k"))
	allow(8, true)
	allow(1, false)
}
