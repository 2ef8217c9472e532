package catalog_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(4)
	pgtest.Main(m)
}

var (
	api    = ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20}
	signUp = ratelimit.FixedWindow{Name: "sign_up", Rate: 100, Period: time.Hour}
	strict = ratelimit.SlidingWindow{Name: "strict", Rate: 100, Period: time.Minute, Slots: 12}
)

// logged is what a Catalog has logged.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logged) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func newDB(tb testing.TB, opts ...pgtest.Option) *pgtest.DB {
	tb.Helper()
	return pgtest.New(tb, append(opts, pgtest.With(migrations.Catalog))...)
}

// newCatalog makes a Catalog in db, or without one in memory, whose log is of the test.
func newCatalog(tb testing.TB, db *pgtest.DB, change ...func(*catalog.Config)) (*catalog.Catalog, *logged) {
	tb.Helper()
	var l logged
	config := catalog.Config{Logger: l.logger()}
	for _, c := range change {
		c(&config)
	}
	var (
		c   *catalog.Catalog
		err error
	)
	if db == nil {
		c, err = catalog.NewInMemory(&config)
	} else {
		config.Schema = db.Schema
		c, err = catalog.New(db.Pool, &config)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return c, &l
}

// newStore makes a store of db, which the end of the test closes.
func newStore(tb testing.TB, db *pgtest.DB, config pgstore.Config) *pgstore.Store {
	tb.Helper()
	config.Schema = db.Schema
	store, err := pgstore.New(db.Pool, &config)
	must(tb, err)
	tb.Cleanup(store.Close)
	return store
}

// both runs a test in PostgreSQL and in memory. another makes a Catalog of the same database,
// which in memory is the same.
func both(t *testing.T, test func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog)) {
	t.Helper()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		c, _ := newCatalog(t, nil)
		test(t, c, func() *catalog.Catalog { return c })
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		db := newDB(t)
		c, _ := newCatalog(t, db)
		test(t, c, func() *catalog.Catalog { c, _ := newCatalog(t, db); return c })
	})
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }

// edited is must for an edit.
func edited(tb testing.TB) func(catalog.Edit, error) {
	return func(_ catalog.Edit, err error) {
		tb.Helper()
		must(tb, err)
	}
}

// wantLimit wants what holds for a key, by its Definition.
func wantLimit(tb testing.TB, c *catalog.Catalog, of ratelimit.Limit, key string, want ratelimit.Limit) {
	tb.Helper()
	r := c.ForN(of, key, 3)
	if got := r.Limit.Definition(); got != want.Definition() || r.Key != key || r.Count != 3 {
		tb.Errorf("%q: got %v for %q, want %v", key, r, r.Key, want)
	}
}

func exec(tb testing.TB, db *pgtest.DB, sql string, args ...any) {
	tb.Helper()
	must(tb, errOf(db.Pool.Exec(tb.Context(), inSchema(db, sql), args...)))
}

func inSchema(db *pgtest.DB, sql string) string {
	return strings.NewReplacer("rate_limit", db.Schema+".rate_limit").Replace(sql)
}

