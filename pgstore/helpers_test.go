package pgstore_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// isolationLevels are those of PostgreSQL; READ UNCOMMITTED is READ COMMITTED.
var isolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// newStore makes a Store for db's schema. Unless changed its Timeout is more than the default,
// which a statement can take on a busy machine.
func newStore(tb testing.TB, db *pgtest.DB, change ...func(*pgstore.Config)) *pgstore.Store {
	tb.Helper()
	config := pgstore.Config{Schema: db.Schema, Timeout: time.Minute}
	for _, c := range change {
		c(&config)
	}
	store, err := pgstore.New(db.Pool, &config)
	if err != nil {
		tb.Fatal(err)
	}
	return store
}

// maxConns sets the size of a test's pool.
func maxConns(n int32) pgtest.Option {
	return pgtest.WithConfig(func(c *pgxpool.Config) { c.MaxConns = n })
}

// tableOf is all of db's rows as text, with the physical version of each: two
// equal answers mean that nothing was changed in between, not even back again.
func tableOf(tb testing.TB, db *pgtest.DB) []string {
	tb.Helper()
	rows, err := db.Pool.Query(tb.Context(), `SELECT concat_ws(' ', quote_literal(name), quote_literal(key), shard, value, extract(epoch FROM ts), xmin, ctid)
		FROM `+db.Schema+`.rate_limits ORDER BY name, key, shard`)
	if err != nil {
		tb.Fatal(err)
	}
	table, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		tb.Fatal(err)
	}
	return table
}

// statesOf is what all of db's rows say, as text and to the last bit.
func statesOf(tb testing.TB, db *pgtest.DB) []string {
	tb.Helper()
	rows, err := db.Pool.Query(tb.Context(), `SELECT concat_ws(' ', quote_literal(name), quote_literal(key), shard, value, extract(epoch FROM ts), extract(epoch FROM paused), slots)
		FROM `+db.Schema+`.rate_limits ORDER BY name, key, shard`)
	if err != nil {
		tb.Fatal(err)
	}
	states, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		tb.Fatal(err)
	}
	return states
}

// noon is where injected clocks start.
var noon = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)

// clock is an injected clock. It is safe for concurrent use.
type clock struct{ micros atomic.Int64 }

func newClock() *clock {
	c := new(clock)
	c.set(noon)
	return c
}

func (c *clock) now() time.Time      { return time.UnixMicro(c.micros.Load()).UTC() }
func (c *clock) set(to time.Time)    { c.micros.Store(to.UnixMicro()) }
func (c *clock) add(d time.Duration) { c.micros.Add(d.Microseconds()) }

// onClock has c decide.
func onClock(c *clock) func(*pgstore.Config) {
	return func(config *pgstore.Config) { config.Clock = c.now }
}

// isPortable chooses the portable form, or not.
func isPortable(portable bool) func(*pgstore.Config) {
	return func(config *pgstore.Config) { config.Portable = portable }
}
