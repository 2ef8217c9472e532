package migrate_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// turns counts how often a turn to migrate was asked for.
type turns struct{ n atomic.Int32 }

func (c *turns) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if strings.HasPrefix(data.SQL, "SELECT") && strings.Contains(data.SQL, "pg_advisory_xact_lock") {
		c.n.Add(1)
	}
	return ctx
}

func (*turns) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// counted is a pool whose turns are counted, of sessions that must not be idle in a transaction
// for as long as a try lasts.
func counted(t *testing.T, db *pgtest.DB) (*pgxpool.Pool, *turns) {
	t.Helper()
	c := &turns{}
	config := db.Pool.Config()
	config.ConnConfig.Tracer = c
	return poolOf(t, config, "SET idle_in_transaction_session_timeout = '200ms'"), c
}

// A dump reads the table for as long as it takes. A migration that comes meanwhile keeps nobody
// waiting behind it for longer than its lock_timeout, says what it waited for, and changes
// nothing.
func TestDecisionsGoOnBesideAMigrationThatWaits(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := &migrate.Config{Schema: db.Schema}
	wantUp(t, db.Pool, cfg, applied)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	dump := begin(t, db.Pool, "LOCK TABLE "+db.Schema+".rate_limits IN ACCESS SHARE MODE")
	defer dump.Rollback(context.Background())

	ctx, end := context.WithCancelCause(t.Context())
	pool, turns := counted(t, db)
	down := make(chan error, 1)
	go func() { down <- errOf(migrate.Down(ctx, pool, cfg)) }()
	limit := ratelimit.TokenBucket{Name: "api", Rate: 1e6, Period: time.Second}
	calls, slowest := 0, time.Duration(0)
	for ; turns.n.Load() < 4 && len(down) == 0; calls++ {
		asked := time.Now()
		if result, err := store.Allow(t.Context(), limit.For("k")); err != nil || !result.OK {
			t.Fatalf("call %d: %v, %v", calls, result, err)
		}
		slowest = max(slowest, time.Since(asked))
		time.Sleep(time.Millisecond)
	}
	t.Logf("%d calls beside 4 tries, the slowest took %s", calls, slowest)
	if slowest > 4*time.Second { // all tries would be one
		t.Errorf("a call took %s", slowest)
	}
	stopped := errors.New("it was long enough")
	end(stopped)
	if err := <-down; !errors.Is(err, stopped) && !errors.Is(err, context.Canceled) || sqlState(err) != "55P03" || !strings.Contains(err.Error(), "such as a dump") {
		t.Errorf("got %v, want an error that names both", err)
	}
	wantStatus(t, db.Pool, cfg, applied)
}

// What is applied before a lock is not available stays, and is in the result of the call that
// goes on once it is. Others have their turn between its tries.
func TestUpGoesOnWhenTheLockIsAvailable(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	db := pgtest.NewEmpty(t)
	wantUp(t, db.Pool, &migrate.Config{Schema: db.Schema}, applied)
	holder := begin(t, db.Pool, "LOCK TABLE "+db.Schema+".rate_limits IN ACCESS EXCLUSIVE MODE") // views need to look at it
	defer holder.Rollback(context.Background())

	cfg := &migrate.Config{Schema: db.Schema, Set: migrations.Catalog}
	pool, turns := counted(t, db)
	type result struct {
		applied []migrate.Migration
		err     error
	}
	up := func(ctx context.Context, tries int32) (done chan result) {
		done = make(chan result, 1)
		turns.n.Store(0)
		go func() {
			applied, err := migrate.Up(ctx, pool, cfg)
			done <- result{applied, err}
		}()
		for turns.n.Load() < tries && len(done) == 0 {
			time.Sleep(time.Millisecond)
		}
		return done
	}
	first, last := migrate.Migration{Version: 1, Name: "00001_definitions.sql", Applied: true}, migrate.Migration{Version: 2, Name: "00002_views.sql", Applied: true}
	ctx, cancel := context.WithCancel(t.Context())
	given := up(ctx, 2)
	cancel()
	if got := <-given; !errors.Is(got.err, context.Canceled) || sqlState(got.err) != "55P03" || !slices.Equal(got.applied, []migrate.Migration{first}) {
		t.Errorf("got %v, %v, want the first with an error", got.applied, got.err)
	}
	must(t, errOf(migrate.Down(t.Context(), db.Pool, cfg)))
	done := up(t.Context(), 2)
	wantUp(t, db.Pool, &migrate.Config{Schema: db.Schema, Set: migrations.Refusals}, []migrate.Migration{{Version: 1, Name: "00001_refusals.sql", Applied: true}})
	must(t, holder.Rollback(t.Context()))
	if got := <-done; got.err != nil || !slices.Equal(got.applied, []migrate.Migration{first, last}) {
		t.Errorf("got %v, %v, want both", got.applied, got.err)
	}
}

