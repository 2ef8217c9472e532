package migrate_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
)

var (
	pending = all(0)
	applied = all(4)
)

// all is the migrations when the first n are applied.
func all(n int) []migrate.Migration {
	return []migrate.Migration{
		{Version: 1, Name: "00001_rate_limits.sql", Applied: n > 0},
		{Version: 2, Name: "00002_pauses.sql", Applied: n > 1},
		{Version: 3, Name: "00003_sliding_windows.sql", Applied: n > 2},
		{Version: 4, Name: "00004_escrow.sql", Applied: n > 3},
	}
}

func TestTimeline(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema}

	wantDown := func(want *migrate.Migration) {
		t.Helper()
		got, err := migrate.Down(t.Context(), db.Pool, cfg)
		if err != nil || (got == nil) != (want == nil) || (got != nil && *got != *want) {
			t.Fatalf("Down: got %v, %v, want %v", got, err, want)
		}
	}
	wantStatus(t, db.Pool, cfg, pending)
	wantDown(nil)
	wantTables(t, db.Pool, db.Schema) // neither of them left a version table
	wantUp(t, db.Pool, cfg, applied)
	wantTables(t, db.Pool, db.Schema, "rate_limits", migrations.VersionTable)
	wantStatus(t, db.Pool, cfg, applied)
	wantUp(t, db.Pool, cfg, nil)
	wantDown(&pending[3])
	wantDown(&pending[2])
	wantDown(&pending[1])
	wantStatus(t, db.Pool, cfg, all(1))
	wantUp(t, db.Pool, cfg, applied[1:])
	wantDown(&pending[3])
	wantDown(&pending[2])
	wantDown(&pending[1])
	wantDown(&pending[0])
	wantTables(t, db.Pool, db.Schema, migrations.VersionTable)
	wantStatus(t, db.Pool, cfg, pending)
	wantDown(nil)
	wantUp(t, db.Pool, cfg, applied)
	wantTables(t, db.Pool, db.Schema, "rate_limits", migrations.VersionTable)
}

func TestDefaultSchema(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	pool := poolWith(t, db.Pool, "SET search_path TO no_such_schema, "+quote(db.Schema))

	wantUp(t, pool, nil, applied)
	wantStatus(t, pool, nil, applied)
	wantTables(t, pool, db.Schema, "rate_limits", migrations.VersionTable)
}

func TestMissingSchemaWithOddName(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: `My-"Schema" of ` + db.Schema}
	dropSchema(t, db.Pool, cfg.Schema)

	wantStatus(t, db.Pool, cfg, pending)
	if got, err := migrate.Down(ctx, db.Pool, cfg); err != nil || got != nil {
		t.Fatalf("Down: got %v, %v, want nil", got, err)
	}
	wantUp(t, db.Pool, cfg, applied)
	wantTables(t, db.Pool, cfg.Schema, "rate_limits", migrations.VersionTable)
}

// Several processes start at once, on a database that has not even the schema.
func TestAllAtOnce(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema + "_at_once"}
	dropSchema(t, db.Pool, cfg.Schema)

	const callers = 8
	var (
		wg    sync.WaitGroup
		did   [callers][]migrate.Migration
		fails [callers]error
	)
	for i := range callers {
		wg.Go(func() { did[i], fails[i] = migrate.Up(ctx, db.Pool, cfg) })
	}
	wg.Wait()

	must(t, errors.Join(fails[:]...))
	if got := slices.Concat(did[:]...); !slices.Equal(got, applied) {
		t.Errorf("all of them together applied %v, want %v", got, applied)
	}
}

func TestPoolIsLeftAlone(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.NewEmpty(t)
	cfg := db.Pool.Config()
	cfg.MaxConns = 1
	pool := newPool(t, cfg)
	conn, err := pool.Acquire(ctx) // the only one: needing it would wait for ever
	must(t, err)
	defer conn.Release()
	before := searchPath(t, conn)

	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	must(t, errOf(migrate.Up(ctx, pool, &migrate.Config{Schema: db.Schema})))
	if got := searchPath(t, conn); got != before {
		t.Errorf("search_path: got %q, want %q", got, before)
	}
}

