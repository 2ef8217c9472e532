package catalog_test

import (
	"context"
	"fmt"
	"slices"
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

// One key's override, by which all rows are far from full, keeps that key's row, and rows of
// other keys go: by a store that the catalog tells, and by one that has met the override.
func TestPruneByAnOverrideOfItsKey(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	t.Run("memory", func(t *testing.T) {
		c, _ := newCatalog(t, nil)
		now := now
		store := memstore.New(func() time.Time { return now })
		pruneByAnOverride(t, c, store, store, store.Permits(), &now)
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		db := newDB(t)
		c, _ := newCatalog(t, db)
		now := now
		var stores [2]*pgstore.Store
		for i := range stores {
			var err error
			stores[i], err = pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Clock: func() time.Time { return now }})
			must(t, err)
		}
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
	if result, err := store.Allow(ctx, c.ForN(api, "large", 90_000)); err != nil || !result.OK {
		t.Fatalf("got %v, %v", result, err)
	}
	const keys = 1000
	for name, prune := range map[string]func() (int64, error){
		"by the catalog":     func() (int64, error) { return c.Prune(ctx, another, permits) },
		"by what it has met": func() (int64, error) { return store.Prune(ctx, api) },
	} {
		var requests []ratelimit.Request
		for i := range keys {
			requests = append(requests, c.For(api, fmt.Sprint(i)))
		}
		for some := range slices.Chunk(requests, ratelimit.MaxRequests) {
			if result, err := store.Allow(ctx, some...); err != nil || !result.OK {
				t.Fatalf("got %v, %v", result, err)
			}
		}
		*now = now.Add(10 * time.Minute) // full by api: 100 tokens
		if n, err := prune(); n != keys || err != nil {
			t.Errorf("%s: pruned %d, %v, want %d", name, n, err, keys)
		}
	}
	left, err := store.CheckEach(ctx, c.ForN(api, "large", 0))
	if err != nil || left[0].Value != 10_200 {
		t.Errorf("the key with the override: got %v, %v, want 10200 left", left, err)
	}
}

// Edits of one key by its override, and their previews, bind that key: a store that made them prunes
// the rows of all others.
func TestPruneByAStoreThatHasEditedAKey(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	clock := func() time.Time { return now }
	t.Run("memory", func(t *testing.T) {
		store := memstore.New(clock)
		c, _ := newCatalog(t, nil, func(c *catalog.Config) { c.Store, c.Clock = store, clock })
		pruneAfterEdits(t, c, store, &now)
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		db := newDB(t)
		store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Clock: clock})
		must(t, err)
		c, _ := newCatalog(t, db, func(c *catalog.Config) { c.Store, c.Clock = store, clock })
		pruneAfterEdits(t, c, store, &now)
	})
}

func pruneAfterEdits(t *testing.T, c *catalog.Catalog, store pruningStore, now *time.Time) {
	ctx := t.Context()
	must(t, c.Publish(ctx, api))
	edited(t)(c.Set(ctx, "api", "large", catalog.Override{Capacity: 100_000}))
	must(t, c.Refresh(ctx))
	large, other := c.For(api, "large"), c.For(api, "another")
	edits := []struct {
		name string
		do   func() error
	}{
		{"a preview", func() error {
			_, err := c.Preview(ctx, "api", "large", &catalog.Override{Capacity: 90_000})
			return err
		}},
		{"an edit of the override", func() error {
			_, err := c.Set(ctx, "api", "large", catalog.Override{Capacity: 80_000})
			return err
		}},
		{"a pause", func() error { _, err := store.Pause(ctx, large.Limit, "large", time.Second); return err }},
		{"a resume", func() error { return store.Resume(ctx, large.Limit, "large") }},
		{"a reset", func() error { return store.Reset(ctx, large.Limit, "large") }},
		{"a change", func() error { _, err := store.Change(ctx, api, large.Limit, "large"); return err }},
	}
	for _, edit := range edits {
		must(t, edit.do())
		if result, err := store.Allow(ctx, other); err != nil || !result.OK {
			t.Fatalf("got %v, %v", result, err)
		}
		*now = now.Add(10 * time.Minute) // full by api: 100 tokens
		if n, err := store.Prune(ctx, api); n != 1 || err != nil {
			t.Errorf("after %s: pruned %d, %v, want the row of the other key", edit.name, n, err)
		}
	}
}
