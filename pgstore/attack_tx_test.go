package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"
	"weak"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Attacks by way of calls in the caller's transaction.

// A transaction that comes to a sharded limit for a second time deadlocks with no
// other that does.
func TestSecondStepDoesNotDeadlock(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const goroutines, each = 8, 20
	first, second := shardedSlow("l", 1e9, 8).ForN("k", 1200), shardedSlow("l", 1e9, 8).ForN("k", 360)
	for name, test := range map[string]struct {
		took float64
		more func(context.Context, *pgstore.Store, pgx.Tx) error
	}{
		"CreditTx": {840, func(ctx context.Context, s *pgstore.Store, tx pgx.Tx) error {
			return errOf(s.CreditTx(ctx, tx, second))
		}},
		"TakeTx": {1560, func(ctx context.Context, s *pgstore.Store, tx pgx.Tx) error { return s.TakeTx(ctx, tx, second) }},
		"ReserveTx of several": {1560, func(ctx context.Context, s *pgstore.Store, tx pgx.Tx) error {
			own := slow("own", 1e9).For(fmt.Sprint(tx.Conn().PgConn().PID()))
			return errOf(ratelimit.Granted(s.ReserveTx(ctx, tx, second, own)))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.New(t, maxConns(goroutines))
			store, ctx := newStore(t, db, onClock(newClock())), within(t, 20*time.Second)
			must(t, connectAll(t.Context(), db.Pool))
			together(goroutines, func(int) {
				for range each {
					if err := pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
						return errors.Join(store.TakeTx(ctx, tx, first), test.more(ctx, store, tx))
					}); err != nil {
						t.Error(err)
						return
					}
				}
			})
			if !t.Failed() {
				wantLeft(t, store, first.Limit.ForN("k", 0), 1e9-test.took*goroutines*each)
			}
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
		for _, level := range isolationLevels {
			for verb, take := range map[string]func(*pgstore.Store, context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error){
				"allow": (*pgstore.Store).AllowTx, "reserve": (*pgstore.Store).ReserveTx,
			} {
				t.Run(fmt.Sprintf("%s/%s/%s", ratelimit.NameOf(empty), level, verb), func(t *testing.T) {
					t.Parallel()
					db, store := setUp(t)
					createOrders(t, db)
					requests := append(noDebt(empty.For("k")), slow("never used", 10).For("k"))
					mustAllow(t, store, requests[0].Limit.ForN("k", empty.Definition().Capacity))
					for _, l := range quick("m") {
						mustAllow(t, store, l.ForN("k", 1000.1))
						requests = append(requests, l.ForN("k", 0.1))
					}
					refuse := func(tx pgx.Tx) {
						t.Helper()
						before := numbersIn(t, db, tx)
						mustExec(t, tx, "SELECT pg_sleep(0.003)")
						result, err := take(store, t.Context(), tx, requests...)
						if err != nil || result.OK || result.RetryAfter <= 0 || result.Receipt != nil {
							t.Fatalf("got OK %v after %v, error %v, want a refusal", result.OK, result.RetryAfter, err)
						}
						if after := numbersIn(t, db, tx); !slices.Equal(after, before) {
							t.Fatalf("got  %q\nwant %q", after, before)
						}
					}
					before := statesOf(t, db)
					tx := begin(t, db, level)
					mustExec(t, tx, "INSERT INTO "+db.Schema+".orders (what) VALUES ('order')")
					refuse(tx)
					refuse(tx)
					inSavepoint(t, tx, pgx.Tx.Rollback, refuse)
					inSavepoint(t, tx, pgx.Tx.Commit, refuse)
					end(t, tx.Commit)
					wantOrders(t, db, "order", 1)
					if after := statesOf(t, db); !slices.Equal(after, before) {
						t.Errorf("afterwards got  %q\nwant %q", after, before)
					}

					tx = begin(t, db, level) // in which some was taken before
					takeIn(t, store, tx, requests[2:]...)
					refuse(tx)
					inSavepoint(t, tx, pgx.Tx.Rollback, refuse)
					takeIn(t, store, tx, requests[1:]...)
					end(t, tx.Commit)
				})
			}
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
		conn, err := pgx.ConnectConfig(t.Context(), db.Pool.Config().ConnConfig)
		must(t, err)
		defer conn.Close(t.Context())
		must(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			return store.TakeTx(t.Context(), tx, shardedSlow("l", 100, 4).For("k"))
		}))
		return weak.Make(conn)
	}()
	eventually(t, "the connection is collected", func() bool {
		runtime.GC()
		return closed.Value() == nil
	})
	runtime.KeepAlive(store)
}
