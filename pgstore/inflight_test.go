package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// permits is the verbs of limits of how many at once.
type permits interface {
	ratelimit.TxPermits[pgx.Tx]
	Prune(ctx context.Context, limits ...ratelimit.InFlight) (int64, error)
}

// flightStore is the same, with the rate limits of its store.
type flightStore struct {
	permits
	rates ratelimit.Store
}

// flightStores runs a test on each kind of store, on a clock of its own.
func flightStores(t *testing.T, test func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock)) {
	t.Helper()
	permitStores(t, true, test)
}

// permitStores does so, on the stores' own clocks if none is injected.
func permitStores(t *testing.T, injected bool, test func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock)) {
	t.Helper()
	for _, kind := range []string{"plain", "portable", "memstore"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			clock, config := newClock(), memstore.Config{}
			if injected {
				config.Clock = clock.now
			}
			if kind == "memstore" {
				store := memstore.NewWithConfig(config)
				test(t, flightStore{store.Permits(), store}, func() pgx.Tx {
					tx, err := store.Begin(t.Context())
					must(t, err)
					return tx
				}, clock)
				return
			}
			db := pgtest.New(t, maxConns(8))
			store := newStore(t, db, isPortable(kind == "portable"), func(c *pgstore.Config) { c.Clock = config.Clock })
			test(t, flightStore{store.Permits(), store}, func() pgx.Tx { return begin(t, db, pgx.ReadCommitted) }, clock)
		})
	}
}

var calls = ratelimit.InFlight{Name: "calls", Limit: 3, Lease: time.Minute}

func acquire(t *testing.T, store permits, r ratelimit.PermitRequest) ratelimit.Permit {
	t.Helper()
	permit, err := store.Acquire(t.Context(), r)
	must(t, err)
	return permit
}

// takePermit acquires a permit, which must be granted.
func takePermit(t *testing.T, store permits, limit ratelimit.InFlight, key string) ratelimit.Permit {
	t.Helper()
	permit := acquire(t, store, limit.For(key))
	if !permit.OK {
		t.Fatalf("Acquire of %v: refused, not before %v", limit, permit.NotBefore)
	}
	return permit
}

func refusedFor(t *testing.T, store permits, limit ratelimit.InFlight, key string) ratelimit.Permit {
	t.Helper()
	permit := acquire(t, store, limit.For(key))
	if permit.OK || permit.N != 1 {
		t.Fatalf("Acquire of %v: got %v, want a refusal of one", limit, permit)
	}
	if err := permit.Err(); !errors.Is(err, ratelimit.ErrRefused) || !errors.As(err, new(*ratelimit.FullError)) {
		t.Fatalf("the refusal's error is %v, want a FullError that is ErrRefused", err)
	}
	return permit
}

func TestPermits(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		var permits []ratelimit.Permit
		numbers := map[int]bool{}
		for range calls.Limit {
			clock.add(time.Second)
			permit := takePermit(t, store, calls, "k")
			if permit.Number < 0 || permit.Number >= calls.Limit || numbers[permit.Number] {
				t.Errorf("got permit %d, want another one below %d", permit.Number, calls.Limit)
			}
			if !permit.At.Equal(clock.now()) || !permit.Until.Equal(permit.At.Add(time.Minute)) {
				t.Errorf("got a lease from %v to %v, want a minute from %v", permit.At, permit.Until, clock.now())
			}
			numbers[permit.Number] = true
			permits = append(permits, permit)
		}
		if refused := refusedFor(t, store, calls, "k"); !refused.NotBefore.Equal(permits[0].Until) {
			t.Errorf("refused not before %v, want the first end of a lease, %v", refused.NotBefore, permits[0].Until)
		}
		takePermit(t, store, calls, "another key")

		// A permit that is released is free; and its fence grows, although the clock stands still.
		must(t, store.Release(ctx, permits[1]))
		again := takePermit(t, store, calls, "k")
		if again.Number != permits[1].Number || again.Fence <= permits[1].Fence {
			t.Errorf("got %v after %v was released, want the same permit with a larger fence", again, permits[1])
		}
		for name, err := range map[string]error{"release": store.Release(ctx, permits[1]), "renew": renewed(ctx, store, permits[1])} {
			if !errors.Is(err, ratelimit.ErrLeaseLost) {
				t.Errorf("to %s a permit that another holds: got %v, want ErrLeaseLost", name, err)
			}
		}
		refusedFor(t, store, calls, "k")

		// Renewed permits last, the others are free when their leases are over, and not before.
		clock.set(permits[0].Until.Add(-time.Microsecond))
		refusedFor(t, store, calls, "k")
		longer, err := store.Renew(ctx, permits[0])
		if err != nil || !longer.Until.Equal(clock.now().Add(time.Minute)) || longer.Fence != permits[0].Fence {
			t.Fatalf("Renew: got %v until %v and %v, want the same permit until a minute from %v", longer, longer.Until, err, clock.now())
		}
		clock.set(permits[2].Until)
		if err := renewed(ctx, store, permits[2]); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("Renew when the lease is over: got %v, want ErrLeaseLost", err)
		}
		all, err := store.Held(ctx, calls, "k")
		if err != nil || len(all) != 1 || all[0].Fence != permits[0].Fence || !all[0].Until.Equal(longer.Until) {
			t.Errorf("Permits: got %v and %v, want the one that was renewed", all, err)
		}
		takePermit(t, store, calls, "k")
		takePermit(t, store, calls, "k")
		refusedFor(t, store, calls, "k")
		if err := store.Release(ctx, all[0]); err != nil {
			t.Errorf("Release of a permit that was listed: %v", err)
		}
		takePermit(t, store, calls, "k")
	})
}

