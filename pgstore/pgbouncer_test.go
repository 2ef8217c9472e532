package pgstore_test

import (
	"errors"
	"os/exec"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// throughPgBouncer starts a PgBouncer in transaction pooling, and returns what has a pool connect through
// it in one of pgx's modes.
func throughPgBouncer(t *testing.T) func(pgx.QueryExecMode) func(*pgxpool.Config) {
	t.Helper()
	bouncer, err := throwaway.PgBouncer(t.Context(), pgtest.URL(t), 8)
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("there is no pgbouncer here: apt-get install pgbouncer")
	}
	must(t, err)
	t.Cleanup(func() { _ = bouncer.Close() })
	through, err := pgx.ParseConfig(bouncer.URL)
	must(t, err)
	return func(mode pgx.QueryExecMode) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) {
			c.ConnConfig.Host, c.ConnConfig.Port = through.Host, through.Port
			c.ConnConfig.Fallbacks, c.ConnConfig.TLSConfig = nil, nil
			c.ConnConfig.DefaultQueryExecMode = mode
		}
	}
}

// TestPgBouncer runs the same histories as TestQueryExecModes through PgBouncer, which changes the server
// connection after every transaction, in pgx's modes that prepare nothing on it. So are transactions that
// take on COMMIT.
func TestPgBouncer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	through := throughPgBouncer(t)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.WithConfig(through(mode)))
			runHistories(t, db, 9100)
			eachFirst(t, db)
		})
	}
}
