package catalog_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// behind makes a database whose pool goes through a relay.
func behind(t *testing.T) (*pgtest.DB, *relay.Relay) {
	t.Helper()
	direct := newDB(t)
	config, err := pgxpool.ParseConfig(direct.URL)
	must(t, err)
	r, err := relay.New(pgconn.NetworkAddress(config.ConnConfig.Host, config.ConnConfig.Port))
	must(t, err)
	config.ConnConfig.Host, config.ConnConfig.Port = "127.0.0.1", uint16(r.Address().Port)
	config.ConnConfig.Fallbacks = nil
	config.MaxConns = 10 // pgx keeps one that a time-out broke for up to 15 seconds
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	t.Cleanup(r.Close) // before, or the pool would wait for connections that are silent
	through := *direct
	through.Pool = pool
	return &through, r
}

// A database that is silent at the start leaves the catalog not ready, and one that is later
// leaves it with what it has, and tells.
func TestSilence(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db, wire := behind(t)
	ctx := t.Context()
	const timeout = time.Second // for what is to succeed, too
	c, l := newCatalog(t, db, func(config *catalog.Config) { config.Timeout = timeout })
	silent := func() { wire.Interfere(nil, func(int, []byte) relay.Fate { return relay.Silence }) }
	heard := func() { wire.Interfere(nil, nil) }

	silent()
	if err := c.Publish(ctx, api); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("publish: got %v", err)
	}
	if err := c.Refresh(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("refresh: got %v", err)
	}
	if err := c.Ready(); !errors.Is(err, catalog.ErrNotReady) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ready: got %v", err)
	}
	heard()
	for c.Publish(ctx, api) != nil && ctx.Err() == nil { // while connections are made
	}
	edited(t)(c.Set(ctx, "api", "a", catalog.Override{Rate: 50}))
	must(t, c.Ready())

	silent()
	raised := ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: 20}
	age := c.Age()
	for range 2 {
		if err := c.Refresh(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("refresh: got %v", err)
		}
		if older := c.Age(); older < age+timeout {
			t.Errorf("got age %v after %v", older, age)
		}
		age = c.Age()
		wantLimit(t, c, api, "a", raised)
		must(t, c.Ready())
	}
	heard()
	for c.Refresh(ctx) != nil && ctx.Err() == nil {
	}
	if c.Age() >= age {
		t.Errorf("got age %v", c.Age())
	}
	text := l.String()
	if failed, back := strings.Count(text, "could not be read"), strings.Count(text, "is read again"); failed != 2 || back != 2 {
		t.Errorf("told %d times that it fails, and %d that it is back, want 2 each:\n%s", failed, back, text)
	}
}

func TestNotMigrated(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	c, _ := newCatalog(t, db)
	for _, err := range []error{c.Refresh(t.Context()), c.Publish(t.Context(), api), c.Ready()} {
		var pgErr *pgconn.PgError
		if !errors.Is(err, catalog.ErrNotMigrated) || !errors.As(err, &pgErr) {
			t.Errorf("got %v", err)
		}
	}
}

// Run reads at once and then now and again, and ends with its context.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newCatalog(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { c.Run(ctx); close(done) }()
		synctest.Wait()
		must(t, c.Ready())
		oldest := time.Duration(0)
		for range 200 {
			time.Sleep(100 * time.Millisecond)
			oldest = max(oldest, c.Age())
		}
		if oldest < 4*time.Second || oldest > 5500*time.Millisecond {
			t.Errorf("got an age of up to %v, want some 5 seconds", oldest)
		}
		cancel()
		<-done
	})
}

