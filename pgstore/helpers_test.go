package pgstore_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
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
	must(tb, err)
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
	must(tb, err)
	table, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(tb, err)
	return table
}

// statesOf is what all of db's rows say, as text and to the last bit.
func statesOf(tb testing.TB, db *pgtest.DB) []string {
	tb.Helper()
	rows, err := db.Pool.Query(tb.Context(), `SELECT concat_ws(' ', quote_literal(name), quote_literal(key), shard, value, extract(epoch FROM ts), extract(epoch FROM paused), slots)
		FROM `+db.Schema+`.rate_limits ORDER BY name, key, shard`)
	must(tb, err)
	states, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(tb, err)
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

// slow is a limit to which nothing that counts comes in during a test.
func slow(name string, capacity float64) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{Name: name, Rate: capacity, Period: 10 * 365 * 24 * time.Hour}
}

// slowWindow is slow as a fixed window, which has no edge during a test.
func slowWindow(name string, capacity float64) ratelimit.FixedWindow {
	return ratelimit.FixedWindow{Name: name, Rate: capacity, Period: 24 * time.Hour, Start: time.Now().Add(-12 * time.Hour).Truncate(time.Second)}
}

func slowSliding(name string, rate float64) ratelimit.SlidingWindow {
	return ratelimit.SlidingWindow{Name: name, Rate: rate, Period: 24 * time.Hour}
}

func shardedSlow(name string, capacity float64, shards int) ratelimit.TokenBucket {
	limit := slow(name, capacity)
	limit.Shards = shards
	return limit
}

func newPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	must(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// another is a pool to the same schema as db's, with other settings.
func another(t *testing.T, db *pgtest.DB, change func(*pgxpool.Config)) *pgtest.DB {
	t.Helper()
	config := db.Pool.Config()
	change(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	return &pgtest.DB{URL: db.URL, Schema: db.Schema, Pool: pool}
}

// beside is db with a pool of its own.
func beside(t *testing.T, db *pgtest.DB) *pgtest.DB {
	t.Helper()
	return &pgtest.DB{URL: db.URL, Schema: db.Schema, Pool: newPool(t, db.URL)}
}

// connectAll opens all connections of a pool, so that the first callers do not
// wait for them.
func connectAll(ctx context.Context, pool *pgxpool.Pool) error {
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return err
		}
		defer conn.Release()
	}
	return nil
}

// idle returns when all connections have come back to the pool. One that is
// broken comes back a little later than the call that broke it.
func idle(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	eventually(t, "all connections are back in the pool", func() bool { return pool.Stat().AcquiredConns() == 0 })
}

// withTimeout bounds decisions whose context has no deadline.
func withTimeout(d time.Duration) func(*pgstore.Config) {
	return func(c *pgstore.Config) { c.Timeout = d }
}

// withEscrow has a store take ahead for so long.
func withEscrow(lasts time.Duration) func(*pgstore.Config) {
	return func(c *pgstore.Config) { c.Escrow = lasts }
}

func unchanged(*pgstore.Config) {}

func portable(c *pgstore.Config) { c.Portable = true }

// takes is a way to take from a limit, with all that belongs to it: the
// transaction is committed when it returns.
type takes func(context.Context, *pgxpool.Pool, *pgstore.Store, ...ratelimit.Request) (ratelimit.Result, error)

// allowAt takes in a transaction of the given level, from BEGIN again when
// PostgreSQL asks for that.
func allowAt(level pgx.TxIsoLevel) takes {
	return func(ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
		for {
			err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				result, err = store.AllowTx(ctx, tx, requests...)
				return err
			})
			if err == nil {
				return result, nil
			}
			if !hasCode(err, serializationFailure) {
				return ratelimit.Result{}, err
			}
		}
	}
}

func allowFunc(ctx context.Context, _ *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
	result, err := store.AllowFunc(ctx, requests, func(pgx.Tx, ratelimit.Result) error { return nil })
	if errors.Is(err, ratelimit.ErrRefused) {
		err = nil
	}
	return result, err
}

func allowOwn(ctx context.Context, _ *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return store.Allow(ctx, requests...)
}

