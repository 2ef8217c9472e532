package catalog_test

import (
	"context"
	"testing"

	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// No error names a key, and each that is exported is provoked with one.
func TestNoErrorShowsKeys(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := newDB(t)
	c, _ := newCatalog(t, db)
	notReady := c.Ready()
	_, unknown := c.Set(ctx, "unknown", leak.Key, catalog.Override{Rate: 5})
	must(t, c.Publish(ctx, api))
	preview, err := c.Preview(ctx, "api", leak.Key, &catalog.Override{Rate: 50})
	must(t, err)
	edited(t)(c.Set(ctx, "api", leak.Key, catalog.Override{Rate: 60}))
	changed := c.Apply(ctx, &preview)
	lost := commitsThatWait(t, db)(func(ctx context.Context) error {
		return errOf(c.Set(ctx, "api", leak.Key+" too", catalog.Override{Rate: 5}))
	})
	bare, _ := newCatalog(t, pgtest.New(t))
	_, notMigrated := bare.Set(ctx, "api", leak.Key, catalog.Override{Rate: 5})
	leak.Errors(t, ".", map[string]leak.Provoked{
		"ErrNotReady": {Is: catalog.ErrNotReady, Err: notReady}, "ErrNotMigrated": {Is: catalog.ErrNotMigrated, Err: notMigrated},
		"ErrUnknown": {Is: catalog.ErrUnknown, Err: unknown}, "UnknownError": {Err: unknown}, "ErrChanged": {Is: catalog.ErrChanged, Err: changed},
		"ErrOutcomeUnknown": {Is: catalog.ErrOutcomeUnknown, Err: lost},
	})
}
