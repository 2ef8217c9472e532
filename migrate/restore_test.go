package migrate_test

import (
	"context"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	perMinute = ratelimit.TokenBucket{Name: "per_minute", Rate: 10, Period: time.Minute}
	exports   = ratelimit.InFlight{Name: "exports", Limit: 3, Lease: time.Hour}
	restored  = []string{"rate_limits", "rate_limit_definitions", "rate_limit_history", "rate_limit_refusals"}
)

// dumped is a schema of a database, both of a role's own that is no superuser.
type dumped struct {
	schema, url string
	pool        *pgxpool.Pool
}

// newDumped makes a database, with the tables of all sets if they are wanted.
func newDumped(t *testing.T, role, name string, migrated bool) dumped {
	t.Helper()
	admin, err := pgx.Connect(t.Context(), pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { admin.Close(context.Background()) })
	u, err := url.Parse(pgtest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Exec(t.Context(), "CREATE DATABASE "+name+" OWNER "+role); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := admin.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Error(err)
		}
	})
	u.User, u.Path = url.UserPassword(role, "secret"), "/"+name
	d := dumped{"limits", u.String(), nil}
	config, err := pgxpool.ParseConfig(d.url)
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["search_path"] = d.schema
	if d.pool, err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.pool.Close)
	for _, set := range []migrations.Set{"", migrations.Catalog, migrations.Functions, migrations.Refusals} {
		if !migrated {
			break
		}
		if _, err := migrate.Up(t.Context(), d.pool, &migrate.Config{Schema: d.schema, Set: set}); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// rows returns the rows of a table, one in a line.
func (d dumped) rows(t *testing.T, table string) (lines []string) {
	t.Helper()
	rows, err := d.pool.Query(t.Context(), "SELECT to_jsonb(t)::text FROM "+table+" AS t ORDER BY 1")
	if err == nil {
		lines, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// catalogOf returns the catalog of a database, as a process has read it.
func (d dumped) catalogOf(t *testing.T) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New(d.pool, nil)
	if err == nil {
		err = c.Refresh(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// inUse has rows in all tables: among them an override that a dump has before the definition that
// it overrides, since that was published again, and a history whose oldest change is gone.
func (d dumped) inUse(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	store, err := pgstore.New(d.pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := d.catalogOf(t)
	again := perMinute
	again.Rate = 12
	for _, do := range []func() error{
		func() error { return c.Publish(ctx, perMinute) },
		func() error { return c.PublishInFlight(ctx, exports) },
		func() error {
			_, err := c.Set(ctx, perMinute.Name, "ann", catalog.Override{Rate: 50, Note: "moving house"})
			return err
		},
		func() error { return c.Publish(ctx, again) },
		func() error { _, err := store.Allow(ctx, c.ForN(perMinute, "ann", 7)); return err },
		func() error { _, err := store.Permits().Acquire(ctx, exports.For("bob")); return err },
		func() error {
			_, err := d.pool.Exec(ctx, "INSERT INTO rate_limit_refusals VALUES ('per_minute', 'eve', now(), 3, 0, now(), now())")
			return err
		},
		func() error {
			_, err := d.pool.Exec(ctx, "DELETE FROM rate_limit_history WHERE version = 1")
			return err
		},
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
}

// run runs a program of PostgreSQL's.
func run(t *testing.T, name string, args ...string) {
	t.Helper()
	path, err := exec.LookPath(name)
	if dir := os.Getenv(throwaway.BinVariable); dir != "" {
		path, err = exec.LookPath(filepath.Join(dir, name))
	}
	if err != nil {
		t.Fatalf("%v: install the client programs of PostgreSQL", err)
	}
	if out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
}

// What pg_dump has written can be restored in each way, by a role that is no superuser. Edits go on
// from there, and a process that has read the catalog before learns of what has come.
func TestDumpAndRestore(t *testing.T) {
	pgtest.Long(t)
	db := pgtest.NewEmpty(t)
	_, role := asProgram(t, db)
	execute(t, db.Pool, "ALTER ROLE "+role+" LOGIN PASSWORD 'secret'")
	source := newDumped(t, role, role+"_source", true)
	source.inUse(t)
	for name, way := range map[string]struct {
		migrated bool
		dump     []string
		restore  string
	}{
		"plain":      {false, []string{"--format", "plain"}, "psql"},
		"custom":     {false, []string{"--format", "custom"}, "pg_restore"},
		"one_schema": {false, []string{"--format", "plain", "--schema", "limits"}, "psql"},
		"data_only":  {true, []string{"--format", "plain", "--data-only", "--exclude-table", "*.rate_limits*_version"}, "psql"},
		"data_only_custom": {true, []string{
			"--format", "custom", "--data-only", "--exclude-table", "*.rate_limits*_version",
		}, "pg_restore"},
	} {
		t.Run(name, func(t *testing.T) {
			target := newDumped(t, role, role+"_"+name, way.migrated)
			var running *catalog.Catalog
			if way.migrated {
				running = target.catalogOf(t)
			}
			file := filepath.Join(t.TempDir(), "dump")
			run(t, "pg_dump", append(way.dump, "--dbname", source.url, "--file", file)...)
			if way.restore == "psql" {
				run(t, "psql", "--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--single-transaction", "--dbname", target.url, "--file", file)
			} else {
				run(t, "pg_restore", "--exit-on-error", "--single-transaction", "--dbname", target.url, file)
			}
			wantRestored(t, source, target)
			if running == nil {
				running = target.catalogOf(t)
			}
			wantEdits(t, target, running)
		})
	}
}

// wantRestored wants each row of source in target.
func wantRestored(t *testing.T, source, target dumped) {
	t.Helper()
	for _, table := range restored {
		got := strings.Join(target.rows(t, table), "\n")
		for _, row := range source.rows(t, table) {
			if !strings.Contains(got, row) {
				t.Errorf("%s lacks %s, and has\n%s", table, row, got)
			}
		}
	}
}

// wantEdits wants a running process to go by what was restored, and edits to be noted and heard.
func wantEdits(t *testing.T, d dumped, running *catalog.Catalog) {
	t.Helper()
	ctx := t.Context()
	if err := running.Refresh(ctx); err != nil {
		t.Fatal(err)
	}
	if o, ok := running.Override(perMinute.Name, "ann"); !ok || o.Rate != 50 {
		t.Errorf("after the restore a process goes by %v, %v, want a rate of 50", o, ok)
	}
	editor := d.catalogOf(t)
	before, err := editor.History(ctx, "", 1)
	if err != nil || len(before) != 1 {
		t.Fatalf("got %v, %v, want a newest change", before, err)
	}
	for i, key := range []string{"bob", "eve", "ann"} {
		if _, err := editor.Set(ctx, perMinute.Name, key, catalog.Override{Rate: float64(60 + i)}); err != nil {
			t.Fatal(err)
		}
		if err := running.Refresh(ctx); err != nil {
			t.Fatal(err)
		}
		if o, _ := running.Override(perMinute.Name, key); o.Rate != float64(60+i) {
			t.Errorf("a process goes by %v for key %d, want a rate of %d", o, i, 60+i)
		}
	}
	after, err := editor.History(ctx, "", 3)
	if err != nil || len(after) != 3 || after[2].Version <= before[0].Version {
		t.Errorf("got %v, %v, want three changes after version %d", after, err, before[0].Version)
	}
}
