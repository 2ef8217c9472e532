package permits

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// lookAgain is how often a process with waiters looks whether a permit is free, on average.
const lookAgain = 100 * time.Millisecond

// mostLooked is how many permits a limit may have that a process with waiters looks at all of them.
// Of others it looks at parts, by turns with all processes that wait for the key.
const mostLooked = 100

// Await takes a permit, and waits for one until ctx is over. Only the first in line looks; the
// others are handed permits on, or have their turn.
func (f *Permits) Await(ctx context.Context, limit ratelimit.InFlight, key decide.Key) (ratelimit.Permit, error) {
	w, asks := f.local.Arrive(key, limit)
	defer func() {
		if handed, ok := f.local.Leave(w); ok { // beside the one that was found, or too late
			f.GiveBack(ctx, handed)
		}
	}()
	if asks {
		if permit, err := f.acquire(ctx, search{limit: f.local.Limit(w), look: table.PermitLook{Key: key}}); err != nil || permit.OK {
			return permit, err
		}
		f.local.Enter(w)
	}
	return f.inLine(ctx, w, key)
}

// inLine is Await of a waiter.
func (f *Permits) inLine(ctx context.Context, w *flight.Waiter, key decide.Key) (ratelimit.Permit, error) {
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	for {
		select {
		case permit := <-w.Got:
			return permit, nil
		case <-ctx.Done():
			return ratelimit.Permit{}, ctx.Err()
		case now := <-w.Turn:
			if wait := time.Until(f.local.Look(key)); !now && wait > 0 {
				again.Reset(wait)
				continue
			}
		case <-again.C:
		}
		if !f.local.First(w) {
			continue
		}
		limit := f.local.Limit(w)
		s := search{limit: limit, look: table.PermitLook{Key: key}}
		if limit.Limit > mostLooked {
			s.look.PartOf = limit.Limit
		}
		permit, err := f.acquire(ctx, s)
		if err != nil || permit.OK {
			return permit, err
		}
		wait := lookAgain/2 + rand.N(lookAgain)
		if first := permit.NotBefore.Sub(permit.At); first > 0 && first < wait {
			wait = first + rand.N(lookAgain/8)
		}
		f.local.LookAgain(key, time.Now().Add(wait))
		again.Reset(wait)
	}
}