func TestHostMigrationsAreNotDisturbed(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.NewEmpty(t)
	pool := poolWith(t, db.Pool, "SET search_path TO "+quote(db.Schema))
	host := newGoose(t, pool, fstest.MapFS{
		"00001_host.sql": {Data: []byte("-- +goose Up\nCREATE TABLE host ();\n-- +goose Down\nDROP TABLE host;\n")},
	})

	must(t, errOf(host.Up(ctx)))
	wantUp(t, pool, nil, applied)
	if pending, err := host.HasPending(ctx); err != nil || pending {
		t.Errorf("host has pending migrations: got %t, %v, want false", pending, err)
	}
	must(t, errOf(host.Down(ctx)))
	wantStatus(t, pool, nil, applied)
	wantTables(t, pool, db.Schema, goose.DefaultTablename, "rate_limits", migrations.VersionTable)
}

func TestGlobalGoMigrationsDoNotLeakIn(t *testing.T) {
	db := pgtest.NewEmpty(t)
	t.Cleanup(goose.ResetGlobalMigrations)
	fail := func(context.Context, *sql.Tx) error { return errors.New("the host's migration was run as ours") }
	goose.AddNamedMigrationContext("00001_host.go", fail, fail)
	goose.AddNamedMigrationContext("00002_host.go", fail, fail)

	wantUp(t, db.Pool, &migrate.Config{Schema: db.Schema}, applied)
}

// Whichever way the schema was put in place, it is the same schema.
func TestAllWaysLeadToTheSameTable(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	ways := []struct {
		name string
		up   func(pool *pgxpool.Pool) error
	}{
		{"migrate.Up", func(pool *pgxpool.Pool) error {
			return errOf(migrate.Up(ctx, pool, nil))
		}},
		{"the user's own goose", func(pool *pgxpool.Pool) error {
			return errOf(newGoose(t, pool, migrations.FS, goose.WithTableName(migrations.VersionTable)).Up(ctx))
		}},
		{"plain SQL", func(pool *pgxpool.Pool) error {
			return errOf(pool.Exec(ctx, migrations.UpSQL()))
		}},
	}
	var want string
	for _, way := range ways {
		db := pgtest.NewEmpty(t)
		pool := poolWith(t, db.Pool, "SET search_path TO "+quote(db.Schema))
		if err := way.up(pool); err != nil {
			t.Fatalf("%s: %v", way.name, err)
		}
		got := describe(t, pool)
		if want == "" {
			want = got
		}
		if got != want {
			t.Errorf("%s: got\n%s\nwant\n%s", way.name, got, want)
		}
	}
	if !strings.Contains(want, "fillfactor=50") || !strings.Contains(want, "PRIMARY KEY (name, key, shard)") {
		t.Errorf("an incomplete table:\n%s", want)
	}
}

// The user's own goose in a schema: the connections' search_path says where the
// tables go.
func TestOwnGooseInASchema(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, test := range []struct {
		name string
		open func(url, schema string) (*sql.DB, error)
	}{
		{"search_path in the configuration", func(url, schema string) (*sql.DB, error) {
			config, err := pgx.ParseConfig(url)
			if err != nil {
				return nil, err
			}
			config.RuntimeParams["search_path"] = schema
			return stdlib.OpenDB(*config), nil
		}},
		{"search_path in the URL", func(url, schema string) (*sql.DB, error) {
			and := "?"
			if strings.Contains(url, "?") {
				and = "&"
			}
			return sql.Open("pgx", url+and+"search_path="+schema)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			pg := pgtest.NewEmpty(t)
			db, err := test.open(pg.URL, pg.Schema)
			must(t, err)
			defer db.Close()
			provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS,
				goose.WithTableName(migrations.VersionTable),
				goose.WithDisableGlobalRegistry(true))
			must(t, err)
			must(t, errOf(provider.Up(ctx)))
			wantTables(t, pg.Pool, pg.Schema, "rate_limits", migrations.VersionTable)
			wantUp(t, pg.Pool, &migrate.Config{Schema: pg.Schema}, nil)
		})
	}
}

// A version table's name with a schema in it moves that table and no other. Up and
// Status then find a schema that is up to date, by its version table, and lacks
// the table.
func TestSchemaInTheVersionTablesName(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	meant, other := pgtest.NewEmpty(t), pgtest.NewEmpty(t)
	pool := poolWith(t, other.Pool, "SET search_path TO "+quote(other.Schema)) // public, elsewhere
	name := meant.Schema + "." + migrations.VersionTable
	must(t, errOf(newGoose(t, pool, migrations.FS, goose.WithTableName(name)).Up(ctx)))
	wantTables(t, pool, other.Schema, "rate_limits")

	cfg := &migrate.Config{Schema: meant.Schema}
	words := fmt.Sprintf("schema %q lacks what migrations of it have made (table rate_limits)", meant.Schema)
	_, upErr := migrate.Up(ctx, pool, cfg)
	_, statusErr := migrate.Status(ctx, pool, cfg)
	for verb, err := range map[string]error{"Up": upErr, "Status": statusErr} {
		if err == nil || !strings.Contains(err.Error(), words) || !strings.Contains(err.Error(), "SET SCHEMA") {
			t.Errorf("%s: got error %v, want one with %q and the way out", verb, err, words)
		}
	}

	must(t, errOf(pool.Exec(ctx, fmt.Sprintf("ALTER TABLE %s.rate_limits SET SCHEMA %s", quote(other.Schema), quote(meant.Schema)))))
	wantStatus(t, pool, cfg, applied)
}

