package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// holdDatabases runs a test on each kind of store that has a database, on its own clock.
func holdDatabases(t *testing.T, test func(t *testing.T, store *pgstore.Store, db *pgtest.DB)) {
	t.Helper()
	for _, portable := range []bool{false, true} {
		t.Run(fmt.Sprintf("portable=%v", portable), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, maxConns(8))
			test(t, newStore(t, db, isPortable(portable)), db)
		})
	}
}

// brief has a lease that is renewed several times in a test.
var brief = ratelimit.InFlight{Name: "brief", Limit: 1, Lease: time.Second}

func TestHold(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	permitStores(t, false, func(t *testing.T, store flightStore, begin func() pgx.Tx, _ *clock) {
		ctx := t.Context()
		err := store.Hold(ctx, brief.For("k"), func(ctx context.Context, permit ratelimit.Permit) error {
			for end := time.Now().Add(3 * brief.Lease); time.Now().Before(end); time.Sleep(brief.Lease / 20) {
				refusedFor(t, store, brief, "k")
			}
			return ctx.Err()
		})
		if err != nil {
			t.Errorf("Hold for three leases: %v", err)
		}
		failed := errors.New("failed")
		if err := store.Hold(ctx, brief.For("k"), func(context.Context, ratelimit.Permit) error { return failed }); !errors.Is(err, failed) {
			t.Errorf("Hold of a function that fails: got %v", err)
		}
		func() {
			defer func() { _ = recover() }()
			_ = store.Hold(ctx, brief.For("k"), func(context.Context, ratelimit.Permit) error { panic("on purpose") })
		}()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = store.Hold(ctx, brief.For("k"), func(context.Context, ratelimit.Permit) error { runtime.Goexit(); return nil })
		}()
		<-ended

		// What the function has released in its transaction is not lost.
		err = store.Hold(ctx, brief.For("k"), func(ctx context.Context, permit ratelimit.Permit) error {
			tx := begin()
			if err := store.ReleaseTx(ctx, tx, permit); err != nil {
				return err
			}
			if err := tx.Commit(ctx); err != nil {
				return err
			}
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(brief.Lease):
				return nil
			}
		})
		if err != nil {
			t.Errorf("Hold of a function that releases in a transaction: %v", err)
		}
		takePermit(t, store, brief, "k")
	})
}

func TestHoldTellsThatTheLeaseIsLost(t *testing.T) {
	t.Parallel()
	permitStores(t, false, func(t *testing.T, store flightStore, _ func() pgx.Tx, _ *clock) {
		ctx := t.Context()
		err := store.Hold(ctx, brief.For("k"), func(inner context.Context, permit ratelimit.Permit) error {
			if err := store.Reset(ctx, brief, "k"); err != nil {
				return err
			}
			begun := time.Now()
			<-inner.Done()
			if took := time.Since(begun); took > brief.Lease+brief.Lease/2 {
				t.Errorf("was told after %v, want within a lease of %v", took, brief.Lease)
			}
			if err := context.Cause(inner); !errors.Is(err, ratelimit.ErrLeaseLost) {
				t.Errorf("the context ended because of %v, want ErrLeaseLost", err)
			}
			return nil
		})
		if !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("Hold: got %v, want ErrLeaseLost", err)
		}
		takePermit(t, store, brief, "k")
	})
}

// one has a permit that many wait for.
var one = ratelimit.InFlight{Name: "one", Limit: 1, Lease: time.Minute}

// Who waits is served in order of arrival. Who comes while somebody asks stands in line behind that
// caller, however long the answer takes.
func TestAcquireWaitInOrderBesideASlowAnswer(t *testing.T) {
	t.Parallel()
	const waiters = 10
	holdDatabases(t, func(t *testing.T, store *pgstore.Store, db *pgtest.DB) {
		held := takePermit(t, store.Permits(), one, "k")
		tx := begin(t, db, pgx.ReadCommitted)
		mustExec(t, tx, "LOCK TABLE "+db.Schema+".rate_limits")
		var (
			mu    sync.Mutex
			order []int
			wg    sync.WaitGroup
		)
		for i := range waiters {
			wg.Go(func() {
				permit, err := store.Permits().AcquireWait(t.Context(), one.For("k"))
				if err != nil || !permit.OK {
					t.Errorf("waiter %d: got %v and %v", i, permit, err)
					return
				}
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				should(t, store.Permits().Release(t.Context(), permit))
			})
			eventually(t, "the first asks, and all others stand in line", func() bool {
				return pgtest.Blocks(t, db.Pool, tx) && store.WaitingForPermits(one.Name, "k") == i
			})
		}
		must(t, tx.Rollback(t.Context()))
		eventually(t, "all stand in line", func() bool { return store.WaitingForPermits(one.Name, "k") == waiters })
		must(t, store.Permits().Release(t.Context(), held))
		wg.Wait()
		if !slices.IsSorted(order) || len(order) != waiters {
			t.Errorf("served in the order %v", order)
		}
	})
}

