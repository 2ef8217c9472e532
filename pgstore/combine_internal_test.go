package pgstore

import (
	"context"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func newTurn(t *testing.T, check bool, requests ...ratelimit.Request) *turn {
	t.Helper()
	call, err := ratelimit.NewCall(false, requests...)
	if err != nil {
		t.Fatal(err)
	}
	return &turn{ctx: t.Context(), call: call, check: check, done: make(chan struct{})}
}

func internalStore(t *testing.T, db *pgtest.DB, config Config) *Store {
	t.Helper()
	config.Schema = db.Schema
	store, err := New(db.Pool, &config)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// While a new number of shards is rolled out, two definitions can meet in one
// statement, at a row that is not there yet. Each takes what it says it took.
func TestCombinedShardCounts(t *testing.T) {
	db := pgtest.New(t)
	store := internalStore(t, db, Config{})
	one := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	two := one
	two.Shards = 2
	turns := []*turn{newTurn(t, false, one.ForN("k", 2)), newTurn(t, false, two.ForN("k", 3))}
	store.settleTurns(t.Context(), &store.combiner.lanes[0], turns)
	stored := 0.0 // what is missing in the rows
	for shard, full := range []float64{10, 5} {
		var value float64
		err := db.Pool.QueryRow(t.Context(), "SELECT coalesce(min(value), $2) FROM "+db.Schema+".rate_limits WHERE shard = $1", shard, full).Scan(&value)
		if err != nil {
			t.Fatal(err)
		}
		stored += full - value
	}
	for _, turn := range turns {
		if turn.err != nil || !turn.result.OK {
			t.Errorf("got OK %v, error %v", turn.result.OK, turn.err)
		}
	}
	// To the one of two shards, 10 tokens in a row are 5.
	if stored < 5-0.001 {
		t.Errorf("%v tokens are missing in the rows, want 5 at least", stored)
	}
}

// A limit's definitions can differ, as those of plans do. A key that has no row
// is full for each by its own.
func TestCombinedDefinitions(t *testing.T) {
	db := pgtest.New(t)
	store := internalStore(t, db, Config{})
	plain := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	premium, other := plain, plain
	premium.Rate = 100
	other.Name = "other"
	for name, turns := range map[string][]*turn{
		"read":   {newTurn(t, true, plain.For("a")), newTurn(t, false, premium.ForN("a", 50))},
		"locked": {newTurn(t, true, plain.For("b")), newTurn(t, false, premium.ForN("b", 50), other.For("b"))},
	} {
		store.settleTurns(t.Context(), &store.combiner.lanes[0], turns)
		if got := turns[0]; got.err != nil || got.result.Remaining != 10 {
			t.Errorf("%s: plain has %d left, error %v, want 10", name, got.result.Remaining, got.err)
		}
		if got := turns[1]; got.err != nil || !got.result.OK {
			t.Errorf("%s: premium got OK %v, error %v", name, got.result.OK, got.err)
		}
	}
}

// A refusal by tokens that were granted to others, and then not written, is not
// remembered.
func TestRefusalNotRemembered(t *testing.T) {
	db := pgtest.New(t)
	store := internalStore(t, db, Config{RefusalMemory: 100})
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 24 * time.Hour}
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.AllowTx(t.Context(), tx, limit.For("k")); err != nil { // a row that nobody else sees
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	turns := []*turn{newTurn(t, false, limit.ForN("k", 6)), newTurn(t, false, limit.ForN("k", 6))}
	store.settleTurns(ctx, &store.combiner.lanes[0], turns)
	for _, turn := range turns {
		if turn.err == nil {
			t.Fatalf("got OK %v, want the wait for the row to be over", turn.result.OK)
		}
	}
	eventually(t, "the server has given up, too", func() bool {
		var waits bool
		err := db.Pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))", tx.Conn().PgConn().PID()).Scan(&waits)
		return err == nil && !waits
	})
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if result, err := store.Allow(t.Context(), limit.ForN("k", 6)); err != nil || !result.OK {
		t.Errorf("got OK %v, error %v, want what is there", result.OK, err)
	}
}

// What was seen by another definition says nothing of how full shards are.
func TestShardMemoryByDefinition(t *testing.T) {
	db := pgtest.New(t)
	store := internalStore(t, db, Config{})
	limit := ratelimit.TokenBucket{Name: "l", Rate: 8, Period: 24 * time.Hour, Shards: 8}
	if _, err := store.Allow(t.Context(), limit.For("k")); err != nil {
		t.Fatal(err)
	}
	limit.Rate = 800
	result, err := store.Allow(t.Context(), limit.For("k"))
	if err != nil || result.Remaining < 600 {
		t.Errorf("got %d left, error %v, want what seven shards and more hold", result.Remaining, err)
	}
}
