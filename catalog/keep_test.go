package catalog_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var (
	monthly = ratelimit.FixedWindow{Name: "monthly", Rate: 100, Every: ratelimit.Month, Zone: "UTC"}
	hourly  = ratelimit.TokenBucket{Name: "hourly", Rate: 100, Period: 1000 * time.Hour}
)

// testClock is one for a store and its catalogs.
type testClock struct{ micros atomic.Int64 }

func newTestClock() *testClock {
	var c testClock
	c.micros.Store(time.Date(2026, 5, 12, 10, 0, 0, 0, time.UTC).UnixMicro())
	return &c
}

func (c *testClock) now() time.Time      { return time.UnixMicro(c.micros.Load()).UTC() }
func (c *testClock) add(d time.Duration) { c.micros.Add(d.Microseconds()) }

// keeper is a catalog with its store.
type keeper struct {
	*catalog.Catalog
	store interface {
		catalog.Store
		Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
		Reset(ctx context.Context, limit ratelimit.Limit, key string) error
		Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (time.Time, error)
	}
}

func newKeeper(tb testing.TB, db *pgtest.DB, clock func() time.Time) keeper {
	tb.Helper()
	k := keeper{}
	if db == nil {
		k.store = memstore.New(clock)
	} else {
		k.store = newStore(tb, db, pgstore.Config{Clock: clock})
	}
	k.Catalog, _ = newCatalog(tb, db, func(c *catalog.Config) { c.Store, c.Clock = k.store, clock })
	must(tb, k.Publish(tb.Context(), monthly, hourly, signUp, strict, api))
	return k
}

// left returns what is left of a key by what holds for it.
func (k keeper) left(tb testing.TB, limit ratelimit.Limit, key string) float64 {
	tb.Helper()
	statuses, err := k.store.CheckEach(tb.Context(), k.ForN(limit, key, 0))
	must(tb, err)
	return statuses[0].Value
}

func (k keeper) take(tb testing.TB, limit ratelimit.Limit, key string, n float64) bool {
	tb.Helper()
	result, err := k.store.Allow(tb.Context(), k.ForN(limit, key, n))
	must(tb, err)
	return result.OK
}

// What was used stays used, of one key and of all; a process that has not read the edit takes all the time.
func TestEditsKeepWhatWasUsed(t *testing.T) {
	for _, in := range []string{"memory", "PostgreSQL"} {
		for _, key := range []string{"alice", catalog.AllKeys} {
			t.Run(fmt.Sprintf("%s, one key %v", in, key == "alice"), func(t *testing.T) {
				t.Parallel()
				var db *pgtest.DB
				if in == "PostgreSQL" {
					db = newDB(t)
				}
				for i, limit := range []ratelimit.Limit{monthly, hourly, ratelimit.SlidingWindow{Name: "sliding", Rate: 100, Period: time.Hour}} {
					for _, tt := range []struct{ was, used, becomes, want float64 }{
						{100, 100, 200, 100},
						{100, 30, 200, 170},
						{200, 50, 100, 50},
						{200, 150, 100, 0},
						{50, 50, 1000, 950},
					} {
						clock := newTestClock()
						k := newKeeper(t, db, clock.now)
						must(t, k.Publish(t.Context(), limit))
						name := ratelimit.NameOf(limit)
						edited(t)(k.Set(t.Context(), name, catalog.AllKeys, catalog.Override{Rate: tt.was}))
						clock.add(time.Minute)
						if db != nil {
							must(t, errOf(k.Complete(t.Context())))
						}
						must(t, k.store.Reset(t.Context(), limit, "alice"))
						if !k.take(t, limit, "alice", tt.used) {
							t.Fatal("refused")
						}
						old := k.ForN(limit, "alice", 1).Limit
						edit, err := k.Set(t.Context(), name, key, catalog.Override{Rate: tt.becomes})
						must(t, err)
						stale := 0.0
						if db != nil {
							for range 3 {
								clock.add(time.Millisecond)
								if result, err := k.store.Allow(t.Context(), old.For("alice")); err != nil {
									t.Fatal(err)
								} else if result.OK {
									stale++
								}
							}
							clock.add(10 * time.Second)
							must(t, errOf(k.Complete(t.Context())))
						}
						got, want := k.left(t, limit, "alice"), tt.want-stale
						if i == 2 && tt.used > tt.becomes {
							want = tt.becomes - tt.used - stale // its counts leave it one by one
						}
						if got < want-0.01 || got > want+0.01 {
							t.Errorf("%d: %v of %v used, changed to %v: %v left, want %v", i, tt.used, tt.was, tt.becomes, got, want)
						}
						if key == "alice" {
							if text := edit.Left.String(); i < 2 && tt.becomes == 1000 && text != "0 left of 50 → 950 left of 1000 (within 10s)" && text != "0 left of 50 → 950 left of 1000" {
								t.Errorf("left is told as %q", text)
							}
						}
						if key == "alice" {
							edited(t)(k.Unset(t.Context(), name, key))
						}
					}
				}
			})
		}
	}
}

