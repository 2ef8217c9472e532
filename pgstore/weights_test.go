package pgstore_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func wantCount(t *testing.T, store permits, limit ratelimit.InFlight, key string, want int) {
	t.Helper()
	held, err := store.Held(t.Context(), limit, key)
	if err != nil || len(held) != want {
		t.Errorf("limit %q, key %q: got %d held, and %v, want %d", limit.Name, key, len(held), err, want)
	}
}

// Several permits are acquired all or nothing, renewed and released together.
func TestWeights(t *testing.T) {
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		limit := ratelimit.InFlight{Name: "weights", Limit: 10, Lease: time.Minute}
		three := acquire(t, store, limit.ForN("a", 3))
		if !three.OK || len(three.More) != 2 || three.N != 3 {
			t.Fatalf("got %+v, want three", three)
		}
		wantCount(t, store, limit, "a", 3)
		six := acquire(t, store, limit.ForN("a", 6))
		refused := acquire(t, store, limit.ForN("a", 2))
		if !six.OK || refused.OK || !refused.NotBefore.Equal(three.Until) {
			t.Errorf("got %+v and %+v, want six, and a refusal until the first lease ends", six, refused)
		}
		var full *ratelimit.FullError
		if err := refused.Err(); !errors.As(err, &full) || err.Error() != `ratelimit: limit "weights": fewer than 2 of 10 permits are free` {
			t.Errorf("got %v", err)
		}
		wantCount(t, store, limit, "a", 9)
		fences := map[int]int64{three.Number: three.Fence}
		for _, m := range append(append(three.More, six.More...), ratelimit.PermitNumber{Number: six.Number, Fence: six.Fence}) {
			if fences[m.Number] != 0 {
				t.Errorf("permit %d is held twice", m.Number)
			}
			fences[m.Number] = m.Fence
		}
		clock.add(30 * time.Second)
		renewed, err := store.Renew(t.Context(), three)
		if err != nil || !renewed.Until.Equal(three.Until.Add(30*time.Second)) {
			t.Errorf("got %+v and %v, want it renewed", renewed, err)
		}
		clock.add(31 * time.Second)
		if _, err := store.Renew(t.Context(), six); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("got %v, want the lease to be lost", err)
		}
		wantCount(t, store, limit, "a", 3)
		half := renewed
		half.More = []ratelimit.PermitNumber{renewed.More[0], {Number: renewed.More[1].Number, Fence: 1}}
		if err := store.Release(t.Context(), half); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("got %v, want the lease to be lost", err)
		}
		wantCount(t, store, limit, "a", 3)
		for _, want := range []error{nil, ratelimit.ErrLeaseLost} {
			if err := store.Release(t.Context(), renewed); !errors.Is(err, want) {
				t.Errorf("got %v, want %v", err, want)
			}
		}
		wantCount(t, store, limit, "a", 0)
	})
}

// More permits than the limit has are never granted, and more than a call may ask an error of a value.
func TestWeightsNever(t *testing.T) {
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, _ *clock) {
		limit := ratelimit.InFlight{Name: "weights", Limit: 10}
		other := ratelimit.InFlight{Name: "others", Limit: 10_000}
		for _, test := range []struct {
			request ratelimit.PermitRequest
			want    error
		}{
			{limit.ForN("", 11), ratelimit.ErrExceedsCapacity},
			{limit.ForN("", 0), ratelimit.ErrInvalid},
			{limit.ForN("", -1), ratelimit.ErrInvalid},
			{other.ForN("", ratelimit.MaxPermits+1), ratelimit.ErrInvalid},
			{other.ForN("", ratelimit.MaxPermits).And(limit.For("")), ratelimit.ErrInvalid},
			{limit.For("a").And(limit.For("a")), ratelimit.ErrInvalid},
			{other.For("a").And(limit.ForN("a", 11)), ratelimit.ErrExceedsCapacity},
		} {
			tx := begin()
			for verb, acquire := range map[string]func() (ratelimit.Permit, error){
				"Acquire":     func() (ratelimit.Permit, error) { return store.Acquire(t.Context(), test.request) },
				"AcquireWait": func() (ratelimit.Permit, error) { return store.AcquireWait(t.Context(), test.request) },
				"AcquireTx":   func() (ratelimit.Permit, error) { return store.AcquireTx(t.Context(), tx, test.request) },
			} {
				if permit, err := acquire(); !errors.Is(err, test.want) || permit.OK {
					t.Errorf("%s of %v: got %v, and %v, want %v", verb, test.request, permit, err, test.want)
				}
			}
			_ = tx.Rollback(t.Context())
		}
		if permit := acquire(t, store, other.ForN("", ratelimit.MaxPermits)); !permit.OK || len(permit.More) != ratelimit.MaxPermits-1 {
			t.Errorf("got %v, want the most", permit)
		}
	})
}

