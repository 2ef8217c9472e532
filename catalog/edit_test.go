package catalog_test

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// An edit changes the fields that it names, and keeps the rest. It says what was and what became.
func TestEditsKeepTheRest(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		ctx := t.Context()
		must(t, c.Publish(ctx, api))
		soon := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
		for _, key := range []string{"a", "", catalog.AllKeys} {
			var was *catalog.Override
			for _, step := range []struct {
				name   string
				edit   catalog.Override
				became catalog.Override
				lower  []string
			}{
				{
					"a new one is on",
					catalog.Override{Rate: 100, Capacity: 200, Note: "moving house"},
					catalog.Override{Rate: 100, Capacity: 200, Note: "moving house", Switch: catalog.On},
					nil,
				},
				{
					"until alone",
					catalog.Override{Until: soon},
					catalog.Override{Rate: 100, Capacity: 200, Until: soon, Note: "moving house", Switch: catalog.On},
					nil,
				},
				{
					"off alone",
					catalog.Override{Switch: catalog.Off},
					catalog.Override{Rate: 100, Capacity: 200, Until: soon, Note: "moving house", Switch: catalog.Off},
					nil,
				},
				{
					"a field while it is off",
					catalog.Override{MaxReserved: math.Inf(1), Rate: 1},
					catalog.Override{Rate: 1, Capacity: 200, MaxReserved: math.Inf(1), Until: soon, Note: "moving house", Switch: catalog.Off},
					nil,
				},
				{
					"on alone",
					catalog.Override{Switch: catalog.On},
					catalog.Override{Rate: 1, Capacity: 200, MaxReserved: math.Inf(1), Until: soon, Note: "moving house", Switch: catalog.On},
					[]string{"Rate"},
				},
				{
					"fields taken away",
					catalog.Override{Clear: catalog.FieldUntil | catalog.FieldNote | catalog.FieldCapacity | catalog.FieldRate, Rate: 7, Capacity: ratelimit.None},
					catalog.Override{Rate: 7, Capacity: ratelimit.None, MaxReserved: math.Inf(1), Switch: catalog.On},
					[]string{"Rate", "Capacity"},
				},
				{
					"all anew",
					catalog.Override{Clear: catalog.AllFields, Mode: ratelimit.ModeRefuse, Period: time.Second},
					catalog.Override{Mode: ratelimit.ModeRefuse, Period: time.Second, Switch: catalog.On},
					[]string{"Mode"},
				},
				{
					"the same again",
					catalog.Override{Period: time.Second},
					catalog.Override{Mode: ratelimit.ModeRefuse, Period: time.Second, Switch: catalog.On},
					[]string{"Mode"},
				},
			} {
				before, err := c.History(ctx, "", 0)
				must(t, err)
				seen, err := c.Preview(ctx, "api", key, &step.edit)
				must(t, err)
				made, err := c.Set(ctx, "api", key, step.edit)
				must(t, err)
				for _, e := range []catalog.Edit{seen, made} {
					if e.Name != "api" || e.Key != key || !same(e.Was, was) || !same(e.Became, &step.became) || !slices.Equal(e.Lower, step.lower) || e.Changes() == same(was, &step.became) {
						t.Errorf("%s: was %+v, became %+v, lower %q; want %+v, %+v, %q", step.name, e.Was, e.Became, e.Lower, was, &step.became, step.lower)
					}
				}
				other := another()
				must(t, other.Refresh(ctx))
				if got, ok := other.Override("api", key); !ok || got.Override != step.became || got.Key != key {
					t.Errorf("%s: got %+v", step.name, got)
				}
				after, err := c.History(ctx, "", 0)
				if want := len(before); err != nil || made.Changes() && len(after) != want+1 || !made.Changes() && len(after) != want {
					t.Errorf("%s: the history has %d changes more, %v", step.name, len(after)-want, err)
				}
				became := step.became
				was = &became
			}
			seen, err := c.Preview(ctx, "api", key, nil)
			must(t, err)
			gone, err := c.Unset(ctx, "api", key)
			if err != nil || !same(gone.Was, was) || gone.Became != nil || !same(seen.Was, was) || seen.Became != nil {
				t.Errorf("unset: got %+v and %+v, %v", seen, gone, err)
			}
			if _, ok := c.Override("api", key); ok {
				t.Error("it is there still")
			}
		}
	})
}

