package pgstore_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func TestNoTypeShowsKeys(t *testing.T) {
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.MaxConns = 4 }))
	config := pgstore.Config{Schema: db.Schema, Escrow: 100 * time.Millisecond}
	store, err := pgstore.New(db.Pool, &config)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	limit := slow("l", 100)
	for range 3 {
		if _, err := store.Allow(t.Context(), limit.For(leak.Key)); err != nil {
			t.Fatal(err)
		}
	}
	leak.Check(t, ".", map[string]any{"Store": store, "Permits": store.Permits(), "Config": config, "Stats": store.Stats(), "Held": pgstore.Held{Limit: "l", Keys: 1, Tokens: 2}})
}
