package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// All that there is, some of it, or nothing: in a transaction the rows are locked and read
// in one round trip, and written in another. Where tables are distributed it is looked
// before which rows are there.
func TestAtMostRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	for portable, more := range map[bool]int{false: 0, true: 1} {
		store := newStore(t, c.DB, isPortable(portable))
		for _, l := range []ratelimit.Limit{slow(fmt.Sprint("bucket", portable), 10), slowWindow(fmt.Sprint("window", portable), 10), slowSliding(fmt.Sprint("sliding", portable), 10)} {
			for step, want := range []float64{7, 3, 0, 0} { // the first one prepares
				tx := begin(t, c.DB, pgx.Serializable)
				c.reset()
				result, err := store.AllowAtMostTx(t.Context(), tx, l.ForN("k", 7))
				if err != nil || result.OK != (want > 0) || result.Taken != want {
					t.Errorf("%v, step %d: %v, %v, want %v taken", l, step, result, err, want)
				}
				trips := 2 + more
				if want == 0 { // nothing is written
					trips--
				}
				if got := c.sent().trips; step > 0 && (got < trips || got > trips+1 || step > 1 && got != trips) {
					t.Errorf("%v, step %d: %d round trips, want %d", l, step, got, trips)
				}
				end(t, tx.Commit)
			}
		}
	}
}

// On its own it is looked whether there is anything, and if there is, the row is locked, and
// written. A refusal is a look.
func TestAtMostOnItsOwnRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	store := newStore(t, c.DB)
	for _, l := range []ratelimit.Limit{slow("bucket", 20), slowWindow("window", 20), slowSliding("sliding", 20)} {
		for step, test := range []struct {
			want  float64
			trips int
		}{{7, 0}, {7, 3}, {6, 3}, {0, 1}} { // the first one makes the row, and prepares
			c.reset()
			result, err := store.AllowAtMost(t.Context(), l.ForN("k", 7))
			if err != nil || result.Taken != test.want || result.OK != (test.want > 0) {
				t.Errorf("%v, step %d: %v, %v, want %v taken", l, step, result, err, test.want)
			}
			if got := c.sent().trips; test.trips > 0 && got != test.trips {
				t.Errorf("%v, step %d: %d round trips, want %d", l, step, got, test.trips)
			}
		}
	}
}

// It leaves no predicate lock, so that transactions on different keys do not fail each
// other under SERIALIZABLE.
func TestAtMostLeavesNoPredicateLock(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	for _, l := range []ratelimit.Limit{slow("at most locks", 10), slowSliding("at most slots", 10)} {
		for _, want := range []float64{7, 3} {
			tx := begin(t, db, pgx.Serializable)
			result, err := store.AllowAtMostTx(t.Context(), tx, l.ForN("k", 7))
			if mustTake(t, result, err); result.Taken != want {
				t.Errorf("%v, want %v taken", result, want)
			}
			if locks := predicateLocks(t, db, tx); len(locks) > 0 {
				t.Errorf("%v: predicate locks %q, want none", l, locks)
			}
			end(t, tx.Commit)
		}
	}
}

func TestAtMostAndFirstInvalid(t *testing.T) {
	t.Parallel()
	store := newStore(t, pgtest.New(t))
	l, small, large := slow("at most", 10), slow("small", 2), slow("large", 10)
	empty := ratelimit.TokenBucket{Name: "empty", Rate: 1, Period: time.Second, Capacity: 0.5}
	first := store.AllowFirst
	most := func(ctx context.Context, r ...ratelimit.Request) (ratelimit.Result, error) {
		return store.AllowAtMost(ctx, r[0])
	}
	for _, test := range []struct {
		verb     func(context.Context, ...ratelimit.Request) (ratelimit.Result, error)
		requests []ratelimit.Request
		want     error
	}{
		{most, []ratelimit.Request{l.ForN("k", 0)}, ratelimit.ErrInvalid},
		{most, []ratelimit.Request{l.ForN("k", 0.9)}, ratelimit.ErrInvalid},
		{most, []ratelimit.Request{empty.ForN("k", 1)}, ratelimit.ErrExceedsCapacity},
		{first, nil, ratelimit.ErrInvalid},
		{first, []ratelimit.Request{small.For("k"), small.ForN("k", 2)}, ratelimit.ErrInvalid},
		{first, []ratelimit.Request{small.For("k"), large.ForN("k", -1)}, ratelimit.ErrInvalid},
		{first, []ratelimit.Request{small.ForN("k", 3), large.ForN("k", 11)}, ratelimit.ErrExceedsCapacity},
	} {
		if result, err := test.verb(t.Context(), test.requests...); !errors.Is(err, test.want) || result.OK {
			t.Errorf("%v: %v, %v, want %v", test.requests, result, err, test.want)
		}
	}
	result, err := first(t.Context(), small.ForN("k", 3), large.ForN("k", 3)) // small is passed over
	if mustTake(t, result, err); ratelimit.NameOf(result.Request.Limit) != "large" {
		t.Errorf("%v, want it from large", result)
	}
}

