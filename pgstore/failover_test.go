package pgstore_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// failing counts the statements and batches that fail on the server.
type failing struct {
	traced.Statements
	n atomic.Int64
}

func (f *failing) trace() pgtest.Option {
	return pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = f })
}

func (f *failing) end(err error) {
	if codeOf(err) != "" {
		f.n.Add(1)
	}
}

func (f *failing) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	f.end(data.Err)
}

func (f *failing) TraceBatchEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchEndData) {
	f.end(data.Err)
}

// failOver has the pool's connections lead to a server that is read-only, as an old primary is
// after a fail-over: those that are made from now on lead to the new one.
func failOver(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		must(t, err)
		defer conn.Release()
		must(t, errOf(conn.Exec(t.Context(), "SET default_transaction_read_only = on")))
	}
}

// After a fail-over two statements fail, one for each queue, however many calls there are. The
// others are on the new primary, and what was told OK is there.
func TestFailOver(t *testing.T) {
	t.Parallel()
	const calls = 64
	for name, change := range map[string]func(*pgstore.Config){"plain": unchanged, "portable": portable, "escrow": withEscrow(time.Second)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var statements failing
			db := pgtest.New(t, maxConns(10), statements.trace())
			store := newStore(t, db, change)
			limit := slow("l", 1000)
			mustAllow(t, store, limit.For("k"))
			failOver(t, db.Pool)
			var granted, failed atomic.Int64
			together(calls, func(int) {
				result, err := store.Allow(t.Context(), limit.For("k"))
				switch {
				case err == nil && result.OK:
					granted.Add(1)
				case codeOf(err) == "25006" && !result.OK:
					failed.Add(1)
				default:
					t.Errorf("got OK %v, error %v", result.OK, err)
				}
			})
			if n := statements.n.Load(); n < 1 || n > 2 {
				t.Errorf("%d statements failed, want one or two", n)
			}
			for range 10 { // on whatever connections there are
				mustAllow(t, store, limit.For("k"))
			}
			if name != "escrow" { // which may hold some
				wantLeft(t, store, limit.For("k"), float64(1000-1-granted.Load()-10))
			}
			if granted.Load()+failed.Load() != calls {
				t.Errorf("%d granted, %d failed, want %d together", granted.Load(), failed.Load(), calls)
			}
		})
	}
}

// toWriters has a pool go to servers that take writes, as docs/operations.md has it.
func toWriters(config *pgxpool.Config) {
	config.PrepareConn = func(_ context.Context, conn *pgx.Conn) (ok bool, err error) {
		for _, setting := range []string{"default_transaction_read_only", "in_hot_standby"} {
			if conn.PgConn().ParameterStatus(setting) == "on" {
				return false, nil
			}
		}
		return true, nil
	}
	config.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
}

// With the settings of docs/operations.md no call fails after a fail-over. While all servers are
// read-only each call connects once, and not as often as the pool may have connections, and one.
func TestPoolToWriters(t *testing.T) {
	t.Parallel()
	var connects atomic.Int64
	var readOnly atomic.Bool
	db := pgtest.New(t, maxConns(10), pgtest.WithConfig(toWriters), pgtest.WithConfig(func(c *pgxpool.Config) {
		c.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
			connects.Add(1)
			if readOnly.Load() {
				c.RuntimeParams["default_transaction_read_only"] = "on"
			}
			return nil
		}
	}))
	store := newStore(t, db)
	limit := slow("l", 1000)
	failOver(t, db.Pool)
	mustAllow(t, store, limit.For("k"))
	failOver(t, db.Pool)
	readOnly.Store(true)
	for range 2 { // the first one leaves the connections that there were
		connects.Store(0)
		if result, err := store.Allow(t.Context(), limit.For("k")); err == nil || result.OK || connects.Load() > 1 {
			t.Errorf("with no server that takes writes: got OK %v, error %v after %d connections, want an error after one", result.OK, err, connects.Load())
		}
	}
}

