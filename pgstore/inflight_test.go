package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// flightStore is the verbs of limits of how many at once.
type flightStore interface {
	ratelimit.InFlightStore
	AcquireTx(ctx context.Context, tx pgx.Tx, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (ratelimit.Slot, error)
	ReleaseTx(ctx context.Context, tx pgx.Tx, slot ratelimit.Slot) error
	PruneSlots(ctx context.Context, limits ...ratelimit.InFlight) (int64, error)
	Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
}

var (
	_ flightStore = (*pgstore.Store)(nil)
	_ flightStore = (*memstore.Store)(nil)
)

// flightStores runs a test on each kind of store, on a clock of its own.
func flightStores(t *testing.T, test func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock)) {
	t.Helper()
	for _, portable := range []bool{false, true} {
		t.Run(fmt.Sprintf("portable=%v", portable), func(t *testing.T) {
			t.Parallel()
			db, clock := pgtest.New(t), newClock()
			test(t, newStore(t, db, onClock(clock), isPortable(portable)), func() pgx.Tx { return begun(t, db, pgx.ReadCommitted) }, clock)
		})
	}
	t.Run("memstore", func(t *testing.T) {
		t.Parallel()
		clock := newClock()
		store := memstore.New(clock.now)
		test(t, store, func() pgx.Tx {
			tx, err := store.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return tx
		}, clock)
	})
}

// begun begins a transaction that is rolled back after the test.
func begun(t *testing.T, db *pgtest.DB, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

var calls = ratelimit.InFlight{Name: "calls", Limit: 3, Lease: time.Minute}

func acquire(t *testing.T, store flightStore, limit ratelimit.InFlight, key string) ratelimit.Slot {
	t.Helper()
	slot, err := store.Acquire(t.Context(), limit, key)
	if err != nil {
		t.Fatalf("Acquire: %v", err)
	}
	return slot
}

// takeSlot acquires a slot, which must be granted.
func takeSlot(t *testing.T, store flightStore, limit ratelimit.InFlight, key string) ratelimit.Slot {
	t.Helper()
	slot := acquire(t, store, limit, key)
	if !slot.OK {
		t.Fatalf("Acquire of %v: refused, not before %v", limit, slot.NotBefore)
	}
	return slot
}

func refusedFor(t *testing.T, store flightStore, limit ratelimit.InFlight, key string) ratelimit.Slot {
	t.Helper()
	slot := acquire(t, store, limit, key)
	if slot.OK {
		t.Fatalf("Acquire of %v: got %v, want a refusal", limit, slot)
	}
	if err := slot.Err(); !errors.Is(err, ratelimit.ErrRefused) || !errors.As(err, new(*ratelimit.FullError)) {
		t.Fatalf("the refusal's error is %v, want a FullError that is ErrRefused", err)
	}
	return slot
}

func TestSlots(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		var slots []ratelimit.Slot
		numbers := map[int]bool{}
		for range calls.Limit {
			clock.add(time.Second)
			slot := takeSlot(t, store, calls, "k")
			if slot.Number < 0 || slot.Number >= calls.Limit || numbers[slot.Number] {
				t.Errorf("got slot %d, want another one below %d", slot.Number, calls.Limit)
			}
			if !slot.At.Equal(clock.now()) || !slot.Until.Equal(slot.At.Add(time.Minute)) {
				t.Errorf("got a lease from %v to %v, want a minute from %v", slot.At, slot.Until, clock.now())
			}
			numbers[slot.Number] = true
			slots = append(slots, slot)
		}
		if refused := refusedFor(t, store, calls, "k"); !refused.NotBefore.Equal(slots[0].Until) {
			t.Errorf("refused not before %v, want the first end of a lease, %v", refused.NotBefore, slots[0].Until)
		}
		takeSlot(t, store, calls, "another key")

		// A slot that is released is free; and its fence grows, although the clock stands still.
		if err := store.Release(ctx, slots[1]); err != nil {
			t.Fatal(err)
		}
		again := takeSlot(t, store, calls, "k")
		if again.Number != slots[1].Number || again.Fence <= slots[1].Fence {
			t.Errorf("got %v after %v was released, want the same slot with a larger fence", again, slots[1])
		}
		for name, err := range map[string]error{"release": store.Release(ctx, slots[1]), "renew": renewed(ctx, store, slots[1])} {
			if !errors.Is(err, ratelimit.ErrLeaseLost) {
				t.Errorf("to %s a slot that another holds: got %v, want ErrLeaseLost", name, err)
			}
		}
		refusedFor(t, store, calls, "k")

		// Renewed slots last, the others are free when their leases are over, and not before.
		clock.set(slots[0].Until.Add(-time.Microsecond))
		longer, err := store.Renew(ctx, slots[0])
		if err != nil || !longer.Until.Equal(clock.now().Add(time.Minute)) || longer.Fence != slots[0].Fence {
			t.Fatalf("Renew: got %v until %v and %v, want the same slot until a minute from %v", longer, longer.Until, err, clock.now())
		}
		clock.set(slots[2].Until)
		if err := renewed(ctx, store, slots[2]); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("Renew when the lease is over: got %v, want ErrLeaseLost", err)
		}
		all, err := store.Slots(ctx, calls, "k")
		if err != nil || len(all) != 1 || all[0].Fence != slots[0].Fence || !all[0].Until.Equal(longer.Until) {
			t.Errorf("Slots: got %v and %v, want the one that was renewed", all, err)
		}
		takeSlot(t, store, calls, "k")
		takeSlot(t, store, calls, "k")
		refusedFor(t, store, calls, "k")
		if err := store.Release(ctx, all[0]); err != nil {
			t.Errorf("Release of a slot that was listed: %v", err)
		}
		takeSlot(t, store, calls, "k")
	})
}