// Several permits are acquired beside one that an open transaction has made.
func TestWeightsBesideAnOpenTransaction(t *testing.T) {
	db := pgtest.New(t)
	store := newStore(t, db).Permits()
	limit := ratelimit.InFlight{Name: "weights", Limit: 5}
	for _, key := range strings.Split("abcdefgh", "") {
		tx := begin(t, db, pgx.ReadCommitted)
		if permit, err := store.AcquireTx(t.Context(), tx, limit.For(key)); err != nil || !permit.OK {
			t.Errorf("got %v, and %v", permit, err)
		}
		if permit := acquire(t, store, limit.ForN(key, 4)); !permit.OK {
			t.Errorf("key %q: got %v, want the other four", key, permit)
		}
		should(t, tx.Rollback(t.Context()))
	}
}

// Permits of several limits are acquired all or nothing, with rates as well, and released together.
func TestPermitsOfSeveralLimits(t *testing.T) {
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		tenant := ratelimit.InFlight{Name: "tenant", Limit: 4, Lease: time.Minute}
		all := ratelimit.InFlight{Name: "all", Limit: 5, Lease: 2 * time.Minute}
		rate := ratelimit.TokenBucket{Name: "rate", Rate: 1, Period: time.Hour, Capacity: 2}
		both := tenant.ForN("a", 2).And(all.ForN("", 3))
		permit, err := store.Acquire(t.Context(), both, rate.For(""))
		if err != nil || !permit.OK || permit.InFlight.Name != "tenant" || len(permit.With) != 1 || !permit.Rates.OK {
			t.Fatalf("got %+v and %v, want both", permit, err)
		}
		if of := permit.Parts()[1]; len(of.More) != 2 || !of.Until.Equal(permit.Until.Add(time.Minute)) {
			t.Errorf("got %+v, want three for two minutes", of)
		}
		if refused := acquire(t, store, both); refused.OK || refused.InFlight.Name != "all" {
			t.Errorf("got %+v, want a refusal by all", refused)
		}
		wantCount(t, store, tenant, "a", 2)
		wantCount(t, store, all, "", 3)
		clock.add(30 * time.Second)
		if permit, err = store.Renew(t.Context(), permit); err != nil || !permit.With[0].Until.Equal(permit.Until.Add(time.Minute)) {
			t.Errorf("got %+v and %v, want both renewed", permit, err)
		}
		tx := begin()
		should(t, store.ReleaseTx(t.Context(), tx, permit))
		again, err := store.AcquireTx(t.Context(), tx, all.ForN("", 2).And(tenant.For("b")), rate.For(""))
		if err != nil || !again.OK || !again.Rates.OK {
			t.Errorf("got %+v and %v, want permits in a transaction", again, err)
		}
		should(t, tx.Rollback(t.Context()))
		wantCount(t, store, tenant, "a", 2)
		wantCount(t, store, all, "", 3)
		wantCount(t, store, tenant, "b", 0)
		tx = begin()
		lost := permit
		lost.Fence = 1
		if err := store.ReleaseTx(t.Context(), tx, lost); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("got %v, want the lease to be lost", err)
		}
		should(t, tx.Commit(t.Context()))
		wantCount(t, store, all, "", 3)
		refused, err := store.Acquire(t.Context(), all.For("").And(tenant.For("b")), rate.ForN("", 2))
		if err != nil || refused.OK || refused.Err() == nil {
			t.Errorf("got %+v and %v, want a refusal by the rate", refused, err)
		}
		wantCount(t, store, tenant, "b", 0)
		tx = begin()
		should(t, store.ReleaseTx(t.Context(), tx, permit))
		should(t, tx.Commit(t.Context()))
		wantCount(t, store, tenant, "a", 0)
		wantCount(t, store, all, "", 0)
	})
}

