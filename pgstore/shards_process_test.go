package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// shared is a sharded limit that two processes empty: 40 at once, 200 a second.
var shared = ratelimit.TokenBucket{Name: "shared", Rate: 200, Period: time.Second, Capacity: 40, Shards: 8}

// hammer takes from shared with 64 goroutines for a while, in every form, and
// says how many tokens it was granted.
func hammer(ctx context.Context, pool *pgxpool.Pool, schema string) (int64, error) {
	store, err := pgstore.New(pool, &pgstore.Config{Schema: schema})
	if err != nil {
		return 0, err
	}
	var (
		granted atomic.Int64
		group   sync.WaitGroup
		errs    = make([]error, 64)
		forms   = []takes{allowOwn, allowFunc, allowAt(pgx.ReadCommitted), allowAt(pgx.Serializable)}
		end     = time.Now().Add(1500 * time.Millisecond)
	)
	for i := range errs {
		group.Go(func() {
			for n := i; time.Now().Before(end) && errs[i] == nil; n++ {
				count := 1 + n%3
				result, err := forms[n%len(forms)](ctx, pool, store, shared.ForN("k", float64(count)))
				if errs[i] = err; result.OK {
					granted.Add(int64(count))
				}
			}
		})
	}
	group.Wait()
	return granted.Load(), errors.Join(errs...)
}

// Two processes, all forms at once: together never over what the limit lets
// in, and never short of what it held.
func TestShardsNeverOverInTwoProcesses(t *testing.T) {
	const schemaVariable = "RATELIMIT_TEST_SHARDS_SCHEMA"
	if schema := os.Getenv(schemaVariable); schema != "" {
		pool, err := pgxpool.New(t.Context(), os.Getenv(childURL+"_SHARDS"))
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		granted, err := hammer(t.Context(), pool, schema)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("granted", granted)
		return
	}
	db := pgtest.New(t, maxConns(16))
	clock := func() (now time.Time) {
		t.Helper()
		if err := db.Pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now); err != nil {
			t.Fatal(err)
		}
		return now
	}
	start := clock()
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestShardsNeverOverInTwoProcesses$")
	child.Env = append(os.Environ(), childURL+"_SHARDS="+db.URL, schemaVariable+"="+db.Schema)
	var out strings.Builder
	child.Stdout, child.Stderr = &out, &out
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	granted, err := hammer(t.Context(), db.Pool, db.Schema)
	if err := errors.Join(err, child.Wait()); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	elapsed := clock().Sub(start)
	_, line, _ := strings.Cut(out.String(), "granted ")
	childs, err := strconv.ParseInt(strings.Fields(line + " ?")[0], 10, 64)
	if err != nil {
		t.Fatalf("the other process said %q", out.String())
	}
	bound := shared.Capacity + shared.Rate*elapsed.Seconds()
	t.Logf("granted %d here and %d there, bound %.1f in %v", granted, childs, bound, elapsed)
	if total := float64(granted + childs); total > bound || total < shared.Capacity {
		t.Errorf("granted %v, want %v to %v", total, shared.Capacity, bound)
	}
}