// Random histories of edits, of one key and of all, with resets, and calls by a process that reads a raise
// seconds later: the row never has more than if all had known each edit at once, so nothing that was
// used is given back, and no more than the larger limit is granted.
func TestKeptHistories(t *testing.T) {
	t.Parallel()
	var kill killer
	db := newDB(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &kill }))
	n := uint64(100)
	if testing.Short() {
		n = 20
	}
	for seed := range n {
		r := rand.New(rand.NewPCG(seed, 57))
		limit := ratelimit.Limit(ratelimit.TokenBucket{Name: fmt.Sprint("b", seed), Rate: []float64{1, 50, 500}[r.IntN(3)], Period: time.Minute, Capacity: 100, Shards: 1 + r.IntN(2)})
		if seed%2 == 0 {
			limit = ratelimit.FixedWindow{Name: fmt.Sprint("w", seed), Rate: 100, Period: time.Minute}
		}
		h := keptHistory{r: r, clock: newTestClock(), limit: limit, kill: &kill}
		h.now, h.late = newKeeper(t, db, h.clock.now), newKeeper(t, db, h.clock.now)
		must(t, h.now.Publish(t.Context(), limit))
		must(t, h.late.Refresh(t.Context()))
		h.reset()
		for range 40 {
			h.step(t)
			if got := h.now.left(t, limit, "k"); got > h.right.Value+1e-6 {
				t.Fatalf("seed %d: %v has %v left, and %v is right", seed, h.now.For(limit, "k").Limit, got, h.right.Value)
			}
		}
		for range 3 { // of a cut that was killed: the cut, what is raised after it, and keys apart
			h.clock.add(time.Minute)
			must(t, errOf(h.now.Complete(t.Context())))
		}
	}
	var marks int
	must(t, db.Pool.QueryRow(t.Context(), "SELECT (SELECT count(*) FROM "+db.Schema+".rate_limits WHERE paused < '2000-01-01') + (SELECT count(*) FROM "+db.Schema+".rate_limit_pending)").Scan(&marks))
	if marks > 0 {
		t.Errorf("%d rows still have a mark, or are pending", marks)
	}
}

// keptHistory is a history of a key.
type keptHistory struct {
	r         *rand.Rand
	clock     *testClock
	limit     ratelimit.Limit
	kill      *killer
	now, late keeper    // late reads raises up to 8 seconds later
	read      time.Time // when late has read
	right     bucket.State
}

// holds is what holds for the key, in one shard.
func (h *keptHistory) holds() *bucket.Definition {
	d := bucket.Definition(h.now.For(h.limit, "k").Limit.Definition())
	d.Shards = 1
	return &d
}

func (h *keptHistory) reset() { h.right = h.holds().Fresh("k", h.clock.now()) }

