package fallback_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/fallback"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/pgstore"
)

var longer = flag.Bool("longer", false, "have the network of TestSilentNetwork be silent for 12 seconds, not 4")

func TestMain(m *testing.M) { pgtest.Main(m) }

// network is stores of several processes, on pools whose connections go through a relay.
type network struct {
	*relay.Relay
	stores []*fallback.Store
	pools  []*pgxpool.Pool
}

func newNetwork(t *testing.T, processes int, set func(*pgxpool.Config)) *network {
	t.Helper()
	server, err := pgx.ParseConfig(pgtest.URL(t))
	must(t, err)
	r, err := relay.New(pgconn.NetworkAddress(server.Host, server.Port))
	must(t, err)
	n := &network{Relay: r}
	address := r.Address()
	db := pgtest.New(t)
	for range processes {
		config := db.Pool.Config()
		config.MaxConns = 10
		config.ConnConfig.Host, config.ConnConfig.Port = address.IP.String(), uint16(address.Port)
		config.ConnConfig.Fallbacks, config.ConnConfig.TLSConfig = nil, nil
		if set != nil {
			set(config)
		}
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		must(t, err)
		t.Cleanup(pool.Close)
		store, err := pgstore.New(pool, &pgstore.Config{Schema: db.Schema})
		must(t, err)
		n.pools = append(n.pools, pool)
		n.stores = append(n.stores, newStore(t, store, fallback.Config{Processes: processes}))
	}
	t.Cleanup(r.Close) // before the pools, which wait for connections to end
	return n
}

func (n *network) silent(yes bool) {
	if !yes {
		n.Interfere(nil, nil)
		return
	}
	lost := func(int, []byte) relay.Fate { return relay.Silence }
	n.Interfere(lost, lost)
}

// answered is the end of a request.
type answered struct {
	at, took time.Duration // since the network fell silent
	ok       bool
	err      error
}

// flood sends 200 requests a second to the stores in turn, as a middleware does with its time-out, until
// one is answered by the database after the silence. It returns their ends.
func (n *network) flood(t *testing.T, limit ratelimit.Limit, began time.Time, until func() bool) (ends []answered) {
	t.Helper()
	var mu sync.Mutex
	var calls sync.WaitGroup
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for i := 0; !until(); i++ {
		<-tick.C
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			asked := time.Now()
			result, err := n.stores[i%len(n.stores)].Allow(ctx, limit.For("k"))
			mu.Lock()
			defer mu.Unlock()
			ends = append(ends, answered{asked.Sub(began), time.Since(asked), err == nil && result.OK, err})
		})
	}
	calls.Wait()
	return ends
}

// A network that loses everything for some seconds: calls are answered at once from the second
// second on, all processes together keep to the limit, and the database decides again within 1.2
// seconds once it can be reached.
func TestSilentNetwork(t *testing.T) {
	pgtest.Long(t)
	lasts := 4 * time.Second
	if *longer {
		lasts = 12 * time.Second
	}
	for _, processes := range []int{1, 3} {
		t.Run(fmt.Sprint(processes), func(t *testing.T) {
			n := newNetwork(t, processes, nil)
			limit := ratelimit.TokenBucket{Name: "api", Rate: 10, Period: time.Second}
			for _, s := range n.stores {
				must(t, errOf(s.Check(t.Context(), limit.For("k"))))
			}
			before := runtime.NumGoroutine()
			began, most := time.Now(), goroutines{}
			n.silent(true)
			ends := n.flood(t, limit, began, func() bool {
				at := time.Since(began)
				most.see(at > 3*time.Second)
				return at > lasts
			})
			n.silent(false)
			back := time.Now()
			for _, s := range n.stores {
				n.awaitDatabase(t, s, back)
			}
			n.judge(t, ends, lasts, before, most)
		})
	}
}

// goroutines is the most that were seen: while calls wait for their time-outs, and later.
type goroutines struct{ early, late int }

func (g *goroutines) see(late bool) {
	if n := runtime.NumGoroutine(); late {
		g.late = max(g.late, n)
	} else {
		g.early = max(g.early, n)
	}
}

// awaitDatabase waits until a store's calls are the database's to decide.
func (n *network) awaitDatabase(t *testing.T, s *fallback.Store, back time.Time) {
	t.Helper()
	other := ratelimit.TokenBucket{Name: "other", Rate: 1e6, Period: time.Second}
	for {
		silent := s.Stats().Silent
		if r, err := s.Allow(t.Context(), other.For("k")); err != nil || !r.OK {
			t.Fatal(r, err)
		}
		if !silent {
			break
		}
		time.Sleep(time.Millisecond)
	}
	took := time.Since(back)
	t.Logf("the database decides again after %v", took)
	if took > 3*time.Second { // 1.2 on a machine that is not busy
		t.Errorf("the database decides again after %v", took)
	}
}