// An override replaces the fields that it has: first that for all keys, then that of the key.
func TestOverrides(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		ctx := t.Context()
		if err := c.Ready(); !errors.Is(err, catalog.ErrNotReady) || c.Age() != math.MaxInt64 {
			t.Errorf("before the first reading: got %v, age %v", err, c.Age())
		}
		wantLimit(t, c, api, "a", api)
		must(t, c.Publish(ctx, api, signUp, strict))
		if err := c.Ready(); err != nil || c.Age() > time.Minute {
			t.Errorf("after it: got %v, age %v", err, c.Age())
		}
		other := another()
		must(t, other.Refresh(ctx))
		steps := []struct {
			name string
			do   func() error
			of   ratelimit.Limit
			want map[string]ratelimit.Limit
		}{
			{"a rate", func() error { return errOf(c.Set(ctx, "api", "a", catalog.Override{Rate: 50})) }, api, map[string]ratelimit.Limit{
				"a": ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: 20}, "b": api, "": api,
			}},
			{"for all", func() error {
				return errOf(c.Set(ctx, "api", catalog.AllKeys, catalog.Override{Capacity: 30, MaxReserved: 5}))
			}, api, map[string]ratelimit.Limit{
				"a": ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: 30, MaxReserved: 5},
				"b": ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 30, MaxReserved: 5},
			}},
			{"the empty key", func() error {
				return errOf(c.Set(ctx, "api", "", catalog.Override{Capacity: ratelimit.None, MaxReserved: math.Inf(1)}))
			}, api, map[string]ratelimit.Limit{
				"":  ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: ratelimit.None},
				"b": ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 30, MaxReserved: 5},
			}},
			{"none of all any more", func() error { _, err := c.Unset(ctx, "api", catalog.AllKeys); return err }, api, map[string]ratelimit.Limit{
				"a": ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: 20}, "b": api,
			}},
			{"off", func() error { return errOf(c.Set(ctx, "api", "a", catalog.Override{Switch: catalog.Off})) }, api, map[string]ratelimit.Limit{"a": api}},
			{"over", func() error {
				return errOf(c.Set(ctx, "api", "a", catalog.Override{Until: time.Now().Add(-time.Second)}))
			}, api, map[string]ratelimit.Limit{"a": api}},
			{"not over", func() error {
				return errOf(c.Set(ctx, "api", "a", catalog.Override{Until: time.Now().Add(time.Hour), Switch: catalog.On}))
			}, api, map[string]ratelimit.Limit{"a": ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: 20}}},
			{"gone", func() error { _, err := c.Unset(ctx, "api", "a"); return err }, api, map[string]ratelimit.Limit{"a": api}},
			{
				"a window whose capacity is its rate", func() error {
					return errOf(c.Set(ctx, "sign_up", "a", catalog.Override{Rate: 1000, Period: 2 * time.Hour}))
				},
				signUp,
				map[string]ratelimit.Limit{"a": ratelimit.FixedWindow{Name: "sign_up", Rate: 1000, Period: 2 * time.Hour}, "b": signUp},
			},
			{
				"a sliding window", func() error { return errOf(c.Set(ctx, "strict", "a", catalog.Override{Rate: 5, Slots: 60})) },
				strict,
				map[string]ratelimit.Limit{"a": ratelimit.SlidingWindow{Name: "strict", Rate: 5, Period: time.Minute, Slots: 60}},
			},
			{
				"another version of the program", func() error { return errOf(c.Set(ctx, "api", catalog.AllKeys, catalog.Override{Capacity: 30})) },
				ratelimit.TokenBucket{Name: "api", Rate: 7, Period: time.Second},
				map[string]ratelimit.Limit{
					"z": ratelimit.TokenBucket{Name: "api", Rate: 7, Period: time.Second, Capacity: 30},
				},
			},
		}
		for _, step := range steps {
			if err := step.do(); err != nil {
				t.Fatalf("%s: %v", step.name, err)
			}
			must(t, other.Refresh(ctx))
			for key, want := range step.want {
				t.Run(step.name, func(t *testing.T) {
					wantLimit(t, c, step.of, key, want)
					wantLimit(t, c, step.of, key, want) // remembered
					wantLimit(t, other, step.of, key, want)
				})
			}
			if t.Failed() {
				return
			}
		}
		if got := c.Definitions(); len(got) != 3 || got[0] != api.Definition() || got[2] != strict.Definition() {
			t.Errorf("definitions: got %v", got)
		}
		if got := c.Overrides("sign_up"); len(got) != 1 || got[0].Key != "a" || got[0].Rate != 1000 || time.Since(got[0].UpdatedAt) > time.Minute {
			t.Errorf("overrides: got %+v", got)
		}
		if n, err := c.Forget(ctx, "api"); err != nil || n != 3 {
			t.Errorf("forget: got %d, %v", n, err)
		}
		wantLimit(t, c, api, "z", api)
		must(t, other.Refresh(ctx))
		wantLimit(t, other, api, "z", api)
	})
}

// Until is judged by the database's clock, without another reading.
func TestUntilEndsByItself(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, _ func() *catalog.Catalog) {
		must(t, c.Publish(t.Context(), api))
		asked := time.Now()
		until := asked.Add(300 * time.Millisecond)
		edited(t)(c.Set(t.Context(), "api", "a", catalog.Override{Rate: 50, Until: until}))
		// The database's clock is read between the question and its answer, and is taken for that
		// of the question: so the override ends early by as much as both take, on a busy machine.
		early := time.Since(asked) + 50*time.Millisecond
		for {
			before := time.Now()
			raised := c.For(api, "a").Limit.Definition().Rate == 50
			switch after := time.Now(); {
			case raised && before.After(until.Add(50*time.Millisecond)):
				t.Fatalf("still raised %v after its end", before.Sub(until))
			case !raised && after.Add(early).Before(until):
				t.Fatalf("over %v before its end, of which %v may be", until.Sub(after), early)
			case !raised:
				return
			}
		}
	})
}

