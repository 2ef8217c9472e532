// Package doors tests the ways into the database that are not pgx's: transactions of
// database/sql with more than one driver.
package doors

import (
	"context"
	"database/sql"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/sqltx"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(5) // they wait for locked rows and for leases
	pgtest.Main(m)
}

// driver is a way to open a database.
type driver struct {
	name, driver string
	key, value   string // of the URL, to choose how statements are sent
}

var drivers = []driver{
	{name: "pgx", driver: "pgx"},
	{name: "pgx, exec", driver: "pgx", key: "default_query_exec_mode", value: "exec"},
	{name: "pgx, simple protocol", driver: "pgx", key: "default_query_exec_mode", value: "simple_protocol"},
	{name: "lib-pq", driver: "postgres"},
	{name: "lib-pq, binary parameters", driver: "postgres", key: "binary_parameters", value: "yes"},
}

// open opens the database of a test.
func (d driver) open(t *testing.T, db *pgtest.DB) *sql.DB {
	t.Helper()
	u, err := url.Parse(db.URL)
	must(t, err)
	query := u.Query()
	query.Set("sslmode", "disable")
	if d.key != "" {
		query.Set(d.key, d.value)
	}
	u.RawQuery = query.Encode()
	pool, err := sql.Open(d.driver, u.String())
	must(t, err)
	t.Cleanup(func() { pool.Close() })
	return pool
}

// eachDriver runs a test for each driver, each in a schema of its own.
func eachDriver(t *testing.T, test func(t *testing.T, db *pgtest.DB, pool *sql.DB)) {
	t.Helper()
	t.Parallel()
	for _, d := range drivers {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			test(t, db, d.open(t, db))
		})
	}
}

// newStore makes a store that has no pool, and by which a clock decides, or without one the
// database's.
func newStore(t *testing.T, db *pgtest.DB, clock func() time.Time) *pgstore.Store {
	t.Helper()
	store, err := pgstore.New(nil, &pgstore.Config{Schema: db.Schema, Clock: clock})
	must(t, err)
	return store
}

func begin(t *testing.T, pool *sql.DB, level sql.IsolationLevel) *sql.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
	must(t, err)
	t.Cleanup(func() { tx.Rollback() })
	return tx
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }

// hasCode reports whether an error is of the server, with a code, whatever the driver.
func hasCode(err error, code string) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && state.SQLState() == code
}

// committed is the verbs of a store, each in a transaction of its own that commits.
type committed struct {
	ratelimit.Store
	store ratelimit.TxStore[pgx.Tx]
	pool  *sql.DB
}

// in runs a verb in a transaction, and commits it if there is no error.
func in[T any](ctx context.Context, c committed, verb func(pgx.Tx) (T, error)) (answer T, err error) {
	tx, err := c.pool.BeginTx(ctx, nil)
	if err != nil {
		return answer, err
	}
	defer func() { _ = tx.Rollback() }()
	if answer, err = verb(sqltx.Of(tx)); err != nil {
		return answer, err
	}
	return answer, tx.Commit()
}

func (c committed) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Result, error) { return c.store.AllowTx(ctx, tx, requests...) })
}

func (c committed) AllowAtMost(ctx context.Context, r ratelimit.Request) (ratelimit.Result, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Result, error) { return c.store.AllowAtMostTx(ctx, tx, r) })
}

func (c committed) AllowFirst(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Result, error) { return c.store.AllowFirstTx(ctx, tx, requests...) })
}

func (c committed) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Result, error) { return c.store.ReserveTx(ctx, tx, requests...) })
}

func (c committed) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Result, error) { return c.store.CheckTx(ctx, tx, requests...) })
}

func (c committed) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Result, error) { return c.store.CheckReserveTx(ctx, tx, requests...) })
}

func (c committed) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (ratelimit.Result, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Result, error) { return c.store.SettleTx(ctx, tx, r, used...) })
}

func (c committed) Cancel(ctx context.Context, r *ratelimit.Receipt) (bool, error) {
	return in(ctx, c, func(tx pgx.Tx) (bool, error) { return c.store.CancelTx(ctx, tx, r) })
}

func (c committed) Credit(ctx context.Context, r ratelimit.Request) (ratelimit.Status, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Status, error) { return c.store.CreditTx(ctx, tx, r) })
}

func (c committed) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (time.Time, error) {
	return in(ctx, c, func(tx pgx.Tx) (time.Time, error) { return c.store.PauseTx(ctx, tx, limit, key, lasts) })
}

func (c committed) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	_, err := in(ctx, c, func(tx pgx.Tx) (none struct{}, err error) { return none, c.store.ResumeTx(ctx, tx, limit, key) })
	return err
}

func (c committed) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	_, err := in(ctx, c, func(tx pgx.Tx) (none struct{}, err error) { return none, c.store.ResetTx(ctx, tx, limit, key) })
	return err
}

func (c committed) Change(ctx context.Context, from, to ratelimit.Limit, key string) (ratelimit.Status, error) {
	return in(ctx, c, func(tx pgx.Tx) (ratelimit.Status, error) { return c.store.ChangeTx(ctx, tx, from, to, key) })
}