func renewed(ctx context.Context, store flightStore, slot ratelimit.Slot) error {
	_, err := store.Renew(ctx, slot)
	return err
}

// A clock that goes back frees no slot, and does not keep one that was released.
func TestSlotsWhenTheClockGoesBack(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		first := takeSlot(t, store, one, "")
		clock.add(-time.Hour)
		refusedFor(t, store, one, "")
		if err := store.Release(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		clock.add(-time.Hour)
		second := takeSlot(t, store, one, "")
		if second.Fence <= first.Fence {
			t.Errorf("got fence %d after %d, want a larger one", second.Fence, first.Fence)
		}
		clock.add(-time.Hour) // who renews holds it by the clock that there is
		longer, err := store.Renew(t.Context(), second)
		if err != nil || !longer.Until.Equal(clock.now().Add(time.Minute)) {
			t.Errorf("Renew: got %v and %v, want until a minute from %v", longer.Until, err, clock.now())
		}
		clock.set(longer.Until)
		takeSlot(t, store, one, "")
	})
}

func TestSlotsOfAnotherLimit(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		more, fewer := calls, calls
		more.Limit, fewer.Limit = 5, 1
		var slots []ratelimit.Slot
		for range more.Limit {
			slots = append(slots, takeSlot(t, store, more, "k"))
		}
		for _, slot := range slots { // the first is free, but not for those who may have one only
			if slot.Number >= fewer.Limit {
				if err := store.Release(t.Context(), slot); err != nil {
					t.Fatal(err)
				}
			}
		}
		refusedFor(t, store, fewer, "k")
		takeSlot(t, store, more, "k")
		if n, err := store.Slots(t.Context(), fewer, "k"); err != nil || len(n) != 2 {
			t.Errorf("Slots: got %v and %v, want both that are held", n, err)
		}
	})
}

