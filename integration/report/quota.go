package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const briefly = 100 * time.Millisecond // Config.Escrow of the sections below

// storesWith makes stores that take ahead, the third of which is Portable.
func (p *place) storesWith(n int) (stores []*pgstore.Store, err error) {
	for i := range n {
		store, err := p.store(pgstore.Config{Escrow: briefly, Portable: i == 2})
		if err != nil {
			return nil, err
		}
		stores = append(stores, store)
	}
	return stores, nil
}

const quota = 3000

// grantQuotas has stores grant quotas of a day until nothing is left.
func (l *site) grantQuotas(ctx context.Context, c *chapter) error {
	p, err := l.place(ctx, 16)
	if err != nil {
		return err
	}
	defer p.close()
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
			granted, err := p.grantQuota(ctx, n, limit)
			if err != nil {
				return err
			}
			c.AtLeast(ratelimit.NameOf(limit)+", granted", granted, quota, "")
			c.AtMost(ratelimit.NameOf(limit)+", granted", granted, quota+1, "") // the refill of a bucket meanwhile
		}
	}
	return nil
}

// grantQuota has stores grant a quota until nothing is left. Where less than all is granted it has
// them grant another key's, twice at most: a machine that stands still for longer than tokens are
// held has them return late, which costs what came in meanwhile, or a bucket that is nearly full
// more.
func (p *place) grantQuota(ctx context.Context, n int, limit ratelimit.Limit) (granted float64, err error) {
	for again := 0; again < 3 && granted < quota && err == nil; again++ {
		granted, err = p.drain(ctx, n, limit.For(fmt.Sprint(again)))
	}
	return granted, err
}

// drain takes until nothing was granted for longer than anything is held.
func (p *place) drain(ctx context.Context, n int, request ratelimit.Request) (granted float64, err error) {
	stores, err := p.storesWith(n)
	if err != nil {
		return 0, err
	}
	var taken, last atomic.Int64
	last.Store(time.Now().UnixNano())
	err = lab.Each(9, func(i int) error {
		for time.Since(time.Unix(0, last.Load())) < 10*briefly {
			result, err := stores[i%n].Allow(ctx, request)
			if err != nil {
				return err
			}
			if result.OK {
				taken.Add(1)
				last.Store(time.Now().UnixNano())
			}
			time.Sleep(time.Millisecond)
		}
		return nil
	})
	for _, store := range stores {
		store.Close()
	}
	return float64(taken.Load()), err
}

// meetWindows asks windows for less than their rates, steadily.
func (l *site) meetWindows(ctx context.Context, c *chapter) error {
	const asked = 0.95
	limit := ratelimit.FixedWindow{Name: "window of 4,000 in 2 s, asked for 0.95 of that", Rate: 4000, Period: 2 * time.Second, Start: midnight}
	p, err := l.place(ctx, 16)
	if err != nil {
		return err
	}
	defer p.close()
	store, err := p.store(pgstore.Config{Escrow: briefly})
	if err != nil {
		return err
	}
	const callers = 8
	window := func(at time.Time) int64 { return at.Sub(midnight).Nanoseconds() / int64(limit.Period) }
	perCaller := asked * limit.Rate / limit.Period.Seconds() / callers
	begun, lasts := time.Now(), l.seconds(12, 4)
	var calls, refused atomic.Int64
	err = lab.Each(callers, func(i int) error {
		for n := 0; ; n++ {
			due := begun.Add(time.Duration((float64(n) + float64(i)/callers) / perCaller * float64(time.Second)))
			if due.Sub(begun) > lasts {
				return nil
			}
			time.Sleep(time.Until(due))
			if window(time.Now()) != window(due) {
				continue // the machine was late, and the next window is not for this one's demand
			}
			result, err := store.Allow(ctx, limit.For(arrivalKey))
			if err != nil {
				return err
			}
			calls.Add(1)
			if !result.OK {
				refused.Add(1)
			}
		}
	})
	c.AtLeast(limit.Name+", calls", float64(calls.Load()), asked/2*limit.Rate*lasts.Seconds()/2, "")
	c.Zero(limit.Name+", refused", int(refused.Load()))
	return err
}

// closeBesideWait closes stores while callers wait for reservations, some of whom give up at
// that moment. None of them keeps what it had reserved, once Close has returned.
func (l *site) closeBesideWait(ctx context.Context, c *chapter) error {
	p, err := l.place(ctx, 16)
	if err != nil {
		return err
	}
	defer p.close()
	plain, err := p.store(pgstore.Config{})
	if err != nil {
		return err
	}
	rounds := 40
	if l.quick {
		rounds = 8
	}
	kept, unended := 0, 0
	for round := range rounds {
		keeps, waits, err := p.closeOnce(ctx, plain, round)
		if err != nil {
			return err
		}
		kept, unended = kept+keeps, unended+waits
	}
	c.Zero("closed beside Wait, and what was reserved is not back", kept)
	c.Zero("waits that nobody ended", unended)
	return nil
}

// closeOnce closes a store while callers wait, and counts what was kept then, and the waits that
// did not end with an error.
func (p *place) closeOnce(ctx context.Context, plain *pgstore.Store, round int) (kept, unended int, err error) {
	const waiting = 6
	limit := ratelimit.TokenBucket{Name: "waited for", Rate: 1, Period: 24 * time.Hour, Capacity: 10, MaxReserved: waiting}
	key := fmt.Sprint(round)
	if err := plain.Take(ctx, limit.ForN(key, 10)); err != nil {
		return 0, 0, err
	}
	store, err := p.store(pgstore.Config{Portable: round%2 == 1, Escrow: briefly * time.Duration(round/2%2)})
	if err != nil {
		return 0, 0, err
	}
	gaveUp, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var group sync.WaitGroup
	errs := make([]error, waiting)
	for i := range errs {
		waits := ctx
		if i%2 == 0 {
			waits = gaveUp
		}
		group.Go(func() { _, errs[i] = store.Wait(waits, limit.For(key)) })
	}
	value := func() float64 {
		now, err := plain.Check(ctx, limit.ForN(key, 0))
		if err != nil {
			return 0
		}
		return now.Value
	}
	if err := lab.Within(ctx, patient, "all wait", func() bool { return value() < 0.5-waiting }); err != nil {
		return 0, 0, err
	}
	time.AfterFunc(time.Duration(rand.IntN(2000))*time.Microsecond, giveUp)
	time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
	store.Close()
	if value() < -0.5 {
		kept++
	}
	group.Wait()
	for _, err := range errs {
		if err == nil {
			unended++
		}
	}
	return kept, unended, nil
}
