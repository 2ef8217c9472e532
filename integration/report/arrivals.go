package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// arrivals are the limits whose curves are judged. Reservations count when they are
// due, all else at the instant that callers are told.
var arrivals = []struct {
	limit   ratelimit.Limit
	reserve bool
}{
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

// arrival is what somebody was granted.
type arrival struct {
	Limit int       `json:"l"`
	At    time.Time `json:"a"`
	Count float64   `json:"n"`
}

// arrive takes from all the limits for a while, in every form.
func arrive(ctx context.Context, e *env) error {
	ctx, cancel := context.WithTimeout(ctx, e.For)
	defer cancel()
	var group sync.WaitGroup
	errs := make([]error, len(arrivals)*e.Workers)
	for i := range errs {
		r := rand.New(rand.NewPCG(e.Seed, uint64(e.Process<<8+i)))
		group.Go(func() {
			for ctx.Err() == nil && errs[i] == nil {
				errs[i] = arriveOnce(r, e, i%len(arrivals))
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

func arriveOnce(r *rand.Rand, e *env, limit int) error {
	a, wait, err := arriveAt(r, e.pool, e.store, limit)
	if a.Count > 0 {
		e.out.write(a)
	}
	time.Sleep(wait)
	return err
}

// arriveAt takes from a limit, and returns when that counts and how much; after a
// refusal, which is a count of 0, how long to wait.
func arriveAt(r *rand.Rand, pool *pgxpool.Pool, store *pgstore.Store, limit int) (a arrival, wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	of := arrivals[limit]
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
		return a, 0, fmt.Errorf("%s: %w", ratelimit.NameOf(of.limit), err)
	case !result.OK:
		return a, min(result.RetryAfter, 20*time.Millisecond), nil
	case of.reserve:
		return arrival{limit, result.RetryAt, request.Count}, 0, nil
	}
	return arrival{limit, result.At, request.Count}, 0, nil
}

// attackArrivals judges what several processes were granted in all stretches of time.
func attackArrivals(ctx context.Context, l *lab, c *chapter) error {
	schema, err := l.schema(ctx)
	if err != nil {
		return err
	}
	c.say("Three processes take from each limit in every form, while rows are kept locked and processes stand still (SIGSTOP). For every stretch between two grants, wherever it begins and however long it is, the tokens granted are divided by what the limit promises for it; told is the largest share. A second run has one process whose clock, which then decides, is set forward and back.")
	events := make([][]curve.Event, len(arrivals))
	var mu sync.Mutex
	read := func(line []byte) error {
		var a arrival
		err := json.Unmarshal(line, &a)
		mu.Lock()
		defer mu.Unlock()
		events[a.Limit] = append(events[a.Limit], curve.Event{At: a.At, Count: a.Count})
		return err
	}
	lasts := l.seconds(20, 5)
	var children []*child
	for n := range 3 {
		child, err := start(ctx, task{
			Job: "arrive", URL: l.server.URL, Schema: schema, Process: n + 1, Workers: 3, Conns: 10, For: lasts, Seed: uint64(time.Now().UnixNano()),
		}, read)
		if err != nil {
			return err
		}
		children = append(children, child)
	}
	stalls, holds, err := l.stall(ctx, schema, children, lasts)
	for _, child := range children {
		err = errors.Join(err, <-child.done)
	}
	if err != nil {
		return err
	}
	for i, a := range arrivals {
		if len(events[i]) == 0 {
			return fmt.Errorf("%s: nothing was granted", ratelimit.NameOf(a.limit))
		}
	}
	judge(c, "", events, 0.85)
	c.happened("processes that stood still for 50 to 150 ms", stalls)
	c.happened("rows that were kept locked for 30 to 100 ms", holds)
	return l.stepClock(ctx, c)
}

func judge(c *chapter, how string, events [][]curve.Event, reached float64) {
	for i, a := range arrivals {
		d := a.limit.Definition()
		if events[i] == nil {
			continue
		}
		worst := curve.Judge(events[i], curve.Of(d))
		c.tell(d.Name+how+", grants judged", "%d", len(events[i]))
		c.atMost(d.Name+how+", largest share", worst.Share, 1+1e-9, "")
		c.atLeast(d.Name+how+", reached", worst.Share, reached, "")
	}
}

// stall stops processes and locks rows for a while, in turn.
func (l *lab) stall(ctx context.Context, schema string, children []*child, lasts time.Duration) (stalls, holds int, err error) {
	conn, err := pgx.Connect(ctx, l.server.URL)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close(ctx)
	for end := time.Now().Add(lasts - time.Second); time.Now().Before(end); time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond) {
		if rand.IntN(2) == 0 {
			process := children[rand.IntN(len(children))].cmd.Process
			if err := process.Signal(syscall.SIGSTOP); err != nil {
				return stalls, holds, err
			}
			time.Sleep(time.Duration(50+rand.IntN(100)) * time.Millisecond)
			if err := process.Signal(syscall.SIGCONT); err != nil {
				return stalls, holds, err
			}
			stalls++
			continue
		}
		name := ratelimit.NameOf(arrivals[rand.IntN(len(arrivals))].limit)
		err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			tag, err := tx.Exec(ctx, "SELECT FROM "+schema+".rate_limits WHERE name = $1 AND shard = 0 FOR UPDATE", name)
			holds += int(tag.RowsAffected())
			time.Sleep(time.Duration(30+rand.IntN(70)) * time.Millisecond)
			return err
		})
		if err != nil {
			return stalls, holds, err
		}
	}
	return stalls, holds, nil
}

// stepClock takes from the limits by a clock that is set forward and back.
func (l *lab) stepClock(ctx context.Context, c *chapter) error {
	schema, err := l.schema(ctx)
	if err != nil {
		return err
	}
	pool, err := l.pool(ctx, 12)
	if err != nil {
		return err
	}
	defer pool.Close()
	s := stepped{pool: pool, events: make([][]curve.Event, len(arrivals))}
	s.store, err = pgstore.New(pool, &pgstore.Config{Schema: schema, Clock: func() time.Time {
		return time.Now().Add(time.Duration(s.offset.Load()))
	}})
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, l.seconds(10, 4))
	defer stop()
	errs := make([]error, 2*len(arrivals))
	var group sync.WaitGroup
	for i := range errs {
		if limit := i % len(arrivals); arrivals[limit].limit.Definition().Shards == 1 {
			group.Go(func() {
				for ctx.Err() == nil && errs[i] == nil {
					errs[i] = s.takeOnce(limit)
				}
			})
		}
	}
	forward, back := 0, 0
	for ctx.Err() == nil {
		step := time.Duration(rand.IntN(400)-200) * time.Millisecond
		if step > 0 {
			forward++
		} else {
			back++
		}
		s.set(step)
		time.Sleep(50 * time.Millisecond)
	}
	group.Wait()
	judge(c, ", clock set", s.events, 0.5)
	c.happened("clock set forward by up to 200 ms", forward)
	c.happened("clock set back by up to 200 ms", back)
	return errors.Join(errs...)
}

// stepped takes by a clock that somebody sets when no call is under way.
type stepped struct {
	pool   *pgxpool.Pool
	store  *pgstore.Store
	offset atomic.Int64

	setting sync.RWMutex

	mu     sync.Mutex
	events [][]curve.Event
}

func (s *stepped) set(step time.Duration) {
	s.setting.Lock()
	defer s.setting.Unlock()
	s.offset.Add(int64(step))
}

func (s *stepped) takeOnce(limit int) error {
	s.setting.RLock()
	defer s.setting.RUnlock()
	a, _, err := arriveAt(rand.New(rand.NewPCG(rand.Uint64(), 0)), s.pool, s.store, limit)
	if err != nil || a.Count == 0 {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events[limit] = append(s.events[limit], curve.Event{At: a.At, Count: a.Count})
	return nil
}
