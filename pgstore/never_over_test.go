package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/traced"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// eachForm runs a test in parallel for each limit and form of taking.
func eachForm(t *testing.T, limits []ratelimit.Limit, test func(t *testing.T, limit ratelimit.Limit, form takeForm)) {
	t.Helper()
	for _, limit := range limits {
		for _, form := range takeForms {
			t.Run(ratelimit.NameOf(limit)+"/"+form.name, func(t *testing.T) {
				t.Parallel()
				test(t, limit, form)
			})
		}
	}
}

// twoPools are of the same database.
type twoPools [2]*pgtest.DB

// newTwoPools makes the pools of a test, which its subtests share: new connections cost more
// than most of what the subtests do.
func newTwoPools(t *testing.T, conns int32) twoPools {
	t.Helper()
	db := pgtest.New(t, maxConns(conns))
	return twoPools{db, another(t, db, func(*pgxpool.Config) {})}
}

// taking returns a function that takes by a form, for the i-th caller, from one of two stores,
// which know as little of each other as those of two processes.
func (p twoPools) taking(t *testing.T, form takeForm, change ...func(*pgstore.Config)) func(ctx context.Context, i int, r ratelimit.Request) (ratelimit.Result, error) {
	t.Helper()
	change = append(change, form.change)
	stores := [2]*pgstore.Store{newStore(t, p[0], change...), newStore(t, p[1], change...)}
	return func(ctx context.Context, i int, r ratelimit.Request) (ratelimit.Result, error) {
		return form.take(ctx, p[i%2].Pool, stores[i%2], r)
	}
}

// plentiful are limits of each kind, with as many shards as there are reasons to look at: none,
// and such that one token is in one shard, or in several.
var plentiful = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "bucket", Rate: 300, Period: time.Second, Capacity: 40},
	ratelimit.TokenBucket{Name: "bucket, 3 shards", Rate: 300, Period: time.Second, Capacity: 40, Shards: 3},
	ratelimit.SlidingWindow{Name: "sliding, 2 shards", Rate: 16, Period: 400 * time.Millisecond, Slots: 4, Shards: 2},
	ratelimit.TokenBucket{Name: "bucket, 32 shards", Rate: 300, Period: time.Second, Capacity: 40, Shards: 32},
	ratelimit.FixedWindow{Name: "window", Rate: 16, Period: 100 * time.Millisecond},
	ratelimit.FixedWindow{Name: "window, 8 shards", Rate: 16, Period: 100 * time.Millisecond, Shards: 8},
	ratelimit.SlidingWindow{Name: "sliding", Rate: 16, Period: 400 * time.Millisecond, Slots: 4},
	ratelimit.SlidingWindow{Name: "sliding, 8 shards", Rate: 16, Period: 400 * time.Millisecond, Slots: 4, Shards: 8},
}

// At every instant many callers of two stores who ask at the same time, in whichever form,
// and over however many shards, are together granted what is there, to the token: as much
// as one caller of memory, without shards. So nobody is refused for nothing, either.
func TestGrantsWhatThereIs(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const callers = 8
	pools := newTwoPools(t, callers)
	eachForm(t, plentiful, func(t *testing.T, limit ratelimit.Limit, form takeForm) {
		c := newClock()
		take, memory := pools.taking(t, form, onClock(c)), memstore.New(c.now)
		ctx := within(t, time.Minute)
		for _, step := range []time.Duration{0, 30, 7, 450} { // milliseconds
			c.add(step * time.Millisecond)
			var granted atomic.Int64
			together(callers, func(i int) {
				for counts := []int64{3, 1}[min(i, 1):]; len(counts) > 0; { // one asks for more first
					result, err := take(ctx, i, limit.ForN(form.name, float64(counts[0])))
					switch {
					case err != nil:
						t.Error(err)
						return
					case result.OK:
						granted.Add(counts[0])
					default:
						counts = counts[1:]
					}
				}
			})
			want := drain(t, memory, unsharded(limit).For(form.name))
			if got := granted.Load(); got != want {
				t.Errorf("%v later granted %d, want %d", step*time.Millisecond, got, want)
			}
		}
	})
}

// drain takes until it is refused, and returns how often that was granted.
func drain(t *testing.T, memory *memstore.Store, r ratelimit.Request) (n int64) {
	t.Helper()
	for ; ; n++ {
		result, err := memory.Allow(t.Context(), r)
		must(t, err)
		if !result.OK {
			return n
		}
	}
}

// unsharded returns a limit without its shards.
func unsharded(limit ratelimit.Limit) ratelimit.Limit {
	switch l := limit.(type) {
	case ratelimit.TokenBucket:
		l.Shards = 0
		return l
	case ratelimit.FixedWindow:
		l.Shards = 0
		return l
	case ratelimit.SlidingWindow:
		l.Shards = 0
		return l
	}
	panic("no such kind of limit")
}

