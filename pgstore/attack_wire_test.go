package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/relay"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// What happens between a store and the server: a pooler, a network, a process
// that stands still.

// line is a relay between a test and its server.
type line struct{ *relay.Relay }

func newRelay(t *testing.T) *line {
	t.Helper()
	config, err := pgx.ParseConfig(pgtest.URL(t))
	must(t, err)
	r, err := relay.New(pgconn.NetworkAddress(config.Host, config.Port))
	must(t, err)
	return &line{r}
}

// through has a pool's connections go through the relay.
func (r *line) through() pgtest.Option {
	address := r.Address()
	return pgtest.WithConfig(func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // so that nothing is asked but what is to be decided
		c.ConnConfig.Host, c.ConnConfig.Port = address.IP.String(), uint16(address.Port)
		c.ConnConfig.Fallbacks, c.ConnConfig.TLSConfig = nil, nil
	})
}

// newScene is a scene whose store is behind the relay.
func (r *line) newScene(t *testing.T, conns int32, change ...func(*pgstore.Config)) *scene {
	t.Helper()
	db := pgtest.New(t, maxConns(conns), r.through())
	t.Cleanup(r.Close) // before the pool, which waits for connections to end
	return sceneOn(t, db, change...)
}

// interfere counts requests and answers from now on. after says what becomes of the n-th answer.
func (r *line) interfere(after func(n int) relay.Fate) {
	r.Interfere(nil, func(n int, _ []byte) relay.Fate { return after(n) })
}

// lose has the server be gone with its next answer.
func (r *line) lose() {
	r.Redirect("tcp", "127.0.0.1:1") // where nobody listens
	r.Interfere(nil, func(int, []byte) relay.Fate { return relay.Cut })
}

// When a pooler loses the server after that has committed, what it says is no
// answer of the server's: nobody is charged again.
func TestFatalChargesNobodyTwice(t *testing.T) {
	t.Parallel()
	const callers = 8
	r := newRelay(t)
	s := r.newScene(t, 1)
	limit := slow("l", 1000)
	mustAllow(t, s.store, limit.For("k"))
	left := func() (left float64) {
		should(t, s.side.Pool.QueryRow(t.Context(), "SELECT value FROM "+s.Schema+".rate_limits WHERE name = 'l'").Scan(&left))
		return left
	}
	had := left()
	g := gather(t, s.Pool)
	var told atomic.Int64
	for range callers {
		g.call(forLong, func(ctx context.Context) {
			if result, err := s.store.Allow(ctx, limit.For("k")); err == nil && result.OK {
				told.Add(1)
			}
		})
	}
	var mu sync.Mutex
	cut, last := false, had // once, when several were charged together
	r.interfere(func(int) relay.Fate {
		mu.Lock()
		defer mu.Unlock()
		before := last
		if last = left(); cut || before-last < 1.5 {
			return relay.Pass
		}
		cut = true
		return relay.Fatal
	})
	g.decide()
	mu.Lock()
	defer mu.Unlock()
	if spent := had - left(); spent > callers+0.5 || spent < float64(told.Load())-0.5 {
		t.Errorf("%d callers were told OK, and %.0f tokens are spent, cut %v", told.Load(), spent, cut)
	}
}

