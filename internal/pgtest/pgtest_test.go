package pgtest

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func TestMain(m *testing.M) { Main(m) }

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
	exampleTB
	errors []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func TestCleanupFindsLostConnections(t *testing.T) {
	defer func(d time.Duration) { closeTimeout = d }(closeTimeout)
	closeTimeout = 100 * time.Millisecond

	r := &recorder{exampleTB: exampleTB{TB: t}}
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
