package catalog_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
)

const many = 10_000

// withMany is a catalog with 10,000 overrides in memory, each tenth of which ends.
func withMany(tb testing.TB) (c *catalog.Catalog, keys []string) {
	tb.Helper()
	c, err := catalog.NewInMemory(nil)
	must(tb, err)
	// One by one, each Set would read all.
	must(tb, c.Publish(tb.Context(), api, signUp))
	for i := range many {
		o := catalog.Override{Rate: float64(i + 1)}
		if i%10 == 0 {
			o.Until = time.Now().Add(time.Hour)
		}
		keys = append(keys, fmt.Sprintf("customer %d", i))
		edited(tb)(c.SetTx(tb.Context(), nil, "api", keys[i], o))
	}
	must(tb, c.Refresh(tb.Context()))
	return c, keys
}

var request ratelimit.Request

// For allocates nothing beyond what a limit's own For does.
func TestForAllocatesNothing(t *testing.T) {
	c, keys := withMany(t)
	limit := ratelimit.Limit(api)
	for _, key := range keys {
		request = c.For(limit, key)
	}
	n := 0
	if got := testing.AllocsPerRun(1000, func() { n++; request = c.For(limit, keys[n]) }); got != 0 {
		t.Errorf("got %g allocations", got)
	}
	if got := testing.AllocsPerRun(1000, func() { request = c.For(limit, "none") }); got != 0 {
		t.Errorf("without an override: got %g allocations", got)
	}
	today := testing.AllocsPerRun(1000, func() { request = api.For("none") })
	if got := testing.AllocsPerRun(1000, func() { request = c.For(api, "none") }); got > today {
		t.Errorf("of a limit's type: got %g allocations, and its own For %g", got, today)
	}
}
