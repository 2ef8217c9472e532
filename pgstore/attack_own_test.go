package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The tests in attack_*_test.go attack the store, each in a way that once found a
// fault. These here attack decisions on their own.

func pauseKey(ctx context.Context, store *pgstore.Store, l ratelimit.Limit, key string, d time.Duration) error {
	_, err := store.Pause(ctx, l, key, d)
	return err
}

// gathering is calls that arrive while all connections of a pool are taken, so
// that those who can be decided together are.
type gathering struct {
	t     *testing.T
	conns []*pgxpool.Conn
	calls sync.WaitGroup
}

func gather(t *testing.T, pool *pgxpool.Pool) *gathering {
	t.Helper()
	g := &gathering{t: t}
	for range pool.Config().MaxConns {
		conn, err := pool.Acquire(t.Context())
		must(t, err)
		g.conns = append(g.conns, conn)
	}
	t.Cleanup(g.release)
	return g
}

// call has a call begin, with a deadline, and returns when it waits.
func (g *gathering) call(patience time.Duration, do func(context.Context)) {
	ctx, cancel := context.WithTimeout(g.t.Context(), patience)
	waits := make(chan struct{})
	g.calls.Go(func() {
		defer cancel()
		do(&noticing{Context: ctx, waits: waits})
	})
	select {
	case <-waits:
	case <-time.After(100 * time.Millisecond): // or it does so unnoticed
	}
}

// leaders are calls of other keys, behind which others gather.
func leaders() (requests []ratelimit.Request) {
	for i := range 8 {
		requests = append(requests, slow("leaders", 10).For(fmt.Sprint("leader ", i)))
	}
	return requests
}

// lead has the leaders' calls begin. Their rows should be there.
func (g *gathering) lead(store *pgstore.Store) {
	for _, r := range leaders() {
		g.call(2*time.Second, func(ctx context.Context) { _, _ = store.Allow(ctx, r) })
	}
}

// release gives the connections back.
func (g *gathering) release() {
	for _, conn := range g.conns {
		conn.Release()
	}
	g.conns = nil
}

// decide releases the connections, and returns when all calls have returned.
func (g *gathering) decide() {
	g.release()
	g.calls.Wait()
}

// noticing is a context that tells when somebody first asks for its end.
type noticing struct {
	context.Context
	once  sync.Once
	waits chan struct{}
}

func (n *noticing) Done() <-chan struct{} {
	n.once.Do(func() { close(n.waits) })
	return n.Context.Done()
}

// atCommit has plpgsql statements run at the commit of whoever changes a row of
// the limits, after the server has sent the answers of all statements.
func atCommit(t *testing.T, db *pgtest.DB, plpgsql string) {
	t.Helper()
	execIn(t, db, `CREATE FUNCTION {schema}.at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN `+plpgsql+`; RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT OR UPDATE OR DELETE ON {schema}.rate_limits
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.at_commit()`)
}

// commitFails are the ways in which a commit fails whose statements succeeded.
var commitFails = map[string]string{
	"an error":            `RAISE EXCEPTION 'raised by the test at the commit'`,
	"the connection ends": `PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(5)`,
}

// The commit fails after its statements have succeeded: nobody is told OK. Here
// of one call at a time.
func TestNoOKWithoutCommit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	plain, window, shards := slow("plain", 10), slowWindow("window", 10), shardedSlow("shards", 10, 2)
	for name, requests := range map[string][]ratelimit.Request{
		"Allow":         {plain.For("k"), plain.For("new"), shards.ForN("k", 7)},
		"Allow several": {plain.For("k")},
		"Reserve":       {window.ForN("k", 15), shards.ForN("debt", 1)},
		"AllowFunc":     {plain.For("k")},
		"Credit":        {plain.For("k")},
		"Cancel":        {plain.For("k")},
		"Reset":         {plain.For("k")},
		"Pause":         {plain.For("k")},
	} {
		for i, r := range requests {
			for how, plpgsql := range commitFails {
				t.Run(fmt.Sprintf("%s %d/%s", name, i, how), func(t *testing.T) {
					t.Parallel()
					db, store := setUp(t)
					mustAllow(t, store, plain.For("k"), window.For("k"))
					must(t, errOf(store.Reserve(t.Context(), shards.ForN("debt", 14))))
					want := tableOf(t, db)
					atCommit(t, db, plpgsql)
					ctx, cancel := soon(t)
					defer cancel()
					if ok, err := verbNamed(name).do(ctx, store, r); ok && name != "AllowFunc" || err == nil {
						t.Errorf("got OK %v, error %v, want an error", ok, err)
					}
					if got := tableOf(t, db); !slices.Equal(got, want) {
						t.Errorf("got rows %q, want %q", got, want)
					}
				})
			}
		}
	}
}

