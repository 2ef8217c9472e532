package table

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Grant is the tokens that several calls take together from one row: all of them or none.
type Grant struct {
	decide.Change         // Count is the sum of the calls
	Need          float64 // the tokens that the row must have to grant all calls

	// For a grant that prefetches, which takes more for a lease:
	Lasts        time.Duration // of a token bucket's lease; a window's ends with the window; 0 for a grant that does not prefetch
	Lowered      float64       // the capacity to count with: lower by the tokens refilled during the lease
	Prefetch     float64       // tokens to take besides, at most half of those left, and at most as many as may be out
	Out          float64       // the part of Count that may still return to memory
	bucket.Spent               // of earlier leases

	// Pipelined sends a grant that waits for its row together with its COMMIT, in one round trip.
	// Calls behind it, also in other processes, then wait for one round trip only. A caller that
	// gives up may have taken all the same, as with any statement under way. So Pipelined is for
	// rows that others lock only briefly, and waits no longer than longestTurn. Grants that
	// prefetch are always heard to their end, and are all pipelined.
	Pipelined bool

	Added any // what the layer that added to the grant keeps with it

	Taken  Taken
	Waited time.Duration // for its turn, at least; for a grant that waits for its row
	turn   bool          // it has had its turn, or needs none
}

// End returns when the lease of a granted Grant ends, on the database's clock.
func (g *Grant) End() time.Time { return g.ends(g.Taken.After.TS) }

// ends returns when a lease ends whose row was left at ts.
func (g *Grant) ends(ts time.Time) time.Time { return g.Definition.End(ts, ts, g.Lasts) }

// TakesExtra reports whether a grant takes more than its calls want, for a lease.
func (g *Grant) TakesExtra() bool { return g.Lasts > 0 }

// prefetches reports whether one of the grants prefetches.
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

// never reports whether a grant needs more than a row can have. Statements do not check that.
func (g *Grant) never() bool { return g.Need > g.capacity() }

// leased returns how long a grant's lease lasts, in microseconds; nil without a lease.
func (g *Grant) leased() *float64 {
	if !g.TakesExtra() {
		return nil
	}
	lasts := micros(g.ends(epoch).Sub(epoch))
	return &lasts
}
