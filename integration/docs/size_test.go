package main

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// What a key in use takes in the database, index and free space included, is what
// docs/scaling.md says.
func TestBytesForEachKey(t *testing.T) {
	pgtest.Long(t)
	const (
		keys   = 5_000
		rounds = 3
		most   = 500
	)
	db := pgtest.New(t)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	limit := ratelimit.TokenBucket{Name: "requests", Rate: 10, Period: time.Hour}
	for range rounds {
		var wg sync.WaitGroup
		for worker := range 64 {
			wg.Go(func() {
				for i := worker; i < keys; i += 64 {
					if err := store.Take(t.Context(), limit.For(fmt.Sprintf("%036d", i))); err != nil { // as long as a UUID
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	var bytes int64
	must(t, db.Pool.QueryRow(t.Context(), "SELECT pg_total_relation_size($1)", db.Schema+".rate_limits").Scan(&bytes))
	t.Logf("%d bytes for each of %d keys", bytes/keys, keys)
	if bytes > most*keys {
		t.Errorf("got %d bytes for each key, want at most %d", bytes/keys, most)
	}
}
