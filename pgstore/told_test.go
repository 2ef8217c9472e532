package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// What callers are told agrees with what is there: the instants of grants keep to the
// limit's curve.

// atMostForms take as many whole tokens as there are.
var atMostForms = []takeForm{
	{"at most", atMostTx, unchanged},
	{"at most, portable", atMostTx, portable},
	{"at most on its own", atMostOwn, unchanged},
	{"at most on its own, portable", atMostOwn, portable},
}

func atMostTx(ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (result ratelimit.Result, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		result, err = store.AllowAtMostTx(ctx, tx, requests[0])
		return err
	})
	return result, err
}

func atMostOwn(ctx context.Context, _ *pgxpool.Pool, store *pgstore.Store, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return store.AllowAtMost(ctx, requests[0])
}

// A clock that goes back creates no tokens, and callers are told no instant by which it
// would have.
func TestToldWhenTheClockGoesBack(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const period = time.Second
	db := pgtest.New(t)
	for i, form := range slices.Concat(takeForms, reserveForms, atMostForms) {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket{Name: "bucket", Rate: 10, Period: period, MaxReserved: 20},
			ratelimit.FixedWindow{Name: "window", Rate: 10, Period: period, MaxReserved: 20},
			ratelimit.SlidingWindow{Name: "sliding", Rate: 10, Period: period, Slots: 5, MaxReserved: 20},
		} {
			t.Run(fmt.Sprint(i, " ", form.name, "/", ratelimit.NameOf(limit)), func(t *testing.T) {
				t.Parallel()
				c, random := newClock(), rand.New(rand.NewPCG(1, 2))
				store := newStore(t, db, onClock(c), form.change)
				var told []curve.Event
				for range 60 {
					step := time.Duration(random.Int64N(int64(period) / 3))
					c.add([]time.Duration{0, 0, step, step, 3 * step, -3 * step}[random.IntN(6)])
					result, err := form.take(t.Context(), db.Pool, store, limit.ForN(t.Name(), float64(1+random.IntN(4))))
					if err != nil && !errors.Is(err, ratelimit.ErrRefused) {
						t.Fatal(err)
					}
					if result.OK {
						told = append(told, curve.Event{At: result.RetryAt, Count: result.Taken})
					}
				}
				if worst := curve.Judge(told, curve.Of(limit.Definition())); worst.Share > 1+1e-9 || worst.Share < 0.5 {
					t.Errorf("callers were told %v", worst)
				}
			})
		}
	}
}

// A call for two limits has the row of the first, and waits for that of the second for
// longer than a period. The first counts from before the wait, and is told so: what comes
// right after it is no second burst.
func TestToldWhenOneOfSeveralIsWaitedFor(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const period = 300 * time.Millisecond
	db := pgtest.New(t, maxConns(40))
	for _, first := range []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "a bucket", Rate: 10, Period: period},
		ratelimit.FixedWindow{Name: "a window", Rate: 10, Period: period, Start: noon},
		ratelimit.SlidingWindow{Name: "a sliding window", Rate: 10, Period: period, Start: noon},
	} {
		for name, take := range map[string]takes{"AllowTx": allowAt(pgx.ReadCommitted), "Allow": allowOwn, "AllowFunc": allowFunc} {
			t.Run(fmt.Sprint(name, "/", ratelimit.NameOf(first)), func(t *testing.T) {
				t.Parallel()
				store, key, second := newStore(t, db), t.Name(), slow("b", 1000)
				mustAllow(t, store, second.For(key))
				holder := begin(t, db, pgx.ReadCommitted)
				mustExec(t, holder, `SELECT FROM `+db.Schema+`.rate_limits WHERE name = 'b' AND key = $1 FOR UPDATE`, key)
				var told []curve.Event
				done := make(chan struct{})
				go func() {
					defer close(done)
					for _, requests := range [][]ratelimit.Request{{first.ForN(key, 9), second.For(key)}, {first.ForN(key, 9)}} {
						result, err := take(t.Context(), db.Pool, store, requests...)
						if err != nil {
							t.Error(err)
						} else if result.OK {
							told = append(told, curve.Event{At: result.Each()[0].At, Count: 9})
						}
					}
				}()
				waitFor(t, db, holder, 1)
				mustExec(t, holder, `SELECT pg_sleep(0.35)`)
				must(t, holder.Rollback(t.Context()))
				<-done
				if worst := curve.Judge(told, curve.Of(first.Definition())); worst.Share > 1+1e-9 || len(told) == 0 {
					t.Errorf("callers were told %v", worst)
				}
			})
		}
	}
}
