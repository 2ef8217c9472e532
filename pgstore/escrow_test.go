package pgstore_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// sluggish are limits of each kind that are refilled with nothing while a test runs, so
// that what a row lacks is what was taken from it.
var sluggish = map[string]ratelimit.Limit{
	"bucket":  ratelimit.TokenBucket{Name: "bucket", Rate: 1e6, Period: 1e5 * time.Hour},
	"window":  ratelimit.FixedWindow{Name: "window", Rate: 1e6, Period: 1e5 * time.Hour},
	"sliding": ratelimit.SlidingWindow{Name: "sliding", Rate: 1e6, Period: 1e5 * time.Hour},
}

// lacks is how many tokens a limit's row lacks.
func lacks(t *testing.T, db *pgtest.DB, limit ratelimit.Limit) float64 {
	t.Helper()
	var value float64
	sql := `SELECT value FROM ` + db.Schema + `.rate_limits WHERE name = $1`
	must(t, db.Pool.QueryRow(t.Context(), sql, ratelimit.NameOf(limit)).Scan(&value))
	return limit.Definition().Capacity - value
}

// tallies reports whether a row lacks what was used of it, but for what is refilled
// while a test runs.
func tallies(lacks, used float64) bool { return math.Abs(lacks-used) < 0.01*used+1 }

// warm takes until a process takes ahead, and returns how many that were.
func warm(t *testing.T, store *pgstore.Store, sent *traced.Statements, r ratelimit.Request) (taken float64) {
	t.Helper()
	for range 1000 {
		before := sent.Sends()
		mustAllow(t, store, r)
		taken += r.Count
		if taken > 3 && sent.Sends() == before {
			return taken
		}
	}
	t.Fatal("nothing was taken ahead in 1,000 calls")
	return 0
}

// holding is a store that takes ahead, and what it sends.
func holding(t *testing.T, lasts time.Duration, change ...func(*pgstore.Config)) (*pgstore.Store, *traced.Statements, *pgtest.DB) {
	t.Helper()
	sent := &traced.Statements{}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
	return newStore(t, db, append(change, withEscrow(lasts))...), sent, db
}

// Most calls are granted without a statement, and when the Store is closed the rows lack
// what was granted, no more and no less.
func TestEscrowHandsOutFromMemory(t *testing.T) {
	t.Parallel()
	for name, limit := range sluggish {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, sent, db := holding(t, pgstore.MaxEscrow)
			together(8, func(int) {
				for range 5000 {
					result, err := store.Allow(t.Context(), limit.For("k"))
					if err != nil || !result.OK || result.Taken != 1 || len(result.Each()) != 1 || result.RetryAfter != 0 {
						t.Errorf("got %+v, %v, want a grant", result, err)
						return
					}
				}
			})
			store.Close()
			if n := sent.Sends(); n > 2000 {
				t.Errorf("sent %d statements for 40,000 calls", n)
			}
			if lacks := lacks(t, db, limit); !tallies(lacks, 40_000) {
				t.Errorf("the row lacks %v, granted 40,000", lacks)
			}
			if _, err := store.Allow(t.Context(), limit.For("k")); !errors.Is(err, pgstore.ErrClosed) {
				t.Errorf("after Close: got %v, want ErrClosed", err)
			}
		})
	}
}

// A grant from memory allocates its receipt, and nothing besides: what a caller asks for need not
// be on the heap. It is not parallel, since others' allocations would count.
func TestEscrowAllocates(t *testing.T) {
	store, sent, _ := holding(t, pgstore.MaxEscrow)
	request := sluggish["bucket"].For("k")
	warm(t, store, sent, request)
	ctx := t.Context()
	if got := testing.AllocsPerRun(5000, func() { _, _ = store.Allow(ctx, request) }); got != 1 {
		t.Errorf("got %v allocations for each grant from memory, want 1", got)
	}
}

// What nobody needs any more is back in the row before its end.
func TestEscrowGivesBackWhatIsNotNeeded(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, limit := range sluggish {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, sent, db := holding(t, 2*time.Second)
			granted := warm(t, store, sent, limit.For("k"))
			eventually(t, "the row has the rest", func() bool { return tallies(lacks(t, db, limit), granted) })
		})
	}
}

// Processes that hold tokens of one row are together granted what there is, and so is what one gives back.
func TestEscrowGrantsWhatThereIs(t *testing.T) {
	t.Parallel()
	for _, limit := range []ratelimit.Limit{slow("bucket", 1000), slowWindow("window", 1000), slowSliding("sliding", 1000)} {
		first, sent, db := holding(t, pgstore.MaxEscrow, onClock(newClock()))
		granted := warm(t, first, sent, limit.For("k"))
		first.Close()
		var stores [4]*pgstore.Store
		for i := range stores {
			stores[i] = newStore(t, db, onClock(newClock()), withEscrow(pgstore.MaxEscrow))
		}
		for more := true; more; {
			more = false
			for i := range 50 * len(stores) { // so that each takes ahead
				result, err := stores[i/50].Allow(t.Context(), limit.For("k"))
				must(t, err)
				granted, more = granted+result.Taken, more || result.OK
			}
		}
		if n := sent.Sends(); granted < 995 || granted > 1000 || n > 500 { // parts of tokens may be left
			t.Errorf("%s: granted %v of 1000 by %d statements", ratelimit.NameOf(limit), granted, n)
		}
	}
}

