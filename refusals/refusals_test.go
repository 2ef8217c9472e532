package refusals_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/refusals"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newRecorder(t *testing.T, db *pgtest.DB, change ...func(*refusals.Config)) *refusals.Recorder {
	t.Helper()
	config := refusals.Config{Schema: db.Schema}
	for _, c := range change {
		c(&config)
	}
	r, err := refusals.New(db.Pool, &config)
	must(t, err)
	return r
}

// refuse has a key refused n times.
func refuse(r *refusals.Recorder, name, key string, n int) {
	limit := ratelimit.TokenBucket{Name: name, Rate: 1, Period: time.Hour}
	now := time.Now()
	for range n {
		r.Observe(context.Background(), ratelimit.Event{
			Verb: ratelimit.VerbAllow, Outcome: ratelimit.OutcomeRefused,
			Result: ratelimit.Result{Status: ratelimit.Status{Request: limit.For(key), At: now, RetryAt: now.Add(time.Minute)}},
		})
	}
}

func top(t *testing.T, db *pgtest.DB, q refusals.Query) []refusals.Key {
	t.Helper()
	keys, err := refusals.Top(t.Context(), db.Pool, db.Schema, q)
	must(t, err)
	return keys
}

// What stores of several processes refuse is there once, to the last refusal.
func TestTopOfAllProcesses(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	api := ratelimit.TokenBucket{Name: "api", Rate: 5, Period: time.Hour}
	calls := ratelimit.InFlight{Name: "calls", Limit: 1}
	var mu sync.Mutex
	want := map[string]int64{}
	var wg sync.WaitGroup
	for range 3 { // processes
		r := newRecorder(t, db)
		store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema, Observe: r.Observe})
		must(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { r.Run(ctx); close(done) }()
		wg.Go(func() {
			defer func() { cancel(); <-done }()
			for range 100 {
				key := fmt.Sprint(rand.IntN(4))
				result, err := store.Allow(t.Context(), api.For(key))
				store.Check(t.Context(), api.For(key)) // is not counted
				permit, err2 := store.Permits().Acquire(t.Context(), calls.For(key))
				if err != nil || err2 != nil {
					t.Error(err, err2)
				}
				mu.Lock()
				if !result.OK {
					want["api "+key]++
				}
				if !permit.OK {
					want["calls "+key]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	got := top(t, db, refusals.Query{Since: time.Hour, Most: 100})
	for i, k := range got {
		if want[k.Limit+" "+k.Key] != k.Times || k.Uncertain != 0 || time.Since(k.Last) > time.Minute || (k.Limit == "api") != k.RetryAt.After(k.Last) {
			t.Errorf("got %d of %s %s at %v until %v, want %d", k.Times, k.Limit, k.Key, k.Last, k.RetryAt, want[k.Limit+" "+k.Key])
		}
		if i > 0 && k.Times > got[i-1].Times {
			t.Errorf("%d after %d", k.Times, got[i-1].Times)
		}
	}
	if len(got) != len(want) || len(want) != 8 {
		t.Errorf("got %d keys, want %d", len(got), len(want))
	}
	if one := top(t, db, refusals.Query{Limit: "calls", Most: 1}); len(one) != 1 || one[0].Limit != "calls" {
		t.Errorf("got %v of one limit", one)
	}
}

// However many keys are refused, those that are refused most are there, with at least as many
// refusals as they had, and no more than is said; and the memory and the table are bounded.
func TestManyKeys(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	r := newRecorder(t, db, func(c *refusals.Config) { c.Keys, c.Rows = 50, 60 })
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 20_000 {
		refuse(r, "api", fmt.Sprintf("stranger %d", random.IntN(5000)), 1)
		if i%20 == 0 {
			refuse(r, "api", fmt.Sprintf("heavy %d", i/20%3), 3)
		}
	}
	must(t, r.Write(t.Context()))
	keys := top(t, db, refusals.Query{Most: 1000})
	for i, k := range keys[:3] {
		if !strings.HasPrefix(k.Key, "heavy") || k.Times < 999 || k.Times-k.Uncertain > 1002 {
			t.Errorf("place %d is %s with %d, of which %d uncertain; want a heavy one with 1,000", i, k.Key, k.Times, k.Uncertain)
		}
	}
	if len(keys) != 50 {
		t.Errorf("got %d keys, want 50", len(keys))
	}
	// An hour, and so many rows of the minutes before this one, are kept.
	sql := fmt.Sprintf(`INSERT INTO %s.rate_limit_refusals SELECT 'old', g::text, date_trunc('minute', now()) - g * interval '1 minute', 1000000, 0, now() FROM generate_series(1, 200) g`, db.Schema)
	must(t, errOf(db.Pool.Exec(t.Context(), sql)))
	fresh := newRecorder(t, db, func(c *refusals.Config) { c.Rows = 10 })
	must(t, fresh.Write(t.Context()))
	var left int
	if err := db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".rate_limit_refusals WHERE name = 'old'").Scan(&left); err != nil || left != 10 {
		t.Errorf("%d old rows are left, %v, want 10", left, err)
	}
}

// What could not be written is written later, and a table that is missing is named.
func TestWriteAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	r := newRecorder(t, db)
	refuse(r, "api", "k", 3)
	if err := r.Write(t.Context()); !errors.Is(err, refusals.ErrNotMigrated) {
		t.Fatalf("got %v, want %v", err, refusals.ErrNotMigrated)
	}
	if _, err := refusals.Top(t.Context(), db.Pool, db.Schema, refusals.Query{}); !errors.Is(err, refusals.ErrNotMigrated) {
		t.Errorf("got %v, want %v", err, refusals.ErrNotMigrated)
	}
	sql := strings.ReplaceAll(migrations.Refusals.UpSQL(), "TABLE rate_limit", "TABLE "+db.Schema+".rate_limit")
	must(t, errOf(db.Pool.Exec(t.Context(), strings.ReplaceAll(sql, "ON rate_limit", "ON "+db.Schema+".rate_limit"))))
	refuse(r, "api", "k", 2)
	for range 2 { // it is written once
		must(t, r.Write(t.Context()))
	}
	if keys := top(t, db, refusals.Query{}); len(keys) != 1 || keys[0].Times != 5 {
		t.Errorf("got %v, want 5 refusals", keys)
	}
}

// Close ends Run and writes what is counted, also when Run has ended before, and once.
func TestClose(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	for name, ends := range map[string]bool{"running": false, "ended": true} {
		r := newRecorder(t, db, func(c *refusals.Config) { c.Every = time.Hour })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan struct{})
		go func() {
			r.Run(ctx)
			close(ended)
		}()
		refuse(r, name, "k", 2)
		if ends {
			cancel()
			<-ended
			refuse(r, name, "k", 3)
		}
		for range 2 {
			must(t, r.Close(t.Context()))
		}
		<-ended
		if keys := top(t, db, refusals.Query{Limit: name}); len(keys) != 1 || keys[0].Times != map[bool]int64{false: 2, true: 5}[ends] {
			t.Errorf("%s: got %v", name, keys)
		}
	}
}

// Close waits for a write of Run that is under way, no longer than its context, and what that
// could not write is counted.
func TestCloseBesideAWrite(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	r := newRecorder(t, db)
	tx, err := db.Pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(t.Context())
	must(t, errOf(tx.Exec(t.Context(), "LOCK TABLE "+db.Schema+".rate_limit_refusals")))
	refuse(r, "api", "k", 3)
	ctx, cancel := context.WithCancel(t.Context())
	written := make(chan error)
	go func() { written <- r.Write(ctx) }()
	pgtest.AwaitBlocks(t, db.Pool, tx)
	over, end := context.WithCancel(t.Context())
	end()
	if err := r.Close(over); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
	closed := make(chan error)
	go func() { closed <- r.Close(t.Context()) }()
	cancel()
	if err := <-written; err == nil {
		t.Error("the write succeeded although it was cancelled")
	}
	must(t, tx.Rollback(t.Context()))
	must(t, <-closed)
	if keys := top(t, db, refusals.Query{}); len(keys) != 1 || keys[0].Times != 3 {
		t.Errorf("got %v, want 3 refusals", keys)
	}
}

// hostile is keys that want to be more than text.
var hostile = []string{
	"\x1b[31mred\x1b[0m", "<script>alert(1)</script>", "'; DROP TABLE rate_limits; --", "\u202eevil", "a\nb\tc", `{"x":1}`, "%s\\0", strings.Repeat("é", 1024), "",
}

func TestHostileKeys(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	r := newRecorder(t, db)
	for i, key := range hostile {
		refuse(r, "api", key, i+1)
	}
	must(t, r.Write(t.Context()))
	keys := top(t, db, refusals.Query{Most: 100})
	if len(keys) != len(hostile) {
		t.Fatalf("got %d keys, want %d", len(keys), len(hostile))
	}
	for i, k := range keys {
		if want := hostile[len(hostile)-1-i]; k.Key != want {
			t.Errorf("got %q, want %q", k.Key, want)
		}
	}
}

func TestBadInput(t *testing.T) {
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	for _, c := range []refusals.Config{{Keys: -1}, {Every: -1}, {Rows: -1}} {
		if _, err := refusals.New(db.Pool, &c); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%+v: got %v", c, err)
		}
	}
	if _, err := refusals.New(nil, nil); !errors.Is(err, ratelimit.ErrInvalid) {
		t.Errorf("got %v without a pool", err)
	}
	for _, q := range []refusals.Query{{Since: -1}, {Since: 2 * time.Hour}, {Most: -1}} {
		if _, err := refusals.Top(t.Context(), db.Pool, db.Schema, q); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%+v: got %v", q, err)
		}
	}
}