// takeForm is a way to take, with the Config that it needs.
type takeForm struct {
	name   string
	take   takes
	change func(*pgstore.Config)
}

// takeForms are all the ways to take.
var takeForms = []takeForm{
	{"read committed", allowAt(pgx.ReadCommitted), unchanged},
	{"repeatable read", allowAt(pgx.RepeatableRead), unchanged},
	{"serializable", allowFunc, unchanged},
	{"on its own", allowOwn, unchanged},
	{"on its own, portable", allowOwn, portable},
}

func mustTake(t *testing.T, result ratelimit.Result, err error) ratelimit.Result {
	t.Helper()
	if err != nil || !result.OK {
		t.Fatalf("got OK %v, error %v", result.OK, err)
	}
	return result
}

func mustAllow(t *testing.T, store interface {
	Allow(context.Context, ...ratelimit.Request) (ratelimit.Result, error)
}, requests ...ratelimit.Request,
) {
	t.Helper()
	if result, err := store.Allow(t.Context(), requests...); err != nil || !result.OK {
		t.Fatalf("got OK %v, error %v", result.OK, err)
	}
}

// wantLeft compares to a hundredth of a token: slow limits are not quite still.
func wantLeft(t *testing.T, store *pgstore.Store, r ratelimit.Request, want float64) {
	t.Helper()
	result, err := store.Check(t.Context(), r)
	if err != nil || math.Abs(result.Value-want) > 0.01 {
		t.Errorf("%s: got %v left, error %v, want %v", r.Limit.Definition().Name, result.Value, err, want)
	}
}

func wantSaid(t *testing.T, what string, got bool, err error, want bool) {
	t.Helper()
	if err != nil || got != want {
		t.Errorf("%s: got %v, error %v, want %v", what, got, err, want)
	}
}

// wantPaused pauses a limit at now until an instant.
func wantPaused(t *testing.T, store *pgstore.Store, l ratelimit.Limit, key string, now, until time.Time) {
	t.Helper()
	if got, err := store.Pause(t.Context(), l, key, until.Sub(now)); err != nil || !got.Equal(until) {
		t.Fatalf("paused until %v, error %v, want %v", got, err, until)
	}
}

// takenLater is what a call in another goroutine came back with.
type takenLater struct {
	ratelimit.Result
	err error
}

// allowLater takes in tx in a goroutine of its own. The context is not the
// test's, so that nothing is left under way when that fails.
func allowLater(store *pgstore.Store, tx pgx.Tx, requests ...ratelimit.Request) <-chan takenLater {
	later := make(chan takenLater, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		result, err := store.AllowTx(ctx, tx, requests...)
		later <- takenLater{result, err}
	}()
	return later
}

func begin(t *testing.T, db *pgtest.DB, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) }) // unless it has ended
	return tx
}

// takeIn takes in a transaction.
func takeIn(t *testing.T, store *pgstore.Store, tx pgx.Tx, requests ...ratelimit.Request) ratelimit.Result {
	t.Helper()
	result, err := store.AllowTx(t.Context(), tx, requests...)
	return mustTake(t, result, err)
}

func end(t *testing.T, end func(context.Context) error) {
	t.Helper()
	must(t, end(t.Context()))
}

// inSavepoint runs do in a nested transaction of tx, which end ends.
func inSavepoint(t *testing.T, tx pgx.Tx, end func(pgx.Tx, context.Context) error, do func(tx pgx.Tx)) {
	t.Helper()
	nested, err := tx.Begin(t.Context())
	must(t, err)
	do(nested)
	must(t, end(nested, t.Context()))
}

// mustReset forgets a key.
func mustReset(t *testing.T, store *pgstore.Store, l ratelimit.Limit, key string) {
	t.Helper()
	must(t, store.Reset(t.Context(), l, key))
}

func mustExec(t *testing.T, tx pgx.Tx, sql string, args ...any) {
	t.Helper()
	must(t, errOf(tx.Exec(t.Context(), sql, args...)))
}

// execIn runs SQL in which {schema} stands for db's schema.
func execIn(t *testing.T, db *pgtest.DB, sql string) {
	t.Helper()
	must(t, errOf(db.Pool.Exec(t.Context(), strings.ReplaceAll(sql, "{schema}", db.Schema))))
}