// The connection that holds the turn may be lost meanwhile: what was applied is no error.
func TestUpOutlivesTheConnectionOfItsTurn(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	wantUp(t, db.Pool, &migrate.Config{Schema: db.Schema}, applied)
	holder := begin(t, db.Pool, "LOCK TABLE "+db.Schema+".rate_limits IN ACCESS EXCLUSIVE MODE") // views need to look at it
	defer holder.Rollback(context.Background())
	done := make(chan error, 1)
	go func() {
		_, err := migrate.Up(t.Context(), db.Pool, &migrate.Config{Schema: db.Schema, Set: migrations.Catalog})
		done <- err
	}()
	pgtest.AwaitBlocks(t, db.Pool, holder)
	tag, err := db.Pool.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid::int8 << 32 | objid::int8 = $1", int64(0x72_6c_69_6d_69_74))
	if err != nil || tag.RowsAffected() != 1 {
		t.Fatal(tag, err)
	}
	must(t, holder.Rollback(t.Context()))
	if err := <-done; err != nil {
		t.Errorf("got %v", err)
	}
}

// begin begins a transaction with a statement.
func begin(t *testing.T, pool *pgxpool.Pool, sql string) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	must(t, err)
	must(t, errOf(tx.Exec(t.Context(), sql)))
	return tx
}

// What would be dropped may be in use by others.
func TestDownNamesWhatDependsOnIt(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	cfg := func(set migrations.Set) *migrate.Config { return &migrate.Config{Schema: db.Schema, Set: set} }
	wantRefused := func(set migrations.Set, code string, words ...string) {
		t.Helper()
		got, err := migrate.Down(t.Context(), db.Pool, cfg(set))
		if err == nil || got != nil || sqlState(err) != code {
			t.Fatalf("got %v, %v, want an error of class %q", got, err, code)
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("got error %v, want one with %q", err, w)
			}
		}
	}
	for _, set := range migrations.Sets() {
		must(t, errOf(migrate.Up(t.Context(), db.Pool, cfg(set))))
	}
	wantRefused(migrations.Catalog, "", "the set functions depends on table rate_limit_definitions", "down --set functions", "then catalog") // whose calls by name would fail
	execute(t, db.Pool, "CREATE VIEW "+db.Schema+".ours AS SELECT ahead FROM "+db.Schema+".rate_limits")
	for _, set := range []migrations.Set{migrations.Functions, migrations.Catalog} { // each goes first
		wantRefused("", "", "the set "+string(set)+" depends on table rate_limits", "down --set "+string(set))
		down(t, db.Pool, db.Schema, set)
	}
	wantRefused("", "2BP01", "view ours depends on column ahead")
	execute(t, db.Pool, "DROP VIEW "+db.Schema+".ours")
	must(t, errOf(migrate.Down(t.Context(), db.Pool, cfg(""))))
}

// Whatever is lost by taking it back is said, but of views, with which nothing is.
func TestLosses(t *testing.T) {
	t.Parallel()
	db := pgtest.NewEmpty(t)
	for _, set := range migrations.Sets() {
		all, err := migrate.Status(t.Context(), db.Pool, &migrate.Config{Schema: db.Schema, Set: set})
		must(t, err)
		for _, m := range all {
			if loses := m.Loses() != ""; loses == (m.Name == "00002_views.sql") {
				t.Errorf("%s: %q", m.Name, m.Loses())
			}
		}
	}
}