func TestResetAndPruneSlots(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, _ func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		old, kept := takeSlot(t, store, calls, "k"), takeSlot(t, store, calls, "kept")
		if err := store.ResetSlots(ctx, calls, "k"); err != nil {
			t.Fatal(err)
		}
		for name, err := range map[string]error{"Renew": renewed(ctx, store, old), "Release": store.Release(ctx, old)} {
			if !errors.Is(err, ratelimit.ErrLeaseLost) {
				t.Errorf("%s after a reset: got %v, want ErrLeaseLost", name, err)
			}
		}
		for range calls.Limit {
			if slot := takeSlot(t, store, calls, "k"); slot.Number == old.Number && slot.Fence <= old.Fence {
				t.Errorf("got fence %d after %d and a reset, want a larger one", slot.Fence, old.Fence)
			}
		}
		clock.add(30 * time.Second)
		if _, err := store.Renew(ctx, kept); err != nil {
			t.Fatal(err)
		}
		clock.add(31 * time.Second) // the leases of k are over, and not for a minute
		if n, err := store.PruneSlots(ctx, calls); n != 0 || err != nil {
			t.Errorf("PruneSlots: got %d and %v, want nothing yet", n, err)
		}
		clock.add(29 * time.Second)
		if _, err := store.Renew(ctx, kept); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Fatalf("Renew: got %v, want a lease that is over by now", err)
		}
		clock.add(30 * time.Second)
		if n, err := store.PruneSlots(ctx, calls); n != int64(calls.Limit) || err != nil {
			t.Errorf("PruneSlots: got %d and %v, want the %d of k", n, err, calls.Limit)
		}
		if slot := takeSlot(t, store, calls, "k"); slot.Fence <= old.Fence+1 {
			t.Errorf("got fence %d after %d and a Prune, want a larger one", slot.Fence, old.Fence)
		}
	})
}

func TestSlotsInTransactions(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Minute}
		acquireTx := func(tx pgx.Tx) ratelimit.Slot {
			t.Helper()
			slot, err := store.AcquireTx(ctx, tx, two, "k")
			if err != nil {
				t.Fatalf("AcquireTx: %v", err)
			}
			return slot
		}
		ended := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		tx := begin()
		if !acquireTx(tx).OK {
			t.Fatal("AcquireTx of a limit that nobody has used: refused")
		}
		ended(tx.Rollback(ctx))
		tx = begin()
		inner, err := tx.Begin(ctx)
		ended(err)
		if !acquireTx(inner).OK {
			t.Fatal("AcquireTx behind a savepoint: refused")
		}
		ended(inner.Rollback(ctx))
		first, second := acquireTx(tx), acquireTx(tx)
		if third := acquireTx(tx); !first.OK || !second.OK || third.OK || first.Number == second.Number {
			t.Fatalf("got %v, %v and %v of two slots", first, second, third)
		}
		ended(tx.Commit(ctx))
		refusedFor(t, store, two, "k")

		// Rolled back, a release did not happen; committed, it did, and once.
		tx = begin()
		ended(store.ReleaseTx(ctx, tx, first))
		ended(tx.Rollback(ctx))
		refusedFor(t, store, two, "k")
		tx = begin()
		ended(store.ReleaseTx(ctx, tx, first))
		if err := store.ReleaseTx(ctx, tx, first); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("ReleaseTx twice: got %v, want ErrLeaseLost", err)
		}
		ended(tx.Commit(ctx))
		takeSlot(t, store, two, "k")
		refusedFor(t, store, two, "k")

		// A lease that is lost leaves the transaction usable.
		clock.add(time.Minute)
		tx = begin()
		if err := store.ReleaseTx(ctx, tx, second); !errors.Is(err, ratelimit.ErrLeaseLost) {
			t.Errorf("ReleaseTx when the lease is over: got %v, want ErrLeaseLost", err)
		}
		if slot := acquireTx(tx); !slot.OK {
			t.Errorf("AcquireTx after a lease was lost: %v", slot)
		}
		ended(tx.Commit(ctx))
	})
}

