package pgstore_test

import (
	"errors"
	"net/url"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
	"github.com/pgratelimit/ratelimit/migrations"
)

// pair is a primary, and a standby without which it commits nothing.
type pair struct{ primary, standby *pgx.Conn }

// newPair starts both servers, with the library's table, and returns a pool of ten connections to
// whichever of them takes writes.
func newPair(t *testing.T, trace pgx.QueryTracer) (*pair, *pgtest.DB) {
	t.Helper()
	t.Setenv("DATABASE_URL", "") // a server whose settings may change
	start := func(options throwaway.Options) *throwaway.Server {
		server, err := throwaway.StartWith(t.Context(), options)
		if errors.Is(err, exec.ErrNotFound) {
			t.Skip("there is no pg_basebackup here")
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := server.Close(); err != nil {
				t.Error(err)
			}
		})
		return server
	}
	primary := start(throwaway.Options{})
	standby := start(throwaway.Options{StandbyOf: primary.URL})
	p := &pair{connect(t, primary.URL), connect(t, standby.URL)}
	p.exec(t, migrations.UpSQL(), "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
	p.await(t, "the standby is synchronous", "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming')")
	both, err := url.Parse(primary.URL)
	if err != nil {
		t.Fatal(err)
	}
	second, err := url.Parse(standby.URL)
	if err != nil {
		t.Fatal(err)
	}
	both.Host += "," + second.Host
	both.RawQuery += "&target_session_attrs=read-write"
	config, err := pgxpool.ParseConfig(both.String())
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns, config.ConnConfig.Tracer = 10, trace
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return p, &pgtest.DB{URL: both.String(), Schema: "public", Pool: pool}
}

func (p *pair) exec(t *testing.T, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		if _, err := p.primary.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
}

// await waits until the primary answers true.
func (p *pair) await(t *testing.T, what, sql string) {
	t.Helper()
	eventually(t, what, func() (yes bool) {
		if err := p.primary.QueryRow(t.Context(), sql).Scan(&yes); err != nil {
			t.Fatal(err)
		}
		return yes
	})
}

// switchOver makes the primary read-only where it is, and promotes the standby.
func (p *pair) switchOver(t *testing.T) {
	t.Helper()
	p.exec(t, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
	eventually(t, "the sessions are told", func() bool { // as new ones begin with it
		conn, err := pgx.ConnectConfig(t.Context(), p.primary.Config())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(t.Context())
		return conn.PgConn().ParameterStatus("default_transaction_read_only") == "on"
	})
	p.await(t, "the standby has all", `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_xid IS NOT NULL)
		AND EXISTS (SELECT FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn())`)
	var promoted bool
	if err := p.standby.QueryRow(t.Context(), "SELECT pg_promote()").Scan(&promoted); err != nil || !promoted {
		t.Fatal(promoted, err)
	}
}

// The old primary stays, read-only, and a standby is promoted while calls go on: two statements fail
// on the old one at most, no call fails that begins after the promotion, and the new one has all
// that was told OK.
func TestFailOverToAStandby(t *testing.T) {
	pgtest.Long(t)
	var statements failing
	servers, db := newPair(t, &statements)
	store := newStore(t, db)
	limit := slow("l", 1e6)
	mustAllow(t, store, limit.For("k"))
	var granted, failed, late atomic.Int64
	var promoted atomic.Pointer[time.Time]
	var first atomic.Int64 // from the promotion to the first grant
	stop := make(chan struct{})
	var calls sync.WaitGroup
	t.Cleanup(calls.Wait)
	for range 8 {
		calls.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-t.Context().Done():
					return
				case <-time.After(time.Millisecond):
				}
				since := promoted.Load()
				result, err := store.Allow(t.Context(), limit.For("k"))
				switch {
				case err == nil && result.OK:
					granted.Add(1)
					if since != nil {
						first.CompareAndSwap(0, int64(time.Since(*since)))
					}
				case result.OK:
					t.Errorf("got OK with the error %v", err)
				default:
					failed.Add(1)
					if since != nil {
						late.Add(1)
						t.Logf("%v after the promotion: %v", time.Since(*since), err)
					}
				}
			}
		})
	}
	more := func(n int64) {
		t.Helper()
		want := granted.Load() + n
		eventually(t, "calls are granted", func() bool { return granted.Load() >= want })
	}
	more(100)
	servers.switchOver(t)
	now := time.Now()
	promoted.Store(&now)
	more(100)
	close(stop)
	calls.Wait()
	t.Logf("granted %d, failed %d, of them %d that began after the promotion; %d statements failed; the first grant %v after the promotion",
		granted.Load(), failed.Load(), late.Load(), statements.n.Load(), time.Duration(first.Load()))
	if n := statements.n.Load(); n > 2 || late.Load() > 0 {
		t.Errorf("%d statements failed, and %d calls after the promotion, want at most 2 and none", n, late.Load())
	}
	var spent float64
	if err := servers.standby.QueryRow(t.Context(), "SELECT $1 - value FROM rate_limits WHERE key = 'k'", limit.Rate).Scan(&spent); err != nil {
		t.Fatal(err)
	}
	if least := float64(1 + granted.Load()); spent < least-1 || spent > least+float64(failed.Load()) {
		t.Errorf("the new primary has %.2f spent, want %.0f, and at most %d more", spent, least, failed.Load())
	}
}
