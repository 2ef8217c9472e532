package pgstore_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// plenty is a limit that does not bind.
func plenty(shards int) ratelimit.TokenBucket {
	return ratelimit.TokenBucket{
		Name: fmt.Sprintf("plenty_%d", shards), Rate: 1e9, Period: time.Second, Shards: shards,
	}
}

// durable is a pool on a server of its own with its default durability.
func durable(b *testing.B) *pgxpool.Pool {
	b.Helper()
	server, err := throwaway.StartWith(b.Context(), throwaway.Options{Fsync: true})
	must(b, err)
	b.Cleanup(func() { server.Close() })
	config, err := pgxpool.ParseConfig(server.URL)
	must(b, err)
	config.MaxConns = 16
	config.ConnConfig.RuntimeParams["search_path"] = "bench"
	pool, err := pgxpool.NewWithConfig(b.Context(), config)
	must(b, err)
	b.Cleanup(pool.Close)
	must(b, errOf(pool.Exec(b.Context(), "CREATE SCHEMA bench; "+migrations.UpSQL()+"; CREATE TABLE orders (what text NOT NULL)", pgx.QueryExecModeSimpleProtocol)))
	return pool
}

// benchStore is a store on a pool, with a Config.
func benchStore(b *testing.B, pool *pgxpool.Pool, config pgstore.Config) *pgstore.Store {
	b.Helper()
	store, err := pgstore.New(pool, &config)
	must(b, err)
	b.Cleanup(store.Close)
	return store
}

// fromAll measures calls from 64 goroutines on two cores.
func fromAll(b *testing.B, call func() error) {
	b.ReportAllocs()
	b.SetParallelism(32) // times GOMAXPROCS
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			should(b, call())
		}
	})
}

// fromOneAndAll measures calls that wait for each other, and calls from 64 goroutines.
func fromOneAndAll(b *testing.B, name string, call func() error) {
	b.Run(name+"alone", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			should(b, call())
		}
	})
	b.Run(name+"together", func(b *testing.B) { fromAll(b, call) })
}

// BenchmarkShards runs SERIALIZABLE transactions with one INSERT and a limit
// that all share, from 64 goroutines: how many shards are worth it.
func BenchmarkShards(b *testing.B) {
	store := benchStore(b, durable(b), pgstore.Config{})
	for _, shards := range []int{1, 2, 4, 8, 16, 32, 64} {
		b.Run(fmt.Sprint(shards), func(b *testing.B) {
			requests := []ratelimit.Request{plenty(shards).For("")}
			fromAll(b, func() error {
				return errOf(store.AllowFunc(b.Context(), requests, func(tx pgx.Tx, _ ratelimit.Result) error {
					return errOf(tx.Exec(b.Context(), "INSERT INTO orders (what) VALUES ('x')"))
				}))
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "tx/s")
		})
	}
}

// kinds are limits of each kind that do not bind.
var kinds = map[string]ratelimit.Limit{
	"bucket":  plenty(1),
	"fixed":   ratelimit.FixedWindow{Name: "plenty_fixed", Rate: 1e9, Period: time.Second},
	"sliding": ratelimit.SlidingWindow{Name: "plenty_sliding", Rate: 1e9, Period: time.Second},
}

// BenchmarkAllow is a decision on its own, of each kind of limit.
func BenchmarkAllow(b *testing.B) {
	store := benchStore(b, durable(b), pgstore.Config{})
	for name, limit := range kinds {
		fromOneAndAll(b, name+"/", func() error { return store.Take(b.Context(), limit.For("k")) })
	}
}

// BenchmarkPool measures decisions beside an application that uses up its pool: decisions that share
// it, and decisions with a pool of their own.
func BenchmarkPool(b *testing.B) {
	application := durable(b)
	config := application.Config()
	config.MaxConns = 4
	own, err := pgxpool.NewWithConfig(b.Context(), config)
	must(b, err)
	defer own.Close()
	for _, users := range []int{8, 32, 128} {
		for _, pool := range []*pgxpool.Pool{application, own} {
			b.Run(fmt.Sprintf("users=%d/own=%v", users, pool == own), func(b *testing.B) {
				benchmarkBeside(b, application, users, pool)
			})
		}
	}
}

func benchmarkBeside(b *testing.B, application *pgxpool.Pool, users int, pool *pgxpool.Pool) {
	store := benchStore(b, pool, pgstore.Config{})
	ctx, stop := context.WithCancel(b.Context())
	var working sync.WaitGroup
	defer working.Wait()
	defer stop()
	for range users {
		working.Go(func() {
			for ctx.Err() == nil {
				_, _ = application.Exec(ctx, "SELECT pg_sleep(0.05)")
			}
		})
	}
	var took []time.Duration
	for b.Loop() {
		begun := time.Now()
		must(b, store.Take(b.Context(), plenty(1).For("")))
		took = append(took, time.Since(begun))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2])/1e6, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100])/1e6, "p99-ms")
}