// Who changed what is there, and what was rolled back is not.
func TestHistory(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, _ func() *catalog.Catalog) {
		ctx := t.Context()
		must(t, c.Publish(ctx, api))
		must(t, c.Publish(ctx, api)) // changes nothing
		edited(t)(c.Set(ctx, "api", "a", catalog.Override{Rate: 50, Note: "a friend"}))
		edited(t)(c.Set(ctx, "api", "a", catalog.Override{Rate: 50, Note: "a friend"}))
		edited(t)(c.Set(ctx, "api", "a", catalog.Override{Rate: 60}))
		if removed, err := c.Unset(ctx, "api", "a"); err != nil || removed.Was == nil {
			t.Errorf("unset: got %+v, %v", removed, err)
		}
		if removed, err := c.Unset(ctx, "api", "a"); err != nil || removed.Was != nil {
			t.Errorf("unset twice: got %+v, %v", removed, err)
		}
		changes, err := c.History(ctx, "api", 0)
		must(t, err)
		var got []string
		for _, change := range slices.Backward(changes) {
			got = append(got, fmt.Sprintf("%q %t %t", change.Key, change.Was != nil, change.Became != nil))
			if time.Since(change.At).Abs() > time.Minute || change.Role == "" || change.Who != "" {
				t.Errorf("got %+v", change)
			}
		}
		want := []string{fmt.Sprintf("%q false true", catalog.AllKeys), `"a" false true`, `"a" true true`, `"a" true false`}
		if !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		if was := string(changes[1].Was); !strings.Contains(was, `"note"`) || !strings.Contains(was, "a friend") || !strings.Contains(was, "50") {
			t.Errorf("what was: got %s", was)
		}
		edited(t)(c.Set(ctx, "api", "b", catalog.Override{Rate: 70}))
		of, err := c.KeyHistory(ctx, "api", "b", 0)
		must(t, err)
		if len(of) != 2 || of[0].Key != "b" || of[1].Key != catalog.AllKeys {
			t.Errorf("of one key: got %+v, want its own change and that for all keys", of)
		}
		if of, err := c.KeyHistory(ctx, "other", "b", 0); err != nil || len(of) != 0 {
			t.Errorf("of another limit: got %+v, %v", of, err)
		}
		must(t, errOf(c.Unset(ctx, "api", "b")))
		if changes, err = c.History(ctx, "", 2); err != nil || len(changes) != 2 || changes[0].Became != nil {
			t.Errorf("the newest two: got %+v, %v", changes, err)
		}
		if n, err := c.PruneHistory(ctx, time.Hour); err != nil || n != 0 {
			t.Errorf("prune: got %d, %v", n, err)
		}
		if n, err := c.PruneHistory(ctx, 0); err != nil || n != 5 {
			t.Errorf("prune: got %d, %v, want all but the newest", n, err)
		}
		edited(t)(c.Set(ctx, "api", "b", catalog.Override{Rate: 70}))
		wantLimit(t, c, api, "b", ratelimit.TokenBucket{Name: "api", Rate: 70, Period: time.Minute, Capacity: 20})
	})
}

func TestNew(t *testing.T) {
	t.Parallel()
	for field, make := range map[string]func() (*catalog.Catalog, error){
		"Pool":    func() (*catalog.Catalog, error) { return catalog.New(nil, nil) },
		"Every":   func() (*catalog.Catalog, error) { return catalog.NewInMemory(&catalog.Config{Every: -1}) },
		"Timeout": func() (*catalog.Catalog, error) { return catalog.NewInMemory(&catalog.Config{Timeout: -1}) },
	} {
		var bad *ratelimit.FieldError
		if c, err := make(); c != nil || !errors.As(err, &bad) || bad.Field != field {
			t.Errorf("%s: got %v, %v", field, c, err)
		}
	}
	for name, c := range map[string]*catalog.Catalog{"nil": nil, "zero": {}} {
		_, err := c.ForTx(t.Context(), nil, api, "a", 1)
		_, err2 := c.Unset(t.Context(), "api", "a")
		_, err3 := c.History(t.Context(), "", 0)
		for _, err := range []error{err, err2, err3, c.Refresh(t.Context()), c.Publish(t.Context(), api), errOf(c.Set(t.Context(), "api", "a", catalog.Override{})), c.Ready()} {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s: got %v", name, err)
			}
		}
		c.Run(t.Context())
		wantLimit(t, c, api, "a", api)
	}
	c, _ := newCatalog(t, nil)
	if r := c.For(nil, "a"); r.Validate() == nil {
		t.Errorf("no limit: got %v", r)
	}
}

// A limit that is a pointer may change behind it.
func TestPointers(t *testing.T) {
	t.Parallel()
	c, _ := newCatalog(t, nil)
	must(t, c.Publish(t.Context(), api, signUp, strict))
	edited(t)(c.Set(t.Context(), "api", "a", catalog.Override{Rate: 50}))
	limit := api
	for capacity := 20.0; capacity < 23; capacity++ {
		limit.Capacity = capacity
		wantLimit(t, c, &limit, "a", ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: capacity})
	}
	wantLimit(t, c, &signUp, "a", signUp)
	if r := c.For((*ratelimit.TokenBucket)(nil), "a"); r.Validate() == nil {
		t.Errorf("a nil pointer: got %v", r)
	}
}

