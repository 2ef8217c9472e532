package migrate_test

import (
	"context"
	"crypto/rand"
	"errors"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
	restored  = []string{"rate_limits", "rate_limit_definitions", "rate_limit_history", "rate_limit_pending", "rate_limit_refusals", "rate_limit_parked"}
)

// dumped is a schema of a database, both of a role's own that is no superuser.
type dumped struct {
	schema, url string
	pool        *pgxpool.Pool
}

// newDumped makes a database, with the tables of all sets if they are wanted.
func newDumped(t *testing.T, server, role, name string, migrated bool) dumped {
	t.Helper()
	admin, err := pgx.Connect(t.Context(), server)
	must(t, err)
	t.Cleanup(func() { admin.Close(context.Background()) })
	u, err := url.Parse(server)
	must(t, err)
	must(t, errOf(admin.Exec(t.Context(), "CREATE DATABASE "+name+" OWNER "+role)))
	t.Cleanup(func() {
		must(t, errOf(admin.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)")))
	})
	u.User, u.Path = url.UserPassword(role, "secret"), "/"+name
	d := dumped{"limits", u.String(), nil}
	config, err := pgxpool.ParseConfig(d.url)
	must(t, err)
	config.ConnConfig.RuntimeParams["search_path"] = d.schema
	if d.pool, err = pgxpool.NewWithConfig(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.pool.Close)
	for _, set := range migrations.Sets() {
		if !migrated {
			break
		}
		must(t, errOf(migrate.Up(t.Context(), d.pool, &migrate.Config{Schema: d.schema, Set: set})))
	}
	return d
}

// withLogin is asProgram of a role that can connect.
func withLogin(t *testing.T) (db *pgtest.DB, role string) {
	t.Helper()
	db = pgtest.NewEmpty(t)
	_, role = asProgram(t, db)
	execute(t, db.Pool, "ALTER ROLE "+role+" LOGIN PASSWORD 'secret'")
	return db, role
}

// rows returns the rows of a table, one in a line.
func (d dumped) rows(t *testing.T, table string) (lines []string) {
	t.Helper()
	rows, err := d.pool.Query(t.Context(), "SELECT to_jsonb(t)::text FROM "+table+" AS t ORDER BY 1")
	if err == nil {
		lines, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	must(t, err)
	return lines
}

// catalogOf returns the catalog of a database, as a process has read it.
func (d dumped) catalogOf(t *testing.T) *catalog.Catalog {
	t.Helper()
	c, err := catalog.New(d.pool, nil)
	if err == nil {
		err = c.Refresh(t.Context())
	}
	must(t, err)
	return c
}

// inUse has rows in all tables: among them an override that a dump has before the definition that
// it overrides, since that was published again, and a history whose oldest change is gone.
func (d dumped) inUse(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	store, err := pgstore.New(d.pool, nil)
	must(t, err)
	c, err := catalog.New(d.pool, &catalog.Config{Store: store})
	must(t, err)
	again := perMinute
	again.Rate = 12
	for _, do := range []func() error{
		func() error { return c.Publish(ctx, perMinute) },
		func() error { return c.PublishInFlight(ctx, exports) },
		func() error {
			return errOf(c.Set(ctx, perMinute.Name, "ann", catalog.Override{Rate: 50, Note: "moving house"}))
		}, // which is under way
		func() error { return c.Publish(ctx, again) },
		func() error { return errOf(store.Allow(ctx, c.ForN(perMinute, "ann", 7))) },
		func() error { return errOf(store.Permits().Acquire(ctx, exports.For("bob"))) },
		func() error {
			_, err := d.pool.Exec(ctx, "INSERT INTO rate_limit_refusals VALUES ('per_minute', 'eve', now(), 3, 0, now(), now());"+
				"INSERT INTO rate_limit_parked VALUES ('', 'exports', 'eve', 1, 7, 1)")
			return err
		},
		func() error { return errOf(d.pool.Exec(ctx, "DELETE FROM rate_limit_history WHERE version = 1")) },
	} {
		must(t, do())
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
	db, role := withLogin(t)
	source := newDumped(t, db.URL, role, role+"_source", true)
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
		"data_only_rows": {true, []string{
			"--format", "plain", "--data-only", "--rows-per-insert", "1000000", "--exclude-table", "*.rate_limits*_version",
		}, "psql"},
	} {
		t.Run(name, func(t *testing.T) {
			target := newDumped(t, db.URL, role, role+"_"+name, way.migrated)
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
	must(t, running.Refresh(ctx))
	if o, ok := running.Override(perMinute.Name, "ann"); !ok || o.Rate != 50 {
		t.Errorf("after the restore a process goes by %v, %v, want a rate of 50", o, ok)
	}
	editor := d.catalogOf(t)
	before, err := editor.History(ctx, "", 1)
	if err != nil || len(before) != 1 {
		t.Fatalf("got %v, %v, want a newest change", before, err)
	}
	for i, key := range []string{"bob", "eve", "ann"} {
		must(t, errOf(editor.Set(ctx, perMinute.Name, key, catalog.Override{Rate: float64(60 + i)})))
		must(t, running.Refresh(ctx))
		if o, _ := running.Override(perMinute.Name, key); o.Rate != float64(60+i) {
			t.Errorf("a process goes by %v for key %d, want a rate of %d", o, i, 60+i)
		}
	}
	after, err := editor.History(ctx, "", 3)
	if err != nil || len(after) != 3 || after[2].Version <= before[0].Version {
		t.Errorf("got %v, %v, want three changes after version %d", after, err, before[0].Version)
	}
}

// After a restore to an older point what was granted since can be granted again. A permit that was
// taken since is lost, one that was given back since is held until its lease ends, and fences grow.
func TestRestoreToAnOlderPoint(t *testing.T) {
	pgtest.Long(t)
	db, role := withLogin(t)
	ctx := t.Context()
	d := newDumped(t, db.URL, role, role+"_older", true)
	d.inUse(t)
	store, err := pgstore.New(d.pool, nil)
	must(t, err)
	acquire := func(key string) ratelimit.Permit {
		t.Helper()
		permit, err := store.Permits().Acquire(ctx, exports.For(key))
		if err != nil || !permit.OK {
			t.Fatalf("got %v, %v, want a permit", permit, err)
		}
		return permit
	}
	before := acquire("eve")
	file := filepath.Join(t.TempDir(), "limits.sql")
	run(t, "pg_dump", "--data-only", "--table", "*.rate_limit*", "--exclude-table", "*.rate_limits*_version", "--dbname", d.url, "--file", file)
	then := d.rows(t, "rate_limits")

	must(t, store.Permits().Release(ctx, before))
	since := acquire("eve")
	if result, err := store.Allow(ctx, perMinute.ForN("new", 10)); err != nil || !result.OK {
		t.Fatal(result, err)
	}
	running := d.catalogOf(t)
	must(t, errOf(running.Unset(ctx, perMinute.Name, "ann")))
	tables := "limits." + strings.Join(restored, ", limits.")
	run(t, "psql", "--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1", "--single-transaction", "--dbname", d.url, "--command", "TRUNCATE "+tables, "--file", file)

	if now := d.rows(t, "rate_limits"); !slices.Equal(now, then) {
		t.Errorf("got %s, want %s", now, then)
	}
	if result, err := store.Allow(ctx, perMinute.ForN("new", 10)); err != nil || !result.OK {
		t.Errorf("what was granted since: got %v, %v, want that it is granted again", result, err)
	}
	if _, err := store.Permits().Renew(ctx, since); !errors.Is(err, ratelimit.ErrLeaseLost) {
		t.Errorf("a permit that was taken since: got %v, want %v", err, ratelimit.ErrLeaseLost)
	}
	if held, err := store.Permits().Held(ctx, exports, "eve"); err != nil || len(held) != 1 || held[0].Fence != before.Fence {
		t.Errorf("got %v, %v, want that the permit which was given back is held", held, err)
	}
	must(t, store.Permits().Reset(ctx, exports, "eve"))
	if after := acquire("eve"); after.Fence <= since.Fence {
		t.Errorf("got the fence %d after %d", after.Fence, since.Fence)
	}
	wantEdits(t, d, running)
}

// After a switch to a logical replica limits are as they were, edits go on although the history's
// sequence stayed behind, and nothing is left to migrate.
func TestSwitchToALogicalReplica(t *testing.T) {
	pgtest.Long(t)
	ctx := t.Context()
	server, err := throwaway.StartWith(ctx, throwaway.Options{Settings: map[string]string{"wal_level": "logical"}})
	must(t, err)
	t.Cleanup(func() { server.Close() })
	admin, err := pgx.Connect(ctx, server.URL)
	must(t, err)
	t.Cleanup(func() { admin.Close(context.Background()) })
	var level string
	if err := admin.QueryRow(ctx, "SHOW wal_level").Scan(&level); err != nil || level != "logical" {
		t.Skipf("wal_level of DATABASE_URL is %q, %v", level, err)
	}
	role := "ratelimit_role_" + strings.ToLower(rand.Text())
	must(t, errOf(admin.Exec(ctx, "CREATE ROLE "+role+" SUPERUSER LOGIN PASSWORD 'secret'")))
	t.Cleanup(func() {
		must(t, errOf(admin.Exec(context.Background(), "DROP ROLE "+role)))
	})
	old, replica := newDumped(t, server.URL, role, role+"_old", true), newDumped(t, server.URL, role, role+"_replica", true)
	running := replica.catalogOf(t)
	old.inUse(t)
	execute(t, old.pool, "CREATE PUBLICATION limits FOR TABLE limits."+strings.Join(restored, ", limits."))
	execute(t, old.pool, "SELECT pg_create_logical_replication_slot('limits', 'pgoutput')") // one server would wait for itself
	execute(t, replica.pool, "CREATE SUBSCRIPTION limits CONNECTION '"+old.url+"' PUBLICATION limits WITH (create_slot = false)")
	same := func() bool {
		return !slices.ContainsFunc(restored, func(table string) bool { return !slices.Equal(old.rows(t, table), replica.rows(t, table)) })
	}
	for deadline := time.Now().Add(time.Minute); !same(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the replica did not catch up")
		}
	}
	execute(t, replica.pool, "DROP SUBSCRIPTION limits")
	wantEdits(t, replica, running)
	if up, err := migrate.Up(ctx, replica.pool, &migrate.Config{Schema: "limits"}); err != nil || len(up) != 0 {
		t.Errorf("got %v, %v, want nothing to migrate", up, err)
	}
}