func TestSlotsWithRates(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Minute}
		rate := ratelimit.TokenBucket{Name: "rate", Rate: 3, Period: time.Hour}
		big := ratelimit.FixedWindow{Name: "big", Rate: 10, Period: time.Hour}
		left := func() [2]int64 {
			t.Helper()
			result, err := store.Check(ctx, rate.ForN("k", 0), big.ForN("k", 0))
			if err != nil {
				t.Fatal(err)
			}
			return [2]int64{result.Each()[0].Remaining, result.Each()[1].Remaining}
		}
		holding := func() int {
			t.Helper()
			slots, err := store.Slots(ctx, two, "k")
			if err != nil {
				t.Fatal(err)
			}
			return len(slots)
		}
		rates := []ratelimit.Request{rate.For("k"), big.ForN("k", 2)}
		for _, form := range []string{"Acquire", "AcquireTx"} {
			ask := func() (slot ratelimit.Slot) {
				t.Helper()
				var err error
				if form == "Acquire" {
					slot, err = store.Acquire(ctx, two, "k", rates...)
				} else {
					tx := begin()
					if slot, err = store.AcquireTx(ctx, tx, two, "k", rates...); err == nil {
						err = tx.Commit(ctx) // a refusal leaves it usable
					}
				}
				if err != nil {
					t.Fatalf("%s: %v", form, err)
				}
				return slot
			}
			first, second := ask(), ask()
			if !first.OK || !first.Rates.OK || !second.OK || left() != [2]int64{1, 6} {
				t.Fatalf("%s: got %v, %v with %v left, want both with [1 6] left", form, first, second, left())
			}
			third := ask() // no slot: nothing is taken
			if third.OK || left() != [2]int64{1, 6} || !errors.As(third.Err(), new(*ratelimit.FullError)) {
				t.Errorf("%s: got %v (%v) with %v left, want a refusal by the slots and [1 6] left", form, third, third.Err(), left())
			}
			for _, slot := range []ratelimit.Slot{first, second} {
				if err := store.Release(ctx, slot); err != nil {
					t.Fatal(err)
				}
			}
			last := ask()
			fourth := ask() // the rate is used up: no slot is held, and the other rate is not spent
			if !last.OK || fourth.OK || left() != [2]int64{0, 4} || holding() != 1 {
				t.Errorf("%s: got %v and %v with %v left and %d held, want the second refused, [0 4] and 1", form, last, fourth, left(), holding())
			}
			var refused *ratelimit.RefusedError
			if err := fourth.Err(); !errors.As(err, &refused) || ratelimit.NameOf(refused.Result.Request.Limit) != "rate" {
				t.Errorf("%s: the refusal's error is %v, want that of the rate", form, err)
			}
			if err := store.Release(ctx, last); err != nil {
				t.Fatal(err)
			}
			clock.add(2 * time.Hour)
		}
	})
}