// Each customer has a bucket of his own, and borrows from the one that all share.
func TestFirst(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, shards := range []int{1, 4} {
		for _, portable := range []bool{false, true} {
			for _, inTx := range []bool{false, true} {
				name := fmt.Sprintf("%d shards, portable %v, in tx %v", shards, portable, inTx)
				t.Run(name, func(t *testing.T) {
					store := newStore(t, db, isPortable(portable))
					first := store.AllowFirst
					if inTx {
						first = func(ctx context.Context, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
							err = pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
								result, err = store.AllowFirstTx(ctx, tx, requests...)
								return err
							})
							return result, err
						}
					}
					own, shared := slow("own "+name, 5), shardedSlow("all "+name, 8, shards)
					var from []string
					for range 6 {
						for _, who := range []string{"alice", "bob"} {
							result, err := first(t.Context(), own.ForN(who, 2), shared.ForN("", 2))
							must(t, err)
							if !result.OK {
								from = append(from, "-")
								if len(result.Each()) != 2 || result.Receipt != nil || result.RetryAfter != min(result.Each()[0].RetryAfter, result.Each()[1].RetryAfter) {
									t.Errorf("%v, %v, want both, and the shorter wait", result, result.Each())
								}
								continue
							}
							from = append(from, ratelimit.NameOf(result.Request.Limit)[:3])
							if len(result.Each()) != 1 || result.Taken != 2 {
								t.Errorf("%v with %d limits, want the one that granted", result, len(result.Each()))
							}
						}
					}
					if want := []string{"own", "own", "own", "own", "all", "all", "all", "all", "-", "-", "-", "-"}; !slices.Equal(from, want) {
						t.Errorf("taken from %q, want %q", from, want)
					}
					// What was borrowed goes back to where it came from.
					mustReset(t, store, own, "alice")
					taken, err := first(t.Context(), own.ForN("alice", 5), shared.ForN("", 2))
					mustTake(t, taken, err)
					settled, err := store.Settle(t.Context(), stored(t, taken.Receipt), 1)
					mustTake(t, settled, err)
					wantLeft(t, store, own.ForN("alice", 0), 4)
				})
			}
		}
	}
}

// A grant by the first limit is one round trip, and touches no row of the others.
func TestFirstRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	store := newStore(t, c.DB)
	own, shared := slow("own", 100), slow("all", 100)
	for _, what := range []string{"prepares", "later"} {
		tx := begin(t, c.DB, pgx.ReadCommitted)
		c.reset()
		result, err := store.AllowFirstTx(t.Context(), tx, own.For("alice"), shared.For(""))
		mustTake(t, result, err)
		if got := c.sent().trips; what == "later" && got != 1 {
			t.Errorf("%d round trips, want 1", got)
		}
		end(t, tx.Commit)
	}
	if rows := statesOf(t, c.DB); len(rows) != 1 {
		t.Errorf("rows %q, want alice's", rows)
	}
}

// Whatever the order in which they name them, two calls do not deadlock on limits that are
// all short of what is asked.
func TestFirstDoesNotDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, store := setUp(t, maxConns(12))
	a, b := slow("first a", 10), slow("first b", 10)
	mustAllow(t, store, a.ForN("k", 10), b.ForN("k", 10))
	orders := [][]ratelimit.Request{{a.For("k"), b.For("k")}, {b.For("k"), a.For("k")}}
	together(10, func(i int) {
		for range 30 {
			if err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
				result, err := store.AllowFirstTx(t.Context(), tx, orders[i%2]...)
				if err == nil && result.OK {
					err = errors.New("granted what is not there")
				}
				return err
			}); err != nil {
				t.Error(err)
				return
			}
		}
	})
}

// A transaction that has the own bucket's row is waited for: it may give back what it has
// taken, so nothing is borrowed meanwhile. One that has the shared row is not.
func TestFirstWaitsForTheFirst(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	own, shared := slow("wait own", 5), slow("wait shared", 5)
	mustAllow(t, store, own.For("k"), shared.For(""))
	tx := begin(t, db, pgx.ReadCommitted)
	takeIn(t, store, tx, shared.For(""))
	result, err := store.AllowFirst(within(t, 5*time.Second), own.For("k"), shared.For(""))
	mustTake(t, result, err)
	end(t, tx.Rollback)

	tx = begin(t, db, pgx.ReadCommitted)
	takeIn(t, store, tx, own.ForN("k", 3))
	done := make(chan ratelimit.Result, 1)
	go func() {
		result, err := store.AllowFirst(within(t, 10*time.Second), own.ForN("k", 2), shared.ForN("", 2))
		should(t, err)
		done <- result
	}()
	eventually(t, "it waits for the row", func() bool { return pgtest.Blocks(t, db.Pool, tx) })
	end(t, tx.Rollback)
	if result := <-done; ratelimit.NameOf(result.Request.Limit) != "wait own" {
		t.Errorf("%v, want it from the own bucket", result)
	}
}

