package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/slots"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// asked is a call of one row.
type asked struct {
	verb  string // allow, reserve, check, at most
	count float64
}

// answer is what it was told. The instant is that of the decision, so the model need
// not guess one.
type answer struct {
	ok           bool
	taken, value float64
	at, due      time.Time // due for a reservation
}

// rowModel returns a row of a limit as the pure algebra has it.
func rowModel(d bucket.Definition, begin bucket.State) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return begin },
		Step: func(state, input, output any) (bool, any) {
			return stepRow(d, state.(bucket.State), input.(asked), output.(answer))
		},
		Equal: func(a, b any) bool {
			return a.(bucket.State).Equal(b.(bucket.State))
		},
		DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
	}
}

func stepRow(d bucket.Definition, s bucket.State, in asked, out answer) (bool, bucket.State) {
	const rounding = 1e-6
	settled := d.Refill(s, out.at)
	count := in.count
	if in.verb == "at most" {
		count = max(1, min(count, math.Floor(settled.Value+1e-9)))
	}
	after, ok := d.Take(s, out.at, count, d.Floor(in.verb == "reserve"))
	takes := ok && in.verb != "check"
	left := settled
	if takes {
		left = after
	}
	if ok != out.ok || math.Abs(out.value-d.ValueAt(left, out.at)) > rounding {
		return false, s
	}
	if !takes {
		return true, s
	}
	due := d.Due(after, out.at, count)
	return out.taken == count && out.due.Sub(due).Abs() <= time.Microsecond, after
}

var linear = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "token bucket", Rate: 300, Period: time.Second, Capacity: 20, MaxReserved: 10},
	ratelimit.FixedWindow{Name: "fixed window", Rate: 30, Period: 100 * time.Millisecond, MaxReserved: 10},
	ratelimit.SlidingWindow{Name: "sliding window", Rate: 30, Period: 100 * time.Millisecond, Slots: 5, MaxReserved: 30},
}

// attackLinear looks for one order of all calls of a row in which each got the answer
// that the algebra gives.
func attackLinear(ctx context.Context, l *site, c *chapter) error {
	p, err := l.place(ctx, 12)
	if err != nil {
		return err
	}
	defer p.close()
	c.say("Eight goroutines with two stores take from one row. The checker porcupine looks for an order of all calls, each between its beginning and its end, in which the pure functions give the same answers. The time of each decision is known, so the model guesses nothing.")
	rounds := 6
	if l.quick {
		rounds = 2
	}
	for _, limit := range linear {
		calls, verdicts := 0, map[porcupine.CheckResult]int{}
		refused := 0
		for round := range rounds {
			history, begin, err := p.history(ctx, limit, fmt.Sprint(round))
			if err != nil {
				return err
			}
			calls += len(history)
			for _, op := range history {
				if !op.Output.(answer).ok {
					refused++
				}
			}
			verdicts[porcupine.CheckOperationsTimeout(rowModel(bucket.Definition(limit.Definition()), begin), history, time.Minute)]++
		}
		name := ratelimit.NameOf(limit)
		c.Tell(name+", calls in histories", "%d in %d", calls, rounds)
		c.happened(count{name + ", refusals among them", refused})
		c.Zero(name+", histories without such an order", verdicts[porcupine.Illegal])
		c.Zero(name+", histories that were not decided in a minute", verdicts[porcupine.Unknown])
	}
	return nil
}

// history returns the calls and answers of a row.
func (p *place) history(ctx context.Context, limit ratelimit.Limit, key string) (history []porcupine.Operation, begin bucket.State, err error) {
	var stores [2]*pgstore.Store
	for i := range stores {
		if stores[i], err = p.store(pgstore.Config{}); err != nil {
			return nil, begin, err
		}
	}
	if _, err := stores[0].Allow(ctx, limit.For(key)); err != nil {
		return nil, begin, err
	}
	var totals []float64
	if err := p.pool.QueryRow(ctx, "SELECT value, ts, slots FROM "+p.schema+".rate_limits WHERE name = $1 AND key = $2", ratelimit.NameOf(limit), key).Scan(&begin.Value, &begin.TS, &totals); err != nil {
		return nil, begin, err
	}
	begin.Slots = slots.Read(totals, begin.Value)
	const clients, each = 8, 60
	var (
		mu    sync.Mutex
		epoch = time.Now()
	)
	err = lab.Each(clients, func(client int) error {
		r := rand.New(rand.NewPCG(rand.Uint64(), uint64(client)))
		for range each {
			in := asked{[]string{"allow", "allow", "reserve", "check", "at most"}[r.IntN(5)], float64(1 + r.IntN(4))}
			called := time.Since(epoch)
			result, err := askRow(ctx, r, p.pool, stores[client%2], in, limit.ForN(key, in.count))
			if err != nil {
				return err
			}
			out := answer{result.OK, result.Taken, result.Value, result.At, result.RetryAt}
			mu.Lock()
			history = append(history, porcupine.Operation{ClientId: client, Input: in, Call: int64(called), Output: out, Return: int64(time.Since(epoch))})
			mu.Unlock()
		}
		return nil
	})
	return history, begin, err
}

func askRow(ctx context.Context, r *rand.Rand, pool *pgxpool.Pool, store *pgstore.Store, in asked, request ratelimit.Request) (ratelimit.Result, error) {
	switch in.verb {
	case "check":
		return store.Check(ctx, request)
	case "reserve":
		return reserve(store).somehow(ctx, r, pool, 0, request)
	case "at most":
		return atMost(store).somehow(ctx, r, pool, 0, request)
	}
	return allow(store).somehow(ctx, r, pool, 0, request)
}