// When nothing has changed, a look is one statement, which waits for nobody who writes, and
// writes and locks nothing.
func TestNothingChanged(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	ctx := t.Context()
	owner, _ := newCatalog(t, db)
	must(t, owner.Publish(ctx, api))
	var sent traced.Statements
	config := db.Pool.Config()
	config.ConnConfig.Tracer = &sent
	config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	pool, err := pgxpool.NewWithConfig(ctx, config)
	must(t, err)
	defer pool.Close()
	reading := *db
	reading.Pool = pool
	c, _ := newCatalog(t, &reading)
	must(t, c.Refresh(ctx))
	tx, err := db.Pool.Begin(ctx)
	must(t, err)
	defer tx.Rollback(ctx)
	must(t, errOf(tx.Exec(ctx, inSchema(db, "LOCK TABLE rate_limit_definitions, rate_limit_history IN EXCLUSIVE MODE")))) // which goes with plain reading only
	sent.Reset()
	for range 50 {
		must(t, c.Refresh(ctx))
	}
	if n := sent.Sends(); n != 50 {
		t.Errorf("50 looks were %d statements", n)
	}
}

// A role that may only read can use the catalog, one that publishes needs INSERT and UPDATE,
// and one that edits DELETE besides. None needs a right to write the history.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	owner, _ := newCatalog(t, db)
	must(t, owner.Publish(t.Context(), api))
	edited(t)(owner.Set(t.Context(), "api", "a", catalog.Override{Rate: 50}))
	verbs := []struct {
		name string
		may  string // who
		do   func(ctx context.Context, c *catalog.Catalog) error
	}{
		{"Refresh", "reader publisher editor", func(ctx context.Context, c *catalog.Catalog) error { return c.Refresh(ctx) }},
		{"Publish what is there", "reader publisher editor", func(ctx context.Context, c *catalog.Catalog) error { return c.Publish(ctx, api) }},
		{"History", "reader publisher editor", func(ctx context.Context, c *catalog.Catalog) error { _, err := c.History(ctx, "", 5); return err }},
		{"Publish", "publisher editor", func(ctx context.Context, c *catalog.Catalog) error { return c.Publish(ctx, signUp, strict) }},
		{"Set", "publisher editor", func(ctx context.Context, c *catalog.Catalog) error {
			return errOf(c.Set(ctx, "api", "b", catalog.Override{Rate: 60, Note: time.Now().String()}))
		}},
		{"Unset", "editor", func(ctx context.Context, c *catalog.Catalog) error { _, err := c.Unset(ctx, "api", "z"); return err }},
		{"Forget", "editor", func(ctx context.Context, c *catalog.Catalog) error { _, err := c.Forget(ctx, "strict"); return err }},
		{"PruneHistory", "", func(ctx context.Context, c *catalog.Catalog) error { _, err := c.PruneHistory(ctx, 0); return err }},
	}
	for _, role := range []struct{ name, rights string }{
		{"reader", "SELECT"}, {"publisher", "SELECT, INSERT, UPDATE"}, {"editor", "SELECT, INSERT, UPDATE, DELETE"},
	} {
		edited(t)(owner.Set(t.Context(), "api", "z", catalog.Override{Rate: 50}))
		as := restricted(t, db, role.name, role.rights)
		c, _ := newCatalog(t, as)
		for _, verb := range verbs {
			err := verb.do(t.Context(), c)
			var denied *pgconn.PgError
			switch {
			case strings.Contains(verb.may, role.name):
				if err != nil {
					t.Errorf("%s: %s: %v", role.name, verb.name, err)
				}
			case !errors.As(err, &denied) || denied.Code != "42501":
				t.Errorf("%s: %s: got %v, want that it is not permitted", role.name, verb.name, err)
			}
		}
		wantLimit(t, c, api, "a", ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Minute, Capacity: 20})
	}
}

// restricted is db for a role with rights on the definitions, and to read the history.
func restricted(t *testing.T, db *pgtest.DB, name, rights string) *pgtest.DB {
	t.Helper()
	var may bool
	must(t, db.Pool.QueryRow(t.Context(), "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user").Scan(&may))
	if !may {
		t.Skip("the user of DATABASE_URL may not make roles")
	}
	role := strings.Replace(db.Schema, "ratelimit_test_", "ratelimit_"+name+"_", 1)
	_, err := db.Pool.Exec(t.Context(), "CREATE ROLE "+role+"; GRANT "+role+" TO current_user; GRANT USAGE ON SCHEMA "+db.Schema+" TO "+role+
		"; GRANT "+rights+" ON "+db.Schema+".rate_limit_definitions TO "+role+"; GRANT SELECT ON "+db.Schema+".rate_limit_history TO "+role)
	must(t, err)
	t.Cleanup(func() {
		must(t, errOf(db.Pool.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)))
	})
	config := db.Pool.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return errOf(conn.Exec(ctx, "SET ROLE "+role)) }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	as := *db
	as.Pool = pool
	return &as
}

