package table

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Grant is the tokens that several calls take together from one row: all of them or none.
type Grant struct {
	decide.Change         // Count is the sum of the calls
	Need          float64 // tokens that there must be to grant all of them

	// A grant that prefetches takes more, for a lease.
	Lasts        time.Duration // of a token bucket's lease; 0 for a grant that does not prefetch
	Lowered      float64       // capacity to count with, lower by the tokens refilled while the lease lasts
	Prefetch     float64       // tokens to take besides: no more than half of those left then, or than may be out
	Out          float64       // of Count, the tokens that may still return to memory
	bucket.Spent               // of earlier leases

	// Pipelined has a grant that waits for its row sent with its COMMIT, in one round trip, so
	// that those behind it, in other processes too, wait for no other one. A caller that gives up
	// then may have taken all the same, as with any statement that is under way. So it is for
	// rows that others are known to have locked no longer than that takes, and it waits for a
	// moment only. Grants that prefetch are heard to their end in any case: all of them are
	// pipelined.
	Pipelined bool

	Added any // what the layer keeps with the grant that added to it

	Taken  Taken
	Waited time.Duration // for its turn, at least, of one that awaits it
	turn   bool          // it has had its turn, or needs none
}

// Extra returns how much a grant, which was taken, took besides.
func (g *Grant) Extra() float64 { return g.Taken.prefetched }

// End is when the lease ends, on the database's clock, of a grant that was taken and
// prefetched.
func (g *Grant) End() time.Time { return g.ends(g.Taken.After.TS) }

// ends is when the lease ends of a row that is left at ts.
func (g *Grant) ends(ts time.Time) time.Time { return g.Definition.End(ts, ts, g.Lasts) }

// TakesExtra reports whether a grant takes more than its calls want, for a lease.
func (g *Grant) TakesExtra() bool { return g.Lasts > 0 }

// prefetches reports whether one of several grants does.
func prefetches(grants []Grant) bool {
	for i := range grants { // each is half a kilobyte
		if grants[i].TakesExtra() {
			return true
		}
	}
	return false
}

// capacity returns the capacity that a grant counts with.
func (g *Grant) capacity() float64 {
	if g.TakesExtra() {
		return g.Lowered
	}
	return g.Definition.Capacity
}

// never reports whether a grant needs more than there can be, which statements do not ask.
func (g *Grant) never() bool { return g.Need > g.capacity() }

// leased is how long a grant's lease lasts, in microseconds; nil without any.
func (g *Grant) leased() *float64 {
	if !g.TakesExtra() {
		return nil
	}
	lasts := micros(g.ends(epoch).Sub(epoch))
	return &lasts
}
