package pgstore_test

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Attacks by way of calls in the caller's transaction.

// ample is a limit of which no test takes a noticeable part.
func ample(name string, shards int) ratelimit.Limit { return shardedSlow(name, 1e9, shards) }

// steps are transactions that come to a limit for a second time. They count the
// deadlocks that they were told of.
var steps = []struct {
	name string
	run  func(ctx context.Context, db *pgtest.DB, store *pgstore.Store, l ratelimit.Limit, deadlocks *atomic.Int64) error
	took float64
}{
	{"AllowTx and CreditTx", inTwoSteps(creditTx), 840},
	{"AllowTx twice", inTwoSteps(allowTx), 1560},
	{"AllowTx and ReserveTx of several", inTwoSteps(func(ctx context.Context, store *pgstore.Store, tx pgx.Tx, requests []ratelimit.Request) error {
		own := ample("own", 1).For(fmt.Sprint(tx.Conn().PgConn().PID()))
		return reserveTx(ctx, store, tx, append(requests, own))
	}), 1560},
	{"AllowFunc and CreditTx", func(ctx context.Context, _ *pgtest.DB, store *pgstore.Store, l ratelimit.Limit, deadlocks *atomic.Int64) error {
		_, err := store.AllowFunc(ctx, []ratelimit.Request{l.ForN("k", 1200)}, func(tx pgx.Tx, _ ratelimit.Result) error {
			err := creditTx(ctx, store, tx, []ratelimit.Request{l.ForN("k", 360)})
			if countDeadlock(deadlocks, err); deadlocks.Load() > 0 {
				return errTest // so that it is not tried again
			}
			return err
		})
		return err
	}, 840},
}

// inTwoSteps takes 1,200 tokens, and then does something with 360.
func inTwoSteps(more func(context.Context, *pgstore.Store, pgx.Tx, []ratelimit.Request) error) func(context.Context, *pgtest.DB, *pgstore.Store, ratelimit.Limit, *atomic.Int64) error {
	return func(ctx context.Context, db *pgtest.DB, store *pgstore.Store, l ratelimit.Limit, deadlocks *atomic.Int64) error {
		err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
			if err := allowTx(ctx, store, tx, []ratelimit.Request{l.ForN("k", 1200)}); err != nil {
				return err
			}
			return more(ctx, store, tx, []ratelimit.Request{l.ForN("k", 360)})
		})
		countDeadlock(deadlocks, err)
		return err
	}
}

func countDeadlock(deadlocks *atomic.Int64, err error) {
	if hasCode(err, deadlockDetected) {
		deadlocks.Add(1)
	}
}

// A transaction that comes to a sharded limit for a second time deadlocks with no
// other that does.
func TestSecondStepDoesNotDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const goroutines, each = 8, 20
	for _, step := range steps {
		t.Run(step.name, func(t *testing.T) {
			db := pgtest.New(t, maxConns(goroutines))
			store, l := newStore(t, db, onClock(newClock())), ample("l", 8)
			must(t, connectAll(t.Context(), db.Pool))
			ctx := within(t, 20*time.Second)
			var committed, deadlocks atomic.Int64
			together(goroutines, func(int) {
				for range each {
					if deadlocks.Load() > 0 { // each takes a second
						return
					}
					if err := step.run(ctx, db, store, l, &deadlocks); err == nil {
						committed.Add(1)
					}
				}
			})
			if got := committed.Load(); deadlocks.Load() != 0 || got != goroutines*each {
				t.Fatalf("%d deadlocks by the time of %d of %d transactions", deadlocks.Load(), got, goroutines*each)
			}
			wantLeft(t, store, l.ForN("k", 0), 1e9-step.took*float64(committed.Load()))
		})
	}
}

// acquired is how often somebody took a connection from db's pool, or would have.
func acquired(db *pgtest.DB) int64 {
	stat := db.Pool.Stat()
	return stat.AcquireCount() + stat.CanceledAcquireCount()
}

// fetched is how many rows of the limits tx has read, since some instant.
func fetched(t *testing.T, db *pgtest.DB, tx pgx.Tx) (n int64) {
	t.Helper()
	err := tx.QueryRow(t.Context(), `SELECT coalesce(sum(coalesce(idx_tup_fetch, 0) + seq_tup_read), 0)::bigint
		FROM pg_stat_xact_user_tables WHERE relid = $1::regclass`, db.Schema+".rate_limits").Scan(&n)
	must(t, err)
	return n
}

