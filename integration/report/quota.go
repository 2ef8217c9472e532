package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const briefly = 100 * time.Millisecond // Config.Escrow of the sections below

// storesWith are stores that take ahead, the last of which is Portable.
func storesWith(pool *pgxpool.Pool, schema string, n int) (stores []*pgstore.Store, err error) {
	for i := range n {
		store, err := pgstore.New(pool, &pgstore.Config{Schema: schema, Escrow: briefly, Portable: i == 2})
		if err != nil {
			return nil, err
		}
		stores = append(stores, store)
	}
	return stores, nil
}

const quota = 3000

// grantQuotas has stores grant quotas of a day until nothing is left.
func (l *lab) grantQuotas(ctx context.Context, c *chapter) error {
	schema, pool, err := l.place(ctx, 16)
	if err != nil {
		return err
	}
	defer pool.Close()
	stores := []int{1, 3}
	if l.quick {
		stores = stores[1:]
	}
	for _, n := range stores {
		for _, limit := range []ratelimit.Limit{
			ratelimit.TokenBucket{Name: fmt.Sprintf("token bucket of 3,000 a day, stores: %d", n), Rate: quota, Period: 24 * time.Hour},
			ratelimit.FixedWindow{Name: fmt.Sprintf("fixed window of 3,000 a day, stores: %d", n), Rate: quota, Period: eon, Start: midnight},
			ratelimit.SlidingWindow{Name: fmt.Sprintf("sliding window of 3,000 a day, stores: %d", n), Rate: quota, Period: 24 * time.Hour},
		} {
			granted, err := grantQuota(ctx, pool, schema, n, limit)
			if err != nil {
				return err
			}
			c.atLeast(ratelimit.NameOf(limit)+", granted", granted, quota, "")
			c.atMost(ratelimit.NameOf(limit)+", granted", granted, quota+1, "") // the refill of a bucket meanwhile
		}
	}
	return nil
}

// grantQuota has stores grant a quota until nothing is left. Where less than all is granted it has
// them grant another key's, twice at most: a machine that stands still for longer than tokens are
// held has them return late, which costs what came in meanwhile, or a bucket that is nearly full
// more.
func grantQuota(ctx context.Context, pool *pgxpool.Pool, schema string, n int, limit ratelimit.Limit) (granted float64, err error) {
	for again := 0; again < 3 && granted < quota && err == nil; again++ {
		granted, err = drain(ctx, pool, schema, n, limit.For(fmt.Sprint(again)))
	}
	return granted, err
}

// drain takes until nothing was granted for longer than anything is held.
func drain(ctx context.Context, pool *pgxpool.Pool, schema string, n int, request ratelimit.Request) (granted float64, err error) {
	stores, err := storesWith(pool, schema, n)
	if err != nil {
		return 0, err
	}
	var group sync.WaitGroup
	var taken, last atomic.Int64
	last.Store(time.Now().UnixNano())
	errs := make([]error, 9)
	for i := range errs {
		store := stores[i%n]
		group.Go(func() {
			for errs[i] == nil && time.Since(time.Unix(0, last.Load())) < 10*briefly {
				var result ratelimit.Result
				result, errs[i] = store.Allow(ctx, request)
				if result.OK {
					taken.Add(1)
					last.Store(time.Now().UnixNano())
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	group.Wait()
	for _, store := range stores {
		store.Close()
	}
	return float64(taken.Load()), errors.Join(errs...)
}

// meetWindows asks windows for less than their rates, steadily.
func (l *lab) meetWindows(ctx context.Context, c *chapter) error {
	const asked = 0.95
	limit := ratelimit.FixedWindow{Name: "window of 4,000 in 2 s, asked for 0.95 of that", Rate: 4000, Period: 2 * time.Second, Start: midnight}
	schema, pool, err := l.place(ctx, 16)
	if err != nil {
		return err
	}
	defer pool.Close()
	stores, err := storesWith(pool, schema, 1)
	if err != nil {
		return err
	}
	defer stores[0].Close()
	const callers = 8
	window := func(at time.Time) int64 { return at.Sub(midnight).Nanoseconds() / int64(limit.Period) }
	perCaller := asked * limit.Rate / limit.Period.Seconds() / callers
	begun, lasts := time.Now(), l.seconds(12, 4)
	var calls, refused atomic.Int64
	errs := make([]error, callers)
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() {
			for n := 0; errs[i] == nil; n++ {
				due := begun.Add(time.Duration((float64(n) + float64(i)/callers) / perCaller * float64(time.Second)))
				if due.Sub(begun) > lasts {
					return
				}
				time.Sleep(time.Until(due))
				if window(time.Now()) != window(due) {
					continue // the machine was late, and the next window is not for this one's demand
				}
				var result ratelimit.Result
				result, errs[i] = stores[0].Allow(ctx, limit.For(arrivalKey))
				calls.Add(1)
				if !result.OK {
					refused.Add(1)
				}
			}
		})
	}
	group.Wait()
	c.atLeast(limit.Name+", calls", float64(calls.Load()), asked/2*limit.Rate*lasts.Seconds()/2, "")
	c.zero(limit.Name+", refused", int(refused.Load()))
	return errors.Join(errs...)
}

// closeBesideWait closes stores while callers wait for reservations, some of whom give up at
// that moment. None of them keeps what it had reserved, once Close has returned.
func (l *lab) closeBesideWait(ctx context.Context, c *chapter) error {
	schema, pool, err := l.place(ctx, 16)
	if err != nil {
		return err
	}
	defer pool.Close()
	plain, err := pgstore.New(pool, &pgstore.Config{Schema: schema})
	if err != nil {
		return err
	}
	defer plain.Close()
	rounds := 40
	if l.quick {
		rounds = 8
	}
	const waiting = 6
	kept, ended := 0, 0
	for round := range rounds {
		limit := ratelimit.TokenBucket{Name: "waited for", Rate: 1, Period: 24 * time.Hour, Capacity: 10, MaxReserved: waiting}
		key := fmt.Sprint(round)
		if err := plain.Take(ctx, limit.ForN(key, 10)); err != nil {
			return err
		}
		store, err := pgstore.New(pool, &pgstore.Config{Schema: schema, Portable: round%2 == 1, Escrow: briefly * time.Duration(round/2%2)})
		if err != nil {
			return err
		}
		gaveUp, giveUp := context.WithCancel(ctx)
		var group sync.WaitGroup
		errs := make([]error, waiting)
		for i := range errs {
			group.Go(func() {
				ctx := ctx
				if i%2 == 0 {
					ctx = gaveUp
				}
				_, errs[i] = store.Wait(ctx, limit.For(key))
			})
		}
		value := func() float64 {
			now, err := plain.Check(ctx, limit.ForN(key, 0))
			if err != nil {
				return 0
			}
			return now.Value
		}
		if err := within(ctx, patient, "all wait", func() bool { return value() < 0.5-waiting }); err != nil {
			giveUp()
			return err
		}
		go func() {
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
			giveUp()
		}()
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		store.Close()
		if value() < -0.5 {
			kept++
		}
		group.Wait()
		giveUp()
		for _, err := range errs {
			if err != nil {
				ended++
			}
		}
	}
	c.zero("closed beside Wait, and what was reserved is not back", kept)
	c.zero("waits that nobody ended", rounds*waiting-ended)
	return nil
}