// Transactions of the runner touch no row of ours, and what is not committed is put back.
func TestEscrowInTransactions(t *testing.T) {
	t.Parallel()
	limit := sluggish["bucket"]
	cancelled, cancel := context.WithCancel(t.Context())
	failed, now := errors.New("failed"), newClock()
	for name, test := range map[string]struct {
		ctx   context.Context
		do    func(pgx.Tx, ratelimit.Result) error
		spent float64
		err   error
		row   bool // another limit is taken from its row, which tells the outcome
	}{
		"commit": {do: func(tx pgx.Tx, _ ratelimit.Result) error { return nil }, spent: 1},
		"error":  {do: func(tx pgx.Tx, _ ratelimit.Result) error { return failed }, err: failed},
		"panic":  {do: func(tx pgx.Tx, _ ratelimit.Result) error { panic(failed) }, err: failed},
		"an error after the lease's end": {do: func(tx pgx.Tx, _ ratelimit.Result) error {
			now.add(pgstore.MaxEscrow)
			return failed
		}, err: failed},
		"a context that ends": {ctx: cancelled, do: func(tx pgx.Tx, _ ratelimit.Result) error {
			cancel()
			return nil
		}, err: context.Canceled},
		"a function that commits itself and fails": {do: func(tx pgx.Tx, _ ratelimit.Result) error {
			return errors.Join(tx.Commit(t.Context()), failed)
		}, spent: 1, err: failed},
		"a function that commits itself": {do: func(tx pgx.Tx, _ ratelimit.Result) error {
			return tx.Commit(t.Context())
		}, spent: 1, err: pgstore.ErrOutcomeUnknown},
		"a function that rolls back itself": {do: func(tx pgx.Tx, _ ratelimit.Result) error {
			return tx.Rollback(t.Context())
		}, spent: 1, err: pgstore.ErrOutcomeUnknown},
		"a function that rolls back itself, and a row": {row: true, do: func(tx pgx.Tx, _ ratelimit.Result) error {
			return tx.Rollback(t.Context())
		}, err: pgx.ErrTxClosed},
		"a function that rolls back itself and fails, and a row": {row: true, do: func(tx pgx.Tx, _ ratelimit.Result) error {
			return errors.Join(tx.Rollback(t.Context()), failed)
		}, err: failed},
	} {
		t.Run(name, func(t *testing.T) {
			store, sent, db := holding(t, pgstore.MaxEscrow, onClock(now))
			used := warm(t, store, sent, limit.For("k"))
			before, ctx := tableOf(t, db), test.ctx
			if ctx == nil {
				ctx = t.Context()
			}
			requests := []ratelimit.Request{limit.For("k")}
			if test.row {
				requests = append(requests, sluggish["window"].For("k"))
			}
			var receipt *ratelimit.Receipt
			result, err := func() (result ratelimit.Result, err error) {
				defer func() {
					if p := recover(); p != nil {
						err = p.(error)
					}
				}()
				return store.AllowFunc(ctx, requests, func(tx pgx.Tx, result ratelimit.Result) error {
					receipt = result.Receipt
					return test.do(tx, result)
				})
			}()
			if !errors.Is(err, test.err) || (err == nil) != result.OK {
				t.Fatalf("got %v, %v, want %v", result.OK, err, test.err)
			}
			if after := tableOf(t, db); after[0] != before[0] {
				t.Errorf("the row is %v, was %v", after, before)
			}
			if test.spent == 0 {
				if cancelled, err := store.Cancel(t.Context(), receipt); err != nil || cancelled {
					t.Errorf("got %v, %v, want nothing to cancel of what was put back", cancelled, err)
				}
			}
			store.Close()
			if lacks := lacks(t, db, limit); math.Abs(lacks-used-test.spent) > 0.5 {
				t.Errorf("the row lacks %v, want %v", lacks, used+test.spent)
			}
		})
	}
}

// A pause and a reset of this Store are heeded at once.
func TestEscrowHeedsEdits(t *testing.T) {
	t.Parallel()
	limit := sluggish["bucket"]
	for name, test := range map[string]struct {
		edit func(*pgstore.Store) error
		ok   bool
	}{
		"pause": {func(s *pgstore.Store) error { _, err := s.Pause(t.Context(), limit, "k", time.Hour); return err }, false},
		"reset": {func(s *pgstore.Store) error { return s.Reset(t.Context(), limit, "k") }, true},
	} {
		t.Run(name, func(t *testing.T) {
			store, sent, _ := holding(t, pgstore.MaxEscrow)
			warm(t, store, sent, limit.For("k"))
			must(t, test.edit(store))
			before := sent.Sends()
			result, err := store.Allow(t.Context(), limit.For("k"))
			if err != nil || result.OK != test.ok || sent.Sends() == before {
				t.Errorf("got %v, %v by %d statements, want %v by the row", result.OK, err, sent.Sends()-before, test.ok)
			}
		})
	}
}

