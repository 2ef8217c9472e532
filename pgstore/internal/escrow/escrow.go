// Package escrow is a process's knowledge of keys for a moment: the tokens that it has
// prefetched from them and hands out from memory (O'Neil, "The Escrow Transactional Method",
// 1986), and refusals of rows with too few. It knows no database: its user prefetches, and
// returns, by statements of its own.
//
// In every stretch of time a limit grants no more than it would without. The tokens in the row
// and in the memories of all processes are together never more than the capacity; an exhaustive
// test of a small model shows it. These rules see to it, and the statements of pgstore/internal/table
// apply them:
//
//   - A statement that prefetches from a token bucket counts with a capacity that is lower by
//     the tokens refilled until the end of the lease. A lease of a fixed window ends with the
//     window, so nothing is refilled until then; and one of a sliding window ends with the slot
//     in which it is counted.
//   - The end is judged from before the statement was sent that prefetched, so that it is
//     never late.
//   - The row has the number of tokens out, and their latest end. A refund fills it no further
//     than to its capacity less those and the tokens refilled until then.
//   - A refund after the end of its lease is less by the tokens refilled since, unless they had
//     been granted to a caller: meanwhile the row may have been full, and been emptied.
package escrow

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Lowered returns the capacity that a definition counts with when it is prefetched from
// for a time; 0 if nothing can be.
func Lowered(d *bucket.Definition, lasts time.Duration) float64 {
	return max(0, d.Capacity-d.Inflow(lasts))
}

// usable returns for how long tokens can be used that were prefetched at an instant, and
// are counted in the row at ts.
func usable(d *bucket.Definition, ts, at time.Time, lasts time.Duration) time.Duration {
	return min(lasts, d.End(ts, at, lasts).Sub(at))
}

// Lease is the tokens that one statement has prefetched from a row.
type Lease struct {
	Count float64      // tokens to hand out
	Out   float64      // tokens of calls that the statement granted, and that may put them back
	After bucket.State // the row as the statement left it
	At    time.Time    // the instant of the decision, on the database's clock
	End   time.Time    // until which the row counts it as out
	Sent  time.Time    // on this machine's, before the statement was sent
}

// Return is tokens that go back to their row, or only something to tell that.
type Return struct {
	Row        decide.Row
	Definition bucket.Definition
	bucket.Return

	lease *lease // of which they are left, or that was used
}
