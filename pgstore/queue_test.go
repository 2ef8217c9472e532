package pgstore_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// queue is calls of a shop's runner, one behind the other.
type queue struct {
	*shop
	wg sync.WaitGroup
}

// join has a call join the queue, behind those that did before.
func (q *queue) join(ctx context.Context, t *testing.T, do func(pgx.Tx, ratelimit.Result) error) *takenLater {
	t.Helper()
	var a takenLater
	before := q.store.Queued()
	q.wg.Go(func() { a.Result, a.err = q.store.AllowFunc(ctx, q.requests(), do) })
	eventually(t, "it is in the queue", func() bool { return q.store.Queued() > before })
	return &a
}

// first has a call be at the row, until the function that it returns is called
// and it does more.
func (q *queue) first(ctx context.Context, t *testing.T, more func(pgx.Tx) error) (*takenLater, func()) {
	t.Helper()
	var a takenLater
	there, goOn := make(chan struct{}), make(chan struct{})
	q.wg.Go(func() {
		a.Result, a.err = q.store.AllowFunc(ctx, q.requests(), q.order(t.Context(), func(tx pgx.Tx) error {
			close(there)
			<-goOn
			return more(tx)
		}))
	})
	<-there
	return &a, sync.OnceFunc(func() { close(goOn) })
}

// A pool that is to see its connections come and go sees each transaction's, and
// a tracer each COMMIT.
func TestQueueKeepsToThePool(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*pgxpool.Config, *atomic.Int64){
		"PrepareConn": func(c *pgxpool.Config, seen *atomic.Int64) {
			c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { seen.Add(1); return true, nil }
		},
		"BeforeAcquire": func(c *pgxpool.Config, seen *atomic.Int64) {
			c.BeforeAcquire = func(context.Context, *pgx.Conn) bool { seen.Add(1); return true } //lint:ignore SA1019 as long as it is there
		},
		"AfterRelease": func(c *pgxpool.Config, seen *atomic.Int64) {
			c.AfterRelease = func(*pgx.Conn) bool { seen.Add(1); return true }
		},
		"Tracer": func(c *pgxpool.Config, seen *atomic.Int64) { c.ConnConfig.Tracer = commits{seen} },
	} {
		t.Run(name, func(t *testing.T) {
			const calls = 5
			var seen atomic.Int64
			db := pgtest.New(t, pgtest.WithConfig(func(c *pgxpool.Config) { change(c, &seen) }))
			q := &queue{shop: newShopOn(t, db, 100)}
			_, goOn := q.first(t.Context(), t, nothing)
			seen.Store(0)
			for range calls {
				q.join(t.Context(), t, q.order(t.Context(), nothing))
			}
			goOn()
			q.wg.Wait()
			eventually(t, "each was seen", func() bool { return seen.Load() >= calls })
			q.want(t, calls+1)
		})
	}
}

// commits counts them.
type commits struct{ seen *atomic.Int64 }

func (c commits) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if data.SQL == "commit" {
		c.seen.Add(1)
	}
	return ctx
}

func (commits) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A queue does not keep its connection from others who wait for one, and those who
// wait in it hold none.
func TestQueueIsFair(t *testing.T) {
	t.Parallel()
	const calls = 10
	var pool poolTracer
	db := pgtest.New(t, maxConns(1), pool.trace())
	q := &queue{shop: newShopOn(t, db, 100)}
	_, goOn := q.first(t.Context(), t, nothing)
	for range calls {
		q.join(t.Context(), t, q.order(t.Context(), nothing))
	}
	if got := pool.waiting.Load(); got != 0 {
		t.Errorf("%d wait for a connection, want none", got)
	}
	var behind int
	q.wg.Go(func() {
		_, err := q.store.AllowFunc(t.Context(), []ratelimit.Request{q.limit.For("other")}, func(tx pgx.Tx, _ ratelimit.Result) error {
			return tx.QueryRow(t.Context(), `SELECT count(*) FROM `+q.Schema+`.orders`).Scan(&behind)
		})
		should(t, err)
	})
	eventually(t, "another waits for the connection", func() bool { return pool.waiting.Load() == 1 })
	goOn()
	q.wg.Wait()
	if behind > 2 {
		t.Errorf("%d of the queue came first, want the one that had the connection", behind)
	}
	q.want(t, calls+1)
}

// The COMMIT that fails takes nothing along of what was waiting behind it.
func TestQueueCommitFails(t *testing.T) {
	t.Parallel()
	q := &queue{shop: newShop(t, 10)}
	q.atCommit(t, 1, `RAISE EXCEPTION 'raised by the test'`)
	first, goOn := q.first(t.Context(), t, nothing)
	second := q.join(t.Context(), t, q.order(t.Context(), nothing))
	third := q.join(t.Context(), t, q.order(t.Context(), nothing))
	goOn()
	q.wg.Wait()
	if codeOf(first.err) != "P0001" || first.OK {
		t.Errorf("the first: got OK %v, error %v, want code P0001", first.OK, first.err)
	}
	if second.err != nil || third.err != nil || second.Remaining != 9 || third.Remaining != 8 {
		t.Errorf("got %d left, error %v, and %d left, error %v, want 9 and 8", second.Remaining, second.err, third.Remaining, third.err)
	}
	q.want(t, 2)
	idle(t, q.Pool)
}

// While a COMMIT takes its time, who waits behind it can give up, and who
// commits can. What was sent is decided by the server all the same.
func TestQueueGivesUpAtCommit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name          string
		first, second bool // gives up
		want          int
	}{
		{"the one behind", false, true, 2},
		{"the one that commits", true, false, 3},
		{"both", true, true, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			q := &queue{shop: newShop(t, 10)}
			q.atCommit(t, 1, `PERFORM pg_advisory_xact_lock(42)`)
			lock := begin(t, q.DB, pgx.ReadCommitted)
			mustExec(t, lock, `SELECT pg_advisory_xact_lock(42)`)
			firstCtx, cancelFirst := context.WithCancel(t.Context())
			secondCtx, cancelSecond := context.WithCancel(t.Context())
			defer cancelFirst()
			defer cancelSecond()
			first, goOn := q.first(firstCtx, t, nothing)
			second := new(takenLater)
			secondEnded := make(chan struct{})
			q.wg.Go(func() {
				defer close(secondEnded)
				second.Result, second.err = q.store.AllowFunc(secondCtx, q.requests(), q.order(secondCtx, nothing))
			})
			eventually(t, "the second is in the queue", func() bool { return q.store.Queued() == 1 })
			third := q.join(t.Context(), t, q.order(t.Context(), nothing))
			goOn()
			eventually(t, "the COMMIT waits", func() bool { return pgtest.Blocks(t, q.DB.Pool, lock) })
			if test.second {
				cancelSecond()
				<-secondEnded // and does not wait for the COMMIT
				if !errors.Is(second.err, context.Canceled) {
					t.Errorf("the second: got %v, want %v", second.err, context.Canceled)
				}
			}
			if test.first {
				cancelFirst()
			}
			end(t, lock.Rollback)
			q.wg.Wait()
			if third.err != nil {
				t.Errorf("the third: %v", third.err)
			}
			// The first asked what became of it.
			want := test.want
			if first.err != nil {
				want--
			}
			if !test.second && second.err != nil {
				t.Errorf("the second: %v", second.err)
			}
			q.want(t, want)
			idle(t, q.Pool)
		})
	}
}
