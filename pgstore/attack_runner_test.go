package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Attacks on the transaction runner.

// budget is for how long the runner tries again when its context does not say.
func budget(d time.Duration) func(*pgstore.Config) {
	return func(c *pgstore.Config) { c.RetryBudget = d }
}

// newShopOn is newShop on another pool.
func newShopOn(t *testing.T, db *pgtest.DB, capacity float64, change ...func(*pgstore.Config)) *shop {
	t.Helper()
	createOrders(t, db)
	return &shop{DB: db, store: newStore(t, db, change...), limit: slow("orders", capacity)}
}

// newCrashingShop is a shop on a server of its own, which writes nothing to its
// log of changes but what transactions have it write.
func newCrashingShop(t *testing.T) *shop {
	t.Helper()
	t.Setenv("DATABASE_URL", "") // a server that may crash
	server, err := throwaway.StartWith(t.Context(), throwaway.Options{Settings: map[string]string{
		"autovacuum": "off", "wal_level": "minimal", "max_wal_senders": "0", "wal_writer_delay": "10s",
	}})
	must(t, err)
	t.Cleanup(func() {
		should(t, server.Close())
	})
	db := &pgtest.DB{URL: server.URL, Schema: "public", Pool: newPool(t, server.URL)}
	must(t, errOf(db.Pool.Exec(t.Context(), migrations.UpSQL())))
	return newShopOn(t, db, 1e6)
}

// crash has the server throw its shared memory away, as it does when one of its
// processes is killed, and returns when it is up again.
func crash(t *testing.T, url string) {
	t.Helper()
	bystander, victim := connect(t, url), connect(t, url)
	// The shell's parent is the victim's process.
	if _, err := victim.Exec(t.Context(), `COPY (SELECT 1) TO PROGRAM 'kill -9 $PPID'`); err == nil {
		t.Fatal("got no error, want the process to be gone")
	}
	eventually(t, "the server throws everybody out", func() bool { return bystander.Ping(t.Context()) != nil })
	eventually(t, "the server is up again", func() bool {
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			return false
		}
		defer conn.Close(t.Context())
		return conn.Ping(t.Context()) == nil
	})
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	must(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) }) // it is gone when the server crashed
	return conn
}

