package catalog_test

import (
	"context"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// pruningStore is a store that can be asked what is left.
type pruningStore interface {
	catalog.Pruner
	ratelimit.Store
	Prune(ctx context.Context, limits ...ratelimit.Limit) (deleted int64, err error)
	CheckEach(ctx context.Context, requests ...ratelimit.Request) ([]ratelimit.Status, error)
}

// A key's override, by which all rows are far from full, binds that key: a store that has met it by takes, edits
// and previews, and one that the catalog tells of it, prune the rows of all others.
func TestPruneByAnOverrideOfItsKey(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	t.Run("memory", func(t *testing.T) {
		now := now
		clock := func() time.Time { return now }
		store := memstore.New(clock)
		c, _ := newCatalog(t, nil, func(c *catalog.Config) { c.Store, c.Clock = store, clock })
		pruneByAnOverride(t, c, store, store, store.Permits(), &now)
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		now := now
		clock := func() time.Time { return now }
		db := newDB(t)
		var stores [2]*pgstore.Store
		for i := range stores {
			stores[i] = newStore(t, db, pgstore.Config{Clock: clock})
		}
		c, _ := newCatalog(t, db, func(c *catalog.Config) { c.Store, c.Clock = stores[0], clock })
		pruneByAnOverride(t, c, stores[0], stores[1], stores[1].Permits(), &now)
	})
}

func pruneByAnOverride(t *testing.T, c *catalog.Catalog, store, another pruningStore, permits catalog.PermitPruner, now *time.Time) {
	ctx := t.Context()
	must(t, c.Publish(ctx, api))
	edited(t)(c.Set(ctx, "api", "large", catalog.Override{Capacity: 100_000}))
	edited(t)(c.Set(ctx, "api", "only a mode", catalog.Override{Mode: ratelimit.ModeEnforce}))
	must(t, c.Refresh(ctx))
	for key, want := range map[string]bool{"large": true, "only a mode": false, "another": false} {
		if r := c.For(api, key); r.Overridden != want {
			t.Errorf("%q: overridden is %t, want %t", key, r.Overridden, want)
		}
	}
	large := c.ForN(api, "large", 9_000)
	byStore := func() (int64, error) { return store.Prune(ctx, api) }
	for _, test := range []struct {
		name  string
		do    func() error
		prune func() (int64, error)
	}{
		{"a take, by the catalog", func() error { _, err := store.Allow(ctx, large); return err }, func() (int64, error) { return c.Prune(ctx, another, permits) }},
		{"a take", func() error { _, err := store.Allow(ctx, large); return err }, byStore},
		{"a preview", func() error { return errOf(c.Preview(ctx, "api", "large", &catalog.Override{Capacity: 90_000})) }, byStore},
		{"an edit of the override", func() error { return errOf(c.Set(ctx, "api", "large", catalog.Override{Capacity: 80_000})) }, byStore},
		{"a pause", func() error { _, err := store.Pause(ctx, large.Limit, "large", time.Second); return err }, byStore},
		{"a resume", func() error { return store.Resume(ctx, large.Limit, "large") }, byStore},
		{"a reset", func() error { return store.Reset(ctx, large.Limit, "large") }, byStore},
		{"a change", func() error { _, err := store.Change(ctx, api, large.Limit, "large"); return err }, byStore},
	} {
		must(t, test.do())
		if result, err := store.Allow(ctx, c.For(api, "another")); err != nil || !result.OK {
			t.Fatalf("got %v, %v", result, err)
		}
		*now = now.Add(10 * time.Minute) // full by api: 100 tokens
		if n, err := test.prune(); n != 1 || err != nil {
			t.Errorf("after %s: pruned %d, %v, want the row of the other key", test.name, n, err)
		}
	}
}