// A call that one limit refuses does not look at the shards of another, which
// were not short: neither here nor on another connection.
func TestRefusalDoesNotLookAtOthersShards(t *testing.T) {
	t.Parallel()
	const shards = 64
	db, store := setUp(t, maxConns(4))
	user, global := slow("per user", 1), shardedSlow("global", 64000, shards)
	mustAllow(t, store, user.For("k"), global.ForN("k", 32000)) // there are rows of all shards
	if got := len(rowsOf(t, db, "global")); got != shards {
		t.Fatalf("got %d rows, want %d", got, shards)
	}
	for _, level := range isolationLevels {
		for name, requests := range map[string][]ratelimit.Request{
			"the user's first": {user.For("k"), global.For("k")},
			"the global first": {global.For("k"), user.For("k")},
			"reserved":         append(noDebt(user.For("k")), global.For("k")),
		} {
			t.Run(string(level)+"/"+name, func(t *testing.T) {
				tx := begin(t, db, level)
				mustExec(t, tx, `SET LOCAL enable_seqscan = off`)
				take := store.AllowTx
				if name == "reserved" {
					take = store.ReserveTx
				}
				rows, connections := fetched(t, db, tx), acquired(db)
				result, err := take(t.Context(), tx, requests...)
				if err != nil || result.OK || result.Request.Limit.Definition().Name != "per user" {
					t.Fatalf("got OK %v by %v, error %v, want a refusal by the user's", result.OK, result.Request.Limit, err)
				}
				if got := acquired(db) - connections; got != 0 {
					t.Errorf("took %d more connections, want none", got)
				}
				if got := fetched(t, db, tx) - rows; got >= shards {
					t.Errorf("read %d rows, want less than there are shards", got)
				}
			})
		}
	}
}

