package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
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
	at           time.Time
}

// stored is the row, comparable.
type stored struct {
	value float64
	ts    int64
}

// rowModel is a row of a limit as the pure algebra has it.
func rowModel(d ratelimit.Definition, begin stored) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return begin },
		Step: func(state, input, output any) (bool, any) {
			return stepRow(d, state.(stored), input.(asked), output.(answer))
		},
		DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
	}
}

func stepRow(d ratelimit.Definition, s stored, in asked, out answer) (bool, stored) {
	before := ratelimit.State{Value: s.value, TS: time.UnixMicro(s.ts).UTC()}
	count := in.count
	if in.verb == "at most" {
		there := math.Floor(d.Settle(before, out.at).Value + 1e-9)
		if count = min(count, there); count < 1 {
			count = 1
		}
	}
	after, ok := d.Take(before, out.at, count, d.Floor(in.verb == "reserve"))
	if ok != out.ok || math.Abs(out.value-valueTold(in, before, after, d, out, ok)) > 1e-6 {
		return false, s
	}
	if !ok || in.verb == "check" {
		return true, s
	}
	return out.taken == count, stored{after.Value, after.TS.UnixMicro()}
}

// valueTold is the value that a call tells: what it leaves, or if it takes nothing what is
// there.
func valueTold(in asked, before, after ratelimit.State, d ratelimit.Definition, out answer, ok bool) float64 {
	if !ok || in.verb == "check" {
		return d.Settle(before, out.at).Value
	}
	return after.Value
}

var linear = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "token bucket", Rate: 300, Period: time.Second, Capacity: 20, MaxReserved: 10},
	ratelimit.FixedWindow{Name: "fixed window", Rate: 30, Period: 100 * time.Millisecond, MaxReserved: 10},
}

// attackLinear looks for one order of all calls of a row in which each got the answer
// that the algebra gives.
func attackLinear(ctx context.Context, l *lab, c *chapter) error {
	schema, err := l.schema(ctx)
	if err != nil {
		return err
	}
	pool, err := l.pool(ctx, 12)
	if err != nil {
		return err
	}
	defer pool.Close()
	c.say("Eight goroutines with two stores call one row. porcupine looks for an order of all calls, each somewhere between its beginning and its end, in which the pure algebra gives every answer that was given; the instant of each decision is told, so the model has nothing to guess.")
	rounds := 6
	if l.quick {
		rounds = 2
	}
	for _, limit := range linear {
		calls, verdicts := 0, map[porcupine.CheckResult]int{}
		refused := 0
		for round := range rounds {
			history, begin, err := l.history(ctx, pool, schema, limit, fmt.Sprint(round))
			if err != nil {
				return err
			}
			calls += len(history)
			for _, op := range history {
				if !op.Output.(answer).ok {
					refused++
				}
			}
			verdicts[porcupine.CheckOperationsTimeout(rowModel(limit.Definition(), begin), history, time.Minute)]++
		}
		name := ratelimit.NameOf(limit)
		c.tell(name+", calls in histories", "%d in %d", calls, rounds)
		c.happened(name+", refusals among them", refused)
		c.zero(name+", histories without such an order", verdicts[porcupine.Illegal])
		c.zero(name+", histories that were not decided in a minute", verdicts[porcupine.Unknown])
	}
	return nil
}

// history is what was asked of a row, and answered.
func (l *lab) history(ctx context.Context, pool *pgxpool.Pool, schema string, limit ratelimit.Limit, key string) (history []porcupine.Operation, begin stored, err error) {
	var stores [2]*pgstore.Store
	for i := range stores {
		if stores[i], err = pgstore.New(pool, &pgstore.Config{Schema: schema}); err != nil {
			return nil, begin, err
		}
	}
	if _, err := stores[0].Allow(ctx, limit.For(key)); err != nil {
		return nil, begin, err
	}
	var ts time.Time
	if err := pool.QueryRow(ctx, "SELECT value, ts FROM "+schema+".rate_limits WHERE name = $1 AND key = $2", ratelimit.NameOf(limit), key).Scan(&begin.value, &ts); err != nil {
		return nil, begin, err
	}
	begin.ts = ts.UnixMicro()
	const clients, each = 8, 60
	var (
		mu    sync.Mutex
		group sync.WaitGroup
		errs  [clients]error
		epoch = time.Now()
	)
	for client := range clients {
		group.Go(func() {
			for range each {
				in := asked{[]string{"allow", "allow", "reserve", "check", "at most"}[rand.IntN(5)], float64(1 + rand.IntN(4))}
				called := time.Since(epoch)
				result, err := askRow(ctx, pool, stores[client%2], in, limit.ForN(key, in.count))
				if err != nil {
					errs[client] = err
					return
				}
				out := answer{result.OK, result.Taken, result.Value, result.At}
				mu.Lock()
				history = append(history, porcupine.Operation{ClientId: client, Input: in, Call: int64(called), Output: out, Return: int64(time.Since(epoch))})
				mu.Unlock()
			}
		})
	}
	group.Wait()
	return history, begin, errors.Join(errs[:]...)
}

func askRow(ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, in asked, r ratelimit.Request) (result ratelimit.Result, err error) {
	own := rand.IntN(2) == 0
	switch {
	case in.verb == "check":
		return store.Check(ctx, r)
	case in.verb == "allow" && rand.IntN(3) == 0:
		result, err = store.AllowFunc(ctx, []ratelimit.Request{r}, func(pgx.Tx, ratelimit.Result) error { return nil })
		if errors.Is(err, ratelimit.ErrRefused) {
			err = nil
		}
		return result, err
	case own:
		return map[string]func(context.Context) (ratelimit.Result, error){
			"allow":   func(ctx context.Context) (ratelimit.Result, error) { return store.Allow(ctx, r) },
			"reserve": func(ctx context.Context) (ratelimit.Result, error) { return store.Reserve(ctx, r) },
			"at most": func(ctx context.Context) (ratelimit.Result, error) { return store.AllowAtMost(ctx, r) },
		}[in.verb](ctx)
	}
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
		switch in.verb {
		case "allow":
			result, err = store.AllowTx(ctx, tx, r)
		case "reserve":
			result, err = store.ReserveTx(ctx, tx, r)
		default:
			result, err = store.AllowAtMostTx(ctx, tx, r)
		}
		return err
	})
	return result, err
}
