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
	if _, err := store.Allow(t.Context(), limit.For(leak.Key)); err != nil {
		t.Fatal(err)
	}
	leak.Check(t, ".", map[string]any{"Store": store, "Permits": store.Permits(), "Config": memstore.Config{}})
}

func TestNoErrorShowsKeys(t *testing.T) {
	store := memstore.New(nil)
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Minute}
	tx, err := store.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := store.AllowTx(t.Context(), tx, limit.For(leak.Key)); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, locked := store.Allow(short, limit.For(leak.Key))
	_, noDatabase := tx.Exec(t.Context(), "SELECT $1", leak.Key)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	store.SetSilent(true)
	_, silent := store.Allow(t.Context(), limit.For(leak.Key))
	leak.Errors(t, ".", map[string]leak.Provoked{
		"ErrLocked": {Is: memstore.ErrLocked, Err: locked}, "ErrNoDatabase": {Is: memstore.ErrNoDatabase, Err: noDatabase},
		"ErrSilent": {Is: memstore.ErrSilent, Err: silent},
	})
}
