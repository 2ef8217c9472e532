package catalog_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	calls  = ratelimit.InFlight{Name: "calls", Limit: 10, Lease: time.Minute}
	builds = ratelimit.InFlight{Name: "builds", Limit: 2}
)

func wantInFlight(t *testing.T, c *catalog.Catalog, key string, limit int, lease time.Duration) {
	t.Helper()
	if got, want := c.InFlight(calls, key), (ratelimit.InFlight{Name: "calls", Limit: limit, Lease: lease}); got != want {
		t.Errorf("%q: got %v, want %v", key, got, want)
	}
}

// A limit of how many at once is overridden as others are: for one key, for all, until an
// instant, and in a transaction.
func TestInFlight(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		ctx := t.Context()
		wantInFlight(t, c, "a", 10, time.Minute)
		must(t, c.PublishInFlight(ctx, calls, builds))
		must(t, c.Publish(ctx, api))
		must(t, another().PublishInFlight(ctx, builds, calls)) // changes nothing
		if got := c.InFlights(); len(got) != 2 || got[0].Name != "builds" || got[0].Lease != ratelimit.DefaultLease || got[1] != calls {
			t.Errorf("got %v", got)
		}
		if got := c.Definitions(); len(got) != 1 || got[0] != api.Definition() {
			t.Errorf("got %v, want the limits that are rates", got)
		}
		edited(t)(c.Set(ctx, "calls", "a", catalog.Override{AtOnce: 20, Note: "a large customer"}))
		edited(t)(c.Set(ctx, "calls", catalog.AllKeys, catalog.Override{AtOnce: 5, Lease: 2 * time.Minute}))
		edited(t)(c.Set(ctx, "calls", "b", catalog.Override{AtOnce: 30, Switch: catalog.Off}))
		edited(t)(c.Set(ctx, "calls", "c", catalog.Override{AtOnce: 30, Until: time.Now().Add(-time.Hour)}))
		for _, c := range []*catalog.Catalog{c, another()} {
			must(t, c.Refresh(ctx))
			wantInFlight(t, c, "a", 20, 2*time.Minute)
			wantInFlight(t, c, "b", 5, 2*time.Minute)
			wantInFlight(t, c, "c", 5, 2*time.Minute)
		}
		if removed, err := c.Unset(ctx, "calls", "a"); removed.Was == nil || err != nil {
			t.Errorf("got %v, %v", removed, err)
		}
		wantInFlight(t, c, "a", 5, 2*time.Minute)
		changes, err := c.History(ctx, "calls", 0)
		if err != nil || len(changes) != 6 || !strings.Contains(string(changes[5].Became), `"in flight"`) || !strings.Contains(string(changes[0].Was), "20") {
			t.Errorf("got %d changes, %v: %v", len(changes), err, changes)
		}
		var by pruned
		if n, err := c.Prune(ctx, &by, prunedPermits{&by}); n != 18 || err != nil || !slices.ContainsFunc(by, func(r ratelimit.Request) bool { return ratelimit.NameOf(r.Limit) == "builds" }) {
			t.Errorf("pruned %d, %v, by %v", n, err, by)
		}
		if removed, err := c.Forget(ctx, "calls"); removed != 4 || err != nil {
			t.Errorf("forgot %d rows, %v", removed, err)
		}
		wantInFlight(t, c, "b", 10, time.Minute)
	})
}

func TestInFlightRowsByHand(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	c, l := newCatalog(t, db)
	must(t, c.PublishInFlight(ctx, calls))
	must(t, c.Publish(ctx, api))
	exec(t, db, "INSERT INTO rate_limit_definitions (name, key, at_once, lease) VALUES ('calls', 'a', 20, '1 hour')")
	must(t, c.Refresh(ctx))
	wantInFlight(t, c, "a", 20, time.Hour)
	for _, bad := range []string{
		"(name, key, at_once) VALUES ('calls', 'b', 0)", "(name, key, at_once) VALUES ('calls', 'b', 10001)",
		"(name, key, lease) VALUES ('calls', 'b', '1 microsecond')", "(name, key, lease) VALUES ('calls', 'b', '1 month')",
		"(name, key, rate) VALUES ('calls', 'b', 5)", "(name, key, capacity) VALUES ('calls', 'b', 5)", "(name, key, permits) VALUES ('calls', 'b', 5)",
		"(name, mode) VALUES ('calls', 'refused')", "(name, kind, at_once, lease, mode) VALUES ('new', 'in flight', 5, '1 hour', 'refuse')",
		"(name, key, at_once) VALUES ('api', 'b', 5)", "(name, key, lease) VALUES ('api', 'b', '1 hour')",
		"(name, kind, at_once) VALUES ('new', 'in flight', 5)", "(name, kind, at_once, lease, rate) VALUES ('new', 'in flight', 5, '1 hour', 1)",
		"(name, kind, rate, period, max_reserved, shards, at_once) VALUES ('new', 'token bucket', 5, '1 hour', 0, 1, 1)",
	} {
		if _, err := db.Pool.Exec(ctx, inSchema(db, "INSERT INTO rate_limit_definitions "+bad)); err == nil {
			t.Errorf("accepted: %s", bad)
		}
	}

	// A program that has a rate under this name publishes last: that is told, and each goes by its own.
	must(t, c.Publish(ctx, ratelimit.TokenBucket{Name: "calls", Rate: 5, Period: time.Minute}))
	if !strings.Contains(l.String(), "another kind") || len(c.Ignored()) != 1 {
		t.Errorf("told %q, ignored %v", l, c.Ignored())
	}
	wantInFlight(t, c, "a", 20, time.Hour)
	wantInFlight(t, c, "b", 10, time.Minute)
}