// In a process a small one waits behind a large one, also when it could go.
func TestWaitersOfSeveralInOrder(t *testing.T) {
	holdDatabases(t, func(t *testing.T, store *pgstore.Store, _ *pgtest.DB) {
		largeBeforeSmall(t, store.Permits(), func(came int) {
			eventually(t, "all stand in line", func() bool { return store.WaitingForPermits("order", "") == came })
		})
	})
	t.Run("memstore", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { largeBeforeSmall(t, memstore.New(nil).Permits(), func(int) { synctest.Wait() }) })
	})
}

func largeBeforeSmall(t *testing.T, store permits, inLine func(came int)) {
	limit := ratelimit.InFlight{Name: "order", Limit: 3, Lease: time.Minute}
	held := acquire(t, store, limit.ForN("", 2))
	ctx := within(t, 30*time.Second)
	served := make(chan ratelimit.Permit, 2)
	for i, n := range []int{3, 1} {
		go func() {
			permit, err := store.AcquireWait(ctx, limit.ForN("", n))
			should(t, err)
			served <- permit
		}()
		inLine(i + 1)
	}
	for _, n := range []int{3, 1} {
		must(t, store.Release(ctx, held))
		if held = <-served; held.N != n {
			t.Fatalf("got %v, want %d", held, n)
		}
	}
}

// A waiter for several that gives up leaves nothing behind: neither what it had nor what it claimed.
func TestWaiterOfSeveralGivesUp(t *testing.T) {
	permitStores(t, false, func(t *testing.T, store flightStore, _ func() pgx.Tx, _ *clock) {
		limit := ratelimit.InFlight{Name: "gives up", Limit: 4, Lease: time.Minute}
		one := acquire(t, store, limit.For(""))
		ctx := within(t, 500*time.Millisecond)
		if permit, err := store.AcquireWait(ctx, limit.ForN("", 4)); !errors.Is(err, context.DeadlineExceeded) || permit.OK {
			t.Errorf("got %v, and %v", permit, err)
		}
		ctx = within(t, 20*time.Second)
		if permit, err := store.AcquireWait(ctx, limit.ForN("", 3)); err != nil || !permit.OK {
			t.Errorf("got %v, and %v, want what it had", permit, err)
		}
		should(t, store.Release(ctx, one))
		if permit, err := store.AcquireWait(ctx, limit.For("")); err != nil || !permit.OK {
			t.Errorf("got %v, and %v, want what it had claimed", permit, err)
		}
	})
}

