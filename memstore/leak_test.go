package memstore_test

import (
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
