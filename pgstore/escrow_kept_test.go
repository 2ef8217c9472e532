package pgstore_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Nothing that was prefetched is lost while no process is killed, whoever gives up and whatever
// is locked meanwhile.

// eachKept runs a test for limits that are refilled with nothing meanwhile, by both kinds of
// statements.
func eachKept(t *testing.T, test func(t *testing.T, limit ratelimit.Limit, portable bool)) {
	t.Helper()
	t.Parallel()
	for name, portable := range map[string]bool{"plain ": false, "portable ": true} {
		for _, limit := range []ratelimit.Limit{slow("bucket", 1000), slowWindow("window", 1000), slowSliding("sliding", 1000)} {
			t.Run(name+ratelimit.NameOf(limit), func(t *testing.T) {
				t.Parallel()
				test(t, limit, portable)
			})
		}
	}
}

// A statement whose callers give up while the server is at it prefetches all the same. What it
// brings is not lost, and neither are the tokens of transactions that did not begin.
func TestEscrowHearsWhatNobodyWaitsFor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	t.Run("own", func(t *testing.T) {
		hears(t, allowOwn, func(error) bool { return true }) // taken, perhaps
	})
	t.Run("transaction", func(t *testing.T) {
		hears(t, allowFunc, func(err error) bool { return errors.Is(err, pgstore.ErrOutcomeUnknown) })
	})
}

func hears(t *testing.T, take takes, isUnknown func(error) bool) {
	t.Helper()
	eachKept(t, func(t *testing.T, limit ratelimit.Limit, portable bool) {
		store, sent, db := holding(t, pgstore.MaxEscrow, isPortable(portable))
		used := warm(t, store, sent, limit.For("k"))
		execIn(t, db, `CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END';
			CREATE TRIGGER slow BEFORE UPDATE ON {schema}.rate_limits FOR EACH ROW EXECUTE FUNCTION {schema}.slow()`)
		const many = 200 // more than are held
		gaveUp, unknown := 0, 0.0
		for n := 0; gaveUp < 2 && n < 10; n++ {
			pauseFor(t.Context(), 100*time.Millisecond) // it is sent, and not behind another
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			result, err := take(ctx, db.Pool, store, limit.ForN("k", many))
			cancel()
			switch {
			case err != nil:
				gaveUp++
				if isUnknown(err) {
					unknown += many
				}
			case result.OK:
				used += many
			}
		}
		store.Close()
		if lacks := lacks(t, db, limit); gaveUp == 0 || lacks < used-0.5 || lacks > used+unknown+0.5 {
			t.Errorf("the row lacks %v, want from %v to %v", lacks, used, used+unknown)
		}
	})
}

// What is held comes back however long others have the row locked, if it is not nearly full.
func TestEscrowReturnsToARowThatWasLocked(t *testing.T) {
	pgtest.Long(t)
	eachKept(t, func(t *testing.T, limit ratelimit.Limit, portable bool) {
		store, sent, db := holding(t, 50*time.Millisecond, isPortable(portable))
		mustAllow(t, newStore(t, db), limit.ForN("k", 400))
		used := 400 + warm(t, store, sent, limit.For("k"))
		tx := begin(t, db, pgx.ReadCommitted)
		mustExec(t, tx, `SELECT FROM `+db.Schema+`.rate_limits FOR UPDATE`)
		time.Sleep(6 * time.Second) // longer than a single attempt
		must(t, tx.Rollback(t.Context()))
		store.Close()
		if lacks := lacks(t, db, limit); lacks < used-0.5 || lacks > used+0.5 {
			t.Errorf("the row lacks %v, want %v", lacks, used)
		}
	})
}

