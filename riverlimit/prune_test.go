package riverlimit_test

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// A catalog's Prune deletes gates that are full by the largest job, and by their key's override.
func TestPruneGates(t *testing.T) {
	ctx, now := t.Context(), time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	limit := ratelimit.TokenBucket{Name: "calls", Rate: 60, Period: time.Minute, Capacity: 5}
	limits := newCatalog(t)
	must(t, limits.Publish(ctx, limit))
	must(t, errOf(limits.Set(ctx, "calls", "large", catalog.Override{Capacity: 1000})))
	bench := newBench(t)
	m := middleware(t, bench.store, riverlimit.MiddlewareConfig{Limits: each(limit), HardStart: true, Catalog: limits})
	store := memstore.New(func() time.Time { return now })
	for key, count := range map[string]float64{"large": 500, "a": 5} {
		gate := m.Rows(limit.ForN(key, count))[1]
		if gate.Overridden != (key == "large") {
			t.Errorf("the gate of %q: overridden is %t", key, gate.Overridden)
		}
		if result, err := store.Reserve(ctx, gate); err != nil || !result.OK {
			t.Fatalf("got %v, %v", result, err)
		}
	}
	for _, test := range []struct {
		after time.Duration
		most  float64
		want  int64
	}{{70 * time.Second, 50, 0}, {45 * time.Second, 50, 1}, {0, 50, 0}, {time.Hour, 50, 1}} {
		now = now.Add(test.after)
		if n, err := limits.Prune(ctx, m.Pruner(store, test.most), store.Permits()); n != test.want || err != nil {
			t.Errorf("after %v more, most %v: pruned %d, %v, want %d", test.after, test.most, n, err, test.want)
		}
	}
	if _, err := limits.Prune(ctx, m.Pruner(store, -1), store.Permits()); err == nil {
		t.Error("a count of -1 is no error")
	}
}