func renewed(ctx context.Context, store permits, permit ratelimit.Permit) error {
	_, err := store.Renew(ctx, permit)
	return err
}

// A clock that goes back frees no permit, and does not keep one that was released.
func TestPermitsWhenTheClockGoesBack(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		first := takePermit(t, store, one, "")
		clock.add(-time.Hour)
		refusedFor(t, store, one, "")
		must(t, store.Release(t.Context(), first))
		clock.add(-time.Hour)
		second := takePermit(t, store, one, "")
		if second.Fence <= first.Fence {
			t.Errorf("got fence %d after %d, want a larger one", second.Fence, first.Fence)
		}
		clock.add(-time.Hour) // who renews holds it by the clock that there is
		longer, err := store.Renew(t.Context(), second)
		if err != nil || !longer.Until.Equal(clock.now().Add(time.Minute)) {
			t.Errorf("Renew: got %v and %v, want until a minute from %v", longer.Until, err, clock.now())
		}
		clock.set(longer.Until)
		takePermit(t, store, one, "")
	})
}

func TestPermitsOfAnotherLimit(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		more, fewer := calls, calls
		more.Limit, fewer.Limit = 5, 1
		var permits []ratelimit.Permit
		for range more.Limit {
			permits = append(permits, takePermit(t, store, more, "k"))
		}
		for _, permit := range permits { // the first is free, but not for those who may have one only
			if permit.Number >= fewer.Limit {
				must(t, store.Release(t.Context(), permit))
			}
		}
		refusedFor(t, store, fewer, "k")
		takePermit(t, store, more, "k")
		if n, err := store.Held(t.Context(), fewer, "k"); err != nil || len(n) != 2 {
			t.Errorf("Permits: got %v and %v, want both that are held", n, err)
		}
	})
}

func TestResetAndPrunePermits(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		old, kept := takePermit(t, store, calls, "k"), takePermit(t, store, calls, "kept")
		must(t, store.Reset(ctx, calls, "k"))
		for name, err := range map[string]error{"Renew": renewed(ctx, store, old), "Release": store.Release(ctx, old)} {
			if !errors.Is(err, ratelimit.ErrLeaseLost) {
				t.Errorf("%s after a reset: got %v, want ErrLeaseLost", name, err)
			}
		}
		for range calls.Limit {
			if permit := takePermit(t, store, calls, "k"); permit.Number == old.Number && permit.Fence <= old.Fence {
				t.Errorf("got fence %d after %d and a reset, want a larger one", permit.Fence, old.Fence)
			}
		}
		clock.add(30 * time.Second)
		must(t, errOf(store.Renew(ctx, kept)))
		clock.add(31 * time.Second) // the leases of k are over, and not for a minute
		if n, err := store.Prune(ctx, calls); n != 0 || err != nil {
			t.Errorf("PrunePermits: got %d and %v, want nothing yet", n, err)
		}
		clock.add(29 * time.Second)
		if _, err := store.Renew(ctx, kept); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Fatalf("Renew: got %v, want a lease that is over by now", err)
		}
		clock.add(30 * time.Second)
		if n, err := store.Prune(ctx, calls); n != int64(calls.Limit) || err != nil {
			t.Errorf("PrunePermits: got %d and %v, want the %d of k", n, err, calls.Limit)
		}
		if permit := takePermit(t, store, calls, "k"); permit.Fence <= old.Fence+1 {
			t.Errorf("got fence %d after %d and a Prune, want a larger one", permit.Fence, old.Fence)
		}
	})
}

