// Package pgtest gives each test a schema of its own on a PostgreSQL server
// that the tests of one process share. See package throwaway for where the
// server comes from. Without one, tests fail: they are never skipped.
package pgtest

import (
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
)

const (
	startTimeout   = 5 * time.Minute // an image may have to be pulled
	setupTimeout   = time.Minute
	cleanupTimeout = 30 * time.Second
)

// closeTimeout is how long cleaning up waits for goroutines of the test to give
// their connections back. Only the test of that changes it.
var closeTimeout = 5 * time.Second

// started is the server, once there is one.
var started atomic.Pointer[throwaway.Server]

var start = sync.OnceValue(func() error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	server, err := throwaway.Start(ctx)
	if err != nil {
		return err
	}
	started.Store(server)
	return nil
})

// URL returns the URL of the server, which the first call in a process starts.
func URL(tb testing.TB) string {
	tb.Helper()
	if err := start(); err != nil {
		tb.Fatal(err)
	}
	return started.Load().URL
}

// Main runs the tests, stops the server, and exits. A package may do without:
// the server then stops by itself right after the process has ended.
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
func Main(m *testing.M) {
	debug.SetGCPercent(400) // what tests leave behind is much, and what they keep is little
	code := m.Run()
	if server := started.Load(); server != nil {
		if err := server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	os.Exit(code)
}

// AtOnce has n tests of this process run at a time, unless -parallel says otherwise: for
// packages whose tests wait, for instants and for PostgreSQL, more than they compute. To be
// called before Main.
func AtOnce(n int) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) {
		// To a fuzz test -parallel is the number of processes that compute.
		given = given || f.Name == "test.parallel" || f.Name == "test.fuzz"
	})
	if given {
		return
	}
	if err := flag.Set("test.parallel", strconv.Itoa(n)); err != nil {
		panic(err) // there is such a flag in every test binary
	}
}

// Long leaves a test out with -short: one that takes most of a second or more.
func Long(tb testing.TB) {
	tb.Helper()
	if testing.Short() {
		tb.Skip("left out with -short")
	}
}

// DB is a schema of the test's own.
type DB struct {
	// URL is the server's. It does not lead into the schema.
	URL string
	// Schema is the name of the schema. It needs no quoting.
	Schema string
	// Pool has an empty search_path: a statement that does not name the schema
	// fails, rather than work only where the search_path happens to be right.
	Pool *pgxpool.Pool
}

// Option changes what New and NewEmpty make.
type Option func(*options)

type options struct {
	configure []func(*pgxpool.Config)
	sets      []migrations.Set
}

// With has New make the tables of a set, too.
func With(set migrations.Set) Option {
	return func(o *options) { o.sets = append(o.sets, set) }
}

// WithConfig has configure change the configuration of the pool.
func WithConfig(configure func(*pgxpool.Config)) Option {
	return func(o *options) { o.configure = append(o.configure, configure) }
}

// New makes a schema with the library's table in it. Both the schema and the
// pool are gone after the test.
func New(tb testing.TB, opts ...Option) *DB {
	tb.Helper()
	return newDB(tb, migrations.UpSQL(), opts)
}

// NewEmpty is New without the table.
func NewEmpty(tb testing.TB, opts ...Option) *DB {
	tb.Helper()
	return newDB(tb, "", opts)
}

// newDB makes a schema and runs sql in it, and that of sets.
func newDB(tb testing.TB, sql string, opts []Option) *DB {
	tb.Helper()
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	for _, set := range o.sets {
		sql += set.UpSQL()
	}
	db := &DB{
		URL: URL(tb),
		// Random, as several processes may share a server.
		Schema: "ratelimit_test_" + strings.ToLower(rand.Text()),
	}
	// Statements sent together are one transaction: there is nothing to drop if
	// they fail.
	sql = fmt.Sprintf("CREATE SCHEMA %[1]s; SET search_path = %[1]s; %[2]s", db.Schema, sql)
	if err := exec(db.URL, setupTimeout, sql); err != nil {
		tb.Fatalf("pgtest: making a schema: %v", err)
	}
	tb.Cleanup(func() { db.drop(tb) })

	pool, err := newPool(db.URL, o.configure)
	if err != nil {
		tb.Fatalf("pgtest: making a pool: %v", err)
	}
	db.Pool = pool
	tb.Cleanup(func() { db.closePool(tb) })
	return db
}

func newPool(url string, configure []func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("parsing the URL: %w", err)
	}
	config.ConnConfig.RuntimeParams["search_path"] = ""
	for _, change := range configure {
		change(config)
	}
	return pgxpool.NewWithConfig(context.Background(), config)
}

// closePool closes the pool, which waits for connections that are in use. One
// that the test lost is an error, but must not hang the test.
func (db *DB) closePool(tb testing.TB) {
	tb.Helper()
	closed := make(chan struct{})
	go func() {
		db.Pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(closeTimeout):
		tb.Errorf("pgtest: connections not given back to the pool: %d", db.Pool.Stat().AcquiredConns())
	}
}

// drop drops the schema. The lock timeout is for transactions that the test
// left open.
func (db *DB) drop(tb testing.TB) {
	tb.Helper()
	sql := "SET lock_timeout = '5s'; DROP SCHEMA " + db.Schema + " CASCADE"
	if err := exec(db.URL, cleanupTimeout, sql); err != nil {
		tb.Errorf("pgtest: dropping the schema: %v", err)
	}
}

// setup is the connection on which schemas are made and dropped, by one test at a time: to
// connect would take longer than the statements do.
var setup struct {
	sync.Mutex
	conn *pgx.Conn
}

// exec runs SQL on that connection, so that it depends neither on the state of the test's pool
// nor on the test's context. A connection that failed, such as one that a test had the server
// end, is replaced once.
func exec(url string, timeout time.Duration, sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	setup.Lock()
	defer setup.Unlock()
	if setup.conn != nil && setup.conn.Ping(ctx) != nil {
		_ = setup.conn.Close(ctx)
		setup.conn = nil
	}
	if setup.conn == nil {
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			return err
		}
		setup.conn = conn
	}
	_, err := setup.conn.Exec(ctx, sql+"; RESET ALL")
	return err
}

// Querier is a pool, a connection or a transaction.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Blocks reports whether a session waits for a lock of tx, which it asks q.
func Blocks(tb testing.TB, q Querier, tx pgx.Tx) (yes bool) {
	tb.Helper()
	err := q.QueryRow(tb.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1 = ANY(pg_blocking_pids(pid)))", tx.Conn().PgConn().PID()).Scan(&yes)
	if err != nil {
		tb.Fatal(err)
	}
	return yes
}

// AwaitBlocks waits until a session waits for a lock of tx.
func AwaitBlocks(tb testing.TB, q Querier, tx pgx.Tx) {
	tb.Helper()
	for !Blocks(tb, q, tx) {
		time.Sleep(time.Millisecond)
	}
}
