package pgstore_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Every verb does with one connection: one that wants a second while it holds
// the first waits for itself.
func TestOneConnection(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.MaxConns = 1 }))
	ctx := within(t, 30*time.Second)
	for name, portable := range map[string]bool{"plain": false, "portable": true} {
		t.Run(name, func(t *testing.T) {
			store := newStore(t, db, isPortable(portable))
			row := ratelimit.TokenBucket{Name: name + "_row", Rate: 10, Period: time.Hour}
			rows := ratelimit.TokenBucket{Name: name + "_rows", Rate: 10, Period: time.Hour, Shards: 4}
			some := []ratelimit.Request{row.For("k"), rows.ForN("k", 4)}
			must := func(result ratelimit.Result, err error) ratelimit.Result {
				t.Helper()
				if err != nil || !result.OK {
					t.Fatalf("got %v, %v, want a grant", result.OK, err)
				}
				return result
			}
			must(store.Allow(ctx, some...))
			must(store.Check(ctx, some...))
			reserved := must(store.Reserve(ctx, rows.ForN("k", 8)))
			should(t, errOf(store.Cancel(ctx, reserved.Receipt)))
			should(t, errOf(store.Credit(ctx, rows.ForN("k", 1))))
			for _, used := range []float64{0, 5} {
				reserved := must(store.Reserve(ctx, rows.ForN("settled", 3)))
				must(store.Settle(ctx, reserved.Receipt, used))
			}
			must(store.AllowAtMost(ctx, row.ForN("most", 20)))
			must(store.AllowFirst(ctx, row.For("most"), rows.For("k2")))
			must(store.Wait(ctx, rows.For("k2")))
			should(t, store.Take(ctx, row.For("t"), rows.For("t")))
			should(t, errOf(store.CheckEach(ctx, some...)))
			for _, err := range store.Rows(ctx, row, ratelimit.Page{}) {
				should(t, err)
				must(store.Check(ctx, row.ForN("k2", 0))) // in the loop, no connection is held
			}
			must(store.AllowFunc(ctx, some, func(pgx.Tx, ratelimit.Result) error { return nil }))
			should(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
				must(store.AllowTx(ctx, tx, rows.ForN("tx", 9))) // of several shards
				if result, err := store.AllowTx(ctx, tx, rows.ForN("tx", 2)); err != nil || result.OK {
					t.Errorf("got OK %v, error %v, want a refusal", result.OK, err)
				}
				return nil
			}))
			should(t, errOf(store.Pause(ctx, rows, "k", time.Hour)))
			should(t, errOf(store.PauseEach(ctx, some, time.Hour)))
			should(t, store.Reset(ctx, rows, "k"))
			should(t, errOf(store.Prune(ctx, row, rows)))
		})
	}
}
