package pgstore_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
)

// wire counts the round trips of its connections: the times that something is
// written after something was read. It knows nothing of pgx or PostgreSQL.
type wire struct {
	mu      sync.Mutex
	trips   int
	written bool // and nothing read since
}

func (w *wire) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	return wireConn{conn, w}, err
}

func (w *wire) reset() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trips, w.written = 0, false
}

func (w *wire) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.trips
}

type wireConn struct {
	net.Conn
	wire *wire
}

func (c wireConn) Write(p []byte) (int, error) {
	c.wire.mu.Lock()
	if !c.wire.written {
		c.wire.trips++
	}
	c.wire.written = true
	c.wire.mu.Unlock()
	return c.Conn.Write(p)
}

func (c wireConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.wire.mu.Lock()
	c.wire.written = c.wire.written && n == 0
	c.wire.mu.Unlock()
	return n, err
}

// sent is what a call sent.
type sent struct {
	trips            int
	queries, batches int64
}

// counted is a database whose one connection is watched.
type counted struct {
	*pgtest.DB
	wire       wire
	statements traced.Statements
}

func newCounted(t *testing.T) *counted {
	t.Helper()
	c := &counted{}
	c.DB = pgtest.New(t, maxConns(1), pgtest.WithConfig(func(config *pgxpool.Config) {
		config.ConnConfig.DialFunc = c.wire.dial
		config.ConnConfig.Tracer = &c.statements
	}))
	return c
}

func (c *counted) reset() {
	c.wire.reset()
	c.statements.Reset()
}

func (c *counted) sent() sent {
	return sent{c.wire.count(), c.statements.Queries(), c.statements.Batches()}
}

// grants are calls that are granted in full limits.
var grants = []struct {
	name     string
	reserve  bool
	requests []ratelimit.Request
}{
	{"bucket", false, []ratelimit.Request{slow("A", 100).For("k")}},
	{"window", false, []ratelimit.Request{slowWindow("B", 100).For("k")}},
	{"shards", false, []ratelimit.Request{shardedSlow("C", 1000, 4).For("k")}},
	{"reserve bucket", true, []ratelimit.Request{slow("D", 100).ForN("k", 150)}},
	{"reserve window", true, []ratelimit.Request{slowWindow("E", 100).ForN("k", 150)}},
	{"two", false, []ratelimit.Request{slow("F", 100).For("k"), slowWindow("G", 100).For("k")}},
	{"three", false, []ratelimit.Request{slow("H", 100).For("k"), slow("H", 100).For("l"), shardedSlow("I", 1000, 4).For("k")}},
	{"reserve two", true, []ratelimit.Request{slow("J", 100).ForN("k", 150), slowWindow("K", 100).ForN("k", 150)}},
	{"sliding window", false, []ratelimit.Request{slowSliding("L", 100).For("k")}},
	{"two with a sliding window", false, []ratelimit.Request{slow("N", 100).For("k"), slowSliding("O", 100).For("k")}},
}

// A slot of a sliding window is reserved in two round trips: its row is locked and read, and
// then written.
func TestReservedSlotIsTwoRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	store := newStore(t, c.DB)
	for step := range 3 { // the first one prepares, the second is ahead
		tx := begin(t, c.DB, pgx.Serializable)
		c.reset()
		result, err := store.ReserveTx(t.Context(), tx, slowSliding("M", 100).ForN("k", 60))
		if err != nil || !result.OK {
			t.Fatalf("got OK %v, error %v", result.OK, err)
		}
		if got := c.sent().trips; step > 0 && got != 2 {
			t.Errorf("got %d round trips, want 2", got)
		}
		end(t, tx.Commit)
	}
}

// A granted decision in the caller's transaction is one statement, or for
// several limits and for shards one batch, and either way one round trip. (The first on a
// connection is one more: pgx prepares the statement.)
func TestGrantedIsOneRoundTrip(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	store := newStore(t, c.DB)
	for _, test := range grants {
		take, want := store.AllowTx, sent{trips: 1, queries: 1}
		if test.reserve {
			take = store.ReserveTx
		}
		if len(test.requests) > 1 || test.name == "shards" {
			want = sent{trips: 1, batches: 1}
		}
		for _, level := range isolationLevels {
			t.Run(fmt.Sprintf("%s/%s", test.name, level), func(t *testing.T) {
				for _, what := range []string{"prepares", "first of the key", "later"} {
					tx := begin(t, c.DB, level)
					c.reset()
					result, err := take(t.Context(), tx, test.requests...)
					if err != nil || !result.OK {
						t.Fatalf("%s: got OK %v, error %v", what, result.OK, err)
					}
					if got := c.sent(); what != "prepares" && got != want {
						t.Errorf("%s: got %+v, want %+v", what, got, want)
					}
					end := map[string]func(context.Context) error{"prepares": tx.Rollback}[what]
					if end == nil {
						end = tx.Commit
					}
					must(t, end(t.Context()))
				}
				must(t, errOf(c.Pool.Exec(t.Context(), "TRUNCATE "+c.Schema+".rate_limits")))
			})
		}
	}
}

