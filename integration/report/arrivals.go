package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// arriving is a limit whose curve is judged. Reservations count when they are due, all else
// at the instant that callers are told.
type arriving struct {
	limit   ratelimit.Limit
	reserve bool
}

var arrivals = []arriving{
	{ratelimit.TokenBucket{Name: "token bucket", Rate: 100, Period: time.Second, Capacity: 20}, false},
	{ratelimit.TokenBucket{Name: "token bucket, 4 shards", Rate: 100, Period: time.Second, Capacity: 20, Shards: 4}, false},
	{ratelimit.TokenBucket{Name: "token bucket, reserved", Rate: 100, Period: time.Second, Capacity: 20, MaxReserved: 100}, true},
	{ratelimit.FixedWindow{Name: "fixed window", Rate: 10, Period: 100 * time.Millisecond}, false},
	{ratelimit.FixedWindow{Name: "fixed window, 3 shards", Rate: 12, Period: 100 * time.Millisecond, Shards: 3}, false},
	{ratelimit.SlidingWindow{Name: "sliding window", Rate: 20, Period: 200 * time.Millisecond}, false},
	{ratelimit.SlidingWindow{Name: "sliding window, 3 shards", Rate: 24, Period: 200 * time.Millisecond, Shards: 3}, false},
	{ratelimit.SlidingWindow{Name: "sliding window, reserved", Rate: 20, Period: 200 * time.Millisecond, MaxReserved: 20}, true},
}

const arrivalKey = "k"

// arrival is what somebody was granted: when, by what he was told, and between which
// instants of his own clock for certain.
type arrival struct {
	Limit int       `json:"l"`
	At    time.Time `json:"a"`
	Count float64   `json:"n"`
	From  time.Time `json:"f"`
	To    time.Time `json:"t"`
}

// arrive takes from all the limits, in every form.
func arrive(ctx context.Context, e *env) error { return arriveAll(ctx, e, arrivals) }

func arriveAll(ctx context.Context, e *env, limits []arriving) error {
	return lab.Each(len(limits)*e.Workers, func(i int) (err error) {
		r := rand.New(rand.NewPCG(e.Seed, uint64(e.Process<<8+i)))
		for ctx.Err() == nil && err == nil {
			err = arriveOnce(r, e, i%len(limits), limits[i%len(limits)])
		}
		return err
	})
}

func arriveOnce(r *rand.Rand, e *env, limit int, of arriving) error {
	from := time.Now()
	event, wait, err := arriveAt(r, e.pool, e.store, of)
	if event.Count > 0 {
		e.out.Write(arrival{limit, event.At, event.Count, from, time.Now()})
	}
	time.Sleep(wait)
	return err
}

// arriveAt takes from a limit, and returns when that counts and how much; after a
// refusal, which is a count of 0, how long to wait.
func arriveAt(r *rand.Rand, pool *pgxpool.Pool, store *pgstore.Store, of arriving) (event curve.Event, wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	v := allow(store)
	if of.reserve {
		v = reserve(store)
	}
	hold := time.Duration(0)
	if r.IntN(20) == 0 {
		hold = time.Duration(r.IntN(40)) * time.Millisecond
	}
	request := of.limit.ForN(arrivalKey, float64(1+r.IntN(3)))
	result, err := v.somehow(ctx, r, pool, hold, request)
	switch {
	case err != nil:
		return event, 0, fmt.Errorf("%s: %w", ratelimit.NameOf(of.limit), err)
	case !result.OK:
		return event, min(result.RetryAfter, 20*time.Millisecond), nil
	case of.reserve:
		return curve.Event{At: result.RetryAt, Count: request.Count}, 0, nil
	}
	return curve.Event{At: result.At, Count: request.Count}, 0, nil
}

// arrived is the grants of processes, by limit. It is safe for concurrent use.
type arrived struct {
	limits []arriving

	mu     sync.Mutex
	events [][]curve.Event
	served [][]curve.Served
}

func newArrived(limits []arriving) *arrived {
	return &arrived{limits: limits, events: make([][]curve.Event, len(limits)), served: make([][]curve.Served, len(limits))}
}

func (a *arrived) add(one arrival) {
	a.events[one.Limit] = append(a.events[one.Limit], curve.Event{At: one.At, Count: one.Count})
	a.served[one.Limit] = append(a.served[one.Limit], curve.Served{From: one.From, To: one.To, Count: one.Count})
}

// read reads a line of the journal of a process.
func (a *arrived) read(line []byte) error { return lab.Reading(&a.mu, a.add)(line) }

// attackArrivals judges the grants of several processes in all stretches of time.
func attackArrivals(ctx context.Context, l *site, c *chapter) error {
	schema, err := l.schema(ctx)
	if err != nil {
		return err
	}
	c.say("Three processes take from each limit in every form; one process is Portable. Meanwhile rows are kept locked, and processes stand still (SIGSTOP). For every stretch between two grants, the report divides the granted tokens by what the limit allows. It shows the largest share.")
	const reached = 0.85
	granted := newArrived(arrivals)
	children, err := l.launch(ctx, three(task{Job: "arrive", Schema: schema, Workers: 3, Conns: 10}), granted.read)
	if err != nil {
		return err
	}
	lab.AtWork(children)
	stalls, err := inTurn(l.seconds(19, 4), 100*time.Millisecond, func() bool { return slices.Min(granted.shares()) >= reached },
		harm{"processes that stood still for 50 to 150 ms", func() (int, error) {
			return 1, standStill(children[rand.IntN(len(children))], millis(50, 150))
		}},
		harm{"rows that were kept locked for 30 to 100 ms", func() (int, error) {
			return l.holdRow(ctx, schema, arrivals[rand.IntN(len(arrivals))].limit, millis(30, 100))
		}})
	if err := errors.Join(append(lab.End(children), err)...); err != nil {
		return err
	}
	c.happened(stalls...)
	return granted.judge(c, reached)
}

// shares returns the largest share that was used of each limit's bound.
func (a *arrived) shares() (shares []float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, of := range a.limits {
		shares = append(shares, curve.Judge(a.events[i], curve.Of(of.limit.Definition())).Share)
	}
	return shares
}

// judge says by how much of their bounds limits were used: no more than all of it, and at
// least so much, unless that is 0.
func (a *arrived) judge(c *chapter, reached float64) error {
	for i, share := range a.shares() {
		name := ratelimit.NameOf(a.limits[i].limit)
		if len(a.events[i]) == 0 {
			return fmt.Errorf("%s: nothing was granted", name)
		}
		c.Tell(name+", grants judged", "%d", len(a.events[i]))
		c.AtMost(name+", largest share", share, 1+1e-9, "")
		if reached > 0 {
			c.AtLeast(name+", reached", share, reached, "")
		}
	}
	return nil
}

// judgeServed judges by callers' own clocks, for tokens that are used when they are granted.
func (a *arrived) judgeServed(c *chapter) {
	for i, of := range a.limits {
		if of.reserve {
			continue
		}
		d := of.limit.Definition()
		worst := curve.JudgeServed(a.served[i], curve.Of(d))
		c.AtMost(d.Name+", by callers' own clocks, largest share", worst.Share, 1+1e-9, "")
	}
}
