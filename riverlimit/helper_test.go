package riverlimit_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// patience bounds waits for what must happen, on a machine with much else to do.
const patience = 90 * time.Second

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// callArgs is a job that calls somebody.
type callArgs struct {
	N int `json:"n"`
}

func (callArgs) Kind() string { return "call" }

// bench is a schema with River's tables and the limits'.
type bench struct {
	*pgtest.DB
	store *pgstore.Store
}

// newBench makes a bench for a test, which then runs beside others.
func newBench(t testing.TB, opts ...pgtest.Option) *bench {
	t.Helper()
	if t, ok := t.(*testing.T); ok {
		t.Parallel()
	}
	db := pgtest.New(t, append(opts, pgtest.With(migrations.River), pgtest.WithConfig(func(c *pgxpool.Config) { c.MaxConns = 20 }))...)
	migrator, err := rivermigrate.New(riverpgxv5.New(db.Pool), &rivermigrate.Config{Schema: db.Schema, Logger: quiet})
	must(t, err)
	must(t, errOf(migrator.Migrate(t.Context(), rivermigrate.DirectionUp, nil)))
	return &bench{db, newStore(t, db.Pool, db.Schema)}
}

func newStore(t testing.TB, pool *pgxpool.Pool, schema string) *pgstore.Store {
	t.Helper()
	store, err := pgstore.New(pool, &pgstore.Config{Schema: schema})
	must(t, err)
	return store
}

// config is a River configuration with a worker for callArgs.
func (b *bench) config(work func(context.Context, *river.Job[callArgs]) error, middleware ...rivertype.Middleware) *river.Config {
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(work))
	return &river.Config{
		Logger:     quiet,
		Middleware: middleware,
		Queues:     map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}},
		Schema:     b.Schema,
		Workers:    workers,
	}
}

func (b *bench) client(t testing.TB, config *river.Config) *river.Client[pgx.Tx] {
	t.Helper()
	client, err := river.NewClient(riverpgxv5.New(b.Pool), config)
	must(t, err)
	return client
}

// inserter is one whose client only inserts.
func (b *bench) inserter(t testing.TB) riverlimit.Inserter {
	t.Helper()
	return riverlimit.Inserter{Client: b.client(t, &river.Config{Logger: quiet, Schema: b.Schema}), Store: b.store}
}

// startsOf has a client work until n jobs are completed. It returns when they started, after the first, and for
// how long at most the machine stood still.
func (b *bench) startsOf(t testing.TB, n int, middleware ...rivertype.Middleware) (sorted []time.Duration, stall time.Duration) {
	t.Helper()
	var started starts
	stalled := measureStalls()
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		started.add()
		return nil
	}, middleware...)))
	b.eventually(t, n, completed)
	return started.sorted(), stalled()
}

// start starts a client, and stops it before the test ends.
func start(t testing.TB, client *river.Client[pgx.Tx]) {
	t.Helper()
	must(t, client.Start(context.Background()))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := client.StopAndCancel(ctx); err != nil {
			t.Errorf("stop the client: %v", err)
		}
	})
}

func middleware(t testing.TB, store *pgstore.Store, config riverlimit.MiddlewareConfig) *riverlimit.Middleware {
	t.Helper()
	config.Logger = quiet
	m, err := riverlimit.NewMiddleware(store, &config)
	must(t, err)
	return m
}

func each(limit ratelimit.Limit) func(*rivertype.JobRow) []ratelimit.Request {
	return riverlimit.ByKind(map[string]ratelimit.Limit{"call": limit})
}

// inTx runs do in a transaction that commits.
func (b *bench) inTx(t testing.TB, do func(tx pgx.Tx) error) {
	t.Helper()
	must(t, pgx.BeginFunc(t.Context(), b.Pool, do))
}

// insert inserts jobs.
func (b *bench) insert(t testing.TB, in riverlimit.Inserter, params []riverlimit.InsertManyParams) (inserted []*riverlimit.Inserted) {
	t.Helper()
	b.inTx(t, func(tx pgx.Tx) (err error) {
		inserted, err = in.InsertManyTx(t.Context(), tx, params)
		return err
	})
	return inserted
}

// numbered returns n jobs, each with requests.
func numbered(n int, requests ...ratelimit.Request) []riverlimit.InsertManyParams {
	return paramsOf(slices.Repeat([][]ratelimit.Request{requests}, n))
}

// paramsOf returns numbered jobs with these requests.
func paramsOf(jobs [][]ratelimit.Request) []riverlimit.InsertManyParams {
	params := make([]riverlimit.InsertManyParams, len(jobs))
	for i, requests := range jobs {
		params[i] = riverlimit.InsertManyParams{Args: callArgs{i}, Requests: requests}
	}
	return params
}

