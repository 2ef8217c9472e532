package permits

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// lookAgain is the average time after which a process with waiters looks again for a free permit.
const lookAgain = 100 * time.Millisecond

// mostLooked is the largest Limit of which a process with waiters reads all permits at a time. Of a
// larger one it reads a part at a time, in turns with all processes that wait for the key.
const mostLooked = 100

// Await takes the permits of a request, and waits for them until ctx ends. Of the callers in line
// only the first looks for permits, and is handed those that are released here.
func (f *Permits) Await(ctx context.Context, request ratelimit.PermitRequest) (ratelimit.Permit, error) {
	w, asks := f.local.Arrive(request.Parts()...)
	defer func() {
		if handed, ok := f.local.Leave(w); ok { // handed on beside the permit that was found, or too late
			f.GiveBack(ctx, handed)
		}
	}()
	key := keyOf(request)
	c := collector{Permits: f, waiter: w, key: key}
	defer c.end()
	if asks {
		permit, err := c.try(ctx, search{limit: f.local.Wants(w)[0].Limit, look: table.PermitLook{Key: key}})
		if err != nil || permit.OK {
			return permit, err
		}
		f.local.Enter(w)
	}
	return c.inLine(ctx)
}

// inLine waits in line.
func (c *collector) inLine(ctx context.Context) (ratelimit.Permit, error) {
	w, key := c.waiter, c.key
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	var next time.Time // a waiter that reads all permits does not look before
	for {
		select {
		case permit := <-w.Got:
			return permit, nil
		case <-ctx.Done():
			return ratelimit.Permit{}, ctx.Err()
		case now := <-w.Turn:
			at := c.local.Look(key)
			if now {
				at = next
			}
			if wait := time.Until(at); wait > 0 {
				again.Reset(wait)
				continue
			}
		case <-again.C:
		}
		if !c.local.First(w) { // an earlier arrival has asked in vain, and is first now
			c.end()
			continue
		}
		if c.first.IsZero() {
			c.first = time.Now()
		}
		limit := c.local.Wants(w)[0].Limit
		s := search{limit: limit, look: table.PermitLook{Key: key}}
		if limit.Limit > mostLooked {
			s.look.PartOf = limit.Limit
		}
		permit, err := c.try(ctx, s)
		if err != nil || permit.OK {
			return permit, err
		}
		wait := c.pause(time.Now())
		if first := permit.NotBefore.Sub(permit.At); first > 0 && first < wait {
			wait = first + rand.N(lookAgain/8)
		}
		if w.Several() || c.turn != 0 {
			pause := between(limit)
			next, wait = time.Now().Add(pause), max(wait, pause)
		}
		c.local.LookAgain(key, time.Now().Add(wait))
		again.Reset(wait)
	}
}

// pause returns after how long the first in line looks again. While a waiter has collected for a
// short time it looks sooner, since only one of all processes collects.
func (c *collector) pause(now time.Time) time.Duration {
	wait := lookAgain/2 + rand.N(lookAgain)
	if c.turn != 0 {
		wait = min(wait, max(now.Sub(c.since)/2, conn.Poll))
	}
	return wait
}

// between returns the least pause between two looks of a waiter that reads all permits of a limit.
func between(limit ratelimit.InFlight) time.Duration {
	return time.Duration(limit.Limit) * table.PermitTurn / table.PermitPart
}