// The same of calls that are decided together, of which one is refused.
func TestNoOKWithoutCommitTogether(t *testing.T) {
	t.Parallel()
	for how, plpgsql := range commitFails {
		t.Run(how, func(t *testing.T) {
			db, store := setUp(t, maxConns(4))
			limit := slow("l", 10)
			mustAllow(t, store, limit.ForN("k", 5))
			atCommit(t, db, plpgsql)
			g := gather(t, db.Pool)
			g.call(20*time.Second, func(ctx context.Context) { _, _ = store.Check(ctx, limit.For("k")) })
			var told atomic.Int64
			for _, n := range []float64{8, 1, 1, 1, 8, 1} {
				g.call(20*time.Second, func(ctx context.Context) {
					if result, err := store.Allow(ctx, limit.ForN("k", n)); result.OK && err == nil {
						told.Add(1)
					}
				})
			}
			g.decide()
			if n := told.Load(); n != 0 {
				t.Errorf("%d callers were told OK, want none", n)
			}
			wantLeft(t, store, limit.ForN("k", 0), 5)
		})
	}
}

// A Prune comes while a take is under way. It forgets nothing that is taken by a
// call that has read the clock, and has its row only later: others took all, the
// row is full again, and Prune deletes it meanwhile. The call waits in a trigger,
// so that Prune always comes first; those that wait for the row itself are
// overtaken now and then.
func TestPruneForgetsNoTakeUnderWay(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: 200 * time.Millisecond}
	for name, take := range map[string]takes{"AllowTx": allowAt(pgx.ReadCommitted), "AllowFunc": allowFunc, "Allow": allowOwn} {
		t.Run(name, func(t *testing.T) {
			db, store := setUp(t)
			execIn(t, db, `CREATE TABLE {schema}.gate ();
				CREATE FUNCTION {schema}.wait() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN LOCK TABLE {schema}.gate IN SHARE MODE; RETURN NEW; END $$;
				CREATE TRIGGER wait BEFORE INSERT ON {schema}.rate_limits FOR EACH ROW EXECUTE FUNCTION {schema}.wait()`)
			took, err := store.Allow(t.Context(), limit.ForN("k", 10))
			granted := []ratelimit.Result{mustTake(t, took, err)}
			gate := begin(t, db, pgx.ReadCommitted)
			mustExec(t, gate, `LOCK TABLE `+db.Schema+`.gate`)
			told := make(chan takenLater, 1)
			go func() {
				ctx, cancel := soon(t)
				defer cancel()
				result, err := take(ctx, db.Pool, store, limit.ForN("k", 10))
				told <- takenLater{result, err}
			}()
			waitFor(t, db, gate, 1)
			mustExec(t, gate, `SELECT pg_sleep($1 - extract(epoch FROM clock_timestamp() - $2::timestamptz))`, 0.22, took.At)
			must(t, errOf(store.Prune(t.Context(), limit)))
			must(t, gate.Rollback(t.Context()))
			first := <-told
			second, err := store.Allow(t.Context(), limit.ForN("k", 10))
			must(t, errors.Join(first.err, err))
			for _, result := range []ratelimit.Result{first.Result, second} {
				if result.OK {
					granted = append(granted, result)
				}
			}
			wantWithin(t, bucket.Definition(limit.Definition()), granted)
		})
	}
}

// Calls wait for a row for longer than a period. After that, what callers are
// told of when they were granted what keeps to the limit: no second burst comes
// at the instant of the first.
func TestWaitingMakesNoSecondBurst(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const period = 300 * time.Millisecond
	db := pgtest.New(t, maxConns(40))
	for _, verb := range []struct {
		name string
		take takes
	}{{"AllowTx", allowAt(pgx.ReadCommitted)}, {"Allow", allowOwn}, {"AllowFunc", allowFunc}} {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: period},
			ratelimit.FixedWindow{Name: "window", Rate: 10, Period: period, Start: noon},
		} {
			for _, row := range []string{"a row", "no row"} {
				t.Run(verb.name+"/"+limit.Definition().Name+"/"+row, func(t *testing.T) {
					t.Parallel()
					granted := afterAWait(t, db, verb.take, limit.ForN(t.Name(), 9), row == "a row")
					wantWithin(t, bucket.Definition(limit.Definition()), granted)
				})
			}
		}
	}
}

// afterAWait is what is granted when a call that takes r has waited for its row
// for longer than a period, and another comes right after it.
func afterAWait(t *testing.T, db *pgtest.DB, take takes, r ratelimit.Request, there bool) (granted []ratelimit.Result) {
	t.Helper()
	store := newStore(t, db)
	ask := func(take takes, r ratelimit.Request) {
		result, err := take(t.Context(), db.Pool, store, r)
		if err != nil {
			t.Error(err)
		} else if result.OK {
			granted = append(granted, result)
		}
	}
	holder := begin(t, db, pgx.ReadCommitted)
	if there {
		ask(allowOwn, r.Limit.ForN(r.Key, 0.5))
		mustExec(t, holder, `SELECT FROM `+db.Schema+`.rate_limits WHERE key = $1 FOR UPDATE`, r.Key)
	} else if _, err := store.AllowTx(t.Context(), holder, r); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		ask(take, r)
		ask(allowOwn, r)
	}()
	waitFor(t, db, holder, 1)
	mustExec(t, holder, `SELECT pg_sleep(0.31)`)
	must(t, holder.Rollback(t.Context()))
	<-done
	return granted
}