func TestBadSlots(t *testing.T) {
	t.Parallel()
	flightStores(t, func(t *testing.T, store flightStore, begin func() pgx.Tx, clock *clock) {
		ctx := t.Context()
		good, tx := takeSlot(t, store, calls, "k"), begin()
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
				"Acquire":   func() error { _, err := store.Acquire(ctx, bad, "k"); return err },
				"AcquireTx": func() error { _, err := store.AcquireTx(ctx, tx, bad, "k"); return err },
				"Slots":     func() error { _, err := store.Slots(ctx, bad, "k"); return err },
				"Reset":     func() error { return store.ResetSlots(ctx, bad, "k") },
				"Prune":     func() error { _, err := store.PruneSlots(ctx, bad); return err },
				"Hold":      func() error { return store.Hold(ctx, bad, "k", noWork) },
			} {
				var fault *ratelimit.FieldError
				if err := do(); !errors.As(err, &fault) || fault.Field != field {
					t.Errorf("%s with a bad %s: got %v", verb, field, err)
				}
			}
		}
		for name, slot := range map[string]ratelimit.Slot{"none": {}, "refused": {InFlight: calls, Key: "k"}, "number": {InFlight: calls, OK: true, Fence: 1, Number: -1}} {
			for verb, err := range map[string]error{
				"Renew": renewed(ctx, store, slot), "Release": store.Release(ctx, slot), "ReleaseTx": store.ReleaseTx(ctx, tx, slot),
			} {
				if !errors.Is(err, ratelimit.ErrInvalid) {
					t.Errorf("%s of a slot that is %s: got %v, want ErrInvalid", verb, name, err)
				}
			}
		}
		if err := store.Keep(ctx, ratelimit.Slot{InFlight: calls, Key: "k"}, noWork); !errors.Is(err, ratelimit.ErrRefused) {
			t.Errorf("Keep of a refusal: got %v, want ErrRefused", err)
		}
		if err := store.Keep(ctx, good, nil); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Keep without a function: got %v, want ErrInvalid", err)
		}
		if _, err := store.Acquire(ctx, calls, strings.Repeat("k", ratelimit.MaxKeyLength+1)); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("Acquire for a long key: got %v, want ErrInvalid", err)
		}

		// A name is that of one limit.
		same := ratelimit.TokenBucket{Name: calls.Name, Rate: 1, Period: time.Minute}
		if _, err := store.Check(ctx, same.For("k")); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("a rate of the same name: got %v, want ErrInvalid", err)
		}
		other := ratelimit.TokenBucket{Name: "other", Rate: 1, Period: time.Minute}
		if _, err := store.Check(ctx, other.For("k")); err != nil {
			t.Fatal(err)
		}
		if _, err := store.Acquire(ctx, ratelimit.InFlight{Name: "other", Limit: 1}, "k"); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("slots of the same name as a rate: got %v, want ErrInvalid", err)
		}
		if slots, err := store.Slots(ctx, calls, "k"); err != nil || len(slots) != 1 || slots[0].Fence != good.Fence {
			t.Errorf("after bad input: got %v and %v, want the one that was held", slots, err)
		}
	})
}

func noWork(context.Context, ratelimit.Slot) error { return nil }

// Slots and rates do not disturb each other in one table.
func TestSlotsBesideRates(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, ctx := newStore(t, db), t.Context()
	rate := ratelimit.TokenBucket{Name: "rate", Rate: 1, Period: time.Hour}
	if err := store.Take(ctx, rate.For("k")); err != nil {
		t.Fatal(err)
	}
	slot := takeSlot(t, store, calls, "k")
	before := statesOf(t, db)
	for verb, err := range map[string]error{
		"Reset": store.Reset(ctx, ratelimit.TokenBucket{Name: calls.Name, Rate: 1, Period: time.Hour}, "k"),
		"Prune": func() error {
			_, err := store.Prune(ctx, ratelimit.TokenBucket{Name: calls.Name, Rate: 1, Period: time.Hour})
			return err
		}(),
		"ResetSlots": store.ResetSlots(ctx, ratelimit.InFlight{Name: "rate", Limit: 1}, "k"),
	} {
		if !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s of the other sort: got %v, want ErrInvalid", verb, err)
		}
	}
	if n, err := store.Prune(ctx, rate); n != 0 || err != nil {
		t.Errorf("Prune: got %d and %v", n, err)
	}
	if n, err := store.PruneSlots(ctx, calls); n != 0 || err != nil {
		t.Errorf("PruneSlots: got %d and %v", n, err)
	}
	if after := statesOf(t, db); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("the rows were\n%v, and are\n%v", before, after)
	}
	if names, err := store.Names(ctx); err != nil || fmt.Sprint(names) != "[calls rate]" {
		t.Errorf("Names: got %q and %v", names, err)
	}
	if err := store.Release(ctx, slot); err != nil {
		t.Error(err)
	}
}