// What is set in a transaction is seen there, and elsewhere once that is committed.
func TestTransactions(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	c, _ := newCatalog(t, db)
	must(t, c.Publish(ctx, api))
	raised := ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: 20}
	for _, commit := range []bool{false, true} {
		tx, err := db.Pool.Begin(ctx)
		must(t, err)
		edited(t)(c.SetTx(ctx, tx, "api", "a", catalog.Override{Rate: 50}))
		must(t, c.PublishTx(ctx, tx, signUp))
		edited(t)(c.SetTx(ctx, tx, "sign_up", catalog.AllKeys, catalog.Override{Rate: 5, Mode: ratelimit.ModeRefuse}))
		must(t, c.PublishInFlightTx(ctx, tx, calls))
		edited(t)(c.SetTx(ctx, tx, "calls", "a", catalog.Override{AtOnce: 3}))
		if r, err := c.ForTx(ctx, tx, api, "a", 2); err != nil || r.Limit.Definition() != raised.Definition() || r.Count != 2 {
			t.Errorf("in the transaction: got %v, %v", r, err)
		}
		if r, err := c.ForTx(ctx, tx, signUp, "a", 1); err != nil || r.Mode != ratelimit.ModeRefuse {
			t.Errorf("in the transaction: got mode %v, %v", r.Mode, err)
		}
		if got, err := c.InFlightTx(ctx, tx, calls, "a"); err != nil || got.Limit != 3 {
			t.Errorf("in the transaction: got %v, %v", got, err)
		}
		must(t, c.Refresh(ctx))
		wantLimit(t, c, api, "a", api)
		wantInFlight(t, c, "a", 10, time.Minute)
		if commit {
			must(t, tx.Commit(ctx))
		} else {
			must(t, tx.Rollback(ctx))
		}
	}
	wantLimit(t, c, api, "a", api)
	must(t, c.Refresh(ctx))
	wantLimit(t, c, api, "a", raised)
	wantLimit(t, c, signUp, "a", ratelimit.FixedWindow{Name: "sign_up", Rate: 5, Period: time.Hour})
	wantInFlight(t, c, "a", 3, time.Minute)
	tx, err := db.Pool.Begin(ctx)
	must(t, err)
	defer tx.Rollback(ctx)
	removed, err := c.UnsetTx(ctx, tx, "api", "a")
	removedAll, err2 := c.UnsetTx(ctx, tx, "sign_up", catalog.AllKeys)
	if err != nil || err2 != nil || removed.Was == nil || removedAll.Was == nil {
		t.Errorf("unset: got %+v, %v and %+v, %v", removed, err, removedAll, err2)
	}
	if r, err := c.ForTx(ctx, tx, api, "a", 1); err != nil || r.Limit.Definition() != api.Definition() {
		t.Errorf("in the transaction: got %v, %v", r, err)
	}
	for _, tx := range []pgx.Tx{nil, (*pgxTx)(nil)} {
		if _, err := c.ForTx(ctx, tx, api, "a", 1); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("no transaction: got %v", err)
		}
		if _, err := c.UnsetTx(ctx, tx, "api", "a"); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("no transaction: got %v", err)
		}
	}
}

type pgxTx struct{ pgx.Tx }