// numbersIn is what tx sees of all rows: their numbers, to the last bit.
func numbersIn(t *testing.T, db *pgtest.DB, tx pgx.Tx) []string {
	t.Helper()
	rows, err := tx.Query(t.Context(), `SELECT concat_ws(' ', name, key, shard, value, extract(epoch FROM ts)) FROM `+db.Schema+`.rate_limits ORDER BY name, key, shard`)
	must(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	return all
}

// quick is limits to which something comes in all the time, of all kinds, so that
// one that is settled in vain shows.
func quick(name string) []ratelimit.Limit {
	return []ratelimit.Limit{
		ratelimit.TokenBucket{Name: name + " bucket", Rate: 1e3 / 3.0, Period: time.Second, Capacity: 1e6},
		ratelimit.FixedWindow{Name: name + " window", Rate: 1, Period: 7 * time.Millisecond, Capacity: 1e6},
		ratelimit.TokenBucket{Name: name + " shards", Rate: 1e3 / 3.0, Period: time.Second, Capacity: 1e6, Shards: 3},
	}
}

// A refusal by one of several limits leaves the numbers of all as they are, to
// the last bit, whichever came first and whatever the transaction did before; and
// the transaction as usable as it was.
func TestRefusalOfSeveralChangesNoNumber(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, empty := range []ratelimit.Limit{slow("empty", 1), slow("z empty", 1), slowWindow("empty window", 1), slowWindow("z empty window", 1), shardedSlow("empty shards", 2, 2)} {
		t.Run(ratelimit.NameOf(empty), func(t *testing.T) {
			t.Parallel()
			refusesAndChangesNoNumber(t, empty)
		})
	}
}

func refusesAndChangesNoNumber(t *testing.T, empty ratelimit.Limit) {
	t.Helper()
	db, store := setUp(t)
	createOrders(t, db)
	mustAllow(t, store, empty.ForN("k", empty.Definition().Capacity))
	for _, level := range isolationLevels {
		for _, verb := range []string{"allow", "reserve"} {
			t.Run(fmt.Sprintf("%s/%s", level, verb), func(t *testing.T) {
				take := store.AllowTx
				requests := []ratelimit.Request{empty.For("k"), slow("never used", 10).For(t.Name())}
				if verb == "reserve" {
					take, requests[0] = store.ReserveTx, noDebt(empty.For("k"))[0]
				}
				for _, l := range quick("m") {
					mustAllow(t, store, l.ForN(t.Name(), 1000.1))
					requests = append(requests, l.ForN(t.Name(), 0.1))
				}
				refuse := func(tx pgx.Tx) {
					t.Helper()
					before := numbersIn(t, db, tx)
					mustExec(t, tx, "SELECT pg_sleep(0.003)")
					result, err := take(t.Context(), tx, requests...)
					if err != nil || result.OK || result.RetryAfter <= 0 || result.Receipt != nil {
						t.Fatalf("got OK %v after %v, error %v, want a refusal", result.OK, result.RetryAfter, err)
					}
					if after := numbersIn(t, db, tx); !slices.Equal(after, before) {
						t.Fatalf("got  %q\nwant %q", after, before)
					}
				}
				before := statesOf(t, db)
				tx := begin(t, db, level)
				mustExec(t, tx, "INSERT INTO "+db.Schema+".orders (what) VALUES ($1)", t.Name())
				refuse(tx)
				refuse(tx)
				inSavepoint(t, tx, pgx.Tx.Rollback, refuse)
				inSavepoint(t, tx, pgx.Tx.Commit, refuse)
				must(t, tx.Commit(t.Context()))
				wantOrders(t, db, t.Name(), 1)
				if after := statesOf(t, db); !slices.Equal(after, before) {
					t.Errorf("afterwards got  %q\nwant %q", after, before)
				}

				tx = begin(t, db, level) // in which some was taken before
				result, err := store.AllowTx(t.Context(), tx, requests[2:]...)
				mustTake(t, result, err)
				refuse(tx)
				inSavepoint(t, tx, pgx.Tx.Rollback, refuse)
				result, err = store.AllowTx(t.Context(), tx, requests[1:]...)
				mustTake(t, result, err)
				must(t, tx.Commit(t.Context()))
			})
		}
	}
}

// wantError has a verb return an error, and neither say yes nor panic.
func wantError(t *testing.T, what string, verb func(context.Context) (ok bool, err error)) {
	t.Helper()
	t.Run(what, func(t *testing.T) {
		defer func() {
			if v := recover(); v != nil {
				t.Errorf("panicked: %v", v)
			}
		}()
		if ok, err := verb(within(t, 5*time.Second)); ok || err == nil {
			t.Errorf("got OK %v, error %v, want an error", ok, err)
		}
	})
}

// What was forgotten is an error that says so, and no panic: a nil transaction, a
// nil function, a Store that is nil or was not made by New.
func TestNilIsAnError(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	store, r := newStore(t, db), slow("bucket", 10).For("k")
	for _, verb := range verbsInTx {
		wantError(t, verb.name+" in no transaction", func(ctx context.Context) (bool, error) { return verb.do(ctx, store, nil, r) })
	}
	for name, run := range map[string]runner{"AllowFunc": store.AllowFunc, "ReserveFunc": store.ReserveFunc} {
		wantError(t, name+" of no function", func(ctx context.Context) (bool, error) { return isOK(run(ctx, []ratelimit.Request{r}, nil)) })
	}
	idle(t, db.Pool)
	for name, store := range map[string]*pgstore.Store{"nil": nil, "zero": new(pgstore.Store)} {
		for _, verb := range append(tableVerbs, ownVerbs...) {
			wantError(t, verb.name+" of a Store that is "+name, func(ctx context.Context) (bool, error) { return verb.do(ctx, store, r) })
		}
		wantError(t, "Change of a Store that is "+name, func(ctx context.Context) (bool, error) {
			_, err := store.Change(ctx, slow("l", 10), shardedSlow("l", 10, 2), "")
			return false, err
		})
		for _, verb := range verbsInTx {
			tx := begin(t, db, pgx.ReadCommitted)
			wantError(t, verb.name+" of a Store that is "+name, func(ctx context.Context) (bool, error) { return verb.do(ctx, store, tx, r) })
			_ = tx.Rollback(t.Context()) // whatever became of it
		}
		wantError(t, "Close of a Store that is "+name, func(context.Context) (bool, error) {
			store.Close()
			return false, errTest
		})
	}
	if got := tableOf(t, db); len(got) != 0 {
		t.Errorf("got rows %q, want none", got)
	}
}

// A connection that is closed is not kept in memory by what the store noted of its
// transactions.
func TestStoreKeepsNoClosedConnection(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	closed := func() weak.Pointer[pgx.Conn] {
		config := db.Pool.Config().ConnConfig
		conn, err := pgx.ConnectConfig(t.Context(), config)
		must(t, err)
		defer conn.Close(t.Context())
		if err := pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			return store.TakeTx(t.Context(), tx, shardedSlow("l", 100, 4).For("k"))
		}); err != nil {
			t.Fatal(err)
		}
		return weak.Make(conn)
	}()
	eventually(t, "the connection is collected", func() bool {
		runtime.GC()
		return closed.Value() == nil
	})
	runtime.KeepAlive(store)
}
