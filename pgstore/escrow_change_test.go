package pgstore_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// A prefetch that waits for its row while the definition is raised does not cut what that added, nor
// does a return of tokens that the old definition prefetched. Only these tokens may be lost.
func TestEscrowKeepsARaise(t *testing.T) {
	t.Parallel()
	year := func(rate float64) ratelimit.FixedWindow {
		return ratelimit.FixedWindow{Name: "calendar", Rate: rate, Every: ratelimit.Year, Zone: "UTC"}
	}
	for name, change := range map[string]struct{ from, to ratelimit.Limit }{
		"bucket":   {slow("bucket", 1e5), slow("bucket", 1e6)},
		"window":   {slowWindow("window", 1e5), slowWindow("window", 1e6)},
		"sliding":  {slowSliding("sliding", 1e5), slowSliding("sliding", 1e6)},
		"calendar": {year(1e5), year(1e6)},
	} {
		for mode, portable := range map[string]bool{"": false, " portable": true} {
			t.Run(name+mode, func(t *testing.T) {
				t.Parallel()
				store, sent, db := holding(t, pgstore.MaxEscrow, isPortable(portable))
				by, used := newStore(t, db), warm(t, store, sent, change.from.For("k"))
				err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
					if _, err := by.ChangeTx(t.Context(), tx, change.from, change.to, "k"); err != nil {
						return err
					}
					for before := sent.Sends(); sent.Sends() == before; used++ { // from memory, until more is prefetched
						mustAllow(t, store, change.from.For("k"))
						time.Sleep(time.Millisecond)
					}
					eventually(t, "the prefetch waits", func() (waits bool) {
						must(t, tx.QueryRow(t.Context(), `SELECT count(*) > 0 FROM pg_stat_activity
							WHERE wait_event_type = 'Lock' AND pg_backend_pid() = ANY(pg_blocking_pids(pid))`).Scan(&waits))
						return waits
					})
					return nil
				})
				must(t, err)
				store.Close()
				if left := leftOf(t, by, change.to, "k"); left > 1e6-used+1 || left < 1e6-1000 {
					t.Errorf("%v are left of 1e6, want all but the %v that were used, and what was held", left, used)
				}
			})
		}
	}
}

// A receipt from before a raise that is settled while tokens are held does not cut what that added.
func TestEscrowSettlesAfterARaise(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]struct{ from, to ratelimit.Limit }{
		"bucket": {slow("bucket", 1e5), slow("bucket", 1e6)},
		"window": {slowWindow("window", 1e5), slowWindow("window", 1e6)},
	} {
		for mode, portable := range map[string]bool{"": false, " portable": true} {
			t.Run(name+mode, func(t *testing.T) {
				t.Parallel()
				store, sent, db := holding(t, pgstore.MaxEscrow, isPortable(portable))
				paid, err := store.Allow(t.Context(), change.from.ForN("k", 2))
				mustTake(t, paid, err)
				by, used := newStore(t, db), 1+warm(t, store, sent, change.from.For("k"))
				must(t, errOf(by.Change(t.Context(), change.from, change.to, "k")))
				must(t, errOf(by.Settle(t.Context(), paid.Receipt, 1)))
				if left := leftOf(t, by, change.to, "k"); left > 1e6-used+1 || left < 1e6-1000 {
					t.Errorf("%v are left of 1e6, want all but the %v that were used, and what is held", left, used)
				}
			})
		}
	}
}