// Waiters for several, of one key and of two in both orders, in two stores, do not wait for each other.
func TestWaitersOfSeveralDoNotWaitForEachOther(t *testing.T) {
	holdDatabases(t, func(t *testing.T, store *pgstore.Store, db *pgtest.DB) {
		portable := strings.HasSuffix(t.Name(), "true")
		stores := []permits{store.Permits(), newStore(t, db, isPortable(portable)).Permits()}
		// What is left behind is there until the test has failed.
		a := ratelimit.InFlight{Name: "a", Limit: 4, Lease: time.Hour}
		b := ratelimit.InFlight{Name: "b", Limit: 2, Lease: time.Hour}
		requests := []ratelimit.PermitRequest{
			a.ForN("", 3), a.ForN("", 4), a.ForN("", 2).And(b.For("")), b.ForN("", 2).And(a.For("")), a.For(""), b.For(""),
		}
		if portable { // in which nobody collects
			requests = requests[2:]
		}
		ctx := within(t, 60*time.Second)
		var work sync.WaitGroup
		var inA, inB atomic.Int64
		for i := range 2 * len(requests) {
			work.Go(func() {
				for range 5 {
					err := stores[i%2].Hold(ctx, requests[i/2], func(context.Context, ratelimit.Permit) error {
						for _, part := range requests[i/2].Parts() {
							at := &inA
							if part.Limit.Name == "b" {
								at = &inB
							}
							if now := at.Add(int64(part.N)); now > int64(part.Limit.Limit) {
								t.Errorf("%d of %v are held", now, part.Limit)
							}
							defer at.Add(-int64(part.N))
						}
						return nil
					})
					should(t, err)
				}
			})
		}
		work.Wait()
	})
}

// A waiter that wants several is served beside a flood of callers that each want one, some of which
// do not wait.
func TestWaiterOfSeveralIsServed(t *testing.T) {
	t.Run("pgstore", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t, maxConns(8))
		floodAndHold(t, newStore(t, db).Permits(), newStore(t, db).Permits())
	})
	t.Run("memstore", func(t *testing.T) {
		t.Parallel()
		store := memstore.New(nil).Permits()
		floodAndHold(t, store, store)
	})
}

// A waiter that wants one is served beside callers of another process that take all that is free at once,
// again and again.
func TestWaiterOfOneIsServed(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t, maxConns(8))
	large, small := newStore(t, db).Permits(), newStore(t, db).Permits()
	limit := ratelimit.InFlight{Name: "small", Limit: 4, Lease: time.Minute}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	var work sync.WaitGroup
	for range 4 {
		work.Go(func() {
			for ctx.Err() == nil {
				_ = large.Hold(ctx, limit.ForN("", 4), func(ctx context.Context, _ ratelimit.Permit) error {
					time.Sleep(300 * time.Millisecond)
					return nil
				})
			}
		})
	}
	eventually(t, "all are held", func() bool {
		held, err := small.Held(ctx, limit, "")
		return err == nil && len(held) == limit.Limit
	})
	if permit, err := small.AcquireWait(ctx, limit.For("")); err != nil || !permit.OK {
		t.Errorf("got %v, and %v, want a permit", permit, err)
	}
	cancel()
	work.Wait()
}

// floodAndHold holds 8 of 10 permits by a store, while others hold one each by that and another.
func floodAndHold(t *testing.T, store, other permits) {
	limit := ratelimit.InFlight{Name: "flood", Limit: 10, Lease: time.Hour}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	var work sync.WaitGroup
	for worker := range 40 {
		work.Go(func() {
			acquire := []func(context.Context, ratelimit.PermitRequest, ...ratelimit.Request) (ratelimit.Permit, error){
				store.Acquire, store.AcquireWait, other.Acquire, other.AcquireWait,
			}[worker%4]
			for ctx.Err() == nil {
				permit, err := acquire(ctx, limit.For(""))
				if err == nil && permit.OK {
					time.Sleep(5 * time.Millisecond)
					_ = permitsOf(store, other, worker).Release(context.WithoutCancel(ctx), permit)
				}
			}
		})
	}
	for range 5 {
		err := store.Hold(ctx, limit.ForN("", 8), func(ctx context.Context, permit ratelimit.Permit) error {
			held, err := store.Held(ctx, limit, "")
			if len(held) > limit.Limit || len(held) < 8 {
				t.Errorf("got %d held", len(held))
			}
			return err
		})
		should(t, err)
	}
	cancel()
	work.Wait()
}

func permitsOf(store, other permits, worker int) permits {
	if worker%4 < 2 {
		return store
	}
	return other
}
