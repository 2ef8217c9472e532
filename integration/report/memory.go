package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/relay"
)

// hoarded are the limits that processes take ahead from: of each so much is granted that all
// of them do.
var hoarded = []arriving{
	{ratelimit.TokenBucket{Name: "token bucket", Rate: 400, Period: time.Second, Capacity: 600, MaxReserved: ratelimit.None}, false},
	{ratelimit.FixedWindow{Name: "fixed window", Rate: 160, Period: 200 * time.Millisecond, MaxReserved: ratelimit.None}, false},
	{ratelimit.SlidingWindow{Name: "sliding window", Rate: 160, Period: 200 * time.Millisecond, Slots: 4, MaxReserved: ratelimit.None}, false},
	{ratelimit.TokenBucket{Name: "token bucket, reserved", Rate: 400, Period: time.Second, Capacity: 600, MaxReserved: 200}, true},
}

const hoardedAt = 200 * time.Millisecond

// hoard is arrive from limits that are taken ahead from.
func hoard(ctx context.Context, e *env) error { return arriveAll(ctx, e, hoarded) }

// attackMemory judges the grants of processes that prefetch, in all stretches of time.
func attackMemory(ctx context.Context, l *site, c *chapter) error {
	n := 8
	if l.quick {
		n = 3
	}
	c.say("%d processes with Config.Escrow of %v take from each limit in every form; every third one is Portable. Meanwhile processes are stopped for longer than their leases last, or killed and replaced. Rows are kept locked, statements and answers are late, also all at once, and the whole server is stopped. As above, the report shows the largest share of what a limit allows, over all stretches between two grants. By callers' own clocks it shows the share that was used for certain. How near that comes to 1 depends on speed.", n, hoardedAt)
	schema, err := l.schema(ctx)
	if err != nil {
		return err
	}
	granted, slow := newArrived(hoarded), &slowed{}
	if slow.Relay, err = relayTo(l.server.URL); err != nil {
		return err
	}
	defer slow.Close()
	slow.Interfere(slow.delay, slow.delay)
	p := &processes{site: l, read: granted.read, task: func(n int) task {
		return task{Job: "hoard", Schema: schema, Workers: 3, Conns: 10, Escrow: hoardedAt, Relay: slow.Address().String(), Portable: n%3 == 0}
	}}
	err = p.start(ctx, n)
	if err == nil {
		err = p.hoardUnder(ctx, c, schema, slow)
	}
	if err := errors.Join(append(lab.End(p.children), err)...); err != nil {
		return err
	}
	granted.judgeServed(c)
	return granted.judge(c, 0)
}

// hoardUnder does one harm after the other. Before and after that it lets the processes be, to see
// that they get what there is.
func (p *processes) hoardUnder(ctx context.Context, c *chapter, schema string, slow *slowed) error {
	lab.AtWork(p.children)
	time.Sleep(2 * time.Second)
	slow.harming.Store(true)
	long := func() time.Duration { return hoardedAt + millis(50, 200) }
	harmed, err := inTurn(
		p.seconds(17, 5), 250*time.Millisecond, always,
		harm{"processes that were stopped for 250 to 400 ms", func() (int, error) { return 1, standStill(p.any(), long()) }},
		harm{"processes that were killed", func() (int, error) { return 1, p.killOne(ctx) }},
		harm{"rows that were kept locked for 250 to 400 ms", func() (int, error) {
			return p.holdRow(ctx, schema, hoarded[rand.IntN(len(hoarded))].limit, long())
		}},
		harm{"times that the server was stopped for 250 to 400 ms", func() (int, error) { return 1, p.suspend(ctx, long()) }},
		harm{"times that nothing arrived for 250 to 400 ms", func() (int, error) {
			lasts := long()
			slow.stalled.Store(time.Now().Add(lasts).UnixMicro())
			time.Sleep(lasts)
			return 1, nil
		}})
	slow.harming.Store(false)
	time.Sleep(time.Second)
	c.happened(append(harmed, count{"requests and answers that were up to 150 ms late", int(slow.late.Load())})...)
	return err
}

// slowed is a relay that keeps some of the messages for a while.
type slowed struct {
	*relay.Relay
	harming atomic.Bool  // some of the messages are late
	late    atomic.Int64 // how many were
	stalled atomic.Int64 // nothing arrives until then
}

func (s *slowed) delay(int, []byte) relay.Fate {
	if s.harming.Load() && rand.IntN(200) == 0 {
		s.late.Add(1)
		time.Sleep(millis(0, 150))
	}
	time.Sleep(time.Until(time.UnixMicro(s.stalled.Load())))
	return relay.Pass
}