func (h *keptHistory) step(t *testing.T) {
	t.Helper()
	h.clock.add(time.Duration(h.r.Int64N(int64(4 * time.Second))))
	if h.clock.now().Sub(h.read) > 4*time.Second {
		h.read = h.clock.now()
		must(t, h.late.Refresh(t.Context()))
	}
	before := h.holds()
	h.right = before.Refill(h.right, h.clock.now())
	switch h.r.IntN(14) {
	case 0, 1:
		made, killed := false, false
		name, key := ratelimit.NameOf(h.limit), []string{"k", catalog.AllKeys}[h.r.IntN(2)]
		o := catalog.Override{Rate: float64(10 + h.r.IntN(300))}
		if before.Kind == bucket.TokenBucket {
			o = catalog.Override{Capacity: float64(10 + h.r.IntN(300))}
		}
		if h.r.IntN(4) == 0 {
			edited(t)(h.now.Unset(t.Context(), name, key))
		} else {
			made, killed = h.kill.edit(t, h.now, name, key, o, h.r.IntN(40)) // which often is not killed
		}
		after := h.holds()
		h.right = before.Change(after, "k", []bucket.State{h.right}, nil, h.clock.now())[0]
		if after.Capacity < before.Capacity {
			must(t, h.late.Refresh(t.Context())) // by which the bound would be that of before
		}
		if made && killed { // while it completed a cut, which another does in its place
			h.clock.add(31 * time.Second)
			must(t, errOf(h.late.Complete(t.Context())))
			h.right = after.Refill(h.right, h.clock.now())
		}
	case 2:
		must(t, errOf(h.late.Complete(t.Context())))
	case 12:
		edited(t)(h.now.Set(t.Context(), ratelimit.NameOf(h.limit), "k", catalog.Override{MaxReserved: float64(1 + h.r.IntN(90))}))
	case 13:
		until, err := h.late.store.Pause(t.Context(), h.late.For(h.limit, "k").Limit, "k", time.Duration(1+h.r.IntN(8))*time.Second)
		must(t, err)
		h.right = before.Pause(h.right, h.clock.now(), until)
	case 3:
		must(t, h.now.store.Reset(t.Context(), h.limit, "k"))
		h.reset()
	default:
		by := []keeper{h.now, h.late}[h.r.IntN(2)]
		if n := float64(1 + h.r.IntN(10)); by.take(t, h.limit, "k", n) {
			h.right.Value -= n
		}
	}
}

// killer ends an edit at its n-th statement, as if its process was killed.
type killer struct {
	n    int
	kill func()
}

func (k *killer) hit() {
	if k.n--; k.n == 0 {
		k.kill()
	}
}