// Changes are found whoever makes them, and in the order of their commits: one that began
// before what was read and commits after it is not passed over.
func TestChangesAreFound(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	c, _ := newCatalog(t, db)
	must(t, c.Publish(ctx, api, signUp))
	early, err := db.Pool.Begin(ctx)
	must(t, err)
	defer early.Rollback(ctx)
	must(t, errOf(early.Exec(ctx, inSchema(db, "INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('api', 'early', 1)"))))
	late := make(chan error, 1)
	go func() {
		_, err := db.Pool.Exec(ctx, inSchema(db, "INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('api', 'late', 2)"))
		late <- err
	}()
	// It waits for its turn; or, which must not be, has had it.
	for waits := false; !waits && len(late) == 0; {
		must(t, db.Pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'advisory' AND strpos(query, $1) > 0)`,
			db.Schema+".rate_limit_definitions").Scan(&waits))
	}
	must(t, c.Refresh(ctx))
	must(t, early.Commit(ctx))
	must(t, <-late)
	must(t, c.Refresh(ctx))
	rate := func(key string, want float64) {
		t.Helper()
		if got := c.For(api, key).Limit.Definition().Rate; got != want {
			t.Errorf("%s: got a rate of %g, want %g", key, got, want)
		}
	}
	rate("early", 1)
	rate("late", 2)
	for _, step := range []struct {
		sql         string
		early, late float64
	}{
		{"UPDATE rate_limit_definitions SET rate = 3 WHERE key = 'early'", 3, 2},
		{"UPDATE rate_limit_definitions SET note = 'the same' WHERE key = 'early'", 3, 2},
		{"UPDATE rate_limit_definitions SET key = CASE key WHEN 'late' THEN 'later' ELSE key END WHERE key IS NOT NULL", 3, 10},
		{"DELETE FROM rate_limit_definitions WHERE key = 'early'", 10, 10},
		{"UPDATE rate_limit_definitions SET key = 'late'  WHERE key = 'later'", 10, 2},
		{"UPDATE rate_limit_definitions SET name = 'sign_up' WHERE key = 'late'", 10, 10},
		{"INSERT INTO rate_limit_definitions (name, rate) VALUES ('api', 4)", 4, 4},
		{"INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('api', 'late', 5)", 4, 5},
		{"DELETE FROM rate_limit_history", 4, 5},
		{"INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('api', 'early', 6)", 6, 5},
		{"TRUNCATE rate_limit_definitions", 10, 10},
		{"TRUNCATE rate_limit_history", 10, 10},
	} {
		exec(t, db, step.sql)
		must(t, c.Refresh(ctx))
		rate("early", step.early)
		rate("late", step.late)
		if t.Failed() {
			t.Fatal(step.sql)
		}
	}
	if got := c.Definitions(); len(got) != 0 {
		t.Errorf("an empty catalog is heeded: got %v", got)
	}
}

// After a fail-over that lost changes, versions are given out again.
func TestVersionsThatAreGivenOutAgain(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	c, _ := newCatalog(t, db)
	must(t, c.Publish(ctx, api))
	edited(t)(c.Set(ctx, "api", "lost", catalog.Override{Rate: 1}))
	exec(t, db, "ALTER TABLE rate_limit_definitions DISABLE TRIGGER ALL")
	exec(t, db, "DELETE FROM rate_limit_definitions WHERE key = 'lost'")
	exec(t, db, "INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('api', 'kept', 2)")
	exec(t, db, "UPDATE rate_limit_history SET key = 'kept', at = at + interval '1 second' WHERE key = 'lost'")
	must(t, c.Refresh(ctx))
	wantLimit(t, c, api, "lost", api)
	wantLimit(t, c, api, "kept", ratelimit.TokenBucket{Name: "api", Rate: 2, Period: time.Minute, Capacity: 20})
}

// Two versions of a program publish in turn: the last one wins, each goes by its own
// definition with the overrides, and a kind that changes is told.
func TestVersionsOfAProgram(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	old, oldLog := newCatalog(t, db)
	young, youngLog := newCatalog(t, db)
	newer := api
	newer.Rate = 30
	must(t, old.Publish(ctx, api))
	edited(t)(old.Set(ctx, "api", "a", catalog.Override{Capacity: 40}))
	for range 3 {
		must(t, young.Publish(ctx, newer))
		must(t, old.Publish(ctx, api))
	}
	must(t, young.Refresh(ctx))
	if got := young.Definitions(); len(got) != 1 || got[0] != api.Definition() {
		t.Errorf("got %v, want the last one that was published", got)
	}
	wantLimit(t, old, api, "a", ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 40})
	wantLimit(t, young, newer, "a", ratelimit.TokenBucket{Name: "api", Rate: 30, Period: time.Minute, Capacity: 40})
	if text := oldLog.String() + youngLog.String(); text != "" {
		t.Errorf("logged %s", text)
	}
	other := ratelimit.SlidingWindow{Name: "api", Rate: 10, Period: time.Minute}
	must(t, young.Publish(ctx, other))
	if text := youngLog.String(); !strings.Contains(text, "of another kind") || !strings.Contains(text, `was="token bucket"`) {
		t.Errorf("logged %s", text)
	}
	if faults := young.Ignored(); len(faults) != 1 || !strings.Contains(faults[0].Error(), "Capacity") || !strings.Contains(youngLog.String(), "not used") {
		t.Errorf("an override that does not fit any more: got %v, logged %s", faults, youngLog)
	}
	wantLimit(t, young, other, "a", other)
	if changes, err := old.History(ctx, "api", 0); err != nil || len(changes) != 9 {
		t.Errorf("got %d changes, %v, want 9", len(changes), err)
	}
}

// A row that somebody has written by hand is refused by the database if Validate refuses it;
// what only the limit tells is ignored, and told.
func TestRowsByHand(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	c, l := newCatalog(t, db)
	must(t, c.Publish(ctx, api, signUp, strict))
	must(t, c.PublishInFlight(ctx, calls))
	const byCalendar = "(name, kind, rate, period, max_reserved, shards, zone, anchor, every, time) VALUES ('l', 'fixed window', 5, '366 days', 1, 1, 'UTC', '2024-01-01', "
	exec(t, db, "INSERT INTO rate_limit_definitions "+strings.ReplaceAll(byCalendar, "'l'", "'by hand'")+"'3 months', '09:00')")
	for words, sql := range map[string]string{
		`constraint "rate must`:                   "(name, key, rate) VALUES ('api', 'a', -1)",
		`constraint "rate  must`:                  "(name, key, rate) VALUES ('api', 'a', 'NaN')",
		`constraint "period must`:                 "(name, key, period) VALUES ('api', 'a', '1 month')",
		`constraint "period  must`:                "(name, key, period) VALUES ('api', 'a', '-1 s')",
		`constraint "period   must`:               "(name, key, period) VALUES ('api', 'a', '40000 days')",
		`constraint "capacity must`:               "(name, key, capacity) VALUES ('api', 'a', 'Infinity')",
		`constraint "max_reserved must`:           "(name, key, max_reserved) VALUES ('api', 'a', -1)",
		`constraint "slots must`:                  "(name, key, slots) VALUES ('strict', 'a', 0)",
		`constraint "until must`:                  "(name, key, rate, until) VALUES ('api', 'a', 5, 'infinity')",
		`constraint "note must`:                   "(name, key, rate, note) VALUES ('api', 'a', 5, repeat('x', 2049))",
		`constraint "an override must`:            "(name, key, note) VALUES ('api', 'a', 'for nothing')",
		`constraint "shards and start are for`:    "(name, key, rate, shards) VALUES ('api', 'a', 5, 8)",
		`constraint "capacity must fill`:          "(name, key, rate, period, capacity) VALUES ('api', 'a', 1, '1 day', 1e6)",
		`constraint "kind must`:                   "(name, kind, rate, period, max_reserved, shards) VALUES ('l', 'leaky bucket', 1, '1 s', 1, 1)",
		`constraint "a program's row must`:        "(name, kind, rate, max_reserved, shards) VALUES ('l', 'token bucket', 1, 1, 1)",
		`constraint "a rate below 1 needs`:        "(name, kind, rate, period, max_reserved, shards) VALUES ('l', 'token bucket', 0.5, '1 s', 1, 1)",
		`constraint "shards must have`:            "(name, kind, rate, period, max_reserved, shards) VALUES ('l', 'token bucket', 5, '1 s', 1, 8)",
		`constraint "slots are those`:             "(name, kind, rate, period, max_reserved, shards, slots) VALUES ('l', 'token bucket', 5, '1 s', 1, 1, 8)",
		`constraint "start is not for`:            "(name, kind, rate, period, max_reserved, shards, start) VALUES ('l', 'token bucket', 5, '1 s', 1, 1, now())",
		`constraint "name must`:                   "(name, kind, rate, period, max_reserved, shards) VALUES ('', 'token bucket', 5, '1 s', 1, 1)",
		`constraint "every must be day`:           byCalendar + "'months', NULL)",
		`constraint "every  must be day`:          byCalendar + "'0 months', NULL)",
		`constraint "every must be at most`:       byCalendar + "'1197 months', NULL)",
		`constraint "every must be at  most`:      byCalendar + "'36501 days', NULL)",
		`constraint "time must be`:                byCalendar + "'month', '9:00')",
		`constraint "time must  be`:               byCalendar + "'month', '24:00')",
		`constraint "time is that of every"`:      "(name, kind, rate, period, max_reserved, shards, time) VALUES ('l', 'fixed window', 5, '1 s', 1, 1, '09:00')",
		`no program has published a limit "apu"`:  "(name, key, rate) VALUES ('apu', 'a', 5)",
		`whose capacity is its rate`:              "(name, key, capacity) VALUES ('strict', 'a', 5)",
		`of which none is in mode shadow`:         "(name, mode) VALUES ('calls', 'shadow')",
		`is a token bucket, which has no slots`:   "(name, key, slots) VALUES ('api', 'a', 5)",
		`constraint "rate_limit_definitions_all"`: "(name, rate) VALUES ('api', 1), ('api', 2)",
		`constraint "rate_limit_definitions_key"`: "(name, key, rate) VALUES ('api', 'a', 1), ('api', 'a', 2)",
	} {
		_, err := db.Pool.Exec(ctx, inSchema(db, "INSERT INTO rate_limit_definitions ")+sql)
		if err == nil || !strings.Contains(err.Error(), strings.Join(strings.Fields(words), " ")) {
			t.Errorf("%s: got %v, want %s", sql, err, words)
		}
	}
	exec(t, db, "INSERT INTO rate_limit_definitions (name, key, rate) VALUES ('sign_up', 'a', 0.5), ('sign_up', 'b', 5)")
	must(t, c.Refresh(ctx))
	wantLimit(t, c, signUp, "a", signUp)
	wantLimit(t, c, signUp, "b", ratelimit.FixedWindow{Name: "sign_up", Rate: 5, Period: time.Hour})
	if faults := c.Ignored(); len(faults) != 1 || !errors.Is(faults[0], ratelimit.ErrInvalid) || !strings.Contains(faults[0].Error(), "Rate 0.5") {
		t.Errorf("got %v", faults)
	}
	if text := l.String(); strings.Count(text, "Rate 0.5") != 1 {
		t.Errorf("logged %s", text)
	}
	exec(t, db, "ALTER TABLE rate_limit_definitions DROP CONSTRAINT \"kind must be a kind of limit\"")
	exec(t, db, "UPDATE rate_limit_definitions SET kind = 'leaky bucket' WHERE name = 'sign_up' AND kind IS NOT NULL")
	must(t, c.Refresh(ctx))
	if faults := c.Ignored(); len(faults) != 1 || !strings.Contains(faults[0].Error(), "leaky bucket") {
		t.Errorf("a program's row that cannot be: got %v", faults)
	}
	wantLimit(t, c, signUp, "b", ratelimit.FixedWindow{Name: "sign_up", Rate: 5, Period: time.Hour})
	must(t, c.Publish(ctx, signUp))
	if faults := c.Ignored(); len(faults) != 1 || !strings.Contains(faults[0].Error(), "Rate 0.5") {
		t.Errorf("published again: got %v", faults)
	}
}

