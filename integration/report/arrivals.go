package main

import (
	"context"
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
	c.say("Three processes take from each limit in every form; one process is Portable. Meanwhile rows are kept locked, and processes stand still (SIGSTOP). For every stretch between two grants, the report divides the granted tokens by what the limit allows. It shows the largest share. In a second run, the clock of one process decides, and is set forward and back.")
	const reached = 0.85
	granted := newArrived(arrivals)
	children, err := l.launch(ctx, three(task{Job: "arrive", Schema: schema, Workers: 3, Conns: 10}), granted.read)
	if err != nil {
		return err
	}
	stalls, err := l.stall(ctx, schema, children, l.seconds(19, 4), func() bool { return granted.reach(reached) })
	if err := errors.Join(append(lab.End(children), err)...); err != nil {
		return err
	}
	if err := granted.judge(c, "", reached); err != nil {
		return err
	}
	c.happened(stalls...)
	return l.stepClock(ctx, c)
}

// reach reports whether the largest share that was used of each limit's bound is share at least.
// How soon it is depends on the machine's other work.
func (a *arrived) reach(share float64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, of := range a.limits {
		if curve.Judge(a.events[i], curve.Of(of.limit.Definition())).Share < share {
			return false
		}
	}
	return true
}

// judge says by how much of their bounds limits were used: no more than all of it, and at
// least so much. If that is 0 it is a matter of speed, and only told. Of those that nobody was
// to take from there is nothing.
func (a *arrived) judge(c *chapter, how string, reached float64) error {
	for i, of := range a.limits {
		d := of.limit.Definition()
		if len(a.events[i]) == 0 {
			return fmt.Errorf("%s%s: nothing was granted", d.Name, how)
		}
		worst := curve.Judge(a.events[i], curve.Of(d))
		c.Tell(d.Name+how+", grants judged", "%d", len(a.events[i]))
		c.AtMost(d.Name+how+", largest share", worst.Share, 1+1e-9, "")
		if reached > 0 {
			c.AtLeast(d.Name+how+", reached", worst.Share, reached, "")
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

// stall stops processes that are at work, and locks rows, in turn: for as long as lasts, and
// then until both have happened and enough returns true.
func (l *site) stall(ctx context.Context, schema string, children []*lab.Child, lasts time.Duration, enough func() bool) ([]count, error) {
	stalls := []count{{what: "processes that stood still for 50 to 150 ms"}, {what: "rows that were kept locked for 30 to 100 ms"}}
	conn, err := pgx.Connect(ctx, l.server.URL)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	lab.AtWork(children)
	for more := until(lasts, func() bool { return happened(stalls...) && enough() }); more(); time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond) {
		which, n := rand.IntN(len(stalls)), 1
		if which == 0 {
			err = standStill(children[rand.IntN(len(children))], time.Duration(50+rand.IntN(100))*time.Millisecond)
		} else {
			n, err = holdRows(ctx, conn, schema, arrivals[rand.IntN(len(arrivals))].limit, []string{arrivalKey}, time.Duration(30+rand.IntN(70))*time.Millisecond)
		}
		if err != nil {
			return nil, err
		}
		stalls[which].n += n
	}
	return stalls, nil
}

// standStill stops a process for a while.
func standStill(c *lab.Child, lasts time.Duration) error {
	if err := c.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	time.Sleep(lasts)
	return c.Signal(syscall.SIGCONT)
}

// holdRows keeps the first row of a limit and some keys locked for a while, of those that are
// there. It returns how many.
func holdRows(ctx context.Context, conn *pgx.Conn, schema string, limit ratelimit.Limit, keys []string, lasts time.Duration) (n int, err error) {
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, "SELECT FROM "+schema+".rate_limits WHERE name = $1 AND key = ANY ($2) AND shard = 0 FOR UPDATE", ratelimit.NameOf(limit), keys)
		n = int(tag.RowsAffected())
		time.Sleep(lasts)
		return err
	})
	return n, err
}

// stepClock takes from the limits by a clock that is set forward and back.
func (l *site) stepClock(ctx context.Context, c *chapter) error {
	p, err := l.place(ctx, 12)
	if err != nil {
		return err
	}
	defer p.close()
	var limits []arriving
	for _, a := range arrivals {
		if a.limit.Definition().Shards == 1 {
			limits = append(limits, a)
		}
	}
	s := stepped{pool: p.pool, arrived: newArrived(limits)}
	s.store, err = p.store(pgstore.Config{Clock: func() time.Time {
		return time.Now().Add(time.Duration(s.offset.Load()))
	}})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	taken := make(chan error, 1)
	go func() {
		taken <- lab.Each(2*len(limits), func(i int) (err error) {
			for ctx.Err() == nil && err == nil {
				err = s.takeOnce(i % len(limits))
			}
			return err
		})
	}()
	const reached = 0.5
	steps := []count{{what: "clock set forward by up to 200 ms"}, {what: "clock set back by up to 200 ms"}}
	for more := until(l.seconds(10, 4), func() bool { return happened(steps...) && s.reach(reached) }); more(); time.Sleep(50 * time.Millisecond) {
		direction := rand.IntN(len(steps))
		steps[direction].n++
		s.set(time.Duration(1-2*direction) * time.Duration(1+rand.IntN(200)) * time.Millisecond)
	}
	stop()
	err = <-taken
	c.happened(steps...)
	return errors.Join(err, s.judge(c, ", clock set", reached))
}

// stepped takes by a clock that somebody sets when no call is under way.
type stepped struct {
	*arrived
	pool   *pgxpool.Pool
	store  *pgstore.Store
	offset atomic.Int64

	setting sync.RWMutex
}

func (s *stepped) set(step time.Duration) {
	s.setting.Lock()
	defer s.setting.Unlock()
	s.offset.Add(int64(step))
}

func (s *stepped) takeOnce(limit int) error {
	s.setting.RLock()
	defer s.setting.RUnlock()
	event, _, err := arriveAt(rand.New(rand.NewPCG(rand.Uint64(), 0)), s.pool, s.store, s.limits[limit])
	if err == nil && event.Count > 0 {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.add(arrival{Limit: limit, At: event.At, Count: event.Count})
	}
	return err
}
