package pgstore_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
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

// statusOf is what the server says of a transaction.
func statusOf(t *testing.T, conn *pgx.Conn, xid string) (status string) {
	t.Helper()
	err := conn.QueryRow(t.Context(), `SELECT coalesce(pg_xact_status($1::text::xid8), '')`, xid).Scan(&status)
	must(t, err)
	return status
}

// The server crashes before COMMIT: the transaction ID of what a crash has undone
// is given to somebody else, who commits. Who lost his COMMIT must not take that
// for his own, not even if the other took as many tokens from the same row.
func TestLostCommitIsNotMistakenForAnother(t *testing.T) {
	pgtest.Long(t)
	s := newCrashingShop(t)
	for _, test := range []struct {
		name   string
		others int
		do     func(context.Context, *pgx.Conn, *pgstore.Store) error
	}{
		{"other work", 50, func(ctx context.Context, conn *pgx.Conn, _ *pgstore.Store) error {
			return errOf(conn.Exec(ctx, `INSERT INTO orders (what) VALUES ('other')`))
		}},
		{"takes from the same row", 50, takeOn(s.limit.For("k"))},
		{"a take from the same row", 1, takeOn(s.limit.For("k"))},
	} {
		for name, run := range map[string]runner{"AllowFunc": s.store.AllowFunc, "AllowOnCommit": onCommit(s.store, "")} {
			t.Run(test.name+"/"+name, func(t *testing.T) {
				mustAllow(t, s.store, s.limit.For("k")) // there is a row
				orders := countOrders(t, s.DB, "order")
				var xid string
				result, err := run(within(t, 30*time.Second), s.requests(), s.order(t.Context(), func(tx pgx.Tx) error {
					if err := tx.QueryRow(t.Context(), `SELECT pg_current_xact_id()::text`).Scan(&xid); err != nil {
						return err
					}
					crash(t, s.URL)
					conn := connect(t, s.URL)
					for range test.others {
						must(t, test.do(t.Context(), conn, s.store))
					}
					if status := statusOf(t, conn, xid); status != "committed" {
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

// takeOn takes on a connection that the test has, in a transaction.
func takeOn(r ratelimit.Request) func(context.Context, *pgx.Conn, *pgstore.Store) error {
	return func(ctx context.Context, conn *pgx.Conn, store *pgstore.Store) error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return allowTx(ctx, store, tx, []ratelimit.Request{r}) })
	}
}

// ownEndings are ways in which work ends the transaction, which is the runner's
// to end.
var ownEndings = []struct {
	name      string
	committed bool
	end       func(context.Context, pgx.Tx) error
}{
	{"Rollback", false, func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }},
	{"ROLLBACK", false, ending("ROLLBACK")},
	{"Commit of what failed", false, func(ctx context.Context, tx pgx.Tx) error {
		_ = raise(ctx, "P0001")(tx)
		_ = tx.Commit(ctx)
		return nil
	}},
	{"COMMIT of what failed", false, func(ctx context.Context, tx pgx.Tx) error {
		_ = raise(ctx, "P0001")(tx)
		return ending("COMMIT")(ctx, tx)
	}},
	{"Commit", true, func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }},
	{"COMMIT", true, ending("COMMIT")},
}

func ending(sql string) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error { return errOf(tx.Exec(ctx, sql)) }
}

// eachOwnEnding runs work that ends its transaction, alone and in a crowd on one
// key in which every other call leaves the end to the runner, and compares how
// many were told OK, and what is there, with what was committed.
func eachOwnEnding(t *testing.T, committed bool) {
	t.Helper()
	t.Parallel()
	for _, goroutines := range []int{1, 8} {
		for _, ending := range ownEndings {
			if ending.committed != committed {
				continue
			}
			t.Run(fmt.Sprintf("%s/of %d", ending.name, goroutines), func(t *testing.T) {
				s := newShop(t, 1000)
				ctx := within(t, 20*time.Second)
				const each = 5
				want, told := 0, make([]atomic.Int64, 2) // told OK: of those who leave the end to the runner, and of the others
				together(goroutines, func(g int) {
					for i := range each {
						self := (g + i + 1) % 2
						end := []func(pgx.Tx) error{nothing, func(tx pgx.Tx) error { return ending.end(ctx, tx) }}[self]
						result, err := s.store.AllowFunc(ctx, s.requests(), s.order(ctx, end))
						if err == nil && result.OK {
							told[self].Add(1)
						} else if self == 0 || err == nil || result.OK {
							t.Errorf("ends itself: %d: got OK %v, error %v", self, result.OK, err)
						}
					}
				})
				selves := (goroutines*each + 1) / 2
				if committed {
					want = selves
				}
				if got := told[1].Load(); got != int64(want) {
					t.Errorf("%d of %d who ended the transaction were told OK, want %d", got, selves, want)
				}
				s.want(t, goroutines*each-selves+want)
				idle(t, s.Pool)
			})
		}
	}
}

// Work that rolled its transaction back is never told OK.
func TestWorkThatRollsBackIsNotToldOK(t *testing.T) { eachOwnEnding(t, false) }

// Work that committed its transaction is told OK, since all of it is there.
func TestWorkThatCommitsIsToldOK(t *testing.T) { eachOwnEnding(t, true) }

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
		{"Commit", func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }, true, false},
		{"COMMIT", ending("COMMIT"), true, false},
		{"COMMIT AND CHAIN", ending("COMMIT AND CHAIN"), true, false},
		{"COMMIT, BEGIN", ending("COMMIT; BEGIN"), true, false},
		{"Commit, and no connection", func(ctx context.Context, tx pgx.Tx) error { return tx.Commit(ctx) }, true, true},
		{"Rollback", func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }, false, false},
		{"ROLLBACK AND CHAIN", ending("ROLLBACK AND CHAIN"), false, false},
		{"Rollback, and no connection", func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) }, false, true},
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
				if test.committed {
					s.wantRuns(t, 1)
				} else {
					s.wantRuns(t, 2)
				}
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