// The definitions that Publish writes are read as they were written.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 3, 1, 12, 0, 0, 123_456_789, time.FixedZone("", 3600))
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "a", Rate: 0.1, Period: 1500 * time.Microsecond, Capacity: 3, MaxReserved: ratelimit.None},
		ratelimit.TokenBucket{Name: "b", Rate: 10, Period: 100 * 365 * 24 * time.Hour, Capacity: ratelimit.None, MaxReserved: 1e12},
		ratelimit.TokenBucket{Name: "b2", Rate: 0.5, Period: time.Hour, Capacity: 0.5},
		ratelimit.FixedWindow{Name: "c", Rate: 10, Period: 24 * time.Hour, Capacity: 100, Shards: 8, Start: start},
		ratelimit.FixedWindow{Name: "c2", Rate: 10, Every: ratelimit.Month, Zone: "Europe/Berlin", Anchor: ratelimit.Date{Year: 2026, Month: 1, Day: 31}},
		ratelimit.FixedWindow{Name: "c3", Rate: 10, Every: ratelimit.Year, Capacity: 20, Shards: 2},
		ratelimit.FixedWindow{Name: "c4", Rate: 10, Every: 5 * ratelimit.Day, Time: 12 * time.Hour},
		ratelimit.FixedWindow{Name: "c5", Rate: 10, Every: 3 * ratelimit.Month, Zone: "America/New_York", Time: 450 * time.Minute, Anchor: ratelimit.Date{Year: 2026, Month: time.April, Day: 1}},
		ratelimit.SlidingWindow{Name: "d", Rate: 10, Period: time.Minute, Slots: 1000, Start: start, MaxReserved: 5},
		ratelimit.SlidingWindow{Name: "e'\\\u00e9", Rate: 10, Period: time.Minute},
	}
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		must(t, c.Publish(t.Context(), limits...))
		before, err := c.History(t.Context(), "", 0)
		must(t, err)
		other := another()
		must(t, other.Publish(t.Context(), limits...))
		after, err := other.History(t.Context(), "", 0)
		if err != nil || len(after) != len(limits) || len(before) != len(after) {
			t.Errorf("published twice: got %d and %d changes, %v", len(before), len(after), err)
		}
		for i, got := range other.Definitions() {
			want := limits[i].Definition()
			want.Start, got.Start = want.Start.Truncate(time.Microsecond), got.Start.Truncate(time.Microsecond)
			if got != want {
				t.Errorf("got %v, want %v", got, want)
			}
		}
		edited(t)(other.Set(t.Context(), "c5", "k", catalog.Override{Rate: 1_000_000}))
		if got := other.For(limits[7], "k").Limit.Definition(); got.Rate != 1_000_000 || got.Every != 3*ratelimit.Month || got.Time != 450*time.Minute {
			t.Errorf("overridden: got %v", got)
		}
		changes, err := other.History(t.Context(), "c5", 0)
		if err != nil || len(changes) != 2 || !strings.Contains(string(changes[1].Became), `"3 months"`) || !strings.Contains(string(changes[1].Became), `"07:30"`) {
			t.Errorf("the history has %+v, %v", changes, err)
		}
	})
}