// wantWithin wants what was granted, by what callers were told of when, to keep
// to the limit in every stretch of time that begins and ends with a grant, or in
// every window.
func wantWithin(t *testing.T, d bucket.Definition, granted []ratelimit.Result) {
	t.Helper()
	window := func(at time.Time) time.Duration { return at.Sub(d.Start) / d.Period }
	for i, first := range granted {
		sum := 0.0
		for _, r := range granted[i:] {
			came := d.Rate * float64(r.At.Sub(first.At)) / float64(d.Period)
			if d.Kind == ratelimit.KindFixedWindow {
				came = d.Rate * float64(window(r.At)-window(first.At))
			}
			if sum += r.Request.Count; sum > d.Capacity+came+1e-6 {
				t.Errorf("granted %v in %v, want at most %v", sum, r.At.Sub(first.At), d.Capacity+came)
			}
		}
	}
}

// The same if this store took after it, in whichever way.
func TestRemembersWhatItTookAfterARefusal(t *testing.T) {
	t.Parallel()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Hour}
	for name, take := range map[string]takes{"granted without being read": allowOwn, "runner": allowFunc, "caller's transaction": allowAt(pgx.ReadCommitted)} {
		t.Run(name, func(t *testing.T) {
			c := newClock()
			db := pgtest.New(t, maxConns(1))
			store := newStore(t, db, onClock(c), func(config *pgstore.Config) { config.Escrow = pgstore.MaxEscrow })
			mustAllow(t, store, limit.ForN("k", 3))
			g := gather(t, db.Pool)
			for _, n := range []float64{0, 4, 5} { // decided alone, granted, refused by what that left
				g.call(20*time.Second, func(ctx context.Context) {
					should(t, errOf(store.Allow(ctx, limit.ForN("k", n))))
				})
			}
			g.decide()
			if result, err := store.Allow(t.Context(), limit.ForN("k", 5)); err != nil || result.OK { // which is remembered
				t.Fatalf("got OK %v, error %v, want a refusal", result.OK, err)
			}
			result, err := take(t.Context(), db.Pool, store, limit.ForN("k", 2))
			mustTake(t, result, err)
			refused, err := store.Allow(t.Context(), limit.ForN("k", 5))
			if err != nil || refused.OK {
				t.Fatalf("got OK %v, error %v, want a refusal", refused.OK, err)
			}
			c.set(refused.RetryAt)
			if again, err := store.Allow(t.Context(), limit.ForN("k", 5)); err != nil || !again.OK {
				t.Errorf("promised for %v, got OK %v, error %v, and then %v more", refused.RetryAfter, again.OK, err, again.RetryAfter)
			}
		})
	}
}

// Rates as small as floats go: each is refused by Validate, or can be asked. None
// is such that only PostgreSQL cannot count with it.
func TestTinyRates(t *testing.T) {
	t.Parallel()
	c := newClock()
	store := newStore(t, pgtest.New(t), onClock(c))
	for _, rate := range []float64{1e-320, 1e-310, 1e-305, 1e-300, 1e-290, 1e-200, 1e-100, 1e-20} {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket{Name: fmt.Sprint("bucket ", rate), Rate: rate, Period: time.Hour, Capacity: ratelimit.None},
			ratelimit.TokenBucket{Name: fmt.Sprint("shards ", rate), Rate: rate, Period: time.Hour, Capacity: ratelimit.None, Shards: 2},
			ratelimit.TokenBucket{Name: fmt.Sprint("full ", rate), Rate: rate, Period: time.Hour},
			ratelimit.FixedWindow{Name: fmt.Sprint("window ", rate), Rate: rate, Period: time.Hour},
		} {
			if limit.Validate() != nil {
				continue
			}
			for range 2 {
				should(t, errOf(store.Allow(t.Context(), limit.ForN("k", 0))))
				should(t, errOf(store.Reserve(t.Context(), limit.ForN("k", rate))))
				c.add(time.Second)
			}
		}
	}
}

// Tiny counts, asked for again and again: what is granted is spent, and a count
// that is too small to be subtracted is refused as invalid.
func TestTinyCountsAreNotFree(t *testing.T) {
	t.Parallel()
	const capacity, calls = 1e6, 200
	c := newClock() // stands still, so nothing comes in
	db := pgtest.New(t)
	store := newStore(t, db, onClock(c))
	limit := ratelimit.TokenBucket{Name: "l", Rate: capacity, Period: time.Hour}
	mustAllow(t, store, limit.ForN("k", 100))
	for _, count := range []float64{1e-11, 3e-11, 1e-10, 1e-9} {
		before, granted := stateOf(t, db, "l").Value, 0.0
		for range calls {
			result, err := store.Allow(t.Context(), limit.ForN("k", count))
			if err != nil && !errors.Is(err, ratelimit.ErrInvalid) {
				t.Fatal(err)
			}
			if result.OK {
				granted += count
			}
		}
		if spent := before - stateOf(t, db, "l").Value; spent < granted/2 {
			t.Errorf("%g: granted %g, and %g was spent", count, granted, spent)
		}
	}
}
