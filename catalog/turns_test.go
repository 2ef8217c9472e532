package catalog_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Writers take turns before they have a row: a writer that waits has none that the writer whose
// turn it is could need, so no two wait for each other (40P01).
func TestWritersTakeTurnsBeforeRows(t *testing.T) {
	t.Parallel()
	named := func(name string) ratelimit.Limit {
		return ratelimit.TokenBucket{Name: name, Rate: 20, Period: time.Minute}
	}
	for name, write := range map[string]func(context.Context, *catalog.Catalog, *pgtest.DB) error{
		"publish": func(ctx context.Context, c *catalog.Catalog, _ *pgtest.DB) error { return c.Publish(ctx, named("b")) },
		"set": func(ctx context.Context, c *catalog.Catalog, _ *pgtest.DB) error {
			return errOf(c.Set(ctx, "b", "k", catalog.Override{Rate: 3}))
		},
		"unset": func(ctx context.Context, c *catalog.Catalog, _ *pgtest.DB) error {
			return errOf(c.Unset(ctx, "b", "k"))
		},
		"update": func(ctx context.Context, _ *catalog.Catalog, db *pgtest.DB) error {
			return errOf(db.Pool.Exec(ctx, inSchema(db, "UPDATE rate_limit_definitions SET note = 'changed' WHERE name = 'b'")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			ctx := t.Context()
			c, _ := newCatalog(t, db)
			must(t, c.Publish(ctx, api, ratelimit.TokenBucket{Name: "b", Rate: 10, Period: time.Minute}))
			edited(t)(c.Set(ctx, "b", "k", catalog.Override{Rate: 2}))
			wrote := make(chan error, 1)
			must(t, pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
				if _, err := c.SetTx(ctx, tx, "api", "k", catalog.Override{Rate: 2}); err != nil {
					return err
				}
				go func() { wrote <- write(ctx, c, db) }()
				for !pgtest.Blocks(t, db.Pool, tx) && len(wrote) == 0 {
					time.Sleep(time.Millisecond)
				}
				if err := c.PublishTx(ctx, tx, named("b")); err != nil {
					return err
				}
				return errOf(c.SetTx(ctx, tx, "b", "k", catalog.Override{Rate: 4}))
			}))
			must(t, <-wrote)
		})
	}
}