// Prune goes by everything that the catalog knows, also what is off, over, or another's.
func TestPrune(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, another func() *catalog.Catalog) {
		ctx := t.Context()
		must(t, c.Publish(ctx, api, strict))
		edited(t)(c.Set(ctx, "api", "a", catalog.Override{Rate: 100, Capacity: 1000, Switch: catalog.Off}))
		edited(t)(c.Set(ctx, "api", "b", catalog.Override{Period: time.Hour, Until: time.Now().Add(-time.Hour)}))
		edited(t)(c.Set(ctx, "api", catalog.AllKeys, catalog.Override{MaxReserved: 3}))
		var got pruned
		if n, err := another().Prune(ctx, &got, prunedPermits{&got}); err != nil || n != 7 {
			t.Errorf("got %d, %v", n, err)
		}
		want := pruned{
			{Limit: api},
			{Limit: strict},
			{Limit: ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20, MaxReserved: 3}},
			{Limit: ratelimit.TokenBucket{Name: "api", Rate: 100, Period: time.Minute, Capacity: 1000}, Key: "a", Overridden: true},
			{Limit: ratelimit.TokenBucket{Name: "api", Rate: 100, Period: time.Minute, Capacity: 1000, MaxReserved: 3}, Key: "a", Overridden: true},
			{Limit: ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Hour, Capacity: 20}, Key: "b", Overridden: true},
			{Limit: ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Hour, Capacity: 20, MaxReserved: 3}, Key: "b", Overridden: true},
		}
		same := func(a, b ratelimit.Request) bool {
			return a.Limit.Definition() == b.Limit.Definition() && a.Key == b.Key && a.Overridden == b.Overridden
		}
		for _, w := range want {
			if !slices.ContainsFunc(got, func(r ratelimit.Request) bool { return same(r, w) }) {
				t.Errorf("did not prune by %v of %q, but by %v", w.Limit, w.Key, got)
			}
		}
		if len(got) != len(want) {
			t.Errorf("pruned by %d definitions, want %d: %v", len(got), len(want), got)
		}
		empty, _ := newCatalog(t, nil)
		if n, err := empty.Prune(ctx, &got, prunedPermits{&got}); n != 0 || err != nil {
			t.Errorf("an empty catalog: got %d, %v", n, err)
		}
	})
}