func same(a, b *catalog.Override) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// An edit that names nothing, leaves nothing, or does not fit its limit is refused, and so is Preview's.
func TestBadInput(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, _ func() *catalog.Catalog) {
		ctx := t.Context()
		quota := ratelimit.FixedWindow{Name: "quota", Rate: 1000, Every: ratelimit.Month, Zone: "Europe/Berlin"}
		must(t, c.Publish(ctx, api, signUp, strict, quota))
		must(t, c.PublishInFlight(ctx, calls))
		edited(t)(c.Set(ctx, "api", "a", catalog.Override{Rate: 5}))
		before, err := c.History(ctx, "", 0)
		must(t, err)
		for _, bad := range []struct {
			name, key, field string
			o                catalog.Override
		}{
			{"api", "a", "Override", catalog.Override{}},
			{"api", "a", "Override", catalog.Override{Clear: catalog.FieldRate}},
			{"api", "b", "Override", catalog.Override{Switch: catalog.Off}},
			{"api", "b", "Override", catalog.Override{Until: time.Now(), Note: "why"}},
			{"api", "a", "Switch", catalog.Override{Switch: 3}},
			{"api", "a", "Clear", catalog.Override{Rate: 5, Clear: catalog.AllFields + 1}},
			{"api", "a", "Rate", catalog.Override{Rate: -1}},
			{"api", "a", "Rate", catalog.Override{Rate: math.NaN()}},
			{"sign_up", "a", "Rate", catalog.Override{Rate: 0.5}},
			{"api", "a", "Period", catalog.Override{Period: 1}},
			{"quota", "a", "Period", catalog.Override{Period: time.Hour}},
			{"strict", "a", "Capacity", catalog.Override{Capacity: 10}},
			{"api", "a", "Slots", catalog.Override{Slots: 5}},
			{"strict", "a", "Slots", catalog.Override{Slots: 5000}},
			{"api", catalog.AllKeys, "MaxReserved", catalog.Override{MaxReserved: -2}},
			{"api", "a", "Note", catalog.Override{Note: "\xff"}},
			{"api", "a", "Note", catalog.Override{Rate: 5, Note: strings.Repeat("x", 2049)}},
			{"api", "a", "Until", catalog.Override{Until: time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)}},
			{"api", strings.Repeat("k", ratelimit.MaxKeyLength+1), "Key", catalog.Override{Rate: 1}},
			{"calls", "a", "Rate", catalog.Override{Rate: 5}},
			{"calls", "a", "Period", catalog.Override{Period: time.Hour}},
			{"calls", "a", "Capacity", catalog.Override{Capacity: 5}},
			{"calls", "a", "MaxReserved", catalog.Override{MaxReserved: 5}},
			{"calls", "a", "Slots", catalog.Override{Slots: 5}},
			{"calls", "a", "Limit", catalog.Override{AtOnce: ratelimit.MaxInFlight + 1}},
			{"calls", "a", "Lease", catalog.Override{Lease: time.Microsecond}},
			{"calls", "a", "Mode", catalog.Override{Mode: ratelimit.ModeShadow}},
			{"calls", catalog.AllKeys, "Mode", catalog.Override{Mode: 9}},
			{"api", catalog.AllKeys, "Mode", catalog.Override{Mode: 9}},
			{"api", "a", "AtOnce", catalog.Override{AtOnce: 5}},
			{"api", "a", "Lease", catalog.Override{Lease: time.Hour}},
		} {
			var field *ratelimit.FieldError
			if _, err := c.Preview(ctx, bad.name, bad.key, &bad.o); !errors.As(err, &field) || field.Field != bad.field {
				t.Errorf("preview of %+v of %s: got %v", bad.o, bad.name, err)
			}
			if err := errOf(c.Set(ctx, bad.name, bad.key, bad.o)); !errors.Is(err, ratelimit.ErrInvalid) || !errors.As(err, &field) || field.Field != bad.field || field.Limit != bad.name {
				t.Errorf("%+v of %s: got %v", bad.o, bad.name, err)
			}
		}
		_, set := c.Set(ctx, "nobody", "a", catalog.Override{Rate: 1})
		_, unset := c.Unset(ctx, "nobody", "a")
		for _, err := range []error{set, unset} {
			if !errors.Is(err, catalog.ErrUnknown) || !strings.Contains(err.Error(), "nobody") {
				t.Errorf("a limit that nobody has published: got %v", err)
			}
		}
		if err := (ratelimit.Request{Limit: api, Key: catalog.AllKeys, Count: 1}).Validate(); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("AllKeys is a key: %v", err)
		}
		for words, err := range map[string]error{
			"is defined twice": c.Publish(ctx, api, api),
			"Rate 0":           c.Publish(ctx, ratelimit.TokenBucket{Name: "l", Period: time.Second}, signUp),
			"none":             c.PublishInFlight(ctx, builds, ratelimit.InFlight{Name: "none"}),
			"Most":             errOf(c.History(ctx, "", -1)),
			"Age":              errOf(c.PruneHistory(ctx, -1)),
		} {
			if !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), words) {
				t.Errorf("%s: got %v", words, err)
			}
		}
		if after, err := c.History(ctx, "", 0); err != nil || len(after) != len(before) {
			t.Errorf("the history has grown from %d to %d, %v", len(before), len(after), err)
		}
	})
}