func TestPermitsInTransactions(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Minute}
		acquireTx := func(tx pgx.Tx) ratelimit.Permit {
			t.Helper()
			permit, err := store.AcquireTx(ctx, tx, two.For("k"))
			if err != nil {
				t.Fatalf("AcquireTx: %v", err)
			}
			return permit
		}
		tx := begin()
		if !acquireTx(tx).OK {
			t.Fatal("AcquireTx of a limit that nobody has used: refused")
		}
		must(t, tx.Rollback(ctx))
		tx = begin()
		inner, err := tx.Begin(ctx)
		must(t, err)
		if !acquireTx(inner).OK {
			t.Fatal("AcquireTx behind a savepoint: refused")
		}
		must(t, inner.Rollback(ctx))
		first, second := acquireTx(tx), acquireTx(tx)
		if third := acquireTx(tx); !first.OK || !second.OK || third.OK || first.Number == second.Number {
			t.Fatalf("got %v, %v and %v of two permits", first, second, third)
		}
		must(t, tx.Commit(ctx))
		refusedFor(t, store, two, "k")

		// Rolled back, a release did not happen; committed, it did, and once.
		tx = begin()
		must(t, store.ReleaseTx(ctx, tx, first))
		must(t, tx.Rollback(ctx))
		refusedFor(t, store, two, "k")
		tx = begin()
		must(t, store.ReleaseTx(ctx, tx, first))
		if err := store.ReleaseTx(ctx, tx, first); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("ReleaseTx twice: got %v, want ErrLeaseLost", err)
		}
		must(t, tx.Commit(ctx))
		takePermit(t, store, two, "k")
		refusedFor(t, store, two, "k")

		// A lease that is lost leaves the transaction usable.
		clock.add(time.Minute)
		tx = begin()
		if err := store.ReleaseTx(ctx, tx, second); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("ReleaseTx when the lease is over: got %v, want ErrLeaseLost", err)
		}
		if permit := acquireTx(tx); !permit.OK {
			t.Errorf("AcquireTx after a lease was lost: %v", permit)
		}
		must(t, tx.Commit(ctx))
	})
}

func TestPermitsWithRates(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Minute}
		rate := ratelimit.TokenBucket{Name: "rate", Rate: 3, Period: time.Hour}
		big := ratelimit.FixedWindow{Name: "big", Rate: 10, Period: time.Hour}
		left := func() [2]int64 {
			t.Helper()
			result, err := store.rates.Check(ctx, rate.ForN("k", 0), big.ForN("k", 0))
			must(t, err)
			return [2]int64{result.Each()[0].Remaining, result.Each()[1].Remaining}
		}
		holding := func() int {
			t.Helper()
			permits, err := store.Held(ctx, two, "k")
			must(t, err)
			return len(permits)
		}
		rates := []ratelimit.Request{rate.For("k"), big.ForN("k", 2)}
		for _, form := range []string{"Acquire", "AcquireTx"} {
			ask := func() (permit ratelimit.Permit) {
				t.Helper()
				var err error
				if form == "Acquire" {
					permit, err = store.Acquire(ctx, two.For("k"), rates...)
				} else {
					tx := begin()
					if permit, err = store.AcquireTx(ctx, tx, two.For("k"), rates...); err == nil {
						err = tx.Commit(ctx) // a refusal leaves it usable
					}
				}
				if err != nil {
					t.Fatalf("%s: %v", form, err)
				}
				return permit
			}
			first, second := ask(), ask()
			if !first.OK || !first.Rates.OK || !second.OK || left() != [2]int64{1, 6} {
				t.Fatalf("%s: got %v, %v with %v left, want both with [1 6] left", form, first, second, left())
			}
			third := ask() // no permit: nothing is taken
			if third.OK || left() != [2]int64{1, 6} || !errors.As(third.Err(), new(*ratelimit.FullError)) {
				t.Errorf("%s: got %v (%v) with %v left, want a refusal by the permits and [1 6] left", form, third, third.Err(), left())
			}
			for _, permit := range []ratelimit.Permit{first, second} {
				must(t, store.Release(ctx, permit))
			}
			last := ask()
			fourth := ask() // the rate is used up: no permit is held, and the other rate is not spent
			if !last.OK || fourth.OK || left() != [2]int64{0, 4} || holding() != 1 {
				t.Errorf("%s: got %v and %v with %v left and %d held, want the second refused, [0 4] and 1", form, last, fourth, left(), holding())
			}
			var refused *ratelimit.RefusedError
			if err := fourth.Err(); !errors.As(err, &refused) || ratelimit.NameOf(refused.Result.Request.Limit) != "rate" {
				t.Errorf("%s: the refusal's error is %v, want that of the rate", form, err)
			}
			must(t, store.Release(ctx, last))
			clock.add(2 * time.Hour)
		}
	})
}