// The server's error about one slot is told to the call for it alone, though one statement was
// for the slots of many calls.
func TestErrorAboutOneSlot(t *testing.T) {
	t.Parallel()
	const wrong, checkViolation = 11, "23514"
	db := pgtest.New(t, maxConns(2))
	store, limit := newStore(t, db), ratelimit.InFlight{Name: "l", Limit: 1, Lease: time.Minute}
	if _, err := db.Pool.Exec(t.Context(), fmt.Sprintf("ALTER TABLE %s.rate_limits ADD CHECK (key <> '%d')", db.Schema, wrong)); err != nil {
		t.Fatal(err)
	}
	g := gather(t, db.Pool)
	for i := range 16 {
		g.call(time.Minute, func(ctx context.Context) {
			slot, err := store.Acquire(ctx, limit, fmt.Sprint(i))
			if i == wrong && (slot.OK || !hasCode(err, checkViolation)) || i != wrong && (!slot.OK || err != nil) {
				t.Errorf("%d: got %+v and %v", i, slot, err)
			}
		})
	}
	g.decide()
}

// What an open transaction has taken or released delays nobody: not those who want a slot,
// and not those who hold another.
func TestOpenTransactionsDelayNobody(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	mine, others := newStore(t, db), newStore(t, db)
	two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Minute}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // whoever waited for it would wait until then
	defer cancel()
	open := begun(t, db, pgx.Serializable)
	taken, err := mine.AcquireTx(ctx, open, two, "k")
	if err != nil || !taken.OK {
		t.Fatalf("AcquireTx: %v and %v", taken, err)
	}
	for range 20 {
		slot := takeSlot(t, others, two, "k")
		refused := refusedFor(t, others, two, "k")
		if !refused.NotBefore.Equal(refused.At) {
			t.Errorf("refused not before %v, want %v: the transaction may end at any time", refused.NotBefore, refused.At)
		}
		second := begun(t, db, pgx.Serializable)
		if in, err := others.AcquireTx(ctx, second, two, "k"); err != nil || in.OK {
			t.Fatalf("AcquireTx beside it: got %v and %v, want a refusal", in, err)
		}
		if _, err := others.Renew(ctx, slot); err != nil {
			t.Fatal(err)
		}
		if err := others.Release(ctx, slot); err != nil {
			t.Fatal(err)
		}
		_ = second.Rollback(ctx)
	}
	if err := open.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	// One that is being released is held until that commits, and whoever renews it waits.
	open = begun(t, db, pgx.ReadCommitted)
	if err := mine.ReleaseTx(ctx, open, taken); err != nil {
		t.Fatal(err)
	}
	slot := takeSlot(t, others, two, "k")
	refusedFor(t, others, two, "k")
	short, cancelShort := context.WithTimeout(ctx, time.Second) // long enough to see that it is locked
	defer cancelShort()
	if _, err := mine.Renew(short, taken); !errors.Is(err, pgstore.ErrLocked) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Renew of a slot that a transaction releases: got %v, want ErrLocked", err)
	}
	if err := open.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := renewed(ctx, mine, taken); !errors.Is(err, ratelimit.ErrLeaseLost) {
		t.Errorf("Renew after it was released: got %v, want ErrLeaseLost", err)
	}
	takeSlot(t, others, two, "k")
	if err := others.Release(ctx, slot); err != nil {
		t.Error(err)
	}
}