// The server crashes before COMMIT: the transaction ID of what a crash has undone
// is given to somebody else, who commits. Who lost his COMMIT must not take that
// for his own, not even if the other took as many tokens from the same row.
func TestLostCommitIsNotMistakenForAnother(t *testing.T) {
	pgtest.Long(t)
	s := newCrashingShop(t)
	for _, others := range []int{50, 1} { // that take from the same row
		for name, run := range map[string]runner{"AllowFunc": s.store.AllowFunc, "AllowOnCommit": onCommit(s.store, "")} {
			t.Run(fmt.Sprintf("%d others/%s", others, name), func(t *testing.T) {
				mustAllow(t, s.store, s.limit.For("k")) // there is a row
				orders := countOrders(t, s.DB, "order")
				var xid, status string
				result, err := run(within(t, 30*time.Second), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error {
					if err := tx.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text`).Scan(&xid); err != nil {
						return err
					}
					crash(t, s.URL)
					conn := connect(t, s.URL)
					for range others {
						must(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error { return s.store.TakeTx(t.Context(), tx, s.limit.For("k")) }))
					}
					must(t, conn.QueryRow(t.Context(), `SELECT coalesce(pg_xact_status($1::text::xid8), '')`, xid).Scan(&status))
					if status != "committed" {
						t.Fatalf("the ID was not given out again: it is %q", status)
					}
					return nil
				}))
				s.Pool.Reset() // of connections from before the crash
				if got := countOrders(t, s.DB, "order") - orders; err == nil || result.OK || got != 0 {
					t.Errorf("got OK %v, error %v with %d orders, want an error and none", result.OK, err, got)
				}
			})
		}
	}
}

func ending(sql string) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error { return errOf(tx.Exec(ctx, sql)) }
}

func rollback(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }

func commit(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }

// failed ends a transaction in which a statement has failed.
func failed(end func(context.Context, pgx.Tx) error) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, _ = raise(ctx, "P0001")(tx), end(ctx, tx)
		return nil
	}
}

// Work that ends the transaction, which is the runner's to end, is told OK if it has committed, since all
// of it is there, and never if it has rolled back.
func TestWorkThatEndsItsTransaction(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		committed bool
		end       func(context.Context, pgx.Tx) error
	}{
		"Rollback":              {false, rollback},
		"ROLLBACK":              {false, ending("ROLLBACK")},
		"Commit of what failed": {false, failed(commit)},
		"COMMIT of what failed": {false, failed(ending("COMMIT"))},
		"Commit":                {true, commit},
		"COMMIT":                {true, ending("COMMIT")},
	} {
		t.Run(name, func(t *testing.T) {
			s, ctx, want := newShop(t, 1000), within(t, 20*time.Second), 1
			result, err := s.store.AllowFunc(ctx, s.requests(), s.order(ctx, func(tx pgx.Tx) error { return test.end(ctx, tx) }))
			if (err == nil) != test.committed || result.OK != test.committed {
				t.Errorf("got OK %v, error %v", result.OK, err)
			}
			if test.committed {
				want = 2
			}
			must(t, errOf(s.store.AllowFunc(ctx, s.requests(), s.order(ctx, nothing)))) // whose connection it may be
			s.want(t, want)
			idle(t, s.Pool)
		})
	}
}

// Work that has committed itself is not done again, though the connection on which the
// server is asked about it has forgotten what was prepared.
func TestWorkThatCommitsIsDoneOnce(t *testing.T) {
	t.Parallel()
	s := newShopOn(t, pgtest.New(t, maxConns(1)), 1000)
	ctx := within(t, 20*time.Second)
	commits := func(also string) func(pgx.Tx) error {
		return func(tx pgx.Tx) error { return errOf(tx.Conn().Exec(ctx, also+"COMMIT")) }
	}
	for _, also := range []string{"", "", "DEALLOCATE ALL;"} { // the statements that ask are prepared by then
		if _, err := s.store.AllowFunc(ctx, s.requests(), s.order(ctx, commits(also))); err != nil {
			t.Errorf("%q: %v", also, err)
		}
	}
	s.want(t, 3)
}

// Work that has ended its transaction itself, and then fails with an error that asks for
// another attempt, has one if it has rolled back, and none if it has committed, whatever
// it has done since.
func TestWorkThatCommitsAndFailsIsDoneOnce(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, test := range []struct {
		name      string
		end       func(context.Context, pgx.Tx) error
		committed bool
		lost      bool // the connection, then
	}{
		{"Commit", commit, true, false},
		{"COMMIT", ending("COMMIT"), true, false},
		{"COMMIT AND CHAIN", ending("COMMIT AND CHAIN"), true, false},
		{"COMMIT, BEGIN", ending("COMMIT; BEGIN"), true, false},
		{"Commit, and no connection", commit, true, true},
		{"Rollback", rollback, false, false},
		{"ROLLBACK AND CHAIN", ending("ROLLBACK AND CHAIN"), false, false},
		{"Rollback, and no connection", rollback, false, true},
	} {
		for _, code := range []string{serializationFailure, deadlockDetected, "26000"} {
			t.Run(test.name+" "+code, func(t *testing.T) {
				t.Parallel()
				s := newShopOn(t, pgtest.New(t, maxConns(1)), 1000)
				ctx := within(t, 20*time.Second)
				result, err := s.store.AllowFunc(ctx, s.requests(), s.order(ctx, func(tx pgx.Tx) error {
					if s.runs.Load() > 1 {
						return nil
					}
					if err := test.end(ctx, tx); err != nil {
						return err
					}
					_, err := tx.Conn().Exec(ctx, raising(code))
					if test.lost {
						_ = tx.Conn().Close(ctx)
					}
					return err
				}))
				wantCode(t, err, code, test.committed)
				s.wantRuns(t, map[bool]int64{true: 1, false: 2}[test.committed])
				if result.OK != (err == nil) {
					t.Errorf("got OK %v, error %v", result.OK, err)
				}
				s.want(t, 1)
				idle(t, s.Pool)
			})
		}
	}
}

// wantCode wants an error of PostgreSQL with a code, or none.
func wantCode(t *testing.T, err error, code string, want bool) {
	t.Helper()
	var pgErr *pgconn.PgError
	if want && (!errors.As(err, &pgErr) || pgErr.Code != code) || !want && err != nil {
		t.Errorf("got error %v, want one of code %s: %v", err, code, want)
	}
}

// The same if it is the COMMIT of what the work has begun in its place that fails.
func TestWorkThatCommitsAndCannotCommitIsDoneOnce(t *testing.T) {
	t.Parallel()
	s := newShop(t, 1000)
	s.atCommit(t, 2, "IF currval('"+s.Schema+".commits') = 2 THEN RAISE EXCEPTION 'raised by the test' USING ERRCODE = '40001'; END IF")
	ctx := within(t, 20*time.Second)
	_, err := s.store.AllowFunc(ctx, s.requests(), s.order(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "COMMIT AND CHAIN")
		if err == nil {
			_, err = tx.Exec(ctx, `INSERT INTO `+s.Schema+`.orders (what) VALUES ('another')`)
		}
		return err
	}))
	wantCode(t, err, serializationFailure, true)
	s.wantRuns(t, 1)
	s.want(t, 1)
	wantOrders(t, s.DB, "another", 0)
}

// The same for decisions on their own: each connection that has forgotten has many
// statements to prepare again, and callers see none of that.
func TestOwnDecisionsOutliveDeallocateAll(t *testing.T) {
	t.Parallel()
	db, store := setUp(t, maxConns(4))
	limit, several := slow("l", 1000), []ratelimit.Request{slow("l", 1000).For("a"), slow("l", 1000).For("b")}
	use := func() error {
		_, allowed := store.Allow(t.Context(), limit.For("a"))
		both, twice := store.Allow(t.Context(), several...)
		_, cancelled := store.Cancel(t.Context(), both.Receipt)
		_, credited := store.Credit(t.Context(), limit.For("a"))
		_, checked := store.Check(t.Context(), limit.For("a"))
		return errors.Join(allowed, twice, cancelled, credited, checked)
	}
	crowd := func() {
		together(4, func(int) {
			for range 5 {
				should(t, use())
			}
		})
	}
	crowd()
	for range 3 {
		var conns []*pgxpool.Conn
		for range 4 {
			conn, err := db.Pool.Acquire(t.Context())
			must(t, err)
			should(t, errOf(conn.Exec(t.Context(), "DEALLOCATE ALL")))
			conns = append(conns, conn)
		}
		for _, conn := range conns {
			conn.Release()
		}
		crowd()
	}
}

// Who loses the answer to his COMMIT to a server that is gone hears that before
// long, and does not hammer at the server's door until then.
func TestLostCommitWhileServerIsGone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const (
		callers = 8
		grace   = 10 * time.Second
		most    = 50 // connections, for each caller
	)
	var dials atomic.Int64
	r := newRelay(t)
	db := pgtest.New(t, maxConns(callers), r.through(), pgtest.WithConfig(func(c *pgxpool.Config) {
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { dials.Add(1); return nil }
	}))
	t.Cleanup(r.Close)
	s := newShopOn(t, db, 10, budget(time.Minute))
	must(t, connectAll(t.Context(), db.Pool))
	ctx := within(t, aMoment)
	var ready atomic.Int64
	together(callers, func(i int) {
		_, err := s.store.AllowFunc(ctx, []ratelimit.Request{s.limit.For(fmt.Sprint(i))}, s.order(ctx, func(pgx.Tx) error {
			for ready.Add(1); ready.Load() < callers && ctx.Err() == nil; time.Sleep(time.Millisecond) {
			}
			r.lose()
			return nil
		}))
		if deadline, _ := ctx.Deadline(); !errors.Is(err, pgstore.ErrOutcomeUnknown) || time.Since(deadline) > grace {
			t.Errorf("got %v %v after the deadline, want %v, and soon", err, time.Since(deadline), pgstore.ErrOutcomeUnknown)
		}
	})
	if got := dials.Load(); got < callers+1 || got > callers*most {
		t.Errorf("got %d connections of %d callers, want some to ask, and %d at most", got, callers, callers*most)
	}
	idle(t, db.Pool)
}

// An edit whose context ends in its COMMIT may be done.
func TestEditThatEndsInCommit(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit, lock := slow("l", 10), "pg_advisory_xact_lock(hashtext('"+db.Schema+"'))"
	mustAllow(t, store, limit.ForN("k", 5))
	atCommit(t, db, "PERFORM set_config('lock_timeout', '0', true), "+lock)
	tx := begin(t, db, pgx.ReadCommitted)
	mustExec(t, tx, "SELECT "+lock)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- errOf(store.Credit(ctx, limit.ForN("k", 1))) }()
	eventually(t, "it waits in its COMMIT", func() bool { return pgtest.Blocks(t, db.Pool, tx) })
	cancel()
	if err := <-done; !errors.Is(err, pgstore.ErrOutcomeUnknown) {
		t.Errorf("got %v, want %v", err, pgstore.ErrOutcomeUnknown)
	}
}

// An edit that only waits for rows commits nothing: a COMMIT without an answer would be an edit that may
// be done.
func TestEditThatWaitsCommitsNothing(t *testing.T) {
	t.Parallel()
	var seen atomic.Int64
	db, store := setUp(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = commits{&seen} }))
	a, b := slow("l", 10).For("a"), slow("l", 10).For("b")
	mustAllow(t, store, a, b)
	holder := begin(t, db, pgx.ReadCommitted)
	takeIn(t, store, holder, b)
	before := seen.Load()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := store.PauseEach(ctx, []ratelimit.Request{a, b}, time.Hour); !isLocked(err) || seen.Load() != before {
		t.Errorf("got %v after %d COMMITs, want ErrLocked after none", err, seen.Load()-before)
	}
}
