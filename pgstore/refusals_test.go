package pgstore_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// A flood of calls that cannot succeed sends no statement, and each refusal
// promises the same instant.
func TestRefusalsAreRemembered(t *testing.T) {
	t.Parallel()
	for name, portable := range map[string]bool{"plain": false, "portable": true} {
		t.Run(name, func(t *testing.T) { remembersRefusals(t, portable) })
	}
}

func remembersRefusals(t *testing.T, portable bool) {
	t.Helper()
	sent := &traced.Statements{}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
	store := newStore(t, db, withEscrow(pgstore.MaxEscrow), isPortable(portable))
	ctx := t.Context()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}
	refuse := func() ratelimit.Result { // by an empty row
		t.Helper()
		must(t, store.Reset(ctx, limit, "k"))
		mustAllow(t, store, limit.ForN("k", 10))
		result, err := store.Allow(ctx, limit.For("k"))
		if err != nil || result.OK {
			t.Fatalf("got %v, %v, want a refusal", result.OK, err)
		}
		return result
	}
	first := refuse()
	before := sent.Sends()
	for range 1000 {
		result, err := store.Allow(ctx, limit.For("k"))
		if err != nil || result.OK || result.RetryAfter <= 0 {
			t.Fatalf("got %v after %v, %v, want a refusal", result.OK, result.RetryAfter, err)
		}
		if d := result.RetryAt.Sub(first.RetryAt).Abs(); d > time.Microsecond {
			t.Fatalf("RetryAt is %v off the first", d)
		}
	}
	if n := sent.Sends() - before; n != 0 {
		t.Errorf("sent %d statements, want none", n)
	}
	for name, give := range map[string]func() error{
		"credit": func() error { _, err := store.Credit(ctx, limit.For("k")); return err },
		"reset":  func() error { return store.Reset(ctx, limit, "k") },
		"forget": func() error { return errOf(store.Forget(ctx, limit.Name)) },
	} {
		refuse()
		must(t, give())
		if result, err := store.Allow(ctx, limit.For("k")); err != nil || !result.OK {
			t.Errorf("after a %s: got %v, %v, want a grant", name, result.OK, err)
		}
	}
	faster := limit
	faster.Capacity = 1000
	refuse()
	before = sent.Sends()
	if _, err := store.Allow(ctx, faster.For("k")); err != nil || sent.Sends() == before {
		t.Errorf("another definition: error %v, %d statements, want it asked", err, sent.Sends()-before)
	}
}

// A refusal by tokens that were granted to others, and then not written, is not
// remembered: neither when somebody has the row, nor when the commit fails.
func TestRefusalNotRemembered(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	for name, hinder := range map[string]func(*testing.T, *pgtest.DB) (stop func()){
		"a row that nobody else sees": func(t *testing.T, db *pgtest.DB) func() {
			tx := begin(t, db, pgx.ReadCommitted)
			takeIn(t, newStore(t, db), tx, limit.For("k"))
			return func() { end(t, tx.Rollback) }
		},
		"a commit that fails": func(t *testing.T, db *pgtest.DB) func() {
			atCommit(t, db, commitFails["an error"])
			return func() { execIn(t, db, `DROP TRIGGER at_commit ON {schema}.rate_limits`) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t)
			store := newStore(t, db, func(c *pgstore.Config) { c.Escrow = pgstore.MaxEscrow })
			stop := hinder(t, beside(t, db))
			g := gather(t, db.Pool)
			g.call(200*time.Millisecond, func(ctx context.Context) { _, _ = store.Check(ctx, limit.For("k")) })
			for range 2 {
				g.call(400*time.Millisecond, func(ctx context.Context) {
					if result, err := store.Allow(ctx, limit.ForN("k", 6)); err == nil {
						t.Errorf("got OK %v, want an error", result.OK)
					}
				})
			}
			g.decide()
			stop()
			mustAllow(t, store, limit.ForN("k", 6))
		})
	}
}

// Without the memory a refusal writes no WAL, takes no transaction ID and
// locks no row.
func TestRefusalWritesNothing(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	ctx := t.Context()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}
	must(t, errOf(store.Allow(ctx, limit.ForN("k", 10))))
	row := func() (row string) {
		t.Helper()
		// xmax changes with a lock, ctid and xmin with a write.
		sql := `SELECT (xmin, xmax, ctid, value, ts)::text FROM ` + db.Schema + `.rate_limits`
		must(t, db.Pool.QueryRow(ctx, sql).Scan(&row))
		return row
	}
	before := row()
	for range 100 {
		if result, err := store.Allow(ctx, limit.For("k")); err != nil || result.OK {
			t.Fatalf("got %v, %v, want a refusal", result.OK, err)
		}
	}
	if after := row(); after != before {
		t.Errorf("got the row %s, want %s", after, before)
	}
}

// Close waits for those who are under way, and lets nobody begin.
func TestClose(t *testing.T) {
	t.Parallel()
	const callers = 64
	db, store := setUp(t)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 1e6, Period: time.Hour}
	var granted atomic.Int64
	var begun, ended sync.WaitGroup
	begun.Add(callers)
	for range callers {
		ended.Go(func() {
			hasBegun := sync.OnceFunc(begun.Done)
			defer hasBegun()
			for {
				result, err := store.Allow(t.Context(), limit.For("k"))
				if errors.Is(err, pgstore.ErrClosed) {
					return
				}
				if err != nil || !result.OK {
					t.Errorf("got %v, %v, want a grant", result.OK, err)
					return
				}
				granted.Add(1)
				hasBegun()
			}
		})
	}
	begun.Wait()
	store.Close()
	before := granted.Load()
	ended.Wait()
	if late := granted.Load() - before; late > callers { // one whose answer was there may come to count only now
		t.Errorf("%d grants after Close", late)
	}
	left, err := newStore(t, db).Check(t.Context(), limit.For("k"))
	if spent := 1e6 - left.Value; err != nil || int64(spent+0.5) > granted.Load() {
		t.Errorf("spent %v, granted %d, %v", spent, granted.Load(), err)
	}
}