// pruned is what a store was told to prune by.
type pruned []ratelimit.Request

func (p *pruned) PruneOverridden(_ context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (int64, error) {
	for _, l := range limits {
		*p = append(*p, ratelimit.Request{Limit: l})
	}
	*p = append(*p, overrides...)
	return 7, nil
}

// prunedPermits is pruned for limits of how many at once.
type prunedPermits struct{ *pruned }

func (p prunedPermits) Prune(_ context.Context, limits ...ratelimit.InFlight) (int64, error) {
	for _, l := range limits {
		*p.pruned = append(*p.pruned, ratelimit.Request{Limit: ratelimit.TokenBucket{Name: l.Name}})
	}
	return 11, nil
}

// The history has who made a change, as the program says, beside the role: of every edit, in a
// transaction of its own or of the caller's, and in SQL.
func TestWho(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, c *catalog.Catalog, _ func() *catalog.Catalog) {
		as := func(who string) context.Context { return catalog.WithWho(t.Context(), who) }
		must(t, c.Publish(as("deploy"), api))
		must(t, c.PublishInFlight(as("deploy"), ratelimit.InFlight{Name: "exports", Limit: 3}))
		edited(t)(c.Set(as("ann"), "api", "a", catalog.Override{Rate: 50}))
		edited(t)(c.Set(t.Context(), "api", "a", catalog.Override{Rate: 60}))
		preview, err := c.Preview(t.Context(), "api", "a", &catalog.Override{Rate: 70})
		must(t, err)
		must(t, c.Apply(as("bob"), &preview))
		edited(t)(c.Unset(as("ann \"the boss\" 'o"), "api", "a"))
		must(t, errOf(c.Forget(as("eve"), "api")))
		changes, err := c.History(t.Context(), "", 0)
		must(t, err)
		var got []string
		for _, change := range slices.Backward(changes) {
			got = append(got, change.Who)
			if change.Role == "" {
				t.Errorf("%+v has no role", change)
			}
		}
		if want := []string{"deploy", "deploy", "ann", "", "bob", "ann \"the boss\" 'o", "eve"}; !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		for _, who := range []string{strings.Repeat("x", 256), "\xff", "a\x00"} {
			if err := c.Publish(as(who), api); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "Who") {
				t.Errorf("%q: got %v, want Who to be invalid", who, err)
			}
		}
		if after, err := c.History(t.Context(), "", 0); err != nil || len(after) != len(changes) {
			t.Errorf("got %v, %v: an invalid name changed something", after, err)
		}
	})
}

func TestWhoInTransactions(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	c, _ := newCatalog(t, db)
	must(t, c.Publish(t.Context(), api))
	must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		return errOf(c.SetTx(catalog.WithWho(t.Context(), "ann"), tx, "api", "a", catalog.Override{Rate: 50}))
	}))
	exec(t, db, "BEGIN; SET LOCAL ratelimit.who = 'bob'; UPDATE rate_limit_definitions SET rate = 60 WHERE key = 'a'; COMMIT")
	exec(t, db, "UPDATE rate_limit_definitions SET rate = 70 WHERE key = 'a'") // on a connection that has had the setting
	changes, err := c.History(t.Context(), "api", 3)
	must(t, err)
	if len(changes) != 3 || changes[2].Who != "ann" || changes[1].Who != "bob" || changes[0].Who != "" || changes[0].Role == "" {
		t.Errorf("got %+v, want ann, bob and nobody", changes)
	}
}
