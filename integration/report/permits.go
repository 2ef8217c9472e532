package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// permitLimit is under attack; its leases are short, so that many of them end.
var permitLimit = ratelimit.InFlight{Name: "in flight", Limit: 10, Lease: 500 * time.Millisecond}

// held is what a holder believed: that it had a permit from one instant to another, on the clock
// of the machine, for which it had asked at an instant.
type held struct {
	Holder          int
	Number          int
	Fence           int64
	Asked, From, To int64 // microseconds
	Lost            bool  // and was told so
}

// beliefs are the last beliefs of holders, each of each permit that it had.
type beliefs map[belief]held

type belief struct {
	holder, number int
	fence          int64
}

func (b beliefs) note(h held) { b[belief{h.Holder, h.Number, h.Fence}] = h }

// holdPermits holds one to five permits at a time, of a limit that changes, and notes each 5 ms that it
// believes to hold them.
func holdPermits(ctx context.Context, e *env) error {
	return e.workers(ctx, func(worker int, random *rand.Rand) {
		limit := permitLimit
		limit.Limit -= random.IntN(3)
		_ = e.store.Permits().Hold(ctx, limit.ForN("", 1+random.IntN(5)), func(ctx context.Context, permit ratelimit.Permit) error {
			h := held{Holder: e.Process*e.Workers + worker, Asked: permit.Asked.UnixMicro(), From: time.Now().UnixMicro()}
			h.To = h.From
			note := func() {
				for _, n := range append(permit.More, ratelimit.PermitNumber{Number: permit.Number, Fence: permit.Fence}) {
					h.Number, h.Fence = n.Number, n.Fence
					e.out.Write(h)
				}
			}
			for end := time.Now().Add(time.Duration(random.IntN(1500)) * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				now := time.Now().UnixMicro() // before it asks: it may be stopped in between
				if h.Lost = ctx.Err() != nil; h.Lost {
					break
				}
				h.To = now
				note()
			}
			note()
			return nil
		})
	})
}

// attackPermits is all that is done to limits of how many at once.
func attackPermits(ctx context.Context, l *site, c *chapter) error {
	if err := killHolders(ctx, l, c); err != nil {
		return err
	}
	return waitForPermits(ctx, l, c)
}

const permitHolders = 8 // processes

// killHolders has processes hold permits while some are killed, some stand still past their
// leases and go on, and the server stands still.
func killHolders(ctx context.Context, l *site, c *chapter) error {
	c.say("Eight processes of four goroutines hold the 10 permits of one key, one to five at a time, with leases of 500 ms and a Limit of 8 to 10. Every 5 ms they note that they believe they hold one, by the machine's clock, which is also the server's. Some are killed. Some stand still past their leases and go on (SIGSTOP), and so does the server. Last, all are killed, and another process takes every permit.")
	p, err := l.place(ctx, 8)
	if err != nil {
		return err
	}
	defer p.close()
	store, err := p.store(pgstore.Config{})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	last := beliefs{}
	holders := &processes{site: l, read: lab.Reading(&mu, last.note), task: func(int) task {
		return task{Job: "permits", Schema: p.schema, Workers: 4, Conns: 4}
	}}
	var harmed []count
	if err = holders.start(ctx, permitHolders); err == nil {
		harmed, err = holders.harmHolders(ctx)
	}
	for _, child := range holders.children {
		_ = child.Kill()
	}
	dead := time.Now()
	lab.End(holders.children)
	if err != nil {
		return err
	}
	free := make(chan time.Duration, 1)
	go func() { free <- p.leasesEnd(ctx, dead) }()
	back, err := takeAllPermits(ctx, store, dead)
	if err != nil {
		return err
	}
	over := <-free
	var rows int
	if err := p.pool.QueryRow(ctx, "SELECT count(*) FROM "+p.schema+".rate_limits").Scan(&rows); err != nil {
		return err
	}
	overlaps, lost := last.overlaps()
	c.Zero("two believed to hold one permit at a time", overlaps)
	last.judgeFences(c)
	c.happened(count{"permits held", len(last)}, count{"told that they have lost theirs", lost})
	c.happened(harmed...)
	c.Tell("the leases of those that were killed seen over, by a statement each 100 ms", "%d ms", over.Milliseconds())
	c.AtMost("all permits taken again after everybody was killed", back.Seconds()*1000, 2*max(over, permitLimit.Lease).Seconds()*1000, "ms")
	c.AtMost("rows, with that of the turn", float64(rows), float64(permitLimit.Limit+1), "")
	return nil
}