// By the database's clock a wait is never over too early.
func TestWait(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	l := ratelimit.TokenBucket{Name: "wait", Rate: 50, Period: time.Second, Capacity: 1}
	for range 5 {
		result, err := store.Wait(t.Context(), l.For("k"))
		mustTake(t, result, err)
		if now := databaseNow(t, db); now.Before(result.RetryAt) {
			t.Errorf("returned %v early", result.RetryAt.Sub(now))
		}
	}
	still := slow("still", 5)
	mustAllow(t, store, still.ForN("k", 5))
	_, err := store.Wait(within(t, time.Minute), still.ForN("k", 2))
	var failed *ratelimit.WaitError
	if !errors.As(err, &failed) || !errors.Is(err, context.DeadlineExceeded) || failed.Wait < 365*24*time.Hour {
		t.Errorf("error %v, want a *WaitError with a wait of years", err)
	}
	wantLeft(t, store, still.ForN("k", 0), 0)
}

// All are paused or none.
func TestPauseEach(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, portable := range []bool{false, true} {
		store := newStore(t, db, isPortable(portable))
		a, b := slow(fmt.Sprint("pause b", portable), 5), shardedSlow(fmt.Sprint("pause a", portable), 8, 2)
		if _, err := store.PauseEach(t.Context(), []ratelimit.Request{a.For("k"), ratelimit.TokenBucket{Name: "bad"}.For("k")}, time.Hour); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("a bad limit: %v", err)
		}
		if _, err := store.PauseEach(t.Context(), []ratelimit.Request{a.For("k"), b.For("k")}, -time.Hour); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("a bad duration: %v", err)
		}
		rollBack := errors.New("roll back")
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			_, err := store.PauseEachTx(t.Context(), tx, []ratelimit.Request{a.For("k"), b.For("k")}, time.Hour)
			return errors.Join(err, rollBack)
		})
		if !errors.Is(err, rollBack) {
			t.Fatal(err)
		}
		wantLeft(t, store, a.ForN("k", 0), 5)
		until, err := store.PauseEach(t.Context(), []ratelimit.Request{a.For("k"), b.ForN("k", 3), b.For("k")}, time.Hour)
		must(t, err)
		statuses, err := store.CheckEach(t.Context(), a.ForN("k", 0), b.ForN("k", 0))
		must(t, err)
		for _, status := range statuses {
			if status.OK || status.PausedUntil.After(until) || until.Sub(status.PausedUntil) > time.Second {
				t.Errorf("%v, want a pause until %v", status, until)
			}
		}
	}
}

// Close ends those who wait for a reservation, and returns when they have given it back.
func TestCloseEndsWaits(t *testing.T) {
	t.Parallel()
	db, store := setUp(t, maxConns(8))
	limit := slow("l", 1)
	mustAllow(t, store, limit.For("k"))
	type answer struct {
		result ratelimit.Result
		err    error
	}
	answers := make(chan answer, 2)
	for range 2 {
		go func() {
			result, err := store.Wait(t.Context(), limit.For("k"))
			answers <- answer{result, err}
		}()
	}
	eventually(t, "both wait", func() bool {
		check, err := store.Check(t.Context(), limit.ForN("k", 0))
		return err == nil && check.Value < -1.5
	})
	holder, err := db.Pool.Begin(t.Context())
	must(t, err)
	mustExec(t, holder, "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		store.Close()
	}()
	eventually(t, "one who gives back waits for the row", func() bool { return waitsForLong(t, db, holder) > 0 })
	select {
	case <-closed:
		t.Error("Close has returned before they have given back")
	default:
	}
	must(t, holder.Rollback(t.Context()))
	<-closed
	wantLeft(t, newStore(t, db), limit.For("k"), 0)
	for range 2 {
		var waited *ratelimit.WaitError
		if a := <-answers; !errors.As(a.err, &waited) || !errors.Is(a.err, pgstore.ErrClosed) || waited.Wait < time.Hour {
			t.Errorf("got %v, want a wait that the store has ended", a.err)
		}
	}
	if _, err := store.Wait(t.Context(), limit.For("k")); !errors.Is(err, pgstore.ErrClosed) {
		t.Errorf("got %v of a wait afterwards, want %v", err, pgstore.ErrClosed)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newStore(t, db).Wait(ctx, limit.For("k")); errors.Is(err, pgstore.ErrClosed) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v of a wait that its caller ended, want %v", err, context.Canceled)
	}
}
