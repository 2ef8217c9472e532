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

// TestPgBouncer runs the same histories as TestQueryExecModes through PgBouncer
// in transaction pooling, which changes the server connection after every
// transaction, in pgx's modes that prepare nothing on it. So are transactions that take on COMMIT.
func TestPgBouncer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	bouncer, err := throwaway.PgBouncer(t.Context(), pgtest.URL(t), 8)
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("there is no pgbouncer here: apt-get install pgbouncer")
	}
	must(t, err)
	t.Cleanup(func() { _ = bouncer.Close() })
	through, err := pgx.ParseConfig(bouncer.URL)
	must(t, err)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) {
				c.ConnConfig.Host, c.ConnConfig.Port = through.Host, through.Port
				c.ConnConfig.Fallbacks, c.ConnConfig.TLSConfig = nil, nil
				c.ConnConfig.DefaultQueryExecMode = mode
			}))
			runHistories(t, db, 9100)
			eachFirst(t, db)
		})
	}
}