const (
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
)

// codeOf is the code of PostgreSQL's answer, "" if that is not what err is.
func codeOf(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// hasCode reports whether PostgreSQL's answer is within reach of errors.As.
func hasCode(err error, code string) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == code
}

// isLocked reports whether err says that a call waited for a lock.
func isLocked(err error) bool {
	return errors.Is(err, pgstore.ErrLocked)
}

var errTest = errors.New("the test's own")

// raise is work that PostgreSQL answers with an error of the given code.
func raise(ctx context.Context, code string) func(pgx.Tx) error {
	return func(tx pgx.Tx) error { return errOf(tx.Exec(ctx, raising(code))) }
}

func raising(code string) string {
	return `DO $$ BEGIN RAISE EXCEPTION 'raised by the test' USING ERRCODE = '` + code + `'; END $$`
}

// aMoment is the deadline of those who have nobody to wait for: long for a busy machine,
// and short for somebody who waits for a row after all, which is kept locked for longer.
const (
	aMoment = 5 * time.Second
	forLong = time.Minute
)

// within is a context that ends after d, so that a test ends although a fault
// is there.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func pauseFor(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// together runs do(0) to do(n-1) at the same time, as far as can be.
func together(n int, do func(i int)) {
	var group sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		group.Go(func() {
			<-start
			do(i)
		})
	}
	close(start)
	group.Wait()
}

// eventually polls until it is so, and fails the test when it is not in time.
func eventually(t *testing.T, what string, isSo func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !isSo(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("in vain waited for this: %s", what)
		}
	}
}

// waitsForLock returns when tx is seen to wait for another transaction.
func waitsForLock(t *testing.T, db *pgtest.DB, tx pgx.Tx) {
	t.Helper()
	pid := tx.Conn().PgConn().PID()
	eventually(t, "a transaction waits for a lock", func() (waits bool) {
		err := db.Pool.QueryRow(t.Context(), `SELECT cardinality(pg_blocking_pids($1)) > 0
			FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'`, pid).Scan(&waits)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			t.Fatal(err)
		}
		return waits
	})
}

// waitFor returns when so many are seen to wait for tx, or after a moment: those
// who do not wait in the database are not seen.
func waitFor(t *testing.T, db *pgtest.DB, tx pgx.Tx, n int) {
	t.Helper()
	for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		var waiting int
		err := db.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE wait_event_type = 'Lock' AND $1 = ANY(pg_blocking_pids(pid))`, tx.Conn().PgConn().PID()).Scan(&waiting)
		must(t, err)
		if waiting >= n {
			return
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func databaseNow(t *testing.T, db *pgtest.DB) (now time.Time) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now))
	return now
}

// rowsOf is what db's rows of a limit say, whatever their physical version.
func rowsOf(t *testing.T, db *pgtest.DB, name string) []string {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `SELECT concat_ws(' ', quote_literal(key), shard, value, extract(epoch FROM ts))
		FROM `+db.Schema+`.rate_limits WHERE name = $1 ORDER BY key, shard`, name)
	must(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	return all
}

// stateOf is the only row of a limit.
func stateOf(t *testing.T, db *pgtest.DB, name string) (s bucket.State) {
	t.Helper()
	err := db.Pool.QueryRow(t.Context(), `SELECT value, ts FROM `+db.Schema+`.rate_limits WHERE name = $1`, name).Scan(&s.Value, &s.TS)
	must(t, err)
	s.TS = s.TS.UTC()
	return s
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

// should notes an error as a failure of the test.
func should(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Error(err)
	}
}

// isOK is what a caller acts on. isYes is that, or that there is a receipt.
func isOK(result ratelimit.Result, err error) (bool, error) { return result.OK, err }

func isYes(result ratelimit.Result, err error) (bool, error) {
	return result.OK || result.Receipt != nil, err
}

// setUp makes a database and a store on it.
func setUp(t *testing.T, options ...pgtest.Option) (*pgtest.DB, *pgstore.Store) {
	t.Helper()
	db := pgtest.New(t, options...)
	return db, newStore(t, db)
}