// An error that no value causes fails the statement, and not each half of its calls again.
func TestErrorsOfNoValueAreNotHalved(t *testing.T) {
	t.Parallel()
	const calls = 64
	for _, code := range []string{"58030", "XX001", "0A000", "54001"} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			var statements failing
			db, store := setUp(t, maxConns(10), statements.trace())
			mustAllow(t, store, slow("l", 1000).For("k"))
			execIn(t, db, `CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN
					PERFORM pg_sleep(0.05);
					RAISE EXCEPTION 'of the server' USING ERRCODE = '`+code+`';
				END $$;
				CREATE TRIGGER fail BEFORE UPDATE ON {schema}.rate_limits FOR EACH STATEMENT EXECUTE FUNCTION {schema}.fail()`)
			together(calls, func(int) {
				if result, err := store.Allow(t.Context(), slow("l", 1000).For("k")); result.OK || codeOf(err) != code {
					t.Errorf("got OK %v, error %v, want code %s", result.OK, err, code)
				}
			})
			if n := statements.n.Load(); n < 1 || n > calls/4 { // halved, they are 126
				t.Errorf("%d statements failed, want a few for %d calls", n, calls)
			}
		})
	}
}

// Each verb on its own leaves an old primary after one error.
func TestFailOverOfEachVerb(t *testing.T) {
	t.Parallel()
	for _, verb := range ownVerbs {
		t.Run(verb.name, func(t *testing.T) {
			t.Parallel()
			db, store := setUp(t, maxConns(4))
			r := slow("l", 1000).For("k")
			mustAllow(t, store, r)
			failOver(t, db.Pool)
			ok, err := verb.do(t.Context(), store, r)
			switch {
			case err == nil: // it only reads
				return
			case ok || codeOf(err) != "25006":
				t.Fatalf("got %v, error %v, want code 25006", ok, err)
			}
			for range 4 {
				mustAllow(t, store, r)
			}
		})
	}
}

// A role that is read-only by a setting is connected anew now and then, and not for each call; and
// a transaction of the caller's that is read-only says nothing of the server.
func TestReadOnlyRole(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	readOnly := another(t, db, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on" })
	const calls = 200
	store := newStore(t, readOnly)
	begun, before := time.Now(), readOnly.Pool.Stat().NewConnsCount()
	for range calls {
		if result, err := store.Allow(t.Context(), slow("l", 10).For("k")); codeOf(err) != "25006" || result.OK {
			t.Fatalf("got OK %v, error %v, want code 25006", result.OK, err)
		}
	}
	if got, most := readOnly.Pool.Stat().NewConnsCount()-before, 6+int64(time.Since(begun)/time.Second); got < 1 || got > most {
		t.Errorf("%d connections for %d calls, want some, and %d at most", got, calls, most)
	}
	before = db.Pool.Stat().NewConnsCount()
	own := newStore(t, db)
	mustAllow(t, own, slow("l", 10).For("k"))
	err := pgx.BeginTxFunc(t.Context(), db.Pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		return own.TakeTx(t.Context(), tx, slow("l", 10).For("k"))
	})
	if codeOf(err) != "25006" || errors.Is(err, ratelimit.ErrRefused) {
		t.Fatalf("got %v, want code 25006", err)
	}
	mustAllow(t, own, slow("l", 10).For("k"))
	if got := db.Pool.Stat().NewConnsCount() - before; got > 1 {
		t.Errorf("%d new connections, want none for a transaction of the caller's", got)
	}
}

// A lock_timeout that PostgreSQL reports as a request to cancel, which nobody made, fails no call.
func TestTimeOutReadAsACancellation(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := slow("l", 100)
	result, err := store.Allow(t.Context(), limit.ForN("k", 10))
	mustTake(t, result, err)
	execIn(t, db, `CREATE SEQUENCE {schema}.writes;
		CREATE FUNCTION {schema}.cancel() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF nextval('{schema}.writes') = 1 THEN
				RAISE EXCEPTION 'canceling statement due to user request' USING ERRCODE = '57014';
			END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER cancel BEFORE UPDATE ON {schema}.rate_limits FOR EACH ROW EXECUTE FUNCTION {schema}.cancel()`)
	if settled, err := store.Settle(t.Context(), result.Receipt, 1); err != nil || !settled.OK {
		t.Fatalf("got OK %v, error %v", settled.OK, err)
	}
	wantLeft(t, store, limit.For("k"), 99)
}