// BenchmarkTakeTx is a decision in a transaction that does nothing else and is never
// committed: the statement, without the disk, for each kind of limit.
func BenchmarkTakeTx(b *testing.B) {
	pool := durable(b)
	store := benchStore(b, pool, pgstore.Config{})
	for kind, limit := range kinds {
		for name, take := range map[string]func(context.Context, pgx.Tx, ...ratelimit.Request) (ratelimit.Result, error){
			"allow": store.AllowTx, "reserve": store.ReserveTx,
		} {
			b.Run(kind+"/"+name, func(b *testing.B) {
				tx, err := pool.Begin(b.Context())
				must(b, err)
				defer tx.Rollback(context.Background())
				for n := 0; b.Loop(); n++ {
					if n%100 == 99 { // versions of a row pile up in a transaction
						must(b, errOf(tx.Exec(b.Context(), "COMMIT; BEGIN")))
					}
					must(b, errOf(ratelimit.Granted(take(b.Context(), tx, limit.For("t")))))
				}
			})
		}
	}
}

// BenchmarkEscrow is a decision that is handed out from memory, with the statements that it takes.
func BenchmarkEscrow(b *testing.B) {
	store := benchStore(b, durable(b), pgstore.Config{Escrow: 100 * time.Millisecond})
	request := plenty(1).For("k")
	fromOneAndAll(b, "", func() error { return store.Take(b.Context(), request) })
}

// BenchmarkObserve compares calls with Config.Observe and without it: on their own, in a
// caller's transaction, and from memory. The two take turns within one run, some calls at a time,
// and set/unset is the ratio of the times of their fastest twentieth, in which nobody else had the
// machine.
func BenchmarkObserve(b *testing.B) {
	pool := durable(b)
	for _, form := range []struct {
		name   string
		escrow time.Duration
		calls  int // of a turn
	}{{"own", 0, 1}, {"tx", 0, 1}, {"memory", 100 * time.Millisecond, 100}} {
		b.Run(form.name, func(b *testing.B) {
			var stores [2]*pgstore.Store
			for i, observe := range []ratelimit.Observe{nil, func(context.Context, ratelimit.Event) {}} {
				stores[i] = benchStore(b, pool, pgstore.Config{Escrow: form.escrow, Observe: observe})
			}
			tx, err := pool.Begin(b.Context())
			must(b, err)
			defer tx.Rollback(context.Background())
			limit, keys := plenty(1), [2]string{form.name, form.name + ", observed"}
			var took [2][]float64
			turn := func(i int) {
				begun := time.Now()
				for range form.calls {
					if form.name == "tx" {
						must(b, stores[i].TakeTx(b.Context(), tx, limit.For(keys[i])))
					} else {
						must(b, stores[i].Take(b.Context(), limit.For(keys[i])))
					}
				}
				took[i] = append(took[i], float64(time.Since(begun).Nanoseconds())/float64(form.calls))
			}
			for n := 0; b.Loop(); n++ {
				turn(n % 2)
				turn(1 - n%2)
			}
			for i := range took {
				slices.Sort(took[i])
			}
			unset, set := took[0][len(took[0])/20], took[1][len(took[1])/20]
			b.ReportMetric(unset, "ns/unset")
			b.ReportMetric(set, "ns/set")
			b.ReportMetric(set/unset, "set/unset")
			b.ReportMetric(testing.AllocsPerRun(500, func() { turn(1) })-testing.AllocsPerRun(500, func() { turn(0) }), "more-allocs")
		})
	}
}

// TestAllocations bounds what a granted call allocates, pgx included: what is read of a row goes into
// fields, and a limit that was called before is not validated again.
func TestAllocations(t *testing.T) {
	db, store := setUp(t)
	limit := slow("allocations", 1e9)
	requests := []ratelimit.Request{limit.For("k")}
	granted := func(result ratelimit.Result, err error) {
		if err != nil || !result.OK {
			t.Fatalf("got %+v and %v", result, err)
		}
	}
	tx := begin(t, db, pgx.ReadCommitted)
	for _, test := range []struct {
		name string
		most float64
		call func()
	}{
		{"AllowTx", 29, func() { granted(store.AllowTx(t.Context(), tx, limit.For("in a transaction"))) }},
		{"Allow", 34, func() { granted(store.Allow(t.Context(), limit.For("k"))) }},
		{"AllowFunc", 81, func() {
			granted(store.AllowFunc(t.Context(), requests, func(pgx.Tx, ratelimit.Result) error { return nil }))
		}},
		{"AllowOnCommit", 143, func() {
			granted(store.AllowOnCommit(t.Context(), requests, pgx.ReadCommitted, func(pgx.Tx) error { return nil }))
		}},
	} {
		for range 10 { // until statements are prepared
			test.call()
		}
		if n := testing.AllocsPerRun(200, test.call); n > test.most {
			t.Errorf("%s: %v allocations, want at most %v", test.name, n, test.most)
		}
	}
}