func (k *killer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	k.hit()
	return ctx
}
func (*killer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (k *killer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	k.hit()
	return ctx
}
func (*killer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*killer) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// edit runs an edit that is killed at its n-th statement, and reports whether it is made.
func (k *killer) edit(t *testing.T, c keeper, name, key string, o catalog.Override, n int) (made, killed bool) {
	t.Helper()
	before, _ := c.Override(name, key)
	ctx, kill := context.WithCancel(t.Context())
	defer kill()
	k.n, k.kill = n, kill
	_, err := c.Set(ctx, name, key, o)
	k.n = 0
	if killed = ctx.Err() != nil; !killed {
		must(t, err)
	}
	must(t, c.Refresh(t.Context()))
	after, _ := c.Override(name, key)
	return after.Override != before.Override, killed
}

// An edit for all keys that is killed at any of its statements is made, or leaves every key exactly what
// it had: one that used more than it would have, one in debt, one that is paused, one that is being raised,
// and one whose override leaves it concerned. Those that are not concerned keep theirs in any case.
func TestKilledEditsForAllKeys(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	var kill killer
	db, clock := newDB(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &kill })), newTestClock()
	k := newKeeper(t, db, clock.now)
	rates, outcomes := []float64{20, 300}, map[bool]int{}
	for _, rate := range rates {
		for n := 1; ; n++ {
			limit := ratelimit.FixedWindow{Name: fmt.Sprint(rate, " at ", n), Rate: 100, Every: ratelimit.Month, MaxReserved: 50}
			must(t, k.Publish(t.Context(), limit))
			right := map[string]float64{"little": 95, "much": 5, "debt": -30, "paused": 40, "raised": 60, "apart": 30, "own": 10}
			for key, left := range right {
				must(t, errOf(k.store.(*pgstore.Store).Reserve(t.Context(), limit.ForN(key, 100-left))))
			}
			must(t, errOf(k.store.Pause(t.Context(), limit, "paused", time.Minute)))
			edited(t)(k.Set(t.Context(), limit.Name, "apart", catalog.Override{MaxReserved: 10}))
			edited(t)(k.Set(t.Context(), limit.Name, "own", catalog.Override{Rate: 50}))
			edited(t)(k.Set(t.Context(), limit.Name, "raised", catalog.Override{Capacity: 110}))
			right["own"], right["raised"] = 0, 70
			made, killed := kill.edit(t, k, limit.Name, catalog.AllKeys, catalog.Override{Rate: rate}, n)
			if made {
				for key := range right {
					if d := rate - 100; key != "own" && key != "raised" {
						right[key] = max(right[key]+d, min(right[key], 0))
					}
				}
			}
			outcomes[made]++
			for rounds, overdue := 0, []string(nil); rounds < 3 || len(overdue) > 0 && rounds < 100; rounds++ { // the server may still have the killed edit's locks
				clock.add(31 * time.Second)
				must(t, errOf(k.Complete(t.Context())))
				var err error
				overdue, err = k.Overdue(t.Context(), 0)
				must(t, err)
			}
			for key, want := range right {
				if got := k.left(t, limit, key); got != want {
					t.Errorf("killed at statement %d, made %v: %q has %v left, want %v", n, made, key, got, want)
				}
			}
			if !killed {
				break
			}
		}
	}
	if outcomes[false] < 10 || outcomes[true] < 2 {
		t.Errorf("%d edits were made, and %d not: this tests nothing", outcomes[true], outcomes[false])
	}
}

// An edit for all keys goes on with keys that are edited while it is under way, of which there is one in
// each batch. A raise for all keys is completed once, by whichever process is not killed meanwhile.
func TestEditsOfKeysBesideOneForAll(t *testing.T) {
	t.Parallel()
	var kill killer
	db, clock := newDB(t, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &kill })), newTestClock()
	k, beside := newKeeper(t, db, clock.now), newKeeper(t, db, clock.now)
	for i := range 500 {
		k.take(t, monthly, fmt.Sprintf("%03d", i), 60)
	}
	edits, each := 0, 30
	kill.n, kill.kill = each, func() {
		key := fmt.Sprintf("%03d", 499-edits*37%500)
		edited(t)(beside.Set(t.Context(), "monthly", key, catalog.Override{MaxReserved: float64(1 + edits)}))
		edits++
		kill.n = each
	}
	edited(t)(k.Set(t.Context(), "monthly", catalog.AllKeys, catalog.Override{Rate: 80}))
	kill.n = 0
	left := func(want float64) {
		t.Helper()
		clock.add(time.Minute)
		must(t, errOf(k.Complete(t.Context())))
		for i := range 500 {
			if got := k.left(t, monthly, fmt.Sprintf("%03d", i)); got != want {
				t.Fatalf("key %d has %v left, want %v", i, got, want)
			}
		}
	}
	left(20)
	edited(t)(k.Set(t.Context(), "monthly", catalog.AllKeys, catalog.Override{Rate: 300}))
	for n := range 20 { // each a statement later
		clock.add(time.Minute)
		ctx, stop := context.WithCancel(t.Context())
		kill.n, kill.kill = 1+n, stop
		_, _ = k.Complete(ctx)
		stop()
	}
	kill.n = 0
	left(240)
	if edits < 1 {
		t.Errorf("%d edits beside it", edits)
	}
}

