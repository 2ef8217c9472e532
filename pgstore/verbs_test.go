package pgstore_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// eachKind runs test for limits that hold 12 tokens and get 12 more in a day, on a clock that starts at noon.
func eachKind(t *testing.T, test func(t *testing.T, db *pgtest.DB, c *clock, store *pgstore.Store, l ratelimit.Limit)) {
	t.Helper()
	const day = 24 * time.Hour
	db := pgtest.New(t)
	for _, l := range []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "bucket", Rate: 12, Period: day},
		ratelimit.FixedWindow{Name: "window", Rate: 12, Period: day, Start: noon},
		ratelimit.TokenBucket{Name: "sharded bucket", Rate: 12, Period: day, Shards: 4},
		ratelimit.FixedWindow{Name: "sharded window", Rate: 12, Period: day, Start: noon, Shards: 4},
	} {
		t.Run(ratelimit.NameOf(l), func(t *testing.T) {
			c := newClock()
			test(t, db, c, newStore(t, db, onClock(c)), l)
		})
	}
}

// TestCancelFindsItsShard: what is given back goes where it came from, so that
// all rows are as they were before.
func TestCancelFindsItsShard(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store := newStore(t, db, onClock(newClock()))
	l := slow("shards", 80)
	l.Shards = 8
	for range 30 {
		mustAllow(t, store, l.For("k"))
	}
	for _, n := range []float64{1, 7, 25, 50} {
		before := rowsOf(t, db, l.Name)
		result, err := store.Allow(t.Context(), l.ForN("k", n))
		mustTake(t, result, err)
		if slices.Equal(rowsOf(t, db, l.Name), before) {
			t.Errorf("%v tokens: nothing was taken", n)
		}
		cancelled, err := store.Cancel(t.Context(), result.Receipt)
		wantSaid(t, "cancel", cancelled, err, true)
		if got := rowsOf(t, db, l.Name); !slices.Equal(got, before) {
			t.Errorf("%v tokens: got  %q\nwant %q", n, got, before)
		}
	}
}

// TestCheckOnlyLooks: it writes nothing, gets no transaction ID, waits for no
// lock and leaves none behind.
func TestCheckOnlyLooks(t *testing.T) {
	t.Parallel()
	eachKind(t, func(t *testing.T, db *pgtest.DB, _ *clock, store *pgstore.Store, l ratelimit.Limit) {
		ctx := t.Context()
		mustAllow(t, store, l.ForN("k", 5))
		before := tableOf(t, db)

		holder := begin(t, db, pgx.ReadCommitted)
		lockRows := `SELECT FROM ` + db.Schema + `.rate_limits FOR UPDATE NOWAIT`
		mustExec(t, holder, lockRows)
		tx := begin(t, db, pgx.Serializable)
		mustExec(t, tx, "SET LOCAL lock_timeout = '1ms'")
		for _, key := range []string{"k", "no row"} {
			for _, n := range []float64{0, 1, 12} {
				for _, call := range []func() (ratelimit.Result, error){
					func() (ratelimit.Result, error) { return store.CheckTx(ctx, tx, l.ForN(key, n)) },
					func() (ratelimit.Result, error) { return store.CheckReserveTx(ctx, tx, l.ForN(key, n)) },
					func() (ratelimit.Result, error) { return store.Check(ctx, l.ForN(key, n)) },
					func() (ratelimit.Result, error) { return store.CheckReserve(ctx, l.ForN(key, n)) },
				} {
					if got, err := call(); err != nil || got.Receipt != nil {
						t.Errorf("%s %v: receipt %v, error %v", key, n, got.Receipt, err)
					}
				}
			}
		}
		var noXID bool
		if err := tx.QueryRow(ctx, "SELECT pg_current_xact_id_if_assigned() IS NULL").Scan(&noXID); err != nil || !noXID {
			t.Errorf("has no transaction ID: %v, error %v", noXID, err)
		}
		must(t, holder.Rollback(ctx))
		other := begin(t, db, pgx.ReadCommitted) // while tx is open
		mustExec(t, other, lockRows)
		if got := tableOf(t, db); !slices.Equal(got, before) {
			t.Errorf("got  %q\nwant %q", got, before)
		}
	})
}
