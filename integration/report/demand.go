package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// demanded are limits of which one store can prefetch tokens that another needs.
var demanded = []ratelimit.Limit{
	ratelimit.TokenBucket{Name: "token bucket", Rate: 2000, Period: time.Second, Capacity: 500},
	ratelimit.FixedWindow{Name: "fixed window", Rate: 400, Period: 200 * time.Millisecond},
	ratelimit.SlidingWindow{Name: "sliding window", Rate: 2000, Period: time.Second},
}

// A store that takes ahead grants at least leastOfPlain of what one that does not grants. A
// machine with other work costs some of it; tokens held back by other stores would cost more.
const leastOfPlain = 0.7

// compareDemand compares what those who ask are granted by stores that take ahead with what
// they are granted by one that does not, at the same time on the same machine.
func (l *site) compareDemand(ctx context.Context, c *chapter) error {
	for _, test := range []struct {
		name  string
		moves time.Duration // to the next store
		rate  float64       // the rate of calls, as a share of the limit's; 0 for as fast as possible
	}{
		{"one of eight is busy", time.Hour, 0},
		{"another of eight is busy every 100 ms", 100 * time.Millisecond, 0},
		{"one asks for 0.75 of the rate", time.Hour, 0.75},
	} {
		shares := make([]met, len(demanded))
		if err := lab.Each(len(demanded), func(i int) (err error) {
			shares[i], err = l.meetBoth(ctx, demanded[i], test.moves, test.rate)
			return err
		}); err != nil {
			return err
		}
		for i, limit := range demanded {
			what := fmt.Sprintf("%s, %s", ratelimit.NameOf(limit), test.name)
			c.Tell(what+": granted of that, with memory and without", "%.3f, %.3f", shares[i].ahead, shares[i].plain)
			c.AtLeast(what+": granted with memory, of that without", shares[i].ahead/shares[i].plain, leastOfPlain, "")
		}
	}
	return nil
}

// met is the shares of a demand that were met by stores that take ahead, and by stores that do
// not.
type met struct{ ahead, plain float64 }

const briefly = 100 * time.Millisecond // Config.Escrow of stores that take ahead

// meetBoth has stores of both kinds meet the same demand. Where those that take ahead fall short
// it asks again, twice at most, since other work may have held up either kind: tokens that stores
// hold back are missing each time.
func (l *site) meetBoth(ctx context.Context, limit ratelimit.Limit, moves time.Duration, rate float64) (shares met, err error) {
	to, lasts := []*float64{&shares.plain, &shares.ahead}, l.seconds(4, 2) // whole periods: what a window grants comes in bursts
	for range 3 {
		err = lab.Each(len(to), func(i int) (err error) {
			d := demand{site: l, limit: limit, escrow: time.Duration(i) * briefly, moves: moves, rate: rate, lasts: lasts}
			*to[i], err = d.meet(ctx)
			return err
		})
		if err != nil || shares.ahead >= leastOfPlain*shares.plain {
			break
		}
	}
	return shares, err
}

// demand is the calls for a limit, and the stores that make them.
type demand struct {
	*site
	limit  ratelimit.Limit
	escrow time.Duration
	moves  time.Duration
	rate   float64
	lasts  time.Duration

	stores         [8]*pgstore.Store
	begun          time.Time
	asked, granted atomic.Int64 // after the burst
}

// settles is how long a burst is over after.
const settles = time.Second / 2

// meet has the demand met for a while, and returns which part that was of what the limit
// grants to a flood, or of what was asked for if that was less.
func (d *demand) meet(ctx context.Context) (share float64, err error) {
	p, err := d.place(ctx, 8)
	if err != nil {
		return 0, err
	}
	defer p.close()
	for i := range d.stores {
		if d.stores[i], err = p.store(pgstore.Config{Escrow: d.escrow}); err != nil {
			return 0, err
		}
		for range 40 { // so that each has some to give back
			if _, err := d.stores[i].Allow(ctx, d.limit.For(arrivalKey)); err != nil {
				return 0, err
			}
		}
	}
	ask, callers := d.asMuch, 16
	if d.rate > 0 {
		ask, callers = d.steadily, 1
	}
	d.begun = time.Now()
	err = lab.Each(callers, func(int) error { return ask(ctx) })
	most := d.perSecond() * d.lasts.Seconds()
	if d.rate > 0 {
		most = float64(d.asked.Load())
	}
	return float64(d.granted.Load()) / most, err
}

// perSecond returns how many tokens the limit grants to a flood in a second: of a sliding
// window less than its rate, as a slot more than a period is held against it.
func (d *demand) perSecond() float64 {
	def := d.limit.Definition()
	rate := def.Rate / def.Period.Seconds()
	if def.Kind == ratelimit.KindSlidingWindow {
		rate *= float64(def.Slots) / float64(def.Slots+1)
	}
	return rate
}

// once asks the store whose turn it is, and counts what is granted when the burst is over. It
// reports whether there is more to ask.
func (d *demand) once(ctx context.Context) (result ratelimit.Result, more bool, err error) {
	past := time.Since(d.begun)
	if past >= settles+d.lasts {
		return result, false, nil
	}
	result, err = d.stores[int(past/d.moves)%len(d.stores)].Allow(ctx, d.limit.For(arrivalKey))
	if err == nil && past >= settles {
		d.asked.Add(1)
		if result.OK {
			d.granted.Add(1)
		}
	}
	return result, err == nil, err
}

// asMuch asks for as much as there is.
func (d *demand) asMuch(ctx context.Context) error {
	for {
		result, more, err := d.once(ctx)
		if !more {
			return err
		}
		if !result.OK {
			time.Sleep(min(result.RetryAfter, d.moves))
		}
	}
}

// steadily asks for a part of the rate.
func (d *demand) steadily(ctx context.Context) error {
	for asked := 0; ; time.Sleep(time.Millisecond) {
		for ; float64(asked) < d.rate*d.perSecond()*time.Since(d.begun).Seconds(); asked++ {
			if _, more, err := d.once(ctx); !more {
				return err
			}
		}
	}
}