// What is left is rounded down, as the command and the console round it.
func TestLeftShowsNoTokenThatIsNotThere(t *testing.T) {
	left := catalog.Left{Before: 0.9999, Of: 1e6, After: 2.5, AfterOf: 50, Within: 10 * time.Second}
	if got, want := left.String(), "0.999 left of 1000000 → 2.5 left of 50 (within 10s)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Edits of different fields that are made at the same time are all kept.
func TestEditsAtOnce(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		ctx := t.Context()
		must(t, c.Publish(ctx, api))
		edits := []catalog.Override{{Rate: 50}, {Capacity: 60}, {MaxReserved: 70}, {Period: time.Hour}, {Note: "n"}, {Mode: ratelimit.ModeShadow}}
		var wait sync.WaitGroup
		for _, key := range []string{"a", catalog.AllKeys} {
			edited(t)(c.Set(ctx, "api", key, catalog.Override{Rate: 1}))
			for _, o := range edits {
				c := another()
				wait.Go(func() {
					if _, err := c.Set(ctx, "api", key, o); err != nil {
						t.Error(err)
					}
				})
			}
		}
		wait.Wait()
		must(t, c.Refresh(ctx))
		want := catalog.Override{Rate: 50, Capacity: 60, MaxReserved: 70, Period: time.Hour, Note: "n", Mode: ratelimit.ModeShadow, Switch: catalog.On}
		for _, key := range []string{"a", catalog.AllKeys} {
			if got, _ := c.Override("api", key); got.Override != want {
				t.Errorf("%q: got %+v, want %+v", key, got.Override, want)
			}
		}
	})
}

// Preview's Edit chooses by what would be there, and for all keys leaves those with fields of
// their own to them.
func TestPreviewResolves(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, _ func() *catalog.Catalog) {
		ctx := t.Context()
		must(t, c.Publish(ctx, api))
		must(t, c.PublishInFlight(ctx, calls))
		edited(t)(c.Set(ctx, "api", "own", catalog.Override{Capacity: 40}))
		edit, err := c.Preview(ctx, "api", catalog.AllKeys, &catalog.Override{Capacity: 5})
		must(t, err)
		for key, want := range map[string][2]float64{"a": {20, 5}, "own": {40, 40}} {
			before, after := edit.Resolve(api.For(key))
			if got := [2]float64{before.Limit.Definition().Capacity, after.Limit.Definition().Capacity}; got != want {
				t.Errorf("%q: got %v, want %v", key, got, want)
			}
		}
		edited(t)(c.Set(ctx, "calls", "a", catalog.Override{AtOnce: 3}))
		if edit, err = c.Preview(ctx, "calls", "a", nil); err != nil {
			t.Fatal(err)
		}
		if before, after := edit.InFlight(calls, "a"); before.Limit != 3 || after.Limit != 10 {
			t.Errorf("got %v and %v", before, after)
		}
		wantLimit(t, c, api, "a", api) // nothing was changed
	})
}

