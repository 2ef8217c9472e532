package catalog_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// A mode is for all keys or for one, whose own goes before; it ends with its override; and it
// holds whatever else the override says.
func TestModes(t *testing.T) {
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		ctx := t.Context()
		must(t, c.Publish(ctx, api))
		want := func(key string, mode ratelimit.Mode, until time.Time) {
			t.Helper()
			other := another()
			must(t, other.Refresh(ctx))
			got := other.For(api, key)
			if got.Mode != mode || !got.RefusedUntil.Equal(until) {
				t.Errorf("%q: got %v until %v, want %v until %v", key, got.Mode, got.RefusedUntil, mode, until)
			}
			if asked := other.Resolve(api.For(key).In(ratelimit.ModeShadow)); mode == 0 && asked.Mode != ratelimit.ModeShadow {
				t.Errorf("%q: got %v of a request in shadow", key, asked.Mode)
			}
		}
		soon, late := time.Now().Add(time.Hour).Truncate(time.Microsecond).UTC(), time.Now().Add(2*time.Hour).Truncate(time.Microsecond).UTC()
		want("a", 0, time.Time{})
		edited(t)(c.Set(ctx, "api", catalog.AllKeys, catalog.Override{Mode: ratelimit.ModeRefuse, Until: soon, Note: "the partner is down"}))
		want("a", ratelimit.ModeRefuse, soon)
		edited(t)(c.Set(ctx, "api", "a", catalog.Override{Mode: ratelimit.ModeEnforce}))
		edited(t)(c.Set(ctx, "api", "b", catalog.Override{Rate: 7}))
		edited(t)(c.Set(ctx, "api", "c", catalog.Override{Mode: ratelimit.ModeShadow, Until: late}))
		edited(t)(c.Set(ctx, "api", "d", catalog.Override{Mode: ratelimit.ModeRefuse, Until: late}))
		edited(t)(c.Set(ctx, "api", "e", catalog.Override{Mode: ratelimit.ModeRefuse}))
		edited(t)(c.Set(ctx, "api", "f", catalog.Override{Mode: ratelimit.ModeShadow, Until: time.Now().Add(-time.Hour)}))
		edited(t)(c.Set(ctx, "api", "g", catalog.Override{Mode: ratelimit.ModeShadow, Switch: catalog.Off}))
		want("a", ratelimit.ModeEnforce, time.Time{})
		want("b", ratelimit.ModeRefuse, soon)
		want("c", ratelimit.ModeShadow, time.Time{})
		want("d", ratelimit.ModeRefuse, late)
		want("e", ratelimit.ModeRefuse, time.Time{})
		want("f", ratelimit.ModeRefuse, soon)
		want("g", ratelimit.ModeRefuse, soon)
		must(t, errOf(c.Unset(ctx, "api", catalog.AllKeys)))
		want("a", ratelimit.ModeEnforce, time.Time{})
		want("b", 0, time.Time{})
		want("f", 0, time.Time{})

		changes, err := c.History(ctx, "api", 1)
		if err != nil || len(changes) != 1 || changes[0].Became != nil {
			t.Fatalf("got %+v, %v", changes, err)
		}
		if was := string(changes[0].Was); !strings.Contains(was, `"mode"`) || !strings.Contains(was, `"refuse"`) {
			t.Errorf("the history has %s", was)
		}
	})
}

// The runner of a store that has the catalog goes by it, in definitions and modes.
func TestRunnerGoesByTheCatalog(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	c, _ := newCatalog(t, db)
	must(t, c.Publish(t.Context(), api))
	edited(t)(c.Set(t.Context(), "api", "alice", catalog.Override{Capacity: 2}))
	edited(t)(c.Set(t.Context(), "api", "bob", catalog.Override{Mode: ratelimit.ModeRefuse}))
	edited(t)(c.Set(t.Context(), "api", "carol", catalog.Override{Capacity: 1, Mode: ratelimit.ModeShadow}))
	store := newStore(t, db, pgstore.Config{Catalog: c})
	for key, want := range map[string]int{"alice": 2, "bob": 0, "carol": 3, "dora": 3} {
		for _, run := range []func(context.Context, []ratelimit.Request, func(pgx.Tx, ratelimit.Result) error) (ratelimit.Result, error){store.AllowFunc, store.ReserveFunc} {
			must(t, store.Reset(t.Context(), api, key))
			ran := 0
			for range 3 {
				_, err := run(t.Context(), []ratelimit.Request{api.For(key)}, func(_ pgx.Tx, result ratelimit.Result) error {
					if result.RetryAfter == 0 {
						ran++
					}
					return nil
				})
				if err != nil && !errors.Is(err, ratelimit.ErrRefused) {
					t.Fatal(err)
				}
			}
			if ran != want {
				t.Errorf("%s: %d of 3 ran at once, want %d", key, ran, want)
			}
		}
	}
}