// When a caller comes with a smaller Limit or Lease, it also holds for those who wait already, even while
// they look.
func TestAcquireWaitGoesByTheNewestLimit(t *testing.T) {
	t.Parallel()
	const key = "k"
	two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Hour}
	smaller := ratelimit.InFlight{Name: two.Name, Limit: 1, Lease: time.Minute}
	test := func(t *testing.T, store permits, release func(first ratelimit.Permit)) {
		t.Helper()
		held := [2]ratelimit.Permit{}
		for range held {
			permit := takePermit(t, store, two, key)
			held[permit.Number] = permit
		}
		type answer struct {
			permit ratelimit.Permit
			err    error
		}
		got := make(chan answer, 1)
		go func() {
			permit, err := store.AcquireWait(t.Context(), two.For(key))
			got <- answer{permit, err}
		}()
		release(held[1]) // which is to be given to nobody
		should(t, store.Release(t.Context(), held[0]))
		a := <-got
		if lease := a.permit.Until.Sub(a.permit.At); a.err != nil || a.permit.Number != 0 || lease != time.Minute || a.permit.InFlight.Lease != time.Minute {
			t.Errorf("got %v with a lease of %v, and %v, want permit 0 with a lease of a minute", a.permit, lease, a.err)
		}
	}
	holdDatabases(t, func(t *testing.T, store *pgstore.Store, db *pgtest.DB) {
		test(t, store.Permits(), func(first ratelimit.Permit) {
			eventually(t, "it stands in line", func() bool { return store.WaitingForPermits(two.Name, key) == 1 })
			tx := begin(t, db, pgx.ReadCommitted)
			mustExec(t, tx, "LOCK TABLE "+db.Schema+".rate_limits")
			eventually(t, "it looks", func() bool { return pgtest.Blocks(t, db.Pool, tx) })
			if _, err := store.Permits().Acquire(within(t, time.Second), smaller.For(key)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Acquire of what is locked: got %v, want the end of its context", err)
			}
			should(t, store.Permits().ReleaseTx(t.Context(), tx, first))
			must(t, tx.Commit(t.Context()))
		})
	})
	t.Run("memstore", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			store := memstore.New(nil).Permits()
			test(t, store, func(first ratelimit.Permit) {
				synctest.Wait()
				refusedFor(t, store, smaller, key)
				should(t, store.Release(t.Context(), first))
			})
		})
	})
}

// A process that waits looks at parts of many permits, and finds the one that another has released.
func TestAcquireWaitAmongMany(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	many := ratelimit.InFlight{Name: "many", Limit: 2500, Lease: time.Hour}
	must(t, errOf(db.Pool.Exec(t.Context(), "INSERT INTO "+db.Schema+".rate_limits (name, key, shard, value, ts) SELECT 'many', 'k', n, 1, now() + interval '1 hour' FROM generate_series(0, 2499) AS n")))
	got := make(chan ratelimit.Permit, 1)
	go func() {
		permit, err := newStore(t, db).Permits().AcquireWait(t.Context(), many.For("k"))
		should(t, err)
		got <- permit
	}()
	eventually(t, "it looks at the second part", func() (so bool) {
		err := db.Pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM "+db.Schema+".rate_limits WHERE name = 'many' AND shard = 10000 AND value > 0)").Scan(&so)
		return so && err == nil
	})
	must(t, newStore(t, db).Permits().Release(t.Context(), ratelimit.Permit{InFlight: many, Key: "k", OK: true, Number: 1234, Fence: 1}))
	if permit := <-got; permit.Number != 1234 {
		t.Errorf("got %v, want permit 1234", permit)
	}
	if held, err := newStore(t, db).Permits().Held(t.Context(), many, "k"); err != nil || len(held) != many.Limit {
		t.Errorf("%d permits are held, and %v, want %d", len(held), err, many.Limit)
	}
}

func TestAcquireWaitEnds(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	permitStores(t, false, func(t *testing.T, store flightStore, _ func() pgx.Tx, _ *clock) {
		short := within(t, 50*time.Millisecond)
		first := takePermit(t, store, brief, "k")
		if permit, err := store.AcquireWait(short, brief.For("k")); permit.OK || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("AcquireWait until the deadline: got %v and %v", permit, err)
		}
		begun := time.Now() // the lease of who never releases ends the wait
		permit, err := store.AcquireWait(t.Context(), brief.For("k"))
		if err != nil || !permit.OK || permit.Fence <= first.Fence {
			t.Errorf("AcquireWait: got %v and %v", permit, err)
		}
		if took := time.Since(begun); took > brief.Lease+10*time.Second {
			t.Errorf("waited %v for a lease of %v", took, brief.Lease)
		}
	})
}

func TestCloseEndsWaitsForPermits(t *testing.T) {
	t.Parallel()
	_, store := setUp(t)
	permit := takePermit(t, store.Permits(), one, "k")
	waited := make(chan error)
	go func() {
		_, err := store.Permits().AcquireWait(t.Context(), one.For("k"))
		waited <- err
	}()
	eventually(t, "it waits", func() bool { return store.WaitingForPermits(one.Name, "k") == 1 })
	store.Close()
	if err := <-waited; !errors.Is(err, pgstore.ErrClosed) {
		t.Errorf("AcquireWait when the Store is closed: got %v, want ErrClosed", err)
	}
	if _, err := store.Permits().Acquire(t.Context(), one.For("k")); !errors.Is(err, pgstore.ErrClosed) {
		t.Errorf("Acquire after Close: got %v, want ErrClosed", err)
	}
	if err := store.Permits().Release(t.Context(), permit); err != nil {
		t.Errorf("Release after Close: %v", err)
	}
}
