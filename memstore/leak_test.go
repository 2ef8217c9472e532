package memstore_test

import (
	"context"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/memstore"
)

func TestNoTypeShowsKeys(t *testing.T) {
	store := memstore.New(nil)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 1, Period: time.Minute}
	must(t, errOf(store.Allow(t.Context(), limit.For(leak.Key))))
	leak.Check(t, ".", map[string]any{"Store": store, "Permits": store.Permits(), "Config": memstore.Config{}})
}

func TestNoErrorShowsKeys(t *testing.T) {
	store := memstore.New(nil)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Minute}
	tx, err := store.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(t.Context())
	must(t, errOf(store.AllowTx(t.Context(), tx, limit.For(leak.Key))))
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, locked := store.Allow(short, limit.For(leak.Key))
	_, noDatabase := tx.Exec(t.Context(), "SELECT $1", leak.Key)
	must(t, tx.Rollback(t.Context()))
	store.SetSilent(true)
	_, silent := store.Allow(t.Context(), limit.For(leak.Key))
	leak.Errors(t, ".", map[string]leak.Provoked{
		"ErrLocked": {Is: memstore.ErrLocked, Err: locked}, "ErrNoDatabase": {Is: memstore.ErrNoDatabase, Err: noDatabase},
		"ErrSilent": {Is: memstore.ErrSilent, Err: silent},
	})
}