// Of several limits, what is held comes from memory and the rest from rows, all or nothing.
func TestEscrowOfSeveralLimits(t *testing.T) {
	t.Parallel()
	hot, cold := sluggish["bucket"], ratelimit.TokenBucket{Name: "cold", Rate: 5, Period: 1e5 * time.Hour, MaxReserved: ratelimit.None}
	for name, take := range map[string]func(*pgstore.Store, context.Context, ...ratelimit.Request) (ratelimit.Result, error){
		"allow": (*pgstore.Store).Allow, "reserve": (*pgstore.Store).Reserve,
		"allow func": func(s *pgstore.Store, ctx context.Context, r ...ratelimit.Request) (ratelimit.Result, error) {
			return allowFunc(ctx, nil, s, r...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			store, sent, db := holding(t, pgstore.MaxEscrow)
			used := warm(t, store, sent, hot.ForN("k", 3))
			row := func() string {
				return slices.DeleteFunc(tableOf(t, db), func(r string) bool { return strings.Contains(r, "cold") })[0]
			}
			before := row()
			var last ratelimit.Result
			for i := range 6 {
				result, err := take(store, t.Context(), cold.For("k"), hot.For("k"))
				must(t, err)
				if result.OK != (i < 5) || len(result.Each()) != 2 {
					t.Fatalf("call %d: got %+v", i, result)
				}
				if c, h := result.Each()[0], result.Each()[1]; ratelimit.NameOf(c.Request.Limit) != "cold" || c.OK != result.OK || !h.OK {
					t.Errorf("call %d: got %+v", i, result.Each())
				}
				if result.OK {
					used, last = used+1, result
				}
			}
			if row() != before {
				t.Errorf("the row is %s, was %s", row(), before)
			}
			should(t, errOf(store.Settle(t.Context(), last.Receipt, 0, 1)))
			if lacks := lacks(t, db, cold); math.Abs(lacks-4) > 0.01 {
				t.Errorf("the row of the cold limit lacks %v, want 4", lacks)
			}
			store.Close()
			if lacks := lacks(t, db, hot); !tallies(lacks, used) {
				t.Errorf("the row lacks %v, used %v", lacks, used)
			}
		})
	}
}

// What is not there cannot be held: a reservation goes into debt by the row, and says so.
func TestEscrowReservesDebtByTheRow(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "bucket", Rate: 20, Period: 1e5 * time.Hour}
	store, _, db := holding(t, pgstore.MaxEscrow)
	due := 0
	for range 30 {
		result, err := store.ReserveFunc(t.Context(), []ratelimit.Request{limit.For("k")}, func(pgx.Tx, ratelimit.Result) error { return nil })
		if err != nil || !result.OK {
			t.Fatalf("got %+v, %v", result, err)
		}
		if result.RetryAfter == 0 {
			due++
		}
	}
	if due > 20 {
		t.Errorf("%d reservations are due at once, want 20 at most", due)
	}
	store.Close()
	if lacks := lacks(t, db, limit); math.Abs(lacks-30) > 0.1 {
		t.Errorf("the row lacks %v, want 30", lacks)
	}
}

// What a transaction puts back that outlasts its store is not handed out: the store is closed.
func TestEscrowPutBackAfterClose(t *testing.T) {
	t.Parallel()
	limit, undone := sluggish["bucket"], errors.New("undone")
	store, sent, _ := holding(t, pgstore.MaxEscrow)
	warm(t, store, sent, limit.For("k"))
	_, err := store.AllowFunc(t.Context(), []ratelimit.Request{limit.For("k")}, func(pgx.Tx, ratelimit.Result) error {
		store.Close()
		return undone
	})
	if !errors.Is(err, undone) {
		t.Fatal(err)
	}
	if result, err := store.Allow(t.Context(), limit.For("k")); !errors.Is(err, pgstore.ErrClosed) {
		t.Errorf("after Close: got %v, %v, want ErrClosed", result.OK, err)
	}
}

// What is told to be there is: the row's and what the process holds, be it granted by the
// row or from memory.
func TestEscrowTellsWhatIsThere(t *testing.T) {
	t.Parallel()
	for name, limit := range sluggish {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t)
			store := newStore(t, db, onClock(newClock()), withEscrow(pgstore.MaxEscrow))
			defer store.Close()
			for n := range 50 {
				result, err := store.Allow(t.Context(), limit.For("k"))
				mustTake(t, result, err)
				if want := limit.Definition().Capacity - float64(n+1); result.Value < want-1 || result.Value > want+1 {
					t.Errorf("call %d: got %v, want %v", n, result.Value, want)
				}
			}
		})
	}
}
