package permits

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// lookAgain is the average time after which a process with waiters looks again for a free permit.
const lookAgain = 100 * time.Millisecond

// mostLooked is the largest Limit whose permits a waiting process reads at once. Of a larger one,
// all processes that wait for the key take turns to read a part.
const mostLooked = 100

// Await takes the permits of a request, and waits for them until ctx ends. Of the callers in line
// only the first looks for permits, and is handed those that are released here.
func (f *Permits) Await(ctx context.Context, request ratelimit.PermitRequest) (ratelimit.Permit, error) {
	w, asks := f.local.Arrive(request.Parts()...)
	defer func() {
		if handed, ok := f.local.Leave(w); ok { // a permit was found as well, or it came too late
			f.GiveBack(ctx, handed)
		}
	}()
	key := keyOf(request)
	c := collector{Permits: f, waiter: w, key: key}
	defer c.end()
	if asks {
		permit, err := c.try(ctx, search{look: table.PermitLook{Key: key}})
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
		s := search{look: table.PermitLook{Key: key}}
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

// pause returns after how long the first in line looks again. A waiter that collects looks sooner
// at first, since only one of all processes collects.
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

// collector waits for permits. There are three ways:
//
// Several permits of one limit are collected. The collector needs the turn of the key, which one
// waiter of all processes has. It takes free permits and claims held ones, so that it gets them
// next. (Without a turn, two collectors with half of the permits each would wait for each other.)
//
// One permit is collected once the waiter has been first in line for long: other callers might go
// on taking every permit that gets free. Of many permits, it claims those of one part.
//
// Permits of several limits are taken when all are free, so the collector holds none of one limit
// while it waits for another.
type collector struct {
	*Permits
	waiter *flight.Waiter
	key    decide.Key // of the first limit of the request
	first  time.Time  // since when it is first in line; zero if it is not
	turn   int64      // fence of the turn; 0 without the turn
	since  time.Time  // since when it has the turn
	limit  ratelimit.InFlight
	from   int // see table.Collection
}

// patience is how long a waiter for one permit is first in line before it collects.
const patience = 4 * time.Second

// try takes the permits if they are free, and otherwise collects. For a single permit it searches
// by s.
func (c *collector) try(ctx context.Context, s search) (ratelimit.Permit, error) {
	asked := c.local.Wants(c.waiter)
	for _, r := range asked {
		if err := r.Fits(); err != nil { // the Limit may be smaller by now
			return ratelimit.Permit{}, err
		}
	}
	permit := ratelimit.Permit{InFlight: asked[0].Limit, Key: asked[0].Key, N: asked[0].N}
	if c.turn == 0 {
		var err error
		if c.waiter.Several() {
			permit, err = c.acquireSet(ctx, asked)
		} else {
			s.limit = asked[0].Limit
			permit, err = c.acquire(ctx, s)
			if permit.OK && c.tooMuch(permit) {
				c.GiveBack(ctx, permit)
				return ratelimit.Permit{InFlight: s.limit, Key: asked[0].Key, N: 1}, nil
			}
		}
		if err != nil || permit.OK {
			return permit, err
		}
	}
	waits := c.waiter.Several() || !c.first.IsZero() && time.Since(c.first) > patience
	if len(asked) > 1 || !waits || !c.table.PassesOver() || !c.local.First(c.waiter) || c.turn == 0 && !c.local.MayCollect(c.key, time.Now()) {
		return permit, nil
	}
	got, err := c.collect(ctx, asked[0])
	if got != nil {
		return *got, nil
	}
	return permit, err
}

// tooMuch reports whether a permit has a number or a lease that the limit does not allow any more: a
// caller came with a smaller one while it was searched for.
func (c *collector) tooMuch(permit ratelimit.Permit) bool {
	limit := c.local.Wants(c.waiter)[0].Limit
	return permit.Number >= limit.Limit || permit.InFlight.LeaseOrDefault() > limit.LeaseOrDefault()
}

// collect takes and claims permits, and returns them when all are there.
func (c *collector) collect(ctx context.Context, r ratelimit.PermitRequest) (*ratelimit.Permit, error) {
	end, err := c.Enter(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	asked, began := time.Now(), c.turn
	c.limit = r.Limit
	if most := r.Limit.Limit - table.PermitPart; began == 0 {
		c.from = rand.IntN(max(most, 0) + 1)
	} else if c.from > max(most, 0) { // the Limit is smaller by now
		c.abandon(began)
		c.had(began)
		return nil, nil
	}
	col := &table.Collection{Key: c.key, Limit: r.Limit.Limit, Wanted: r.N, Lease: r.Limit.LeaseOrDefault(), From: c.from, Turn: c.turn}
	made := make(chan error, 1)
	c.Work.Spawn(func() { // await the statement even if the caller gives up: otherwise nobody would know what to free
		ctx, cancel := c.Timed(context.WithoutCancel(ctx))
		defer cancel()
		made <- c.table.CollectPermits(ctx, c.Pool, col, c.Clock())
	})
	select {
	case err = <-made:
	case <-ctx.Done():
		c.had(began)
		c.Work.Spawn(func() {
			<-made
			c.abandon(began)
			if c.abandon(col.Turn); len(col.Permits) > 0 {
				c.giveBack(*c.collected(r, col, asked))
			}
		})
		return nil, ctx.Err()
	}
	switch {
	case conn.TimedOut(err):
		return nil, nil
	case err != nil:
		return nil, c.FaultOf("collect permits of", []string{c.key.Name}, err)
	case col.Turn != began: // the turn was lost, or all permits are there; a transaction may still hand over one more for it
		c.abandon(began)
	}
	if began == 0 && col.Turn != 0 {
		c.since = asked
	}
	if c.turn = col.Turn; len(col.Permits) < r.N {
		return nil, nil
	}
	c.had(c.turn)
	return c.collected(r, col, asked), nil
}

// collected returns the collected permits as one Permit.
func (c *collector) collected(r ratelimit.PermitRequest, col *table.Collection, asked time.Time) *ratelimit.Permit {
	set := make(table.PermitSet, len(col.Permits))
	for i, v := range col.Permits {
		done := table.PermitDone{OK: true, Fence: v.Fence, At: col.At.UTC(), Until: col.Until.UTC()}
		set[i] = &table.PermitOp{Row: decide.Row{Key: c.key, Shard: v.Number}, Lease: r.Limit.LeaseOrDefault(), Done: done}
	}
	op := inOrder(set)
	permit := held([]ratelimit.PermitRequest{r}, op, asked)
	c.taken(op, permit.Ends())
	return &permit
}

// end frees what was collected in vain, and ends the turn.
func (c *collector) end() {
	c.abandon(c.turn)
	c.had(c.turn)
	c.first = time.Time{}
}

// had notes that a turn is over. The next turn belongs to another process, if a waiter there looks
// soon enough. Waiters here learn of each release first, and would take every turn.
func (c *collector) had(turn int64) {
	if c.turn = 0; turn != 0 {
		now := time.Now()
		c.local.Collected(c.key, now.Add(now.Sub(c.since)+2*lookAgain+between(c.limit)))
	}
}

// abandon frees what was collected in a turn, and ends its claims. It tries again until that is
// done or the leases are over.
func (c *collector) abandon(turn int64) {
	if turn == 0 {
		return
	}
	key, lease := c.key, c.limit.LeaseOrDefault()
	c.Work.Spawn(func() {
		ctx, cancel := context.WithTimeout(context.Background(), lease)
		defer cancel()
		defer context.AfterFunc(c.Work.Opened, func() { time.AfterFunc(conn.RollbackTime, cancel) })()
		for pause := conn.Poll; ; pause = min(2*pause, slowRetry) {
			left := 0
			err := c.Standalone(ctx, "abandon permits", func(ctx context.Context) (err error) {
				left, err = c.table.AbandonPermits(ctx, c.Pool, key, turn)
				return err
			})
			if err == nil && left == 0 || conn.Sleep(ctx, pause) != nil {
				return
			}
		}
	})
}