func TestBadPermits(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		good, tx := takePermit(t, store, calls, "k"), begin()
		change := func(f func(*ratelimit.InFlight)) ratelimit.InFlight {
			bad := calls
			f(&bad)
			return bad
		}
		for field, bad := range map[string]ratelimit.InFlight{
			"Name":  change(func(l *ratelimit.InFlight) { l.Name = "" }),
			"Limit": change(func(l *ratelimit.InFlight) { l.Limit = 0 }),
			"Lease": change(func(l *ratelimit.InFlight) { l.Lease = time.Microsecond }),
			"Mode":  change(func(l *ratelimit.InFlight) { l.Mode = 9 }),
		} {
			for verb, do := range map[string]func() error{
				"Acquire":   func() error { _, err := store.Acquire(ctx, bad.For("k")); return err },
				"AcquireTx": func() error { _, err := store.AcquireTx(ctx, tx, bad.For("k")); return err },
				"Permits":   func() error { _, err := store.Held(ctx, bad, "k"); return err },
				"Reset":     func() error { return store.Reset(ctx, bad, "k") },
				"Prune":     func() error { _, err := store.Prune(ctx, bad); return err },
				"Hold":      func() error { return store.Hold(ctx, bad.For("k"), noWork) },
			} {
				var fault *ratelimit.FieldError
				if err := do(); !errors.As(err, &fault) || fault.Field != field {
					t.Errorf("%s with a bad %s: got %v", verb, field, err)
				}
			}
		}
		for name, permit := range map[string]ratelimit.Permit{"none": {}, "refused": {InFlight: calls, Key: "k"}, "number": {InFlight: calls, OK: true, Fence: 1, Number: -1}} {
			for verb, err := range map[string]error{
				"Renew": renewed(ctx, store, permit), "Release": store.Release(ctx, permit), "ReleaseTx": store.ReleaseTx(ctx, tx, permit),
			} {
				if !errors.Is(err, ratelimit.ErrInvalid) {
					t.Errorf("%s of a permit that is %s: got %v, want ErrInvalid", verb, name, err)
				}
			}
		}
		if err := store.Keep(ctx, ratelimit.Permit{InFlight: calls, Key: "k"}, noWork); !errors.Is(err, ratelimit.ErrRefused) {
			t.Errorf("Keep of a refusal: got %v, want ErrRefused", err)
		}
		if err := store.Keep(ctx, good, nil); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Keep without a function: got %v, want ErrInvalid", err)
		}
		if _, err := store.Acquire(ctx, calls.For(strings.Repeat("k", ratelimit.MaxKeyLength+1))); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Acquire for a long key: got %v, want ErrInvalid", err)
		}

		// A name is that of one limit.
		same := ratelimit.TokenBucket{Name: calls.Name, Rate: 1, Period: time.Minute}
		if _, err := store.rates.Check(ctx, same.For("k")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("a rate of the same name: got %v, want ErrInvalid", err)
		}
		other := ratelimit.TokenBucket{Name: "other", Rate: 1, Period: time.Minute}
		must(t, errOf(store.rates.Check(ctx, other.For("k"))))
		if _, err := store.Acquire(ctx, ratelimit.InFlight{Name: "other", Limit: 1}.For("k")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("permits of the same name as a rate: got %v, want ErrInvalid", err)
		}
		if permits, err := store.Held(ctx, calls, "k"); err != nil || len(permits) != 1 || permits[0].Fence != good.Fence {
			t.Errorf("after bad input: got %v and %v, want the one that was held", permits, err)
		}
	})
}

func noWork(context.Context, ratelimit.Permit) error { return nil }

