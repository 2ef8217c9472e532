package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// heldRow is a row that a transaction has locked.
type heldRow struct {
	store *pgstore.Store
	db    *pgtest.DB
	limit ratelimit.Limit
	tx    pgx.Tx
	aside *pgxpool.Pool // to look at the server by
}

// newHeldRow makes a row, of which one token is taken, and locks it.
func newHeldRow(t *testing.T, options ...pgtest.Option) *heldRow {
	t.Helper()
	h := &heldRow{db: pgtest.New(t, options...), limit: slow("l", 1000)}
	h.store = newStore(t, h.db, portable)
	mustAllow(t, h.store, h.limit.For("held"))
	h.tx, h.aside = begin(t, h.db, pgx.ReadCommitted), newPool(t, h.db.URL)
	mustExec(t, h.tx, "SELECT FROM "+h.db.Schema+".rate_limits FOR UPDATE")
	return h
}

// waiting is how many statements of others wait for the row.
func (h *heldRow) waiting(t *testing.T) (n int) {
	t.Helper()
	sql := `SELECT count(*) FROM pg_stat_activity WHERE $1::int4 = ANY (pg_blocking_pids(pid))`
	must(t, h.aside.QueryRow(t.Context(), sql, int32(h.tx.Conn().PgConn().PID())).Scan(&n))
	return n
}

// However many wait for a locked row, they wait by one statement, and others get what they
// want from a pool that has one connection left. When the row is free, those who waited
// are decided by one statement more.
func TestPortableLockedRowStallsNobodyElse(t *testing.T) {
	t.Parallel()
	const callers = 50
	sent := &traced.Statements{}
	h := newHeldRow(t, maxConns(3), pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
	var wg sync.WaitGroup
	ask := func() {
		result, err := h.store.Allow(t.Context(), h.limit.For("held"))
		if err != nil || !result.OK {
			t.Errorf("got OK %v, error %v, want a grant", result.OK, err)
		}
	}
	wg.Go(ask)
	eventually(t, "it waits for the row", func() bool { return h.waiting(t) == 1 })
	for range callers - 1 {
		wg.Go(ask)
	}
	together(8, func(i int) {
		for n := range 20 {
			result, err := h.store.Allow(t.Context(), h.limit.For(fmt.Sprint(i, n)))
			if err != nil || !result.OK {
				t.Errorf("another key: got OK %v, error %v, want a grant", result.OK, err)
			}
		}
	})
	if n := h.waiting(t); n != 1 {
		t.Errorf("%d statements wait for the row, want one", n)
	}
	before := sent.Sends()
	rollBack(t, h.tx) // one statement
	wg.Wait()
	if n := sent.Sends() - before - 1; n > 2 {
		t.Errorf("%d statements for those who gathered, want one, or two if somebody came late", n)
	}
	wantLeft(t, h.store, h.limit.ForN("held", 0), 1000-1-callers)
}

// So does the one whose statement waits for the row, and its statement ends with it: one that has
// begun, as the server does nothing about a request to cancel what it has yet to read.
func TestPortableGivingUpAtTheRow(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, change := range map[string]func(*pgstore.Config){
		"deadline": unchanged,
		"time-out": func(c *pgstore.Config) { c.Timeout = time.Second },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHeldRow(t)
			h.store = newStore(t, h.db, portable, change)
			ctx := t.Context()
			if name == "deadline" {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Second)
				defer cancel()
			}
			together(4, func(int) {
				if result, err := h.store.Allow(ctx, h.limit.For("held")); result.OK || !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got OK %v, error %v, want %v", result.OK, err, context.DeadlineExceeded)
				}
			})
			eventually(t, "nobody waits for the row", func() bool { return h.waiting(t) == 0 })
			rollBack(t, h.tx)
			h.store.Close()
			if _, err := h.store.Allow(t.Context(), h.limit.For("held")); !errors.Is(err, pgstore.ErrClosed) {
				t.Errorf("after Close: got %v, want %v", err, pgstore.ErrClosed)
			}
			wantLeft(t, newStore(t, h.db), h.limit.ForN("held", 0), 1000-1)
		})
	}
}

// A row that is not there when a call looks for it, and has been made by a program with
// another kind of limit by the time that the call has it, is that program's.
func TestPortableRowOfAnotherKindMadeMeanwhile(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, aside := newStore(t, db, portable), newPool(t, db.URL)
	bucket, sliding := slow("l", 10), ratelimit.SlidingWindow{Name: "l", Rate: 10, Period: time.Hour}
	maker, tx := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
	takeIn(t, newStore(t, db), maker, bucket.ForN("k", 0))
	done := make(chan error, 1)
	go func() {
		result, err := store.AllowAtMostTx(t.Context(), tx, sliding.ForN("k", 3))
		if err == nil && (!result.OK || result.Taken != 3) {
			err = fmt.Errorf("got %+v, want 3 taken", result)
		}
		done <- err
	}()
	eventually(t, "it waits for the row", func() bool {
		var blocked bool
		select {
		case err := <-done:
			t.Fatalf("it did not wait: %v", err)
		default:
		}
		sql := `SELECT $1::int4 = ANY (pg_blocking_pids($2::int4))`
		must(t, aside.QueryRow(t.Context(), sql, int32(maker.Conn().PgConn().PID()), int32(tx.Conn().PgConn().PID())).Scan(&blocked))
		return blocked
	})
	must(t, maker.Commit(t.Context()))
	must(t, <-done)
	must(t, tx.Commit(t.Context()))
	wantLeft(t, store, sliding.ForN("k", 0), 7)
}
