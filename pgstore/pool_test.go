package pgstore_test

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
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// poolTracer counts the connections of a pool that are in use, and those who wait
// for one.
type poolTracer struct{ used, most, waiting atomic.Int64 }

func (p *poolTracer) trace() pgtest.Option {
	return pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = p })
}

func (p *poolTracer) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	p.waiting.Add(1)
	return ctx
}

func (p *poolTracer) TraceAcquireEnd(_ context.Context, _ *pgxpool.Pool, data pgxpool.TraceAcquireEndData) {
	p.waiting.Add(-1)
	if data.Err == nil {
		storeMax(&p.most, p.used.Add(1))
	}
}

func (p *poolTracer) TraceRelease(*pgxpool.Pool, pgxpool.TraceReleaseData) { p.used.Add(-1) }

func (*poolTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (*poolTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// askOnTheirOwn has goroutines ask for this and that, each decision on its own, for as long
// as more(n) is true of a goroutine that has asked n times.
func (s *scene) askOnTheirOwn(t *testing.T, goroutines int, more func(n int) bool) {
	t.Helper()
	plain, other, shards := slow("one", 1e6), slowWindow("other", 1e6), shardedSlow("shards", 1e6, 4)
	empty := slow("empty", 1)
	ask := func(random *rand.Rand) (ratelimit.Result, error) {
		key := fmt.Sprint(random.IntN(100))
		switch random.IntN(6) {
		case 0:
			return s.store.Allow(t.Context(), plain.For(key), other.For(key))
		case 1:
			return s.store.Check(t.Context(), plain.For(key), shards.For(key))
		case 2:
			return s.store.Reserve(t.Context(), shards.ForN(key, 3))
		case 3:
			return s.store.Allow(t.Context(), empty.For(key))
		case 4:
			return s.store.CheckReserve(t.Context(), other.For(key))
		default:
			return s.store.Allow(t.Context(), plain.For(key))
		}
	}
	together(goroutines, func(i int) {
		random := rand.New(rand.NewPCG(uint64(i), 5))
		for n := 0; more(n); n++ {
			if _, err := ask(random); err != nil {
				t.Error(err)
				return
			}
		}
	})
}

// Decisions on their own use two connections, however many ask.
func TestDecisionsUseTwoConnections(t *testing.T) {
	t.Parallel()
	var pool poolTracer
	db := pgtest.New(t, maxConns(16), pool.trace())
	s := &scene{DB: db, store: newStore(t, db)}
	s.askOnTheirOwn(t, 64, func(n int) bool { return n < 20 })
	if got := pool.most.Load(); got < 1 || got > 2 {
		t.Errorf("%d connections were in use at a time, want two at most", got)
	}
}

// waitsForLong is how many of those whom tx blocks have waited for longer than
// those who only look whether a row is free, even on a busy machine.
func waitsForLong(t *testing.T, db *pgtest.DB, tx pgx.Tx) (n int64) {
	t.Helper()
	err := db.Pool.QueryRow(t.Context(), `SELECT count(*) FROM pg_stat_activity
		WHERE wait_event_type = 'Lock' AND clock_timestamp() - query_start > interval '300 ms' AND $1 = ANY(pg_blocking_pids(pid))`,
		tx.Conn().PgConn().PID()).Scan(&n)
	must(t, err)
	return n
}

// However many rows are locked, a quarter of the pool, four connections at most,
// waits for them. The other rows are looked at by one connection each, for a
// moment. Those who ask for other rows have two, as always.
func TestConnectionsThatWaitForLockedRows(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const rows = 7
	for conns, spare := range map[int32]int64{3: 0, 8: 2, 32: 4} {
		t.Run(fmt.Sprintf("%d connections", conns), func(t *testing.T) {
			t.Parallel()
			var pool poolTracer
			db := pgtest.New(t, maxConns(conns), pool.trace())
			s := &scene{db, newStore(t, db), beside(t, db)}
			h := s.hold(t, rows, true)
			calls := s.ask(t, h, forLong)
			pool.most.Store(0)
			asked, enough := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(asked)
				s.askOnTheirOwn(t, 16, func(int) bool { return !isClosed(enough) })
			}()
			var most int64
			// For as long as it may take until that many wait, and then until more would.
			for begun := time.Now(); time.Since(begun) < 600*time.Millisecond || most < spare && time.Since(begun) < forLong; {
				most = max(most, waitsForLong(t, s.side, h.tx))
				pauseFor(t.Context(), 10*time.Millisecond)
			}
			close(enough)
			<-asked
			if most != spare {
				t.Errorf("%d connections waited for locked rows, want %d", most, spare)
			}
			if got := pool.most.Load(); got > 2+rows {
				t.Errorf("%d connections were in use at a time, want %d at most", got, 2+rows)
			}
			end(t, h.tx.Rollback)
			for _, call := range calls {
				got := <-call
				mustTake(t, got.Result, got.err)
			}
			idle(t, db.Pool)
		})
	}
}
