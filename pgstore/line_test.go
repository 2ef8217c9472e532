package pgstore_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// lined is a store whose transactions stand in line for the row of a key.
type lined struct {
	*pgtest.DB
	store    *pgstore.Store
	observer *pgxpool.Pool
	request  ratelimit.Request
	lock     int64
}

func newLined(t *testing.T, change ...func(*pgxpool.Config)) *lined {
	t.Helper()
	options := []pgtest.Option{maxConns(4)}
	for _, c := range change {
		options = append(options, pgtest.WithConfig(c))
	}
	l := &lined{DB: pgtest.New(t, options...), request: slow("l", 100).For("k")}
	l.store, l.observer = newStore(t, l.DB), newPool(t, l.URL)
	mustAllow(t, l.store, l.request)
	l.lock = l.store.Meet(l.request)[0]
	return l
}

// inLine is how many sessions have a lock, or wait for it.
func (l *lined) inLine(t *testing.T, granted bool) (n int) {
	t.Helper()
	err := l.observer.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = $1
		AND (classid::int8 << 32 | objid::int8) = $2 AND objsubid = 1`, granted, l.lock).Scan(&n)
	must(t, err)
	return n
}

// allow is a transaction that does something.
func (l *lined) allow(ctx context.Context, n float64, do func(pgx.Tx) error) (ratelimit.Result, error) {
	r := l.request
	r.Count = n
	return l.store.AllowFunc(ctx, []ratelimit.Request{r}, func(tx pgx.Tx, _ ratelimit.Result) error { return do(tx) })
}

// wantEmpty fails the test if a connection has kept the lock, or the next one does not get it.
func (l *lined) wantEmpty(t *testing.T) {
	t.Helper()
	idle(t, l.Pool)
	eventually(t, "nobody is in line", func() bool { return l.inLine(t, true) == 0 })
	had := 0
	_, err := l.allow(within(t, 30*time.Second), 1, func(pgx.Tx) error {
		had = l.inLine(t, true)
		return nil
	})
	if err != nil || had != 1 {
		t.Errorf("the next: error %v, %d locks", err, had)
	}
	idle(t, l.Pool)
	eventually(t, "nobody is in line then", func() bool { return l.inLine(t, true) == 0 })
}

// hold has the lock, as a role that may do nothing with the table, until it is told to give it back.
func (l *lined) hold(t *testing.T) (giveBack func()) {
	t.Helper()
	conn, err := l.observer.Acquire(t.Context())
	must(t, err)
	must(t, errOf(conn.Exec(t.Context(), `SET ROLE pg_signal_backend`)))
	must(t, errOf(conn.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, l.lock)))
	return func() {
		defer conn.Release()
		should(t, errOf(conn.Exec(context.Background(), `RESET ROLE; SELECT pg_advisory_unlock_all()`)))
	}
}

// However a transaction ends, its connection keeps no lock, and those behind it have their
// turn.
func TestLineIsLeft(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	ofFunc := errors.New("of the function")
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	has := func(code string) func(error) bool { return func(err error) bool { return codeOf(err) == code } }
	for name, test := range map[string]struct {
		do    func(ctx context.Context, cancel func(), tx pgx.Tx) error
		want  func(error) bool
		spent float64
	}{
		"committed": {func(context.Context, func(), pgx.Tx) error { return nil }, is(nil), 1},
		"failed":    {func(context.Context, func(), pgx.Tx) error { return ofFunc }, is(ofFunc), 0},
		"canceled": {func(_ context.Context, cancel func(), _ pgx.Tx) error {
			cancel()
			return nil
		}, is(context.Canceled), 0},
		"canceled in a statement": {func(ctx context.Context, cancel func(), tx pgx.Tx) error {
			time.AfterFunc(10*time.Millisecond, cancel)
			_, err := tx.Exec(ctx, "SELECT pg_sleep(60)")
			return err
		}, is(context.Canceled), 0},
		"an error that is swallowed": {func(ctx context.Context, _ func(), tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			return nil
		}, is(pgx.ErrTxCommitRollback), 0},
		"a COMMIT that fails": {func(ctx context.Context, _ func(), tx pgx.Tx) error {
			return errOf(tx.Exec(ctx, `CREATE TEMP TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO late VALUES (1), (1)`))
		}, has("23505"), 0},
		"committed by the function":   {func(ctx context.Context, _ func(), tx pgx.Tx) error { return tx.Commit(ctx) }, is(nil), 1},
		"rolled back by the function": {func(ctx context.Context, _ func(), tx pgx.Tx) error { return tx.Rollback(ctx) }, is(pgx.ErrTxClosed), 0},
		"the session is ended": {func(ctx context.Context, _ func(), tx pgx.Tx) error {
			return errOf(tx.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())"))
		}, has("57P01"), 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLined(t)
			ctx, cancel := context.WithCancel(within(t, 30*time.Second))
			defer cancel()
			had := 0
			_, err := l.allow(ctx, 1, func(tx pgx.Tx) error {
				had = l.inLine(t, true)
				return test.do(ctx, cancel, tx)
			})
			if !test.want(err) || had != 1 {
				t.Errorf("got error %v, with %d locks in the transaction", err, had)
			}
			l.wantEmpty(t)
			wantLeft(t, l.store, slow("l", 100).ForN("k", 0), 98-test.spent)
		})
	}
	t.Run("refused and panicked", func(t *testing.T) {
		t.Parallel()
		l := newLined(t)
		if _, err := l.allow(t.Context(), 99.5, nothing); !errors.Is(err, ratelimit.ErrRefused) {
			t.Errorf("got error %v", err)
		}
		l.wantEmpty(t)
		func() {
			defer func() { _ = recover() }()
			_, _ = l.allow(t.Context(), 1, func(pgx.Tx) error { panic("of the function") })
		}()
		l.wantEmpty(t)
	})
}

// Whoever gives up in the line takes nothing, and leaves nothing behind.
func TestGivingUpInLine(t *testing.T) {
	t.Parallel()
	l := newLined(t)
	giveBack := l.hold(t)
	ctx, cancel := context.WithCancel(within(t, 30*time.Second))
	defer cancel()
	var group sync.WaitGroup
	group.Go(func() {
		if _, err := l.allow(ctx, 1, nothing); !errors.Is(err, context.Canceled) {
			t.Errorf("got error %v", err)
		}
	})
	eventually(t, "it waits in the line", func() bool { return l.inLine(t, false) == 1 })
	cancel()
	group.Wait()
	eventually(t, "it waits no more", func() bool { return l.inLine(t, false) == 0 })
	giveBack()
	l.wantEmpty(t)
	wantLeft(t, l.store, slow("l", 100).ForN("k", 0), 98)
}

// A role that may do nothing with the table may have the lock of a line all the same. Calls wait for
// it, or for the lock_timeout of their sessions, once, and then go on without.
func TestLineThatDoesNotMove(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*pgxpool.Config){
		"as we wait": func(*pgxpool.Config) {},
		"lock_timeout of the session": func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["lock_timeout"] = "50"
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLined(t, change)
			defer l.hold(t)()
			fastest := time.Hour
			for i := range 6 {
				begun := time.Now()
				must(t, errOf(l.allow(within(t, 10*time.Second), 1, nothing)))
				if took := time.Since(begun); i > 0 {
					fastest = min(fastest, took)
				}
			}
			if fastest >= 250*time.Millisecond {
				t.Errorf("the fastest of those that know took %v, as if it had waited", fastest)
			}
			idle(t, l.Pool)
			eventually(t, "no session has kept a place", func() bool { return l.inLine(t, false) == 0 && l.inLine(t, true) == 1 })
			wantLeft(t, l.store, slow("l", 100).ForN("k", 0), 93)
		})
	}
	t.Run("decisions on their own", func(t *testing.T) {
		t.Parallel()
		l := newLined(t)
		defer l.hold(t)()
		row := begin(t, beside(t, l.DB), pgx.ReadCommitted)
		mustExec(t, row, "SELECT FROM "+l.Schema+".rate_limits FOR UPDATE")
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				if result, err := l.store.Allow(within(t, 10*time.Second), l.request); err != nil || !result.OK {
					t.Errorf("got %v, %v", result.OK, err)
				}
			})
		}
		eventually(t, "they wait in the line", func() bool { return l.inLine(t, false) == 1 })
		must(t, row.Rollback(t.Context()))
		group.Wait()
		wantLeft(t, l.store, slow("l", 100).ForN("k", 0), 91)
	})
}

// Somebody may have the locks of all shards. A transaction that was not served in the line of the
// first, and then needs several, waits in no other.
func TestLinesOfShardsThatDoNotMove(t *testing.T) {
	t.Parallel()
	l := newLined(t)
	limit := slow("shards", 20)
	limit.Shards = 2
	l.request = limit.For("k")
	mustAllow(t, l.store, limit.ForN("k", 8))
	mustAllow(t, l.store, limit.ForN("k", 8)) // of the other
	for _, l.lock = range l.store.Meet(l.request) {
		defer l.hold(t)()
	}
	must(t, errOf(l.allow(within(t, 10*time.Second), 4, nothing)))
	wantLeft(t, l.store, limit.ForN("k", 0), 0)
}

// A transaction that cannot take the lock over from its session does nothing, and the session, of
// which nobody knows what it has, is ended.
func TestLineThatCannotBeTakenOver(t *testing.T) {
	t.Parallel()
	l := newLined(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	_, err := l.Pool.Exec(t.Context(), `CREATE FUNCTION `+l.Schema+`.pg_advisory_unlock(bigint) RETURNS bool LANGUAGE plpgsql
		AS $$ BEGIN RAISE 'not now'; END $$; SET search_path = `+l.Schema+`, pg_catalog`)
	must(t, err)
	ran := false
	_, err = l.allow(t.Context(), 1, func(pgx.Tx) error {
		ran = true
		return nil
	})
	if codeOf(err) != "P0001" || ran {
		t.Errorf("got error %v, and ran %v", err, ran)
	}
	l.wantEmpty(t)
	wantLeft(t, l.store, slow("l", 100).ForN("k", 0), 98)
}

// Through a pooler that hands sessions on nobody takes a lock of one.
func TestNoLineBehindAPooler(t *testing.T) {
	t.Parallel()
	l := newLined(t, throughPgBouncer(t)(pgx.QueryExecModeExec))
	for range 10 {
		_, err := l.allow(t.Context(), 1, func(pgx.Tx) error {
			if n := l.inLine(t, true); n != 0 {
				t.Errorf("%d locks through a pooler", n)
			}
			return nil
		})
		must(t, err)
	}
}

// turns is a tracer of batches that wait for a turn at a row.
type turns struct {
	traced.Statements

	mu      sync.Mutex
	batches int // of them, those
	commit  int // that also commit
}

func (c *turns) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	waits, commits := false, false
	for _, q := range data.Batch.QueuedQueries {
		switch {
		case strings.Contains(q.SQL, "pg_advisory_xact_lock"):
			waits, commits = true, false
		case q.SQL == "COMMIT":
			commits = true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if waits {
		c.batches++
		if commits {
			c.commit++
		}
	}
	return ctx
}

// A process that prefetches has its turn at a row without a round trip in it, also when a stranger
// had the row: those behind it wait for no process that is busy, or far away.
func TestPrefetchingTurnIsOneRoundTrip(t *testing.T) {
	t.Parallel()
	seen := &turns{}
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = seen }))
	store := newStore(t, db, withEscrow(time.Second))
	request := slow("l", 1000).For("k")
	mustAllow(t, store, request)
	store.Meet(request)
	tx := begin(t, beside(t, db), pgx.ReadCommitted)
	mustExec(t, tx, "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")
	done := make(chan error, 1)
	go func() {
		_, err := store.AllowFunc(t.Context(), []ratelimit.Request{request}, func(pgx.Tx, ratelimit.Result) error { return nil })
		done <- err
	}()
	eventually(t, "the call waits for its turn", func() bool {
		seen.mu.Lock()
		defer seen.mu.Unlock()
		return seen.batches > 0
	})
	must(t, tx.Rollback(t.Context()))
	must(t, <-done)
	if seen.commit != seen.batches {
		t.Errorf("%d of %d turns commit in their round trip", seen.commit, seen.batches)
	}
}
