package pgtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

func TestMain(m *testing.M) { Main(m) }

// undefinedTable is the SQLSTATE for a table that is not there.
const undefinedTable = "42P01"

func TestNew(t *testing.T) {
	db, other := New(t), New(t)
	_, err := db.Pool.Exec(t.Context(), fmt.Sprintf(
		"INSERT INTO %s.rate_limits (name, key, shard, value, ts) VALUES ('n', 'k', 0, 1, now())", db.Schema))
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		db   *DB
		want int
	}{{db, 1}, {other, 0}} {
		var got int
		row := test.db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+test.db.Schema+".rate_limits")
		if err := row.Scan(&got); err != nil || got != test.want {
			t.Errorf("%d rows, %v; want %d", got, err, test.want)
		}
	}
}

func TestUnqualifiedNamesFail(t *testing.T) {
	db := New(t)
	_, err := db.Pool.Exec(t.Context(), "SELECT FROM rate_limits")
	wantCode(t, err, undefinedTable)
}

func TestNewEmpty(t *testing.T) {
	db := NewEmpty(t)
	_, err := db.Pool.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits")
	wantCode(t, err, undefinedTable)
	if _, err := db.Pool.Exec(t.Context(), "CREATE TABLE "+db.Schema+".t ()"); err != nil {
		t.Error(err)
	}
}

func TestWithConfig(t *testing.T) {
	db := NewEmpty(
		t,
		WithConfig(func(c *pgxpool.Config) { c.MaxConns = 3 }),
		WithConfig(func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec }),
	)
	config := db.Pool.Config()
	if config.MaxConns != 3 || config.ConnConfig.DefaultQueryExecMode != pgx.QueryExecModeExec {
		t.Errorf("got %d connections and mode %v", config.MaxConns, config.ConnConfig.DefaultQueryExecMode)
	}
}

func TestCleanup(t *testing.T) {
	for _, test := range []struct {
		name string
		use  func(*testing.T, *DB)
	}{
		{"untouched", func(*testing.T, *DB) {}},
		{"pool closed", func(_ *testing.T, db *DB) { db.Pool.Close() }},
		{"schema in use by an idle connection", func(t *testing.T, db *DB) {
			if _, err := db.Pool.Exec(t.Context(), "TABLE "+db.Schema+".rate_limits"); err != nil {
				t.Error(err)
			}
		}},
	} {
		var schema string
		t.Run(test.name, func(t *testing.T) {
			db := New(t)
			schema = db.Schema
			test.use(t, db)
		})
		wantDropped(t, schema)
	}
}

// recorder is a test that notes its failures instead of failing.
type recorder struct {
	testing.TB
	cleanups []func()
	errors   []string
}

func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func (r *recorder) end() {
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
}

func TestCleanupFindsLostConnections(t *testing.T) {
	defer func(d time.Duration) { closeTimeout = d }(closeTimeout)
	closeTimeout = 100 * time.Millisecond

	r := &recorder{TB: t}
	db := New(r, WithConfig(func(c *pgxpool.Config) { c.MaxConns = 1 }))
	conn, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	r.end()
	if len(r.errors) != 1 || !strings.Contains(r.errors[0], "not given back to the pool: 1") {
		t.Errorf("got %q", r.errors)
	}
	wantDropped(t, db.Schema)
	conn.Release()
}

func wantCode(t *testing.T, err error, code string) {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != code {
		t.Errorf("got %v, want code %s", err, code)
	}
}

func wantDropped(t *testing.T, schema string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), URL(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var exists bool
	err = conn.QueryRow(t.Context(), "SELECT to_regnamespace($1) IS NOT NULL", schema).Scan(&exists)
	if err != nil || exists {
		t.Errorf("schema %s exists: %v, %v", schema, exists, err)
	}
}