// SERIALIZABLE transactions on slots of different keys do not abort each other.
func TestSlotsOfDifferentKeysDoNotConflict(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, maxConns(12))
	store, ctx := newStore(t, db), t.Context()
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			key := fmt.Sprint("key ", worker)
			for range 50 {
				err := pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
					slot, err := store.AcquireTx(ctx, tx, calls, key)
					if err != nil {
						return err
					}
					if err := slot.Err(); err != nil {
						return err
					}
					return store.ReleaseTx(ctx, tx, slot)
				})
				if err != nil {
					t.Errorf("%s: %v", key, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// Transactions that take slots and rates in opposite orders do not deadlock.
func TestSlotsAndRatesInOppositeOrders(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t, maxConns(12))
	store, ctx := newStore(t, db), t.Context()
	rate := ratelimit.TokenBucket{Name: "rate", Rate: 1e6, Period: time.Second}
	two := ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Minute}
	var wg sync.WaitGroup
	for worker := range 6 {
		wg.Go(func() {
			for range 40 {
				err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
					var slot ratelimit.Slot
					take := func() error { return store.TakeTx(ctx, tx, rate.For("k")) }
					hold := func() (err error) { slot, err = store.AcquireTx(ctx, tx, two, "k"); return err }
					first, second := take, hold
					if worker%2 == 0 {
						first, second = hold, take
					}
					if err := errors.Join(first(), second()); err != nil || !slot.OK {
						return err
					}
					return store.ReleaseTx(ctx, tx, slot)
				})
				if err != nil {
					t.Errorf("worker %d: %v", worker, err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// Never are more slots held than there are, and a guarded resource sees fences grow: with
// several stores, short leases, holders that forget to release, and all verbs.
func TestNeverMoreThanLimit(t *testing.T) {
	t.Parallel()
	for _, portable := range []bool{false, true} {
		t.Run(fmt.Sprintf("portable=%v", portable), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, maxConns(12))
			limit := ratelimit.InFlight{Name: "l", Limit: 3, Lease: 100 * time.Millisecond}
			var (
				mu   sync.Mutex
				seen = map[int]ratelimit.Slot{} // of each slot, who took it last
				took atomic.Int64
			)
			took1 := func(slot ratelimit.Slot) {
				took.Add(1)
				mu.Lock()
				defer mu.Unlock()
				if last, ok := seen[slot.Number]; ok && slot.Fence < last.Fence {
					return // told late
				}
				seen[slot.Number] = slot
			}
			fences := sync.Map{}
			var wg sync.WaitGroup
			more := forAWhile(500*time.Millisecond, func() bool { return took.Load() >= 20 })
			for worker := range 8 {
				store := newStore(t, db, isPortable(portable))
				wg.Go(func() {
					for ; more(); time.Sleep(time.Millisecond) {
						ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
						slot, err := store.Acquire(ctx, limit, "k")
						if err == nil && slot.OK {
							took1(slot)
							if other, twice := fences.LoadOrStore([2]int64{int64(slot.Number), slot.Fence}, worker); twice {
								t.Errorf("%v was given to %d and %d", slot, worker, other)
							}
							switch rand.IntN(4) {
							case 0: // forgotten
							case 1:
								_, err = store.Renew(ctx, slot)
								fallthrough
							default:
								err = errors.Join(err, store.Release(ctx, slot))
							}
						}
						cancel()
						if err != nil && !errors.Is(err, ratelimit.ErrLeaseLost) {
							t.Errorf("worker %d: %v", worker, err)
							return
						}
						if n := holders(t, db); n > limit.Limit {
							t.Errorf("%d slots are held of %d", n, limit.Limit)
						}
					}
				})
			}
			wg.Wait()
			if n := took.Load(); n < 20 {
				t.Errorf("slots were taken %d times, want at least 20", n)
			}
		})
	}
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

// holders is how many rows have a lease that is not over.
func holders(t *testing.T, db *pgtest.DB) (n int) {
	t.Helper()
	err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".rate_limits WHERE ts > clock_timestamp()").Scan(&n)
	if err != nil {
		t.Error(err)
	}
	return n
}

// By the leases that they were told of, holders never overlap on a slot.
func TestLeasesDoNotOverlap(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.New(t, maxConns(12))
	limit := ratelimit.InFlight{Name: "l", Limit: 2, Lease: 20 * time.Millisecond}
	var (
		mu    sync.Mutex
		taken = map[int][]ratelimit.Slot{}
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
				if slot := acquire(t, store, limit, ""); slot.OK {
					mu.Lock()
					taken[slot.Number] = append(taken[slot.Number], slot)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	for number, slots := range taken {
		if len(slots) < 10 {
			t.Errorf("slot %d was taken %d times, want at least 10", number, len(slots))
		}
		for i, a := range slots {
			for _, b := range slots[i+1:] {
				if a.At.Before(b.Until) && b.At.Before(a.Until) || a.Fence == b.Fence || (a.Fence < b.Fence) != a.At.Before(b.At) {
					t.Errorf("slot %d: from %v to %v with fence %d, and from %v to %v with %d", number, a.At, a.Until, a.Fence, b.At, b.Until, b.Fence)
				}
			}
		}
	}
}

// Of a limit with slots to give, a piece of work is two statements, and its rows are updated
// in place.
func TestSlotsAreTwoStatements(t *testing.T) {
	t.Parallel()
	tracer := &traced.Statements{}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
	store, ctx := newStore(t, db), t.Context()
	const pieces = 50
	before := tracer.Batches()
	for range pieces { // of which the first makes its slot
		if err := store.Release(ctx, takeSlot(t, store, calls, "k")); err != nil {
			t.Fatal(err)
		}
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
func TestSlotsSinceTheSnapshot(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, ctx := newStore(t, db), t.Context()
	slot := takeSlot(t, store, one, "")
	tx := begun(t, db, pgx.Serializable)
	if _, err := tx.Exec(ctx, "SELECT FROM "+db.Schema+".rate_limits LIMIT 0"); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Renew(ctx, slot); err != nil {
		t.Fatal(err)
	}
	var fault *pgconn.PgError
	if err := store.ReleaseTx(ctx, tx, slot); !errors.As(err, &fault) || fault.Code != "40001" {
		t.Errorf("ReleaseTx of a slot that was renewed since: got %v, want 40001", err)
	}
}

// When the last slot is taken while a call waits for its rates, they are put back, and whoever
// has the slot is not delayed by the transaction that tried it in vain.
func TestLastSlotTakenMeanwhile(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, others := newStore(t, db), newStore(t, db)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	rate := ratelimit.TokenBucket{Name: "rate", Rate: 10, Period: time.Hour}
	if err := store.Release(ctx, takeSlot(t, store, one, "k")); err != nil {
		t.Fatal(err)
	}
	blocker, tx := begun(t, db, pgx.ReadCommitted), begun(t, db, pgx.ReadCommitted)
	if err := store.TakeTx(ctx, blocker, rate.For("k")); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		slot ratelimit.Slot
		err  error
	}
	answered := make(chan answer, 1)
	go func() {
		slot, err := store.AcquireTx(ctx, tx, one, "k", rate.For("k"))
		answered <- answer{slot, err}
	}()
	for waiting := 0; waiting == 0; {
		err := db.Pool.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%"+db.Schema+"%'").Scan(&waiting)
		if err != nil {
			t.Fatal(err)
		}
	}
	held := takeSlot(t, others, one, "k")
	if err := blocker.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	a := <-answered
	if a.err != nil || a.slot.OK || !errors.As(a.slot.Err(), new(*ratelimit.FullError)) {
		t.Fatalf("AcquireTx: got %v and %v, want a refusal by the slots", a.slot, a.err)
	}
	short, cancelShort := context.WithTimeout(ctx, 2*time.Second)
	defer cancelShort()
	if _, err := others.Renew(short, held); err != nil {
		t.Errorf("Renew of a slot that a transaction tried in vain: %v", err)
	}
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if result, err := store.Check(ctx, rate.ForN("k", 0)); err != nil || result.Remaining != 10 {
		t.Errorf("%d of the rate are left, and %v, want 10", result.Remaining, err)
	}
}
