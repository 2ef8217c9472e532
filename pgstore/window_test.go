package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// reserveForms are all the ways to reserve.
var reserveForms = []takeForm{
	{"read committed", func(ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			result, err = store.ReserveTx(ctx, tx, requests...)
			return err
		})
		return result, err
	}, unchanged},
	{"serializable", func(ctx context.Context, _ *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
		return store.ReserveFunc(ctx, requests, func(pgx.Tx, ratelimit.Result) error { return nil })
	}, unchanged},
	{"on its own", reserveOwn, unchanged},
	{"on its own, portable", reserveOwn, portable},
}

func reserveOwn(ctx context.Context, _ *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return store.Reserve(ctx, requests...)
}

// TestSlidingWindowReservations: what many reserve at once keeps the bound, wherever in
// its slot each of them starts.
func TestSlidingWindowReservations(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const goroutines, each = 32, 5
	db := pgtest.New(t, maxConns(16))
	limit := ratelimit.SlidingWindow{Name: "slots", Rate: 10, Period: time.Minute, Slots: 120}
	for _, form := range reserveForms {
		t.Run(form.name, func(t *testing.T) {
			var (
				store  = newStore(t, db, form.change)
				mu     sync.Mutex
				events []curve.Event
				errs   []error
				group  sync.WaitGroup
			)
			for i := range goroutines {
				random := rand.New(rand.NewPCG(uint64(i), 9))
				group.Go(func() {
					for range each {
						result, err := form.take(t.Context(), db.Pool, store, limit.ForN(form.name, float64(1+random.IntN(3))))
						mu.Lock()
						errs = append(errs, err, result.Err())
						start, d := result.RetryAt, limit.Definition()
						if result.RetryAfter > 0 {
							start = start.Add(time.Duration(random.Int64N(int64(d.SlotWidth()))))
						}
						events = append(events, curve.Event{At: start, Count: result.Request.Count})
						mu.Unlock()
					}
				})
			}
			group.Wait()
			must(t, errors.Join(errs...))
			worst := curve.Judge(events, curve.Of(limit.Definition()))
			t.Logf("%d reservations, at worst %v", len(events), worst)
			if worst.Share != 1 {
				t.Errorf("at worst %v, want all of it and no more", worst)
			}
		})
	}
}

// TestSlidingWindowChangesShards: what the slots hold is the same with another number of
// shards.
func TestSlidingWindowChangesShards(t *testing.T) {
	t.Parallel()
	ctx, c := t.Context(), newClock()
	store := newStore(t, pgtest.New(t), onClock(c))
	sharded := func(n int) ratelimit.SlidingWindow {
		return ratelimit.SlidingWindow{Name: "l", Rate: 120, Period: time.Minute, Slots: 6, Start: noon, Shards: n}
	}
	for _, test := range []struct {
		from, to int
		ahead    float64 // reserved
		want     float64 // left
	}{{2, 8, 0, 40}, {8, 3, 0, 40}, {8, 1, 0, 40}, {1, 4, 100, -140}, {6, 2, 120, -140}} {
		t.Run(fmt.Sprint(test), func(t *testing.T) {
			c.set(noon)
			from, to := sharded(test.from), sharded(test.to)
			must(t, store.Reset(ctx, from, "k"))
			mustAllow(t, store, from.ForN("k", 30))
			c.add(20 * time.Second)
			mustAllow(t, store, from.ForN("k", 50))
			if test.ahead > 0 {
				if result, err := store.Reserve(ctx, from.ForN("k", test.ahead)); err != nil || !result.OK {
					t.Fatalf("Reserve() = %v, %v", result.OK, err)
				}
			}
			must(t, errOf(store.Change(ctx, from, to, "k")))
			wantValueNow := func(want float64) {
				t.Helper()
				if result, err := store.Check(ctx, to.ForN("k", 0)); err != nil || result.Value < want-1e-6 || result.Value > want+1e-6 {
					t.Errorf("at %v: value = %v, %v, want %v", c.now(), result.Value, err, want)
				}
			}
			if test.ahead > 0 {
				wantValueNow(test.want)
				return
			}
			wantValueNow(40)
			c.add(50 * time.Second) // the first slot is past
			wantValueNow(70)
		})
	}
}

// TestSlidingWindowRenewed: a row whose totals have grown is counted anew, in every form,
// and holds what it held.
func TestSlidingWindowRenewed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t)
	c := newClock()
	limit := ratelimit.SlidingWindow{Name: "renewed", Rate: 10, Period: time.Minute, Slots: 6, Start: noon}
	other := ratelimit.TokenBucket{Name: "another", Rate: 1e6, Period: time.Second}
	for i, form := range append(takeForms, reserveForms...) {
		for _, requests := range [][]ratelimit.Request{
			{limit.ForN(fmt.Sprint(i, " ", form.name), 5)},
			{limit.ForN(fmt.Sprint(i, " ", form.name, " with another"), 5), other.For(form.name)},
		} {
			c.set(noon)
			store := newStore(t, db, onClock(c), form.change)
			for i := range 100 {
				result, err := form.take(t.Context(), db.Pool, store, requests...)
				if err != nil || !result.OK || result.RetryAfter != 0 {
					t.Fatalf("%s, call %d: %v, %v, want a grant at once", form.name, i, result, err)
				}
				c.add(35 * time.Second)
			}
			var base float64
			sql := "SELECT slots[4] FROM " + db.Schema + ".rate_limits WHERE name = 'renewed' AND key = $1"
			if err := db.Pool.QueryRow(t.Context(), sql, requests[0].Key).Scan(&base); err != nil || base > 90 {
				t.Errorf("%s: a total of %v from before the oldest slot, %v", form.name, base, err)
			}
		}
	}
}