// When the network goes silent for a connection that is open, whatever had been
// said on it by then, what a call had locked is free again soon. Nobody tells the
// server that its client is gone.
func TestSilenceKeepsNothingLocked(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, verb := range waiting {
		t.Run(verb.name, func(t *testing.T) {
			t.Parallel()
			limit := slow("l", 1000)
			var r *line
			var s *scene
			for n, patience := 1, 200*time.Millisecond; ; n++ {
				if s == nil {
					r = newRelay(t)
					s = r.newScene(t, 16, withTimeout(time.Second)) // pgx is long in closing one that is silent
				}
				key, lost := fmt.Sprint(n), n
				mustAllow(t, newStore(t, s.side), limit.ForN(key, 100))
				r.interfere(func(i int) relay.Fate {
					if i == lost {
						return relay.Silence
					}
					return relay.Pass
				})
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				err := verb.do(ctx, s.store, limit, key)
				cancel()
				_, answers := r.Counted()
				r.Interfere(nil, nil)
				switch {
				case answers >= n && err == nil:
					t.Errorf("answer %d was lost, and the call succeeded", n)
				case answers >= n:
					if _, err := newStore(t, s.side).Allow(within(t, 2*aMoment), limit.For(key)); err != nil { // it may be paused by now
						t.Fatalf("silent from answer %d on: %v", n, err)
					}
				case err == nil: // it has no such answer
					return
				case patience > 5*time.Second:
					t.Fatal(err)
				default: // the machine had other work: once more from the start
					n, s, patience = 0, nil, 2*patience
				}
			}
		})
	}
}

// Against a server that does not answer, every decision on its own without a
// deadline ends within the store's time-out.
func TestServerThatNeverAnswers(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	t.Run("from the start", func(t *testing.T) {
		wantEnds(t, newStore(t, address(t, listen(t)), withTimeout(300*time.Millisecond), budget(300*time.Millisecond)))
	})
	t.Run("from some instant on", func(t *testing.T) {
		r := newRelay(t)
		s := r.newScene(t, 24, withTimeout(300*time.Millisecond), budget(300*time.Millisecond))
		must(t, connectAll(t.Context(), s.Pool))
		r.interfere(func(int) relay.Fate { return relay.Silence })
		wantEnds(t, s.store)
	})
}

// wantEnds wants from all verbs on their own, soon after 300 ms, that their time was over.
func wantEnds(t *testing.T, store *pgstore.Store) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context()) // has no deadline
	time.AfterFunc(2*aMoment, cancel)
	var verbs sync.WaitGroup
	for _, verb := range append([]ownVerb{{"Change", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) (bool, error) {
		return said(s.Change(ctx, r.Limit, shardedSlow(ratelimit.NameOf(r.Limit), 10, 2), r.Key))
	}}}, append(tableVerbs, ownVerbs...)...) {
		verbs.Go(func() {
			if _, err := verb.do(ctx, store, slow("l", 10).For(verb.name)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: got %v, want that its time was over", verb.name, err)
			}
		})
	}
	verbs.Wait()
}

// A permit that a statement took for a caller who gave up is released, also when a transaction has
// its row locked by then.
func TestLockedPermitOfOneWhoLeft(t *testing.T) {
	t.Parallel()
	for _, portable := range []bool{false, true} {
		t.Run(fmt.Sprintf("portable=%v", portable), func(t *testing.T) {
			t.Parallel()
			r := newRelay(t)
			db := pgtest.New(t, maxConns(4), r.through())
			t.Cleanup(r.Close)
			store, locker := newStore(t, db, isPortable(portable)), begin(t, beside(t, db), pgx.ReadCommitted)
			ctx, giveUp := context.WithCancel(t.Context())
			returned := make(chan struct{})
			r.interfere(func(n int) relay.Fate {
				if n == 1 { // it was taken
					mustExec(t, locker, "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")
					giveUp()
					<-returned
				}
				return relay.Pass
			})
			permit, err := store.Permits().Acquire(ctx, one.For("k"))
			if !errors.Is(err, context.Canceled) {
				t.Errorf("Acquire by a caller that gives up: got %v and %v", permit, err)
			}
			close(returned)
			eventually(t, "the release finds the row locked", func() bool {
				requests, answers := r.Counted()
				return requests > 1 && (portable || answers > 1)
			})
			must(t, locker.Rollback(t.Context()))
			store.Close() // which waits for the release
			if permits, err := newStore(t, db).Permits().Held(t.Context(), one, "k"); err != nil || len(permits) > 0 {
				t.Errorf("got %v, and %v, want no permit that is held by nobody", permits, err)
			}
		})
	}
}