// Permits and rates do not disturb each other in one table.
func TestPermitsBesideRates(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, ctx := newStore(t, db), t.Context()
	rate := ratelimit.TokenBucket{Name: "rate", Rate: 1, Period: time.Hour}
	must(t, store.Take(ctx, rate.For("k")))
	permit := takePermit(t, store.Permits(), calls, "k")
	before := statesOf(t, db)
	for verb, err := range map[string]error{
		"Reset": store.Reset(ctx, ratelimit.TokenBucket{Name: calls.Name, Rate: 1, Period: time.Hour}, "k"),
		"Prune": func() error {
			return errOf(store.Prune(ctx, ratelimit.TokenBucket{Name: calls.Name, Rate: 1, Period: time.Hour}))
		}(),
		"ResetPermits": store.Permits().Reset(ctx, ratelimit.InFlight{Name: "rate", Limit: 1}, "k"),
	} {
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s of the other sort: got %v, want ErrInvalid", verb, err)
		}
	}
	if n, err := store.Prune(ctx, rate); n != 0 || err != nil {
		t.Errorf("Prune: got %d and %v", n, err)
	}
	if n, err := store.Permits().Prune(ctx, calls); n != 0 || err != nil {
		t.Errorf("PrunePermits: got %d and %v", n, err)
	}
	if after := statesOf(t, db); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("the rows were\n%v, and are\n%v", before, after)
	}
	if names, err := store.Names(ctx); err != nil || fmt.Sprint(names) != "[calls rate]" {
		t.Errorf("Names: got %q and %v", names, err)
	}
	should(t, store.Permits().Release(ctx, permit))
}

// The server's error about one permit is told to the call for it alone, though one statement was
// for the permits of many calls.
func TestErrorAboutOnePermit(t *testing.T) {
	t.Parallel()
	const wrong, checkViolation = 11, "23514"
	db := pgtest.New(t, maxConns(2))
	store, limit := newStore(t, db), ratelimit.InFlight{Name: "l", Limit: 1, Lease: time.Minute}
	must(t, errOf(db.Pool.Exec(t.Context(), fmt.Sprintf("ALTER TABLE %s.rate_limits ADD CHECK (key <> '%d')", db.Schema, wrong))))
	g := gather(t, db.Pool)
	for i := range 16 {
		g.call(time.Minute, func(ctx context.Context) {
			permit, err := store.Permits().Acquire(ctx, limit.For(fmt.Sprint(i)))
			if i == wrong && (permit.OK || !hasCode(err, checkViolation)) || i != wrong && (!permit.OK || err != nil) {
				t.Errorf("%d: got %+v and %v", i, permit, err)
			}
		})
	}
	g.decide()
}

// What an open transaction has taken or released delays nobody: not those who want a permit,
// and not those who hold another.
func TestOpenTransactionsDelayNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	mine, others := newStore(t, db), newStore(t, db)
	two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Minute}
	ctx := within(t, 30*time.Second) // whoever waited for it would wait until then
	open := begin(t, db, pgx.Serializable)
	taken, err := mine.Permits().AcquireTx(ctx, open, two.For("k"))
	if err != nil || !taken.OK {
		t.Fatalf("AcquireTx: %v and %v", taken, err)
	}
	for range 20 {
		permit := takePermit(t, others.Permits(), two, "k")
		refused := refusedFor(t, others.Permits(), two, "k")
		if !refused.NotBefore.Equal(refused.At) {
			t.Errorf("refused not before %v, want %v: the transaction may end at any time", refused.NotBefore, refused.At)
		}
		second := begin(t, db, pgx.Serializable)
		if in, err := others.Permits().AcquireTx(ctx, second, two.For("k")); err != nil || in.OK {
			t.Fatalf("AcquireTx beside it: got %v and %v, want a refusal", in, err)
		}
		must(t, errOf(others.Permits().Renew(ctx, permit)))
		must(t, others.Permits().Release(ctx, permit))
		_ = second.Rollback(ctx)
	}
	must(t, open.Commit(ctx))
	// One that is being released is held until that commits, and whoever renews it waits.
	open = begin(t, db, pgx.ReadCommitted)
	must(t, mine.Permits().ReleaseTx(ctx, open, taken))
	permit := takePermit(t, others.Permits(), two, "k")
	refusedFor(t, others.Permits(), two, "k")
	short := within(t, time.Second) // long enough to see that it is locked
	if _, err := mine.Permits().Renew(short, taken); !errors.Is(err, pgstore.ErrLocked) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Renew of a permit that a transaction releases: got %v, want ErrLocked", err)
	}
	must(t, open.Commit(ctx))
	if err := renewed(ctx, mine.Permits(), taken); !errors.Is(err, ratelimit.ErrLeaseLost) {
		t.Errorf("Renew after it was released: got %v, want ErrLeaseLost", err)
	}
	takePermit(t, others.Permits(), two, "k")
	should(t, others.Permits().Release(ctx, permit))
}

