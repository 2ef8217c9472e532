package pgstore_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// After a slow take the next ones wait for the row by a statement that does not look all of its
// versions up again and again; where it would leave a predicate lock, by the take itself.
func TestSlowRowIsWaitedForFirst(t *testing.T) {
	t.Parallel()
	one, two := slow("one", 1e6).For("k"), slow("two", 1e6).For("k")
	for name, requests := range map[string][]ratelimit.Request{"one limit": {one}, "several": {one, two}} {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.Serializable} {
			t.Run(name+" "+string(level), func(t *testing.T) {
				t.Parallel()
				db, store := setUp(t, maxConns(5))
				mustAllow(t, store, requests...)
				take := func(tx pgx.Tx) error { return errOf(store.AllowTx(t.Context(), tx, requests...)) }
				// meet has two transactions wait for another, and returns what one waits with.
				meet := func() (statement string) {
					holder, waiters := begin(t, db, level), []pgx.Tx{begin(t, db, level), begin(t, db, level)}
					must(t, take(holder))
					done := make(chan error, len(waiters))
					for _, waiter := range waiters {
						go func() {
							err := take(waiter)
							predicates := 0
							if err == nil {
								err = waiter.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid() AND relation = $1::regclass", db.Schema+".rate_limits").Scan(&predicates)
							}
							if predicates > 0 {
								err = fmt.Errorf("%d predicate locks", predicates)
							}
							done <- errors.Join(err, waiter.Rollback(t.Context()))
						}()
					}
					for _, waiter := range waiters {
						waitsForLock(t, db, waiter)
					}
					must(t, db.Pool.QueryRow(t.Context(), "SELECT query FROM pg_stat_activity WHERE pid = $1", waiters[0].Conn().PgConn().PID()).Scan(&statement))
					time.Sleep(25 * time.Millisecond) // so long they wait at least
					must(t, holder.Rollback(t.Context()))
					for range waiters {
						should(t, <-done)
					}
					return statement
				}
				if first := meet(); !strings.HasPrefix(first, "INSERT") {
					t.Errorf("at first it waits with %s", first)
				}
				waited, tries := false, 20 // each within a second after the one before
				if level == pgx.Serializable {
					tries = 2
				}
				for ; tries > 0 && !waited; tries-- {
					waited = strings.HasSuffix(meet(), "FOR UPDATE")
				}
				if want := level == pgx.ReadCommitted; waited != want {
					t.Errorf("waited for the row first: %v, want %v", waited, want)
				}
			})
		}
	}
}