// A key that has no row is raised as well: a process that takes by the definition of before does not make
// it one with less.
func TestRaiseOfAKeyWithoutARow(t *testing.T) {
	t.Parallel()
	db, clock := newDB(t), newTestClock()
	k := newKeeper(t, db, clock.now)
	old := k.For(monthly, "new").Limit
	edited(t)(k.Set(t.Context(), "monthly", "new", catalog.Override{Rate: 1000}))
	if result, err := k.store.Allow(t.Context(), old.For("new")); err != nil || !result.OK {
		t.Fatalf("%v, %v", result, err)
	}
	clock.add(10 * time.Second)
	must(t, errOf(k.Complete(t.Context())))
	if got := k.left(t, monthly, "new"); got != 999 {
		t.Errorf("%v left, want 999", got)
	}
}

// A row that a transaction keeps locked holds up its own key only, which is raised later.
func TestRaiseBesideALockedRow(t *testing.T) {
	t.Parallel()
	db, clock := newDB(t), newTestClock()
	store := newStore(t, db, pgstore.Config{Clock: clock.now, Timeout: 300 * time.Millisecond})
	k := keeper{store: store}
	k.Catalog, _ = newCatalog(t, db, func(c *catalog.Config) { c.Store, c.Clock = store, clock.now })
	must(t, k.Publish(t.Context(), monthly))
	for _, key := range []string{"a", "b", "c"} {
		if !k.take(t, monthly, key, 100) {
			t.Fatal("refused")
		}
	}
	edited(t)(k.Set(t.Context(), "monthly", catalog.AllKeys, catalog.Override{Rate: 300}))
	tx, err := db.Pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(context.Background())
	must(t, errOf(tx.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits WHERE key = 'b' FOR UPDATE")))
	for i, want := range [][]float64{{200, 0, 200}, {200, 200, 200}} {
		clock.add(time.Minute)
		must(t, errOf(k.Complete(t.Context())))
		for j, key := range []string{"a", "b", "c"} {
			if got := k.left(t, monthly, key); got != want[j] {
				t.Errorf("after %d: %s has %v left, want %v", i, key, got, want[j])
			}
		}
		_ = tx.Rollback(t.Context())
	}
	var pending int
	if must(t, db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM "+db.Schema+".rate_limit_pending").Scan(&pending)); pending != 0 {
		t.Errorf("%d edits are pending", pending)
	}
}

// A raise of one key is complete though a process takes by the old definition all the time, and the
// editor is gone. What nobody completes is overdue.
func TestRaiseBesideTheOldDefinition(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	k := newKeeper(t, db, nil)
	if !k.take(t, monthly, "acme", 100) {
		t.Fatal("refused")
	}
	old := k.For(monthly, "acme").Limit
	edit, err := k.Set(t.Context(), "monthly", "acme", catalog.Override{Rate: 1000})
	must(t, err)
	if got := edit.Left.String(); got != "0 left of 100 → 900 left of 1000 (within 10s)" {
		t.Errorf("it tells %q", got)
	}
	granted := 0
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if result, err := k.store.Allow(t.Context(), old.For("acme")); err != nil {
			t.Fatal(err)
		} else if result.OK {
			granted++
		}
	}
	if n, err := k.Complete(t.Context()); err != nil || n != 0 || k.left(t, monthly, "acme") != 0 {
		t.Errorf("%d keys completed before it was due, %v", n, err)
	}
	must(t, errOf(db.Pool.Exec(t.Context(), "UPDATE "+db.Schema+".rate_limit_pending SET due = clock_timestamp() - interval '1 minute'")))
	if names, err := k.Overdue(t.Context(), 30*time.Second); err != nil || len(names) != 1 || names[0] != "monthly" {
		t.Errorf("overdue: %q, %v", names, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	another, _ := newCatalog(t, db, func(c *catalog.Config) { c.Store, c.Every = k.store, 10*time.Millisecond })
	go another.Run(ctx)
	for end := time.Now().Add(20 * time.Second); k.left(t, monthly, "acme") != 900-float64(granted); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%v left, want %d", k.left(t, monthly, "acme"), 900-granted)
		}
	}
}

// A raise that is followed by another edit before all processes have read it is not lost, though a process takes by
// the definition before both: what it leaves is measured by the smallest of all.
func TestEditsWhileARaiseIsPending(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, limit := range []ratelimit.Limit{monthly, hourly} {
		for _, key := range []string{"alice", catalog.AllKeys} {
			for _, becomes := range []float64{500, 120, 60, 2000} {
				name := fmt.Sprint(ratelimit.NameOf(limit), ", one key ", key == "alice", ", ", becomes)
				t.Run(name, func(t *testing.T) {
					clock := newTestClock()
					k := newKeeper(t, db, clock.now)
					d := limit.Definition()
					d.Name = name
					limit := d.Limit()
					must(t, k.Publish(t.Context(), limit))
					old := k.For(limit, "alice").Limit
					used := 0.0
					take := func(limit ratelimit.Limit, key string, n float64) {
						t.Helper()
						result, err := k.store.Allow(t.Context(), limit.ForN(key, n))
						must(t, err)
						if !result.OK {
							t.Fatalf("%v refused", n)
						}
						if key == "alice" {
							used += n
						}
					}
					take(old, "alice", 10)
					edited(t)(k.Set(t.Context(), name, key, catalog.Override{Rate: 1000}))
					take(k.For(limit, "bob").Limit, "bob", 70) // a row that the raise has not seen, for all keys
					clock.add(2 * time.Second)
					take(old, "alice", 1)
					before := k.left(t, limit, "bob")
					of := k.For(limit, "bob").Limit.Definition().Capacity
					edited(t)(k.Set(t.Context(), name, key, catalog.Override{Rate: becomes}))
					clock.add(time.Second)
					if got, want := k.left(t, limit, "bob"), max(0, before+k.For(limit, "bob").Limit.Definition().Capacity-of); got > want+0.01 {
						t.Errorf("another key has %v left, want %v", got, want)
					}
					take(old, "alice", 1)
					clock.add(10 * time.Second)
					for range 2 {
						must(t, errOf(k.Complete(t.Context())))
						clock.add(10 * time.Second)
					}
					if got, want := k.left(t, limit, "alice"), max(0, becomes-used); got > want+0.1 || got < want-0.1 { // a bucket fills by 2 an hour
						t.Errorf("%v of %v left, want %v", got, becomes, want)
					}
				})
			}
		}
	}
}

// A key in debt is raised and, before all processes have read that, edited again. A process that takes by
// the definition before both does not clip what the raise gives.
func TestEditsOfAKeyInDebtWhileARaiseIsPending(t *testing.T) {
	t.Parallel()
	db, clock := newDB(t), newTestClock()
	for _, key := range []string{"acme", catalog.AllKeys} {
		for becomes, want := range map[float64]float64{1100: 989, 900: 789, 95: -1} {
			k := newKeeper(t, db, clock.now)
			limit := ratelimit.FixedWindow{Name: fmt.Sprint(becomes, key == "acme"), Rate: 100, Every: ratelimit.Month}
			must(t, k.Publish(t.Context(), limit))
			reserve := func(n float64) {
				must(t, errOf(k.store.(*pgstore.Store).Reserve(t.Context(), limit.ForN("acme", n)))) // by the code's definition
			}
			reserve(110)
			edited(t)(k.Set(t.Context(), limit.Name, key, catalog.Override{Rate: 1000}))
			edited(t)(k.Set(t.Context(), limit.Name, key, catalog.Override{Rate: becomes}))
			reserve(1)
			for range 2 {
				clock.add(20 * time.Second)
				must(t, errOf(k.Complete(t.Context())))
			}
			if got := k.left(t, limit, "acme"); got != want {
				t.Errorf("one key %v: raised to 1,000, then %v: %v left, want %v", key == "acme", becomes, got, want)
			}
		}
	}
}