// Any role may have the locks by which a transaction passes permits over. It takes permits without
// them, one and several, that are there or not; keeps its own lock_timeout; and waits for no row that
// another transaction has taken so, also when the stranger is gone.
func TestPermitsHiddenByAStranger(t *testing.T) {
	t.Parallel()
	for _, there := range []bool{true, false} {
		t.Run(fmt.Sprintf("rows there %v", there), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, maxConns(8))
			store := newStore(t, db).Permits()
			four := ratelimit.InFlight{Name: "four", Limit: 4}
			if there {
				permit, err := store.Acquire(t.Context(), four.ForN("k", 4))
				if err == nil {
					err = store.Release(t.Context(), permit)
				}
				must(t, err)
			}
			stranger := begin(t, db, pgx.ReadCommitted)
			mustExec(t, stranger, `SET LOCAL ROLE pg_signal_backend`)
			for number := range four.Limit {
				mustExec(t, stranger, `SELECT pg_advisory_xact_lock($1)`, table.Lock(db.Schema, decide.Row{Key: decide.Key{Name: "four", Key: "k"}, Shard: number}))
			}
			for _, in := range []struct{ one, several bool }{{true, false}, {false, true}, {true, false}, {false, false}} {
				tx := begin(t, db, pgx.ReadCommitted)
				mustExec(t, tx, `SET LOCAL lock_timeout = '17s'`)
				request, want := four.For("k"), in.one || in.several
				if in.several {
					request = four.ForN("k", 2)
				}
				permit, err := store.AcquireTx(within(t, 20*time.Second), tx, request)
				if err != nil || permit.OK != want {
					t.Errorf("%+v: %v, %v, want OK %v", in, permit, err, want)
				}
				var bound string
				if err := tx.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&bound); err != nil || bound != "17s" {
					t.Errorf("%+v: lock_timeout %q, %v, want 17s", in, bound, err)
				}
			}
			must(t, stranger.Rollback(t.Context()))
			again := newStore(t, db).Permits() // which does not know what is free, and guesses
			if permit, err := again.AcquireTx(within(t, 20*time.Second), begin(t, db, pgx.ReadCommitted), four.For("k")); err != nil || permit.OK {
				t.Errorf("without the stranger: %v, %v, want a refusal", permit, err)
			}
		})
	}
}

// SERIALIZABLE transactions on permits of different keys do not abort each other.
func TestPermitsOfDifferentKeysDoNotConflict(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, maxConns(12))
	store, ctx := newStore(t, db), t.Context()
	together(8, func(i int) {
		key := fmt.Sprint("key ", i)
		for range 50 {
			err := pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				permit, err := store.Permits().AcquireTx(ctx, tx, calls.For(key))
				if err = errors.Join(err, permit.Err()); err != nil {
					return err
				}
				return store.Permits().ReleaseTx(ctx, tx, permit)
			})
			if err != nil {
				t.Errorf("%s: %v", key, err)
				return
			}
		}
	})
}

// forAWhile says whether to go on: for as long as this lasts and, on a machine with much else
// to do, up to half a minute until it was enough.
func forAWhile(lasts time.Duration, enough func() bool) (more func() bool) {
	begun := time.Now()
	return func() bool {
		since := time.Since(begun)
		return since < lasts || since < 30*time.Second && !enough()
	}
}