// hold acquires permits.
func (b *bench) hold(t testing.TB, request ratelimit.PermitRequest) ratelimit.Permit {
	t.Helper()
	permit, err := b.store.Permits().Acquire(t.Context(), request)
	if err != nil || !permit.OK {
		t.Fatal(permit, err)
	}
	return permit
}

func newCatalog(t testing.TB) *catalog.Catalog {
	t.Helper()
	limits, err := catalog.NewInMemory(nil)
	must(t, err)
	return limits
}

// exec executes statements.
func (b *bench) exec(t testing.TB, sql string) {
	t.Helper()
	b.inTx(t, func(tx pgx.Tx) error {
		return errOf(tx.Exec(t.Context(), "SET LOCAL search_path = "+b.Schema+"; "+sql))
	})
}

// query scans the only row of a query.
func (b *bench) query(t testing.TB, sql string, into ...any) {
	t.Helper()
	b.inTx(t, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SET LOCAL search_path = "+b.Schema); err != nil {
			return err
		}
		return tx.QueryRow(t.Context(), sql).Scan(into...)
	})
}

// count is query for a number.
func (b *bench) count(t testing.TB, sql string) (n int) {
	t.Helper()
	b.query(t, sql, &n)
	return n
}

// want is count of a number that is there already.
func (b *bench) want(t testing.TB, want int, sql string) {
	t.Helper()
	if got := b.count(t, sql); got != want {
		t.Errorf("%s: got %d, want %d", sql, got, want)
	}
}

// begin begins a transaction, and rolls it back before the test ends.
func (b *bench) begin(t testing.TB) pgx.Tx {
	t.Helper()
	tx, err := b.Pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// eventually polls until sql yields want.
func (b *bench) eventually(t testing.TB, want int, sql string) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		got := b.count(t, sql)
		if got == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: got %d after %v, want %d", sql, got, patience, want)
		}
	}
}

// value is a limit's tokens in the database; its row must be there.
func (b *bench) value(t *testing.T, name string) (v float64) {
	t.Helper()
	b.query(t, "SELECT value FROM rate_limits WHERE name = '"+name+"'", &v)
	return v
}

// wantWait wants a job to be put off for so long, or off less or more.
func wantWait(t testing.TB, job *rivertype.JobRow, want, off time.Duration) {
	t.Helper()
	if wait := time.Until(job.ScheduledAt); (wait - want).Abs() > off {
		t.Errorf("job %d is put off for %v, want %v", job.ID, wait, want)
	}
}

// starts are the instants at which jobs started, on one monotonic clock.
type starts struct {
	mu sync.Mutex
	at []time.Time
}

func (s *starts) add() {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at = append(s.at, now)
}

// sorted are the starts as durations after the first.
func (s *starts) sorted() []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return sinceFirst(s.at)
}

func sinceFirst(at []time.Time) []time.Duration {
	since := make([]time.Duration, len(at))
	for i, a := range at {
		since[i] = a.Sub(at[0])
	}
	slices.Sort(since)
	for i := len(since) - 1; i >= 0; i-- {
		since[i] -= since[0]
	}
	return since
}

// mostIn is the largest number of starts in any window [t, t+window).
func mostIn(sorted []time.Duration, window time.Duration) int {
	most, first := 0, 0
	for i, at := range sorted {
		for at-sorted[first] >= window {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

// noted is the note in a job's metadata.
func noted(t *testing.T, job *rivertype.JobRow) (n struct {
	Attempt int
	At      time.Time
	Paid    []struct{ Name, Key string }
	Started bool
},
) {
	t.Helper()
	var metadata map[string]json.RawMessage
	must(t, json.Unmarshal(job.Metadata, &metadata))
	if err := json.Unmarshal(metadata[riverlimit.MetadataKey], &n); err != nil {
		t.Fatalf("metadata %s: %v", job.Metadata, err)
	}
	return n
}

// measureStalls measures for how long at a time the machine had better things to do than
// to run this process, until the returned function is called: how late a short sleep was
// over. A job may start that much later than it was let in.
func measureStalls() (longest func() time.Duration) {
	const short = 5 * time.Millisecond
	stop, found := make(chan struct{}), make(chan time.Duration)
	go func() {
		most := time.Duration(0)
		for {
			begun := time.Now()
			select {
			case <-stop:
				found <- most
				return
			case <-time.After(short):
			}
			most = max(most, time.Since(begun)-short)
		}
	}()
	return func() time.Duration {
		close(stop)
		return <-found
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a function that returns a value as well.
func errOf[T any](_ T, err error) error { return err }