// Whoever edits by hand is told what was and what it becomes, and can still roll back.
func TestEditsByHandAreTold(t *testing.T) {
	t.Parallel()
	var told []string
	db := newDB(t, pgtest.WithConfig(func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { told = append(told, n.Message) }
	}))
	c, _ := newCatalog(t, db)
	must(t, c.Publish(t.Context(), api))
	for _, step := range []struct{ sql, want string }{
		{"INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('api', 'alice', 50)", `override of limit "api": was none, becomes {"rate": 50, "enabled": true}`},
		{"UPDATE rate_limit_definitions SET enabled = false WHERE key = 'alice'", `override of limit "api": was {"rate": 50, "enabled": true}, becomes {"rate": 50, "enabled": false}`},
		{"UPDATE rate_limit_definitions SET enabled = false WHERE key = 'alice'", ""},
		{"UPDATE rate_limit_definitions SET key = 'bob' WHERE key = 'alice'", `override of limit "api": was {"rate": 50, "enabled": false}, becomes {"rate": 50, "enabled": false} for a key of limit "api"`},
		{"UPDATE rate_limit_definitions SET key = NULL WHERE key = 'bob'", `override of limit "api": was {"rate": 50, "enabled": false}, becomes {"rate": 50, "enabled": false} for all keys of limit "api"`},
		{"DELETE FROM rate_limit_definitions WHERE kind IS NULL", `override of limit "api": was {"rate": 50, "enabled": false}, becomes none`},
		{"UPDATE rate_limit_definitions SET rate = 11 WHERE kind IS NOT NULL", ""},
	} {
		told = nil
		exec(t, db, step.sql)
		if got := strings.Join(told, "; "); got != step.want {
			t.Errorf("%s: told %q, want %q", step.sql, got, step.want)
		}
	}
}

// A statement that edits many overrides looks at the history once, and not once a row: it took 170 s
// for 100,000. Replayed, the history is the table, also where overrides take the keys of each other.
func TestManyEditsByHand(t *testing.T) {
	t.Parallel()
	var told []string
	db := newDB(t, pgtest.WithConfig(func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { told = append(told, n.Message) }
	}))
	c, _ := newCatalog(t, db)
	must(t, c.Publish(t.Context(), api))
	for _, step := range []struct {
		sql           string
		logged, tells int
	}{
		{"INSERT INTO rate_limit_definitions (name, key, rate) SELECT 'api', n, n FROM generate_series(1, 1000) AS n", 1000, 11},
		{"UPDATE rate_limit_definitions SET key = key::int - 1 WHERE key IS NOT NULL", 2000, 11},
		{"UPDATE rate_limit_definitions SET note = 'the same' WHERE note IS NULL AND key IS NOT NULL AND rate <= 10", 10, 10},
		{`INSERT INTO rate_limit_definitions (name, key, rate) SELECT 'api', n, 7 FROM generate_series(500, 1499) AS n
			ON CONFLICT (name, key) WHERE key IS NOT NULL DO UPDATE SET rate = excluded.rate`, 1000, 22},
		{"DELETE FROM rate_limit_definitions WHERE key::int % 2 = 0", 750, 11},
	} {
		told = nil
		var before, logged, scanned, scans, differ int
		must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			const looked = "(SELECT seq_scan + idx_scan FROM pg_stat_xact_user_tables WHERE relid = 'rate_limit_history'::regclass)"
			err := tx.QueryRow(t.Context(), inSchema(db, "SELECT max(version), "+looked+" FROM rate_limit_history")).Scan(&before, &scanned)
			if err != nil {
				return err
			}
			if _, err := tx.Exec(t.Context(), inSchema(db, step.sql)); err != nil {
				return err
			}
			return tx.QueryRow(t.Context(), inSchema(db, "SELECT count(*), "+looked+" FROM rate_limit_history WHERE version > $1"), before).Scan(&logged, &scans)
		}))
		must(t, db.Pool.QueryRow(t.Context(), inSchema(db, `SELECT count(*) FROM rate_limit_definitions AS d
			FULL JOIN (SELECT DISTINCT ON (name, key) name, key, became FROM rate_limit_history ORDER BY name, key, version DESC) AS h
			ON h.name = d.name AND coalesce(h.key, '') = coalesce(d.key, '')
			WHERE (h.became->>'rate')::float8 IS DISTINCT FROM d.rate OR h.became->>'note' IS DISTINCT FROM d.note`)).Scan(&differ))
		if logged != step.logged || differ != 0 {
			t.Errorf("%s: logged %d changes, want %d; %d overrides are not as the history says", step.sql, logged, step.logged, differ)
		}
		if scans -= scanned; scans > 10 || len(told) != step.tells {
			t.Errorf("%s: looked at the history %d times, told %d times, want %d", step.sql, scans, len(told), step.tells)
		}
	}
}