// outage is a server that is gone with the next thing that is written to it.
type outage struct {
	begun atomic.Bool
	dials atomic.Int64 // during it
}

func (o *outage) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if o.begun.Load() {
		o.dials.Add(1)
		return nil, errors.New("connection refused by the test")
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	return outageConn{conn, o}, err
}

type outageConn struct {
	net.Conn
	outage *outage
}

func (c outageConn) Write(p []byte) (int, error) {
	if c.outage.begun.Load() {
		defer c.Conn.Close()
	}
	return c.Conn.Write(p)
}

// Read loses the answer also if pgx reads it before its write has returned, as it does when
// that takes long.
func (c outageConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.outage.begun.Load() {
		return 0, cmp.Or(err, net.ErrClosed)
	}
	return n, err
}

// Who loses the answer to his COMMIT to a server that is gone hears that before
// long, and does not hammer at the server's door until then.
func TestLostCommitWhileServerIsGone(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const (
		callers = 8
		lasts   = time.Second // the callers' context
		grace   = 10 * time.Second
		dials   = 50 // for each caller
	)
	var outage outage
	db := pgtest.New(t, maxConns(callers), pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.DialFunc = outage.dial }))
	s := newShopOn(t, db, 10, budget(time.Minute))
	must(t, connectAll(t.Context(), db.Pool))
	ctx := within(t, lasts)
	var ready sync.WaitGroup
	ready.Add(callers)
	var latest [callers]time.Time
	together(callers, func(i int) {
		_, err := s.store.AllowFunc(ctx, []ratelimit.Request{s.limit.For(fmt.Sprint(i))}, s.order(ctx, func(pgx.Tx) error {
			ready.Done()
			ready.Wait()
			outage.begun.Store(true)
			return nil
		}))
		latest[i] = time.Now()
		if !errors.Is(err, pgstore.ErrOutcomeUnknown) {
			t.Errorf("got %v, want %v", err, pgstore.ErrOutcomeUnknown)
		}
	})
	deadline, _ := ctx.Deadline()
	if late := slices.MaxFunc(latest[:], time.Time.Compare).Sub(deadline); late > grace {
		t.Errorf("returned %v after the deadline, want %v at most", late, grace)
	}
	if got := outage.dials.Load(); got > callers*dials {
		t.Errorf("got %d attempts to connect by %d callers, want %d at most", got, callers, callers*dials)
	}
	outage.begun.Store(false)
	idle(t, db.Pool)
}

// An edit whose context ends in its COMMIT may be done.
func TestEditThatEndsInCommit(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, limit := newStore(t, db), slow("l", 10)
	must(t, errOf(store.Allow(t.Context(), limit.ForN("k", 5))))
	lock := "pg_advisory_xact_lock(hashtext('" + db.Schema + "'))"
	for _, sql := range []string{
		"CREATE FUNCTION " + db.Schema + ".waits() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM set_config('lock_timeout', '0', true), " + lock + "; RETURN NULL; END$$",
		"CREATE CONSTRAINT TRIGGER waits AFTER UPDATE ON " + db.Schema + ".rate_limits DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION " + db.Schema + ".waits()",
	} {
		must(t, errOf(db.Pool.Exec(t.Context(), sql)))
	}
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SELECT "+lock); err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := store.Credit(ctx, limit.ForN("k", 1))
			done <- err
		}()
		for !pgtest.Blocks(t, db.Pool, tx) {
			time.Sleep(time.Millisecond)
		}
		cancel()
		if err := <-done; !errors.Is(err, pgstore.ErrOutcomeUnknown) {
			t.Errorf("got %v, want %v", err, pgstore.ErrOutcomeUnknown)
		}
		return nil
	})
	must(t, err)
}

// An edit that only waits for rows commits nothing: a COMMIT without an answer would be an edit that may
// be done.
func TestEditThatWaitsCommitsNothing(t *testing.T) {
	t.Parallel()
	var seen atomic.Int64
	db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = commits{&seen} }))
	store, limit := newStore(t, db), slow("l", 10)
	a, b := limit.For("a"), limit.For("b")
	mustAllow(t, store, a)
	mustAllow(t, store, b)
	holder := begin(t, db, pgx.ReadCommitted)
	takeIn(t, store, holder, b)
	before := seen.Load()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := store.PauseEach(ctx, []ratelimit.Request{a, b}, time.Hour); !isLocked(err) || seen.Load() != before {
		t.Errorf("got %v after %d COMMITs, want ErrLocked after none", err, seen.Load()-before)
	}
}