// harmHolders kills and stops processes, and stops the server, for a while.
func (p *processes) harmHolders(ctx context.Context) ([]count, error) {
	return inTurn(
		p.seconds(60, 10), 2*permitLimit.Lease, always,
		harm{"processes killed", func() (int, error) { return 1, p.killOne(ctx) }},
		harm{"stood still", func() (int, error) { // half of them, as one alone may hold nothing just then
			return permitHolders / 2, lab.Each(permitHolders/2, func(i int) error { return standStill(p.children[i], 2*permitLimit.Lease) })
		}},
		harm{"servers stood still", func() (int, error) { return 1, p.suspend(ctx, 2*permitLimit.Lease) }})
}

// takeAllPermits takes every permit, and returns how long after an instant it had them.
func takeAllPermits(ctx context.Context, store *pgstore.Store, dead time.Time) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, patient)
	defer cancel()
	for range permitLimit.Limit {
		long := permitLimit
		long.Lease = time.Hour
		if _, err := store.Permits().AcquireWait(ctx, long.For("")); err != nil {
			return 0, fmt.Errorf("taking all permits: %w", err)
		}
	}
	return time.Since(dead), nil
}

// leasesEnd returns how long after an instant a statement each 100 ms finds no lease of those that
// were killed then: what the machine allows, whatever else it has to do.
func (p *place) leasesEnd(ctx context.Context, dead time.Time) time.Duration {
	held := "SELECT count(*) FROM " + p.schema + ".rate_limits WHERE ts > clock_timestamp() AND ts < clock_timestamp() + interval '1 minute'"
	for n := 1; n > 0 && ctx.Err() == nil; {
		time.Sleep(100 * time.Millisecond)
		if err := p.pool.QueryRow(ctx, held).Scan(&n); err != nil {
			n = 1
		}
	}
	return time.Since(dead)
}

// byPermit returns the beliefs about each permit, by their beginning.
func (b beliefs) byPermit() map[int][]held {
	of := map[int][]held{}
	for _, h := range b {
		of[h.Number] = append(of[h.Number], h)
	}
	for _, all := range of {
		slices.SortFunc(all, func(a, b held) int { return int(a.From - b.From) })
	}
	return of
}

// overlaps counts the holders of a permit with overlapping beliefs, and those that lost theirs.
func (b beliefs) overlaps() (overlaps, lost int) {
	for _, all := range b.byPermit() {
		for i, h := range all {
			if h.Lost {
				lost++
			}
			if i > 0 && h.From < all[i-1].To {
				overlaps++
			}
		}
	}
	return overlaps, lost
}

// judgeFences judges as what holders work on would, which turns smaller fences away: a fence
// is of one holder, and who asked when another held a permit already has a larger one.
func (b beliefs) judgeFences(c *chapter) {
	twice, disorder := 0, 0
	for _, all := range b.byPermit() {
		given := map[int64]bool{}
		for _, h := range all {
			if given[h.Fence] {
				twice++
			}
			given[h.Fence] = true
		}
		// The largest fence of leases that began before an instant.
		byAsked := slices.Clone(all)
		slices.SortFunc(byAsked, func(a, b held) int { return int(a.Asked - b.Asked) })
		largest, next := int64(0), 0
		for _, h := range byAsked {
			for ; next < len(all) && all[next].From < h.Asked; next++ {
				largest = max(largest, all[next].Fence)
			}
			if h.Fence <= largest {
				disorder++
			}
		}
	}
	c.Zero("two had one fence", twice)
	c.Zero("a smaller fence was given after a larger one", disorder)
}
