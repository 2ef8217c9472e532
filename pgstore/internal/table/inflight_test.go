package table

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Of many permits a look reads the next part, if none has a turn earlier. It waits for no row.
func TestLookAtPartsOfPermits(t *testing.T) {
	db := pgtest.New(t)
	table, ctx, rows := New(db.Schema, false, time.Second), t.Context(), db.Schema+".rate_limits"
	exec := func(sql string) {
		t.Helper()
		noError(t, errOf(db.Pool.Exec(ctx, sql)))
	}
	look := func() *PermitLook {
		t.Helper()
		look := &PermitLook{Key: decide.Key{Name: "l", Key: "k"}, PartOf: 2500}
		noError(t, table.LookAtPermits(ctx, db.Pool, []*PermitLook{look}, nil))
		return look
	}
	exec("INSERT INTO " + rows + " (name, key, shard, value, ts) SELECT 'l', 'k', n, 1, now() FROM generate_series(0, 2498) AS n")
	for i, want := range []struct{ from, permits int }{{0, 1000}, {1000, 1000}, {2000, 499}, {0, 1000}} {
		if got := look(); got.From != want.from || got.To != want.from+PermitPart || len(got.Permits) != want.permits || got.Permits[0].Number != want.from {
			t.Errorf("look %d: got %d permits from %d to %d, want %d from %d", i, len(got.Permits), got.From, got.To, want.permits, want.from)
		}
		exec("UPDATE " + rows + " SET ts = now() + interval '900 ms' WHERE shard = 10000") // a turn that lasts
		if got := look(); got.To != 0 || len(got.Permits) != 0 {
			t.Errorf("look %d in the turn of another: got %d permits", i, len(got.Permits))
		}
		exec("UPDATE " + rows + " SET ts = now() - interval '61 ms' WHERE shard = 10000")
	}
	tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{})
	noError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	noError(t, errOf(tx.Exec(ctx, "SELECT FROM "+rows+" FOR UPDATE")))
	if got := look(); got.To != 0 {
		t.Errorf("look at a turn that a transaction has locked: got %d permits", len(got.Permits))
	}
	all := &PermitLook{Key: decide.Key{Name: "l", Key: "k"}}
	if err := table.LookAtPermits(ctx, db.Pool, []*PermitLook{all}, nil); err != nil || len(all.Permits) != 2499 {
		t.Errorf("look at all: got %d permits, and %v, want 2499", len(all.Permits), err)
	}
}