// The runner adds one round trip to the take and the work: COMMIT. So with a
// function that runs one statement they are three.
func TestRunnerRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	store := newStore(t, c.DB)
	createOrders(t, c.DB)
	works := []func(pgx.Tx) error{nothing, func(tx pgx.Tx) error {
		return errOf(tx.Exec(t.Context(), "INSERT INTO "+c.Schema+".orders (what) VALUES ('order')"))
	}}
	for _, test := range grants {
		t.Run(test.name, func(t *testing.T) {
			run := store.AllowFunc
			if test.reserve {
				run = store.ReserveFunc
			}
			for statements, work := range works {
				for _, what := range []string{"prepares", "later"} {
					c.reset()
					_, err := run(t.Context(), test.requests, func(tx pgx.Tx, _ ratelimit.Result) error { return work(tx) })
					must(t, err)
					if got := c.wire.count(); what == "later" && got != 2+statements {
						t.Errorf("got %d round trips, want %d", got, 2+statements)
					}
				}
			}
		})
	}
}

// predicateLocks is on what of the limits' table and its index tx holds
// predicate locks.
func predicateLocks(t *testing.T, db *pgtest.DB, tx pgx.Tx) []string {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `SELECT concat_ws(' ', relation::regclass, locktype, page, tuple) FROM pg_locks
		WHERE mode = 'SIReadLock' AND pid = $1 AND relation IN (
			SELECT $2::regclass UNION SELECT indexrelid FROM pg_index WHERE indrelid = $2::regclass)`,
		tx.Conn().PgConn().PID(), db.Schema+".rate_limits")
	must(t, err)
	locks, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	return locks
}

// A grant does not read, as SERIALIZABLE sees it. That is why transactions
// that take from different rows do not get in each other's way.
func TestGrantedLeavesNoPredicateLock(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	for _, test := range grants {
		take := store.AllowTx
		if test.reserve {
			take = store.ReserveTx
		}
		t.Run(test.name, func(t *testing.T) {
			for _, what := range []string{"no row", "a row"} {
				tx := begin(t, db, pgx.Serializable)
				if result, err := take(t.Context(), tx, test.requests...); err != nil || !result.OK {
					t.Fatalf("got OK %v, error %v", result.OK, err)
				}
				if got := predicateLocks(t, db, tx); len(got) != 0 {
					t.Errorf("%s: got predicate locks on %q, want none", what, got)
				}
				must(t, tx.Commit(t.Context()))
			}
		})
	}
	t.Run("but a check does", func(t *testing.T) {
		tx := begin(t, db, pgx.Serializable)
		must(t, errOf(store.CheckTx(t.Context(), tx, grants[0].requests...)))
		if got := predicateLocks(t, db, tx); len(got) == 0 {
			t.Error("got no predicate lock, want one")
		}
	})
}

// A lone call on its own is one round trip if its row grants it, two if the row refuses it, and
// four if there is no row.
func TestLoneRoundTrips(t *testing.T) {
	t.Parallel()
	c := newCounted(t)
	db := *c.DB
	db.Pool = newPool(t, db.URL) // of others
	others := newStore(t, &db)
	for name, limit := range map[string]ratelimit.Limit{"bucket": slow("bucket", 10), "window": slowWindow("window", 10), "sliding window": slowSliding("sliding", 10)} {
		t.Run(name, func(t *testing.T) {
			mustAllow(t, newStore(t, c.DB), limit.For("prepares"))
			mustAllow(t, newStore(t, c.DB), limit.For("prepares"))
			mustAllow(t, others, limit.For("there"))
			mustAllow(t, others, limit.ForN("empty", 10))
			store := newStore(t, c.DB)
			for _, test := range []struct {
				key   string
				ok    bool
				trips int
			}{{"new", true, 4}, {"new", true, 1}, {"there", true, 1}, {"there", true, 1}, {"empty", false, 2}} {
				c.reset()
				result, err := store.Allow(t.Context(), limit.For(test.key))
				if err != nil || result.OK != test.ok {
					t.Fatalf("%s: %v, %v", test.key, result, err)
				}
				if got := c.sent().trips; got != test.trips {
					t.Errorf("%s: %d round trips, want %d", test.key, got, test.trips)
				}
			}
			wantLeft(t, others, limit.For("new"), 8)
			wantLeft(t, others, limit.For("there"), 7)
		})
	}
}