func TestDownSQL(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.NewEmpty(t)
	pool := poolWith(t, db.Pool, "SET search_path TO "+quote(db.Schema))
	must(t, errOf(pool.Exec(ctx, migrations.UpSQL()+migrations.DownSQL())))
	wantTables(t, pool, db.Schema)
}

func TestErrors(t *testing.T) {
	t.Parallel()
	const insufficientPrivilege = "42501"
	db := pgtest.NewEmpty(t)
	// A role that every server has and that may do nothing here.
	asMonitor := poolWith(t, db.Pool, "SET ROLE pg_monitor")
	grantUsage := "GRANT USAGE ON SCHEMA " + quote(db.Schema) + " TO pg_monitor"

	tests := []struct {
		name   string
		before string
		pool   *pgxpool.Pool
		schema string
		words  string // that the message must have
		code   string // of the PgError inside, if any
	}{
		{"nil pool", "", nil, "", "migrate up: the pool is nil", ""},
		{"no schema", "", poolWith(t, db.Pool, "SET search_path TO ''"), "", "set Config.Schema", ""},
		{"no right to use the schema", "", asMonitor, db.Schema, "lacks the right (USAGE)", ""},
		{"no right to create tables", grantUsage, asMonitor, db.Schema, "permission denied for schema " + db.Schema, insufficientPrivilege},
		{"no right to create the schema", "", asMonitor, db.Schema + "_missing", `create schema "` + db.Schema + `_missing": `, insufficientPrivilege},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			must(t, errOf(db.Pool.Exec(t.Context(), test.before)))
			_, err := migrate.Up(t.Context(), test.pool, &migrate.Config{Schema: test.schema})
			if err == nil || !strings.Contains(err.Error(), test.words) {
				t.Errorf("got error %v, want one with %q", err, test.words)
			}
			if got := sqlState(err); got != test.code {
				t.Errorf("SQLSTATE: got %q, want %q", got, test.code)
			}
		})
	}
}

// goose would try to create its version table for 3 s, with the lock held for which all
// others wait.
func TestNoRightIsToldAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	execute(t, db.Pool, "GRANT USAGE ON SCHEMA "+quote(db.Schema)+" TO pg_monitor")
	config := db.Pool.Config()
	creations := &creations{}
	config.ConnConfig.Tracer = creations
	pool := poolOf(t, config, "SET ROLE pg_monitor")
	for _, set := range migrations.Sets() {
		creations.n.Store(0)
		cfg := &migrate.Config{Schema: db.Schema, Set: set}
		wantRefused(t, pool, cfg, set.VersionTable(), "permission denied for schema "+db.Schema)
		if got := creations.n.Load(); got != 1 {
			t.Errorf("set %q: %d tries to create a table, want 1", set, got)
		}
	}
}

// creations counts the statements that create a table.
type creations struct{ n atomic.Int32 }

func (c *creations) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.HasPrefix(strings.TrimSpace(data.SQL), "CREATE TABLE") {
		c.n.Add(1)
	}
	return ctx
}

func (*creations) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// poolWith returns a pool like another whose new connections begin with setup.
func poolWith(t *testing.T, pool *pgxpool.Pool, setup string) *pgxpool.Pool {
	t.Helper()
	return poolOf(t, pool.Config(), setup)
}

func poolOf(t *testing.T, cfg *pgxpool.Config, setup string) *pgxpool.Pool {
	t.Helper()
	before := cfg.AfterConnect
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if before != nil {
			if err := before(ctx, conn); err != nil {
				return err
			}
		}
		return errOf(conn.Exec(ctx, setup))
	}
	return newPool(t, cfg)
}

func newPool(t *testing.T, cfg *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// newGoose returns a provider as an application makes it for itself.
func newGoose(t *testing.T, pool *pgxpool.Pool, files fs.FS, options ...goose.ProviderOption) *goose.Provider {
	t.Helper()
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { db.Close() })
	options = append(options, goose.WithDisableGlobalRegistry(true))
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files, options...)
	must(t, err)
	return provider
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