// The view tells of each key what Permits does, by what holds for the key; and the view of
// rates leaves permits alone.
func TestViewOfPermits(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	c, _ := newCatalog(t, db)
	must(t, c.PublishInFlight(ctx, calls, builds))
	edited(t)(c.Set(ctx, "calls", "b", catalog.Override{AtOnce: 1, Lease: time.Hour}))
	store := newStore(t, db, pgstore.Config{})
	want := map[string]string{"a": "3 of 10, true, refuse", "b": "1 of 1, true, enforce"}
	for key, n := range map[string]int{"a": 4, "b": 2, "c": 1} {
		for i := range n {
			permit, err := store.Permits().Acquire(ctx, c.InFlight(calls, key).For(key))
			if must(t, err); permit.OK != (key != "b" || i == 0) {
				t.Errorf("%q: got %v", key, permit)
			}
			if i == 0 && key != "b" {
				must(t, store.Permits().Release(ctx, permit))
			}
		}
	}
	edited(t)(c.Set(ctx, "calls", catalog.AllKeys, catalog.Override{Mode: ratelimit.ModeRefuse}))
	edited(t)(c.Set(ctx, "calls", "b", catalog.Override{AtOnce: 1, Lease: time.Hour, Mode: ratelimit.ModeEnforce}))
	// A mode that is left from when the limit was of another kind.
	exec(t, db, "ALTER TABLE rate_limit_definitions DISABLE TRIGGER USER")
	exec(t, db, "UPDATE rate_limit_definitions SET mode = 'shadow' WHERE key = 'b'")
	rows, err := db.Pool.Query(ctx, inSchema(db, "SELECT name, key, at_once, held, not_before, until, overridden, mode FROM rate_limits_in_flight"))
	must(t, err)
	var (
		name, key, mode string
		atOnce, held    int
		first, last     time.Time
		overridden      bool
		got             = map[string]string{}
		_, errOfReader  = pgx.ForEachRow(rows, []any{&name, &key, &atOnce, &held, &first, &last, &overridden, &mode}, func() error {
			got[key] = fmt.Sprintf("%d of %d, %v, %s", held, atOnce, overridden, mode)
			permits, err := store.Permits().Held(ctx, calls, key)
			must(t, err)
			ends := make([]time.Time, len(permits))
			for i, s := range permits {
				ends[i] = s.Until
			}
			if name != "calls" || len(ends) != held || !slices.MinFunc(ends, time.Time.Compare).Equal(first) || !slices.MaxFunc(ends, time.Time.Compare).Equal(last) {
				t.Errorf("%q: the leases end at %v, by the view from %v to %v", key, ends, first, last)
			}
			return nil
		})
	)
	must(t, errOfReader)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if seen := viewAt(t, db, time.Now(), ""); len(seen) != 0 {
		t.Errorf("as rates they are %v", seen)
	}
}

// A mode is for all keys or for one, whose own goes before, as that of a rate is; and it holds
// for whoever acquires by the catalog.
func TestModesInFlight(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		ctx := t.Context()
		must(t, c.PublishInFlight(ctx, calls, builds.In(ratelimit.ModeRefuse)))
		if got := c.InFlights(); len(got) != 2 || got[0].Mode != 0 {
			t.Errorf("published %v, want no mode", got)
		}
		want := func(key string, mode ratelimit.Mode, until time.Time) {
			t.Helper()
			other := another()
			must(t, other.Refresh(ctx))
			if got := other.InFlight(calls, key); got.Mode != mode || !got.RefusedUntil.Equal(until) || got.Limit != calls.Limit {
				t.Errorf("%q: got %v until %v, want %v until %v", key, got, got.RefusedUntil, mode, until)
			}
			if got := other.InFlight(calls.In(ratelimit.ModeRefuse), key); mode == 0 && got.Mode != ratelimit.ModeRefuse {
				t.Errorf("%q: got %v of a limit that refuses in code", key, got)
			}
		}
		soon := time.Now().Add(time.Hour).Truncate(time.Microsecond).UTC()
		want("a", 0, time.Time{})
		edited(t)(c.Set(ctx, "calls", catalog.AllKeys, catalog.Override{Mode: ratelimit.ModeRefuse, Until: soon, Note: "the partner is down"}))
		edited(t)(c.Set(ctx, "calls", "b", catalog.Override{Mode: ratelimit.ModeEnforce}))
		edited(t)(c.Set(ctx, "calls", "d", catalog.Override{Mode: ratelimit.ModeEnforce, Switch: catalog.Off}))
		want("a", ratelimit.ModeRefuse, soon)
		want("b", ratelimit.ModeEnforce, time.Time{})
		want("c", ratelimit.ModeRefuse, soon)
		want("d", ratelimit.ModeRefuse, soon)
		store := memstore.New(nil)
		for key, ok := range map[string]bool{"a": false, "b": true} {
			if permit, err := store.Permits().AcquireWait(ctx, c.InFlight(calls, key).For(key)); err != nil || permit.OK != ok {
				t.Errorf("%q: got %v, %v", key, permit, err)
			}
		}
		must(t, errOf(c.Unset(ctx, "calls", catalog.AllKeys)))
		want("a", 0, time.Time{})
	})
}