// What was used from memory can be cancelled to the last token, as the row is told that it is
// not out any more: although the transaction that told it first was rolled back, or the lease
// had ended when it was used.
func TestEscrowIsToldWhatWasUsed(t *testing.T) {
	pgtest.Long(t)
	eachKept(t, func(t *testing.T, limit ratelimit.Limit, portable bool) {
		clock := newClock() // the row can be told for a second after a lease, which the machine may take longer for
		store, sent, db := holding(t, pgstore.MaxEscrow, isPortable(portable), onClock(clock))
		var receipts []*ratelimit.Receipt
		allow := func() {
			result, err := store.Allow(t.Context(), limit.For("k"))
			receipts = append(receipts, mustTake(t, result, err).Receipt)
		}
		cancel := func() {
			t.Helper()
			for _, r := range receipts {
				done, err := store.Cancel(t.Context(), r)
				wantSaid(t, "cancel", done, err, true)
			}
			receipts = nil
		}
		for held := 0; held < 30; {
			before := sent.Sends()
			if allow(); sent.Sends() == before {
				held++
			}
		}
		undone := begin(t, db, pgx.ReadCommitted)
		last := receipts[len(receipts)-1]
		done, err := store.CancelTx(t.Context(), undone, last)
		wantSaid(t, "cancel", done, err, true)
		receipts = receipts[:len(receipts)-1]
		before := sent.Sends()
		cancelled := make(chan struct{})
		go func() {
			defer close(cancelled)
			cancel() // waits for the row, by more than one attempt
		}()
		for sent.Sends() < before+6 {
			time.Sleep(time.Millisecond)
		}
		must(t, undone.Rollback(t.Context()))
		<-cancelled
		receipts = append(receipts, last)

		for held := false; !held; {
			before := sent.Sends()
			result, err := store.AllowFunc(t.Context(), []ratelimit.Request{limit.ForN("k", 2)}, func(pgx.Tx, ratelimit.Result) error {
				if held = sent.Sends() == before+1; held { // BEGIN alone: it is from memory
					clock.add(pgstore.MaxEscrow)
					if held := store.Stats().Held; len(held) > 0 {
						t.Errorf("%v is held after its end", held)
					}
				}
				return nil
			})
			must(t, err)
			receipts = append(receipts, result.Receipt)
		}
		cancel()
		store.Close()
		if lacks := lacks(t, db, limit); lacks < -0.5 || lacks > 0.5 {
			t.Errorf("the row lacks %v of what was cancelled", lacks)
		}
	})
}

// While somebody holds what he took ahead, the row does not fill up so far that both are
// more than the capacity, and it is not used after its end; and what is given back just
// before its end counts for less, or the row would fill up while somebody else holds what he
// took in the meantime.
func TestEscrowAndRowTogether(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "bucket", Rate: 5, Period: time.Second, Capacity: 400}
	const almost = pgstore.MaxEscrow - time.Millisecond
	for name, between := range map[string]func(*sharing){
		"held until the end": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
		},
		"held until long after": func(to *sharing) {
			to.warm(0)
			to.clock.add(19 * pgstore.MaxEscrow / 10)
		},
		"given back before the end": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
			to.warm(1)
			to.stores[0].Close()
			to.clock.add(almost)
		},
		"held while the clock is set back": func(to *sharing) {
			to.warm(0)
			to.clock.add(almost)
			to.warm(1)
			to.clock.add(-almost)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var worst curve.Worst
			// Much of it, since nothing but the test's clock goes on, or it has tried nothing. But in a
			// run that takes long, memory gives back meanwhile, by the machine's clock.
			const much = 0.6
			for n := 0; n < 5 && worst.Share < much; n++ {
				if w := shareOut(t, limit, between); w.Share > worst.Share {
					worst = w
				}
			}
			if worst.Share < much {
				t.Errorf("%v", worst)
			}
		})
	}
}

// shareOut has stores take ahead, and then hands out what is in the row and in their memories.
func shareOut(t *testing.T, limit ratelimit.Limit, between func(*sharing)) curve.Worst {
	t.Helper()
	to := &sharing{t: t, clock: newClock(), limit: limit}
	db := pgtest.New(t)
	for range 2 {
		to.stores = append(to.stores, newStore(t, db, onClock(to.clock), withEscrow(pgstore.MaxEscrow)))
	}
	between(to)
	to.stores = append([]*pgstore.Store{newStore(t, db, onClock(to.clock))}, to.stores...)
	for i, store := range to.stores {
		for i > 0 && to.held(store) || i == 0 && to.allow(store) {
		}
	}
	worst := curve.Judge(to.events, curve.Of(limit.Definition()))
	if worst.Share > 1+1e-9 {
		t.Errorf("too much: %v", worst)
	}
	return worst
}

// sharing is stores that share a limit, and what was granted.
type sharing struct {
	t      *testing.T
	clock  *clock
	limit  ratelimit.Limit
	stores []*pgstore.Store
	events []curve.Event
}

func (to *sharing) warm(i int) {
	for range 34 { // of which the last are from memory
		to.allow(to.stores[i])
	}
}

func (to *sharing) allow(store *pgstore.Store) bool {
	to.t.Helper()
	result, err := store.Allow(to.t.Context(), to.limit.For("k"))
	must(to.t, err)
	if at := result.At; result.OK {
		if n := len(to.events); n > 0 && to.events[n-1].At.After(at) {
			at = to.events[n-1].At // by a clock that never goes back
		}
		to.events = append(to.events, curve.Event{At: at, Count: 1})
	}
	return result.OK
}

// held is allow, but for a store that is closed.
func (to *sharing) held(store *pgstore.Store) bool {
	if _, err := store.Check(to.t.Context(), to.limit.For("k")); errors.Is(err, pgstore.ErrClosed) {
		return false
	}
	return to.allow(store)
}