func dropSchema(t *testing.T, pool *pgxpool.Pool, name string) {
	t.Cleanup(func() {
		must(t, errOf(pool.Exec(context.Background(), "DROP SCHEMA IF EXISTS "+quote(name)+" CASCADE")))
	})
}

func wantTables(t *testing.T, pool *pgxpool.Pool, schema string, want ...string) {
	t.Helper()
	rows, err := pool.Query(t.Context(),
		`SELECT tablename::text FROM pg_tables WHERE schemaname = $1::text ORDER BY tablename COLLATE "C"`, schema)
	must(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("tables: got %v, %v, want %v", got, err, want)
	}
}

func searchPath(t *testing.T, conn *pgxpool.Conn) (path string) {
	t.Helper()
	must(t, conn.QueryRow(t.Context(), "SELECT current_setting('search_path')").Scan(&path))
	return path
}

// describe returns all that matters of the table, as text.
func describe(t *testing.T, pool *pgxpool.Pool) (text string) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `
		SELECT concat_ws(E'\n',
			(SELECT concat_ws(' ', reloptions::text, obj_description(oid)) FROM pg_class WHERE oid = table_oid),
			(SELECT string_agg(concat_ws(' ', attname, format_type(atttypid, atttypmod), attnotnull,
				attcollation::regcollation, col_description(attrelid, attnum)), E'\n' ORDER BY attnum)
				FROM pg_attribute WHERE attrelid = table_oid AND attnum > 0),
			(SELECT string_agg(pg_get_constraintdef(oid), E'\n' ORDER BY conname)
				FROM pg_constraint WHERE conrelid = table_oid),
			(SELECT string_agg(indexrelid::regclass::text, E'\n' ORDER BY indexrelid)
				FROM pg_index WHERE indrelid = table_oid))
		FROM (SELECT 'rate_limits'::regclass AS table_oid) AS t`).Scan(&text)
	must(t, err)
	return text
}

func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// An optional set has versions of its own, beside those of the limits, which it leaves alone.
func TestSetsTimeline(t *testing.T) {
	t.Parallel()
	for _, set := range migrations.Sets()[1:] {
		t.Run(string(set), func(t *testing.T) { setTimeline(t, set) })
	}
}

func setTimeline(t *testing.T, set migrations.Set) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.NewEmpty(t)
	base, cfg := &migrate.Config{Schema: db.Schema}, &migrate.Config{Schema: db.Schema, Set: set}
	names, err := set.FS().(fs.ReadDirFS).ReadDir(".")
	must(t, err)
	have := func(n int) (all []migrate.Migration) {
		for i, name := range names {
			all = append(all, migrate.Migration{Version: int64(i + 1), Name: name.Name(), Applied: i < n})
		}
		return all
	}
	wantUp(t, db.Pool, base, applied)
	wantStatus(t, db.Pool, cfg, have(0))
	wantUp(t, db.Pool, cfg, have(len(names)))
	wantUp(t, db.Pool, cfg, nil)
	wantStatus(t, db.Pool, cfg, have(len(names)))
	wantStatus(t, db.Pool, base, applied)
	for n := len(names); n > 0; n-- {
		if got, err := migrate.Down(ctx, db.Pool, cfg); err != nil || got == nil || got.Version != int64(n) {
			t.Fatalf("Down: got %v, %v, want version %d", got, err, n)
		}
	}
	if got, err := migrate.Down(ctx, db.Pool, cfg); err != nil || got != nil {
		t.Errorf("Down: got %v, %v, want nothing", got, err)
	}
	wantTables(t, db.Pool, db.Schema, "rate_limits", set.VersionTable(), migrations.VersionTable)

	pool := poolWith(t, db.Pool, "SET search_path TO "+quote(db.Schema))
	execute(t, pool, "DROP TABLE "+set.VersionTable())
	execute(t, pool, set.UpSQL())
	made := have(len(names))
	for i := range made {
		made[i].Untracked = true
	}
	wantStatus(t, db.Pool, cfg, made)
	wantUp(t, db.Pool, cfg, nil)

	wantRefused(t, db.Pool, &migrate.Config{Schema: db.Schema, Set: "none"}, `Config.Set "none"`, `"catalog"`)
	wantRefused(t, db.Pool, &migrate.Config{Schema: strings.Repeat("s", 64)}, `Config.Schema "ssss`, "at most 63 bytes")
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