func TestNoTypeShowsKeys(t *testing.T) {
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	r := newRecorder(t, db)
	refuse(r, "api", leak.Key, 1)
	leak.Check(t, ".", map[string]any{
		"Config": refusals.Config{}, "Recorder": r, "Query": refusals.Query{Limit: "api"}, "Key": refusals.Key{Limit: "api", Key: leak.Key, Times: 3},
	})
	bare := newRecorder(t, pgtest.New(t))
	refuse(bare, "api", leak.Key, 1)
	leak.Errors(t, ".", map[string]leak.Provoked{"ErrNotMigrated": {Is: refusals.ErrNotMigrated, Err: bare.Write(t.Context())}})
}

func Example() {
	pool, done := pgtest.Example(migrations.Refusals.UpSQL())
	defer done()
	ctx := context.Background()
	recorder, err := refusals.New(pool, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	store := memstore.NewWithConfig(memstore.Config{Observe: recorder.Observe}) // or a pgstore.Store
	limit := ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: time.Minute, Capacity: 2}
	for range 7 {
		if _, err := store.Allow(ctx, limit.For("alice")); err != nil {
			fmt.Println(err)
			return
		}
	}
	if err := recorder.Write(ctx); err != nil { // as Run does, every few seconds
		fmt.Println(err)
		return
	}
	top, err := refusals.Top(ctx, pool, "", refusals.Query{Since: 10 * time.Minute})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, k := range top {
		fmt.Println(k.Limit, k.Key, k.Times)
	}
	// Output:
	// send_message alice 5
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
