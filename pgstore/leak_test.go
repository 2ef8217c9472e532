package pgstore_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func TestNoTypeShowsKeys(t *testing.T) {
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.MaxConns = 4 }))
	config := pgstore.Config{Schema: db.Schema, Escrow: 100 * time.Millisecond}
	store, err := pgstore.New(db.Pool, &config)
	must(t, err)
	defer store.Close()
	limit := slow("l", 100)
	for range 3 {
		must(t, errOf(store.Allow(t.Context(), limit.For(leak.Key))))
	}
	take, err := store.QueueTake(new(pgx.Batch), limit.For(leak.Key))
	must(t, err)
	leak.Check(t, ".", map[string]any{
		"Store": store, "Permits": store.Permits(), "Config": config, "Stats": store.Stats(), "Held": pgstore.Held{Limit: "l", Keys: 1, Tokens: 2},
		"QueuedTake": take, "Versions": pgstore.Versions{Dead: 1},
	})
}

// No error names a key, and each that is exported is provoked with one.
func TestNoErrorShowsKeys(t *testing.T) {
	pgtest.Long(t)
	r := newRelay(t)
	db := pgtest.New(t, r.through())
	t.Cleanup(r.Close)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Timeout: 200 * time.Millisecond, RetryBudget: 200 * time.Millisecond})
	must(t, err)
	request := slow("l", 100).For(leak.Key)
	allow := func(pool *pgxpool.Pool, schema string, closed bool) error {
		t.Helper()
		s, err := pgstore.New(pool, &pgstore.Config{Schema: schema})
		must(t, err)
		if closed {
			s.Close()
		}
		_, err = s.Allow(t.Context(), request)
		return err
	}
	tx, err := db.Pool.Begin(t.Context())
	must(t, err)
	must(t, errOf(store.AllowTx(t.Context(), tx, request)))
	_, locked := store.Allow(t.Context(), request)
	must(t, tx.Rollback(t.Context()))
	provoked := map[string]leak.Provoked{
		"ErrNoPool":      {Is: pgstore.ErrNoPool, Err: allow(nil, db.Schema, false)},
		"ErrClosed":      {Is: pgstore.ErrClosed, Err: allow(db.Pool, db.Schema, true)},
		"ErrNotMigrated": {Is: pgstore.ErrNotMigrated, Err: allow(db.Pool, "pg_catalog", false)},
		"ErrLocked":      {Is: pgstore.ErrLocked, Err: locked},
	}
	_, unknown := store.AllowFunc(t.Context(), []ratelimit.Request{request}, func(pgx.Tx, ratelimit.Result) error {
		r.lose()
		return nil
	})
	provoked["ErrOutcomeUnknown"] = leak.Provoked{Is: pgstore.ErrOutcomeUnknown, Err: unknown}
	leak.Errors(t, ".", provoked)
}
