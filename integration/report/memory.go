package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/relay"
)

// hoarded are the limits that processes take ahead from: of each so much is granted that all
// of them do.
var hoarded = []arriving{
	{ratelimit.TokenBucket{Name: "token bucket", Rate: 800, Period: time.Second, Capacity: 2400, MaxReserved: ratelimit.None}, false},
	{ratelimit.FixedWindow{Name: "fixed window", Rate: 160, Period: 200 * time.Millisecond, MaxReserved: ratelimit.None}, false},
	{ratelimit.SlidingWindow{Name: "sliding window", Rate: 160, Period: 200 * time.Millisecond, Slots: 4, MaxReserved: ratelimit.None}, false},
	{ratelimit.TokenBucket{Name: "token bucket, reserved", Rate: 800, Period: time.Second, Capacity: 2400, MaxReserved: 200}, true},
}

const hoardedAt = 200 * time.Millisecond

// hoard is arrive from limits that are taken ahead from.
func hoard(ctx context.Context, e *env) error { return arriveAll(ctx, e, hoarded) }

// attackMemory judges the grants of processes that prefetch, in all stretches of time.
func attackMemory(ctx context.Context, l *site, c *chapter) error {
	h := &hoarding{site: l, granted: newArrived(hoarded), processes: 8}
	if l.quick {
		h.processes = 3
	}
	c.say("%d processes with Config.Escrow of %v take from each limit in every form; every third one is Portable. Meanwhile processes are stopped for longer than their leases last, or killed and replaced. Rows are kept locked, statements and answers are late, also all at once, and the whole server is stopped. As above, the report shows the largest share of what a limit allows, over all stretches between two grants. By callers' own clocks it shows the share that was used for certain. How near that comes to 1 depends on speed. Then eight stores take ahead, while one of them is busy, or another each time. A store without Config.Escrow meets the same demand. A measurement that falls short is repeated, at most twice.", h.processes, hoardedAt)
	harmed, err := h.run(ctx)
	if err != nil {
		return err
	}
	if err := h.granted.judge(c, "", 0); err != nil {
		return err
	}
	h.granted.judgeServed(c)
	c.happened(harmed...)
	return l.compareDemand(ctx, c)
}

// hoarding is processes that prefetch, and the harm done to them.
type hoarding struct {
	*site
	granted   *arrived
	processes int // at a time

	schema   string
	started  int
	children []*lab.Child

	relay   *relay.Relay
	harming atomic.Bool  // some of the messages are late
	late    atomic.Int64 // how much of it was
	stalled atomic.Int64 // nothing arrives until then
}

func (h *hoarding) run(ctx context.Context) (harmed []count, err error) {
	if h.schema, err = h.site.schema(ctx); err != nil {
		return nil, err
	}
	if h.relay, err = relayTo(h.server.URL); err != nil {
		return nil, err
	}
	defer h.relay.Close()
	h.relay.Interfere(h.delay, h.delay)
	for range h.processes {
		if err := h.startOne(ctx); err != nil {
			return nil, err
		}
	}
	harmed, err = h.harm(ctx)
	return harmed, errors.Join(append(lab.End(h.children), err)...)
}

func (h *hoarding) startOne(ctx context.Context) error {
	h.started++
	started, err := h.launch(ctx, []task{{
		Job: "hoard", Schema: h.schema, Process: h.started, Workers: 3, Conns: 10,
		Escrow: hoardedAt, Relay: h.relay.Address().String(), Portable: h.started%3 == 0,
	}}, h.granted.read)
	h.children = append(h.children, started...)
	return err
}

// delay keeps some of the messages for a while.
func (h *hoarding) delay(int, []byte) relay.Fate {
	if h.harming.Load() && rand.IntN(200) == 0 {
		h.late.Add(1)
		time.Sleep(time.Duration(rand.IntN(150)) * time.Millisecond)
	}
	time.Sleep(time.Until(time.UnixMicro(h.stalled.Load())))
	return relay.Pass
}

// harm does one thing after the other. Before and after that it lets them be, to see that
// they get what there is.
func (h *hoarding) harm(ctx context.Context) ([]count, error) {
	conn, err := pgx.Connect(ctx, h.server.URL)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	lab.AtWork(h.children)
	time.Sleep(2 * time.Second)
	harmed := []count{
		{what: "processes that were stopped for 250 to 400 ms"},
		{what: "processes that were killed"},
		{what: "rows that were kept locked for 250 to 400 ms"},
		{what: "times that the server was stopped for 250 to 400 ms"},
		{what: "times that nothing arrived for 250 to 400 ms"},
	}
	h.harming.Store(true)
	more := until(h.seconds(17, 5), func() bool { return happened(harmed...) })
	for n := 0; more(); n++ {
		time.Sleep(time.Duration(50+rand.IntN(200)) * time.Millisecond)
		long := hoardedAt + time.Duration(50+rand.IntN(150))*time.Millisecond
		which, times := n%len(harmed), 1
		switch which {
		case 0:
			err = standStill(h.children[rand.IntN(h.processes)], long)
		case 1:
			err = h.killOne(ctx)
		case 2:
			times, err = holdRows(ctx, conn, h.schema, hoarded[rand.IntN(len(hoarded))].limit, []string{arrivalKey}, long)
		case 3:
			err = h.suspend(ctx, long)
		case 4:
			h.stalled.Store(time.Now().Add(long).UnixMicro())
			time.Sleep(long)
		}
		if err != nil {
			return nil, err
		}
		harmed[which].n += times
	}
	h.harming.Store(false)
	time.Sleep(time.Second)
	return append(harmed, count{"requests and answers that were up to 150 ms late", int(h.late.Load())}), nil
}

// killOne kills a process, and starts another.
func (h *hoarding) killOne(ctx context.Context) error {
	i := rand.IntN(h.processes)
	victim := h.children[i]
	if err := victim.Kill(); err != nil {
		return err
	}
	_ = victim.Wait() // with an error, of course
	h.children = append(h.children[:i], h.children[i+1:]...)
	return h.startOne(ctx)
}

// suspend stops the server for a while.
func (l *site) suspend(ctx context.Context, lasts time.Duration) error {
	resume, err := l.server.Suspend(ctx)
	if err != nil {
		return err
	}
	time.Sleep(lasts)
	return resume()
}
