package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The error of a decision that waits for the table says which session it waits for: one that has it
// locked, or one that waits for it behind a dump.
func TestLockOfTheTableIsNamed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, maxConns(16))
	dump, tool := begin(t, beside(t, db), pgx.ReadCommitted), begin(t, beside(t, db), pgx.ReadCommitted)
	mustExec(t, dump, "LOCK TABLE "+db.Schema+".rate_limits IN ACCESS SHARE MODE")
	mustExec(t, tool, "SET application_name = 'another tool'")
	pid, locked := tool.Conn().PgConn().PID(), make(chan error, 1)
	go func() {
		_, err := tool.Exec(t.Context(), "LOCK TABLE "+db.Schema+".rate_limits IN ACCESS EXCLUSIVE MODE")
		locked <- err
	}()
	waitsForLock(t, db, tool)
	wantTableNamed(t, db, fmt.Sprintf("table %s.rate_limits is waited for by pid %d (AccessExclusiveLock, another tool)", db.Schema, pid))
	end(t, dump.Rollback)
	must(t, <-locked)
	wantTableNamed(t, db, fmt.Sprintf("table %s.rate_limits is locked by pid %d (AccessExclusiveLock, another tool)", db.Schema, pid))
}

func wantTableNamed(t *testing.T, db *pgtest.DB, words string) {
	t.Helper()
	for _, change := range []func(*pgstore.Config){unchanged, portable} {
		store, limit := newStore(t, db, change, withTimeout(100*time.Millisecond)), slow("api", 10)
		for verb, do := range map[string]func(context.Context) error{
			"Allow":   func(ctx context.Context) error { _, err := store.Allow(ctx, limit.For("secret")); return err },
			"Reserve": func(ctx context.Context) error { _, err := store.Reserve(ctx, limit.For("secret")); return err },
			"Credit":  func(ctx context.Context) error { _, err := store.Credit(ctx, limit.For("secret")); return err },
			"Pause":   func(ctx context.Context) error { return pauseKey(ctx, store, limit, "secret", time.Hour) },
			"Allow of several": func(ctx context.Context) error {
				return errOf(store.Allow(ctx, limit.For("secret"), slow("b", 10).For("secret")))
			},
			"Acquire": func(ctx context.Context) error {
				return errOf(store.Permits().Acquire(ctx, ratelimit.InFlight{Name: "calls", Limit: 3}.For("secret")))
			},
			"AllowFunc": func(ctx context.Context) error {
				return errOf(store.AllowFunc(ctx, []ratelimit.Request{limit.For("secret")}, func(pgx.Tx, ratelimit.Result) error { return nil }))
			},
		} {
			eventually(t, verb+" says "+words, func() bool { // where the look was not answered in time
				ctx := within(t, 100*time.Millisecond)
				err := do(ctx)
				if !errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "secret") {
					t.Fatalf("%s: got %v", verb, err)
				}
				return isLocked(err) && strings.Contains(err.Error(), words)
			})
		}
	}
}