// By the leases that they were told of, holders never overlap on a permit.
func TestLeasesDoNotOverlap(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t, maxConns(12))
	limit := ratelimit.InFlight{Name: "l", Limit: 2, Lease: 20 * time.Millisecond}
	var (
		mu    sync.Mutex
		taken = map[int][]ratelimit.Permit{}
		wg    sync.WaitGroup
	)
	more := forAWhile(time.Second, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return min(len(taken[0]), len(taken[1])) >= 10
	})
	for range 4 {
		store := newStore(t, db)
		wg.Go(func() {
			for ; more(); time.Sleep(time.Millisecond) { // nobody releases
				if permit := acquire(t, store.Permits(), limit.For("")); permit.OK {
					mu.Lock()
					taken[permit.Number] = append(taken[permit.Number], permit)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	for number, permits := range taken {
		if len(permits) < 10 {
			t.Errorf("permit %d was taken %d times, want at least 10", number, len(permits))
		}
		for i, a := range permits {
			for _, b := range permits[i+1:] {
				if a.At.Before(b.Until) && b.At.Before(a.Until) || a.Fence == b.Fence || (a.Fence < b.Fence) != a.At.Before(b.At) {
					t.Errorf("permit %d: from %v to %v with fence %d, and from %v to %v with %d", number, a.At, a.Until, a.Fence, b.At, b.Until, b.Fence)
				}
			}
		}
	}
}

// Of a limit with permits to give, a piece of work is two statements, and its rows are updated
// in place.
func TestPermitsAreTwoStatements(t *testing.T) {
	t.Parallel()
	tracer := &traced.Statements{}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
	store, ctx := newStore(t, db), t.Context()
	const pieces = 50
	before := tracer.Batches()
	for range pieces { // of which the first makes its permit
		must(t, store.Permits().Release(ctx, takePermit(t, store.Permits(), calls, "k")))
	}
	if n := tracer.Batches() - before; n != 2*pieces {
		t.Errorf("%d pieces of work took %d round trips, want %d", pieces, n, 2*pieces)
	}
	var rows int
	if err := db.Pool.QueryRow(ctx, "SELECT count(*) FROM "+db.Schema+".rate_limits").Scan(&rows); err != nil || rows > calls.Limit {
		t.Errorf("got %d rows and %v, want at most %d", rows, err, calls.Limit)
	}
}

// At REPEATABLE READ and SERIALIZABLE, what was released since the snapshot is a 40001, and
// not a yes.
func TestPermitsSinceTheSnapshot(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, ctx := newStore(t, db), t.Context()
	permit := takePermit(t, store.Permits(), one, "")
	tx := begin(t, db, pgx.Serializable)
	must(t, errOf(tx.Exec(ctx, "SELECT FROM "+db.Schema+".rate_limits LIMIT 0")))
	must(t, errOf(store.Permits().Renew(ctx, permit)))
	var fault *pgconn.PgError
	if err := store.Permits().ReleaseTx(ctx, tx, permit); !errors.As(err, &fault) || fault.Code != "40001" {
		t.Errorf("ReleaseTx of a permit that was renewed since: got %v, want 40001", err)
	}
}

// When the last permit is taken while a call waits for its rates, they are put back, and whoever
// has the permit is not delayed by the transaction that tried it in vain.
func TestLastPermitTakenMeanwhile(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, others := newStore(t, db), newStore(t, db)
	ctx := within(t, 20*time.Second)
	rate := ratelimit.TokenBucket{Name: "rate", Rate: 10, Period: time.Hour}
	must(t, store.Permits().Release(ctx, takePermit(t, store.Permits(), one, "k")))
	blocker, tx := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
	must(t, store.TakeTx(ctx, blocker, rate.For("k")))
	type answer struct {
		permit ratelimit.Permit
		err    error
	}
	answered := make(chan answer, 1)
	go func() {
		permit, err := store.Permits().AcquireTx(ctx, tx, one.For("k"), rate.For("k"))
		answered <- answer{permit, err}
	}()
	for waiting := 0; waiting == 0; {
		err := db.Pool.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%"+db.Schema+"%'").Scan(&waiting)
		must(t, err)
	}
	held := takePermit(t, others.Permits(), one, "k")
	must(t, blocker.Rollback(ctx))
	a := <-answered
	if a.err != nil || a.permit.OK || !errors.As(a.permit.Err(), new(*ratelimit.FullError)) {
		t.Fatalf("AcquireTx: got %v and %v, want a refusal by the permits", a.permit, a.err)
	}
	short := within(t, 2*time.Second)
	if _, err := others.Permits().Renew(short, held); err != nil {
		t.Errorf("Renew of a permit that a transaction tried in vain: %v", err)
	}
	must(t, tx.Commit(ctx))
	if result, err := store.Check(ctx, rate.ForN("k", 0)); err != nil || result.Remaining != 10 {
		t.Errorf("%d of the rate are left, and %v, want 10", result.Remaining, err)
	}
}
