package pgstore_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/pgstore"
)

// A call that takes nothing writes into no shard that somebody else has locked: what
// stands for that shard meanwhile is not what is in it.
func TestCountZeroLeavesALockedShardAlone(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := shardedSlow("l", 10, 2)
	mustAllow(t, store, limit.ForN("k", 7)) // from both
	want := statesOf(t, db)
	holder := begin(t, db, pgx.ReadCommitted)
	mustExec(t, holder, "SELECT FROM "+db.Schema+".rate_limits WHERE shard = 0 FOR UPDATE")
	for range 3 {
		if err := untilLocked(t, limit, func(ctx context.Context) error { return errOf(store.Allow(ctx, limit.ForN("k", 0))) }); err != nil && !isLocked(err) {
			t.Errorf("got error %v", err)
		}
	}
	must(t, holder.Rollback(t.Context()))
	store.Close() // whatever was under way has ended
	wantLeft(t, newStore(t, db), limit.ForN("k", 0), 3)
	if got := statesOf(t, db); len(got) != len(want) {
		t.Errorf("got rows %q, want %q", got, want)
	}
}

// Whoever gave up waiting for a locked row is not charged once it is free.
func TestGivingUpChargesNothing(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := slow("l", 10)
	mustAllow(t, store, limit.For("k"))
	holder := begin(t, db, pgx.ReadCommitted)
	takeIn(t, store, holder, limit.For("k"))
	for range 3 {
		if err := untilLocked(t, limit, func(ctx context.Context) error {
			result, err := store.Allow(ctx, limit.For("k"))
			if result.OK {
				t.Errorf("got OK with error %v", err)
			}
			return err
		}); !isLocked(err) {
			t.Errorf("got error %v, want %v", err, pgstore.ErrLocked)
		}
	}
	must(t, holder.Rollback(t.Context()))
	store.Close()
	wantLeft(t, newStore(t, db), limit.ForN("k", 0), 9)
}

// While a limit's number of shards changes, a transaction can meet both.
func TestTwoNumbersOfShardsInOneTransaction(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	for range 20 {
		tx := begin(t, db, pgx.ReadCommitted)
		for _, shards := range []int{8, 2, 8} {
			takeIn(t, store, tx, shardedSlow("l", 1000, shards).For("k"))
		}
		must(t, tx.Rollback(t.Context()))
	}
}