// Who looks at a view needs to read it, the limits and the definitions, and nothing else.
func TestPrivilegesOfViews(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	as := restricted(t, db, "viewer", "SELECT")
	for _, view := range []string{"rate_limits_now", "rate_limits_short", "rate_limits_in_flight"} {
		_, err := as.Pool.Exec(t.Context(), inSchema(db, "SELECT * FROM "+view))
		var denied *pgconn.PgError
		if !errors.As(err, &denied) || denied.Code != "42501" {
			t.Errorf("%s: got %v, want that it is not permitted", view, err)
		}
	}
	role := strings.Replace(db.Schema, "ratelimit_test_", "ratelimit_viewer_", 1)
	exec(t, db, "GRANT SELECT ON rate_limits, rate_limits_now, rate_limits_short, rate_limits_in_flight TO "+role)
	for _, view := range []string{"rate_limits_now", "rate_limits_short", "rate_limits_in_flight"} {
		if _, err := as.Pool.Exec(t.Context(), inSchema(db, "SELECT * FROM "+view)); err != nil {
			t.Errorf("%s: %v", view, err)
		}
	}
}

// Whoever may use the table must not use its trigger's rights elsewhere.
func TestTriggerIsNobodysTool(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	as := restricted(t, db, "stranger", "SELECT")
	_, err := as.Pool.Exec(t.Context(), `CREATE TEMPORARY TABLE rate_limit_definitions (name text, key text, kind text);
		CREATE TRIGGER mine AFTER INSERT ON rate_limit_definitions FOR EACH ROW EXECUTE FUNCTION `+db.Schema+`.rate_limit_definitions_log()`)
	var denied *pgconn.PgError
	if !errors.As(err, &denied) || denied.Code != "42501" {
		t.Errorf("got %v, want that it is not permitted", err)
	}
}