// A transaction that was opened long ago, with the snapshot and the now() of
// then, neither gets tokens that are gone nor brings them back for others.
func TestOldTransactionCreatesNoTokens(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	limit := slow("drained", 10)
	for _, test := range []struct {
		level  pgx.TxIsoLevel
		before float64 // taken before the old transaction's snapshot
		want   string  // the error's code
	}{
		{pgx.ReadCommitted, 0, ""},
		{pgx.ReadCommitted, 3, ""},
		{pgx.RepeatableRead, 0, serializationFailure},
		{pgx.RepeatableRead, 3, serializationFailure},
		{pgx.Serializable, 0, serializationFailure},
		{pgx.Serializable, 3, serializationFailure},
	} {
		t.Run(fmt.Sprintf("%s after %g", test.level, test.before), func(t *testing.T) {
			t.Parallel()
			db, store := setUp(t)
			ctx, key := t.Context(), t.Name()
			if test.before > 0 {
				mustAllow(t, store, limit.ForN(key, test.before))
			}
			old := begin(t, db, test.level)
			mustExec(t, old, "SELECT pg_sleep(0.2)")
			mustAllow(t, store, limit.ForN(key, limit.Rate-test.before))
			want := tableOf(t, db)

			result, err := store.AllowTx(ctx, old, limit.For(key))
			if result.OK || hasCode(err, serializationFailure) != (test.want != "") || err != nil && test.want == "" {
				t.Errorf("got OK %v, error %v; want a refusal or code %q", result.OK, err, test.want)
			}
			_ = old.Commit(ctx) // fails after an error
			if got := tableOf(t, db); !slices.Equal(got, want) {
				t.Errorf("got row\n%s, want\n%s", got, want)
			}
			if result, err := store.Allow(ctx, limit.For(key)); err != nil || result.OK {
				t.Errorf("afterwards: got OK %v, error %v, want a refusal", result.OK, err)
			}
		})
	}
}

// A caller reads the clock and then waits for the row. The time that it
// waited was counted by those it waited for, so it must not count again.
func TestWaitingCreatesNoTokens(t *testing.T) {
	t.Parallel()
	db, store := setUp(t)
	limit := ratelimit.TokenBucket{Name: "quick", Rate: 100, Period: time.Second}
	ctx := t.Context()
	first, second := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
	must(t, errOf(store.AllowTx(ctx, first, limit.ForN("k", 50))))
	later := allowLater(store, second, limit.For("k"))
	waitsForLock(t, db, second)
	mustExec(t, first, "SELECT pg_sleep(0.1)")
	takeIn(t, store, first, limit.ForN("k", 40))
	must(t, first.Commit(ctx))
	got := <-later
	mustTake(t, got.Result, got.err)
	before := stateOf(t, db, limit.Name) // as the first left it
	must(t, second.Commit(ctx))
	want := bucket.State{Value: before.Value - 1, TS: before.TS}
	if after := stateOf(t, db, limit.Name); after != want || got.Value != want.Value {
		t.Errorf("got %v and in the result %v, want %v", after, got.Value, want)
	}
}

// Two callers who name the same two limits in opposite orders never meet in a
// deadlock, and a refusal by one limit takes nothing from the other.
func TestOppositeOrders(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const calls = 100 // of each of two goroutines
	for _, test := range append(takeForms, takeForm{"AllowTx, serializable", allowAt(pgx.Serializable), unchanged}) {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			store := newStore(t, db, test.change)
			// The last tenth of the calls is refused, by B alone.
			a, b := slow("A", float64(4*calls)), slow("B", float64(2*calls-calls/5))
			orders := [][]ratelimit.Request{{a.For(""), b.For("")}, {b.For(""), a.For("")}}
			var granted atomic.Int64
			together(len(orders), func(i int) {
				for range calls {
					result, err := test.take(t.Context(), db.Pool, store, orders[i]...)
					if err != nil {
						t.Error(err)
						return
					}
					if result.OK {
						granted.Add(1)
					}
				}
			})
			wantLeft(t, store, a.For(""), a.Rate-float64(granted.Load()))
			wantLeft(t, store, b.For(""), 0)
			if want := int64(b.Rate); granted.Load() != want {
				t.Errorf("granted %d, want %d", granted.Load(), want)
			}
		})
	}
}

// sqlTracer is a tracer that does something before each statement is sent, also of a batch.
type sqlTracer struct {
	traced.Statements
	do func(sql string)
}

func (s *sqlTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.do(data.SQL)
	return ctx
}

func (s *sqlTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		s.do(q.SQL)
	}
	return ctx
}

func eachSQL(do func(sql string)) pgtest.Option {
	return pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = &sqlTracer{do: do} })
}

// A caller whom others forestall every time is refused in the end: it neither
// fails, nor tries for ever, nor gets what is not there. (Decisions on their own
// lock the rows in the end, so nobody comes before.)
func TestAlwaysTooLate(t *testing.T) {
	t.Parallel()
	ctx := within(t, 30*time.Second)
	limit := slow("contested", 1)
	var others *pgstore.Store
	takes := 0
	db, store := setUp(t, eachSQL(func(sql string) {
		switch {
		case others == nil:
		case strings.Contains(sql, "INSERT INTO"): // what a look has found is gone by the time of the take
			takes++
			should(t, errOf(others.Allow(ctx, limit.For("k"))))
		case strings.Contains(sql, "LATERAL"):
			should(t, others.Reset(ctx, limit, "k"))
		}
	}))
	others = newStore(t, beside(t, db))
	result, err := store.AllowFunc(ctx, []ratelimit.Request{limit.For("k")}, func(pgx.Tx, ratelimit.Result) error { return nil })
	if !errors.Is(err, ratelimit.ErrRefused) || result.OK || result.RetryAfter <= 0 {
		t.Errorf("got OK %v after %v, error %v, want a refusal", result.OK, result.RetryAfter, err)
	}
	if takes < 2 {
		t.Errorf("got %d takes, want it to have tried again", takes)
	}
}