// counted counts the rows that statements return.
type counted struct{ rows atomic.Int64 }

func (*counted) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (c *counted) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if data.CommandTag.Select() {
		c.rows.Add(data.CommandTag.RowsAffected())
	}
}

// A change of one override of 100,000 reads that row, in PostgreSQL and over the network, and
// copies no more of the others than a part.
func TestOneChangeOfMany(t *testing.T) {
	pgtest.Long(t)
	var count counted
	db := newDB(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &count }))
	ctx := t.Context()
	c, _ := newCatalog(t, db, func(c *catalog.Config) { c.Timeout = time.Minute })
	must(t, c.Publish(ctx, api))
	exec(t, db, `ALTER TABLE rate_limit_definitions DISABLE TRIGGER USER`) // which take a minute
	exec(t, db, `INSERT INTO rate_limit_definitions (name, key, rate) SELECT 'api', 'key ' || i, i FROM generate_series(1, 100000) AS i`)
	exec(t, db, `ALTER TABLE rate_limit_definitions ENABLE TRIGGER USER`)
	exec(t, db, `ANALYZE rate_limit_definitions`)
	exec(t, db, `ANALYZE rate_limit_history`)
	reader, _ := newCatalog(t, db, func(c *catalog.Config) { c.Timeout = time.Minute })
	c = reader
	must(t, c.Refresh(ctx))
	edited(t)(c.Set(ctx, "api", "key 8", catalog.Override{Rate: 9})) // the statements are prepared
	exec(t, db, `UPDATE rate_limit_definitions SET rate = 77 WHERE name = 'api' AND key = 'key 7'`)
	before := count.rows.Load()
	var memory [2]runtime.MemStats
	runtime.ReadMemStats(&memory[0])
	must(t, c.Refresh(ctx))
	runtime.ReadMemStats(&memory[1])
	wantLimit(t, c, api, "key 7", ratelimit.TokenBucket{Name: "api", Rate: 77, Period: time.Minute, Capacity: 20})
	wantLimit(t, c, api, "key 99999", ratelimit.TokenBucket{Name: "api", Rate: 99999, Period: time.Minute, Capacity: 20})
	if rows := count.rows.Load() - before; rows != 2 { // the look for changes, and the override
		t.Errorf("read %d rows, want 2", rows)
	}
	if bytes := memory[1].TotalAlloc - memory[0].TotalAlloc; bytes > 400_000 { // all of them are 10 MB
		t.Errorf("allocated %d bytes", bytes)
	}
	if n := len(c.Overrides("api")); n != 100_000 {
		t.Errorf("got %d overrides", n)
	}
}
