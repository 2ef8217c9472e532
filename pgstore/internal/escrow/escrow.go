// Package escrow keeps what a process knows of keys for a moment: tokens that it has prefetched
// and hands out from memory (O'Neil, "The Escrow Transactional Method", 1986), and refusals of
// rows with too few tokens. It knows no database: the layer above sends the statements.
//
// In every stretch of time a limit grants no more than it would without escrow. The tokens in the
// row and in the memories of all processes are together never more than the capacity. The statements
// of pgstore/internal/table apply these rules; its TestReturnsAgree compares them with these in random
// histories:
//
//   - A statement that prefetches from a token bucket counts with a lower capacity: less by the
//     tokens refilled until the end of the lease. Nothing is refilled during a lease of a window,
//     since it ends with the fixed window, or with the slot of a sliding window.
//   - The end of a lease is counted from before its statement was sent, so it is never late.
//   - The row has the number of tokens out, and their latest end. A refund fills the row no
//     further than to its capacity, less those tokens and the ones refilled until then.
//   - A refund after the end of its lease is less by the tokens refilled since, because the row
//     may have been full meanwhile, and been emptied. Tokens that a caller was granted go back
//     in full.
package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Config configures a Cache.
type Config struct {
	Lasts time.Duration    // for how long tokens are handed out
	Clock func() time.Time // nil for the machine's

	// Prefetch is called when it is time to prefetch. It runs during a call that does not wait
	// for it, and must have [Entry.Prefetched] called at its end.
	Prefetch func(*Entry)

	// GiveBack is called with tokens to return to their rows. No lock of a key is held.
	GiveBack func([]Return)
}

func (c *Config) now() time.Time {
	if c.Clock != nil {
		return c.Clock()
	}
	return time.Now()
}

func (c *Config) moment() moment { return momentOf(c.now()) }

// sent returns when a statement was sent that decided at an instant. An injected clock stands
// still between the two.
func (c *Config) sent(sent, at time.Time) moment {
	if c.Clock != nil {
		return momentOf(at)
	}
	return momentOf(sent)
}

// margin returns how long before its end the rest of a lease is returned.
func (c *Config) margin() time.Duration { return c.Lasts / 16 }

func (c *Config) giveBack(returns []Return) {
	if len(returns) > 0 {
		c.GiveBack(returns)
	}
}

// Lowered returns the capacity with which a statement counts that prefetches for a time; 0 if
// nothing can be prefetched for that long.
func Lowered(d *bucket.Definition, lasts time.Duration) float64 {
	return max(0, d.Capacity-d.Inflow(lasts))
}

// usable returns for how long tokens can be used that were prefetched at an instant, and
// are counted in the row at ts.
func usable(d *bucket.Definition, ts, at time.Time, lasts time.Duration) time.Duration {
	return min(lasts, d.End(ts, at, lasts).Sub(at))
}

// Lease holds the tokens that one statement has prefetched from a row.
type Lease struct {
	Count float64      // tokens to hand out
	Out   float64      // tokens that the statement granted to transactions, which may put them back
	After bucket.State // the row as the statement left it
	At    time.Time    // the instant of the decision, on the database's clock
	End   time.Time    // until when the row counts the tokens as out
	Sent  time.Time    // on this machine's clock, before the statement was sent
}

// Return holds tokens that go back to their row, and spent tokens to report with them. The count
// is 0 if there is only something to report.
type Return struct {
	Row        decide.Row
	Definition bucket.Definition
	bucket.Return

	lease *lease // which the tokens were prefetched with
}