// All of pgx's modes do the same, under any DateStyle.
func TestQueryExecModes(t *testing.T) {
	t.Parallel()
	quota := ratelimit.FixedWindow{Name: "quota", Rate: 1000, Every: ratelimit.Month, Zone: "Europe/Berlin", Anchor: ratelimit.Date{Year: 2026, Month: 3, Day: 1}}
	started := ratelimit.FixedWindow{Name: "started", Rate: 10, Period: time.Hour, Start: noon}
	until := time.Date(2031, 2, 3, 4, 5, 6, 789_000, time.UTC)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		for _, style := range []string{"ISO, MDY", "SQL, DMY", "SQL, MDY", "German", "Postgres, MDY"} {
			if style != "ISO, MDY" {
				pgtest.Long(t)
			}
			t.Run(mode.String()+" "+style, func(t *testing.T) {
				ctx := t.Context()
				db := newDB(t, pgtest.WithConfig(func(c *pgxpool.Config) {
					c.ConnConfig.RuntimeParams["datestyle"], c.ConnConfig.RuntimeParams["intervalstyle"] = style, "sql_standard"
					c.ConnConfig.DefaultQueryExecMode = mode
				}))
				c, l := newCatalog(t, db)
				must(t, c.Publish(ctx, api, quota, started, strict))
				must(t, c.Publish(ctx, api, quota, started, strict))
				edited(t)(c.Set(ctx, "api", "a", catalog.Override{Rate: 50, Period: time.Hour, Capacity: ratelimit.None, MaxReserved: 7, Until: until, Note: "n"}))
				edited(t)(c.Set(ctx, "quota", "a", catalog.Override{Rate: 5000}))
				edited(t)(c.Set(ctx, "strict", catalog.AllKeys, catalog.Override{Slots: 10, Switch: catalog.Off}))
				other, _ := newCatalog(t, db)
				must(t, other.Refresh(ctx))
				raised := quota
				raised.Rate = 5000
				wantLimit(t, other, quota, "a", raised)
				wantLimit(t, other, api, "a", ratelimit.TokenBucket{Name: "api", Rate: 50, Period: time.Hour, Capacity: ratelimit.None, MaxReserved: 7})
				if d := other.Definitions(); len(d) != 4 || d[1] != quota.Definition() || !d[2].Start.Equal(noon) {
					t.Errorf("got %v", d)
				}
				edited(t)(c.Set(ctx, "api", "b", catalog.Override{Rate: 5}))
				must(t, other.Refresh(ctx)) // what has changed
				wantLimit(t, other, api, "b", ratelimit.TokenBucket{Name: "api", Rate: 5, Period: time.Minute, Capacity: 20})
				if e, _ := other.Override("api", "a"); !e.Until.Equal(until) || time.Since(e.UpdatedAt).Abs() > time.Minute {
					t.Errorf("got %+v", e)
				}
				if got := other.Overrides("strict"); len(got) != 1 || got[0].Switch != catalog.Off || got[0].Slots != 10 || got[0].Key != catalog.AllKeys {
					t.Errorf("got %+v", got)
				}
				changes, err := c.History(ctx, "", 0)
				if err != nil || len(changes) != 8 || time.Since(changes[0].At).Abs() > time.Minute {
					t.Errorf("got %d changes, %v", len(changes), err)
				}
				if n, err := c.PruneHistory(ctx, 0); err != nil || n != 7 {
					t.Errorf("got %d, %v", n, err)
				}
				if removed, err := c.Unset(ctx, "strict", catalog.AllKeys); err != nil || removed.Was == nil {
					t.Errorf("got %+v, %v", removed, err)
				}
				if text := l.String(); strings.Contains(text, "not used") || len(other.Ignored()) > 0 {
					t.Errorf("ignored %v: %s", other.Ignored(), text)
				}
			})
		}
	}
}

// An edit whose context ends in its COMMIT may be done, and its error says so.
func TestEditThatEndsInCommit(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	c, _ := newCatalog(t, db)
	must(t, c.Publish(t.Context(), api))
	inCommit := commitsThatWait(t, db)
	for name, edit := range map[string]func(context.Context) error{
		"Set":     func(ctx context.Context) error { return errOf(c.Set(ctx, "api", "k", catalog.Override{Rate: 3})) },
		"Publish": func(ctx context.Context) error { return c.Publish(ctx, signUp) },
	} {
		if err := inCommit(edit); !errors.Is(err, catalog.ErrOutcomeUnknown) || !errors.Is(err, pgstore.ErrOutcomeUnknown) {
			t.Errorf("%s: got %v, want %v", name, err, catalog.ErrOutcomeUnknown)
		}
	}
}

// commitsThatWait has transactions that insert a definition wait in COMMIT. It returns a function that
// runs such an edit, ends its context there, and returns the edit's error.
func commitsThatWait(t *testing.T, db *pgtest.DB) func(edit func(context.Context) error) error {
	t.Helper()
	const lock = "pg_advisory_xact_lock(hashtext('rate_limit'))"
	exec(t, db, "CREATE FUNCTION rate_limit_waits() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM "+lock+"; RETURN NULL; END$$")
	exec(t, db, "CREATE CONSTRAINT TRIGGER waits AFTER INSERT ON rate_limit_definitions DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION rate_limit_waits()")
	return func(edit func(context.Context) error) (err error) {
		must(t, pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), inSchema(db, "SELECT "+lock)); err != nil {
				return err
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- edit(ctx) }()
			pgtest.AwaitBlocks(t, db.Pool, tx)
			cancel()
			err = <-done
			return nil
		}))
		return err
	}
}