func (n *network) judge(t *testing.T, ends []answered, lasts time.Duration, before int, most goroutines) {
	t.Helper()
	granted, failed := 0, 0
	var late []time.Duration
	for _, e := range ends {
		if e.ok {
			granted++
		}
		if e.err != nil {
			failed++
		}
		if e.at > 2*time.Second {
			late = append(late, e.took)
		}
	}
	slices.Sort(late)
	p99 := late[len(late)*99/100]
	bound := 10 + int(10*lasts.Seconds())
	t.Logf("%d requests: granted %d of at most %d, failed %d; p99 after 2 s %v; goroutines %d, then %+v", len(ends), granted, bound, failed, p99, before, most)
	if granted > bound || granted < bound/3 {
		t.Errorf("granted %d, want at most %d and not much less", granted, bound)
	}
	if p99 > 50*time.Millisecond {
		t.Errorf("p99 is %v from the third second on, want 50ms", p99)
	}
	// 200 calls begin in the second of a time-out, and pgx takes 15 to close a connection: those of each
	// pool, and a probe's each second.
	if most.early > before+500 || most.late > before+100*len(n.stores) {
		t.Errorf("%+v goroutines, and %d before", most, before)
	}
}

// The application has all connections of the pool: that is an error of its own, and no silence.
func TestPoolInUse(t *testing.T) {
	t.Parallel()
	n := newNetwork(t, 1, nil)
	pool, s := n.pools[0], n.stores[0]
	for range pool.Config().MaxConns {
		c, err := pool.Acquire(t.Context())
		must(t, err)
		defer c.Release()
	}
	call := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		return s.Take(ctx, perSecond.For("k"))
	}
	for end := time.Now().Add(10 * time.Second); !errors.Is(call(), fallback.ErrBusy); { // once the probe has its answer
		if time.Now().After(end) {
			t.Fatal("no ErrBusy")
		}
	}
	for range 9 {
		if err := call(); !errors.Is(err, fallback.ErrBusy) {
			t.Errorf("Take() = %v, want ErrBusy", err)
		}
	}
	if stats := s.Stats(); stats.Silences > 0 || stats.Busy != 10 {
		t.Errorf("%+v, want no silence and 10 of a pool in use", stats)
	}
}

// closeDead is BeforeClose of docs/monitoring.md.
func closeDead(conn *pgx.Conn) {
	if !conn.IsClosed() {
		return
	}
	select {
	case <-conn.PgConn().CleanupDone():
	case <-time.After(250 * time.Millisecond):
		_ = conn.PgConn().Conn().Close()
	}
}

// traffic is how requests ended.
type traffic struct {
	mu      sync.Mutex
	failed  []error
	decided time.Time // when the first request was sent that the database decided
}

// send sends 200 requests a second, with 50 keys. Each fifth is a transaction of the application
// instead, on the same pool.
func (n *network) send(t *testing.T, until func(*traffic) bool) *traffic {
	t.Helper()
	var calls sync.WaitGroup
	defer calls.Wait()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	sent := &traffic{}
	for i := 0; !until(sent); i++ {
		<-tick.C
		calls.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if i%5 == 0 {
				_ = pgx.BeginFunc(ctx, n.pools[0], func(tx pgx.Tx) error {
					return errOf(tx.Exec(ctx, "SELECT 1"))
				})
				return
			}
			silent, asked := n.stores[0].Stats().Silent, time.Now()
			_, err := n.stores[0].Allow(ctx, perSecond.For(fmt.Sprint(i%50)))
			sent.mu.Lock()
			defer sent.mu.Unlock()
			switch {
			case err != nil:
				sent.failed = append(sent.failed, err)
			case !silent && sent.decided.IsZero():
				sent.decided = asked
			}
		})
	}
	return sent
}

// A network loses everything for three seconds. pgx then takes up to 15 to close the connections that
// died, which fill the pool meanwhile. Memory answers for as long, so that no call fails, and none is
// told that the application has the pool in use. With closeDead the database decides soon.
func TestBack(t *testing.T) {
	pgtest.Long(t)
	for _, conns := range []int32{2, 4} {
		for name, c := range map[string]struct {
			beforeClose func(*pgx.Conn)
			within      time.Duration
		}{"as it is": {nil, 25 * time.Second}, "closed soon": {closeDead, 6 * time.Second}} {
			t.Run(fmt.Sprintf("%d connections, %s", conns, name), func(t *testing.T) {
				t.Parallel()
				n := newNetwork(t, 1, func(config *pgxpool.Config) { config.MaxConns, config.BeforeClose = conns, c.beforeClose })
				must(t, n.stores[0].Take(t.Context(), perSecond.For("k")))
				begun := time.Now()
				n.silent(true)
				during := n.send(t, func(*traffic) bool { return time.Since(begun) > 3*time.Second })
				n.silent(false)
				back := time.Now()
				after := n.send(t, func(sent *traffic) bool {
					sent.mu.Lock()
					defer sent.mu.Unlock()
					since := time.Since(back)
					return since > c.within || !sent.decided.IsZero() && since > sent.decided.Sub(back)+time.Second
				})
				t.Logf("the database decides again after %v; %d calls failed, and %d during the silence", after.decided.Sub(back), len(after.failed), len(during.failed))
				if after.decided.IsZero() {
					t.Errorf("the database does not decide within %v", c.within)
				}
				if len(after.failed) > 20 { // 1,774 if the silence ends with the network's
					t.Errorf("%d calls failed, such as with %v", len(after.failed), after.failed[0])
				}
				if busy := n.stores[0].Stats().Busy; busy > 0 {
					t.Errorf("%d calls ended with ErrBusy", busy)
				}
			})
		}
	}
}
