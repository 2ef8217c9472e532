package bucket

import (
	"math"
	"time"
)

// Out counts the tokens of a row in the memories of processes, which may still use or return them,
// and has their latest end.
type Out struct {
	Tokens float64
	Until  time.Time
}

// Grace is the time after its end for which a row still counts a lease, so that used or returned
// tokens of it can be subtracted from those that are out. Any value is safe. With a shorter one,
// tokens count as out for longer.
const Grace = time.Second

// Spent counts tokens of leases that a process has used and has not reported yet. They are not out
// any more.
type Spent struct {
	Spent    float64
	SpentEnd time.Time // the latest end of these leases
}

// Return describes tokens that come back to their row from memory.
type Return struct {
	Count float64   // tokens; may be 0, to report only spent tokens
	Taken time.Time // ts of the row when they were taken
	End   time.Time // of their lease; zero for tokens that were granted to a caller
	Known time.Time // a past instant by the process's clock; zero if it knows none
	Spent
}

// past returns the latest instant that is known to be past. now can be earlier if the clock was set
// back, and s.TS can be earlier if a pause was ended.
func (r *Return) past(s State, now time.Time) time.Time { return Later(Later(now, s.TS), r.Known) }

// leftover reports whether the tokens are the rest of a lease, and were not granted to a caller.
func (r *Return) leftover() bool { return !r.End.IsZero() }

// Fades returns how long a return can be of use at most, for a lease of the length lasts.
func (d *Definition) Fades(r *Return, lasts time.Duration) time.Duration {
	switch {
	case !r.leftover():
		return math.MaxInt64
	case d.Stepped():
		return time.Duration(d.Slots+1) * time.Duration(d.Tick()) * time.Microsecond
	}
	full := max(r.Count, r.Spent.Spent) / d.Rate * float64(d.Period)
	return lasts + Grace + time.Duration(min(full, math.MaxInt64/2))
}

// Counted returns the instant until which a lease with this end counts for certain as out; zero for
// none.
func (d *Definition) Counted(end time.Time) time.Time {
	if end.IsZero() || d.Stepped() {
		return end
	}
	return end.Add(Grace)
}

// Less subtracts spent tokens from those that are out, if their lease still counts at an instant.
func (d *Definition) Less(out Out, s Spent, at time.Time) Out {
	if d.Counted(s.SpentEnd).After(at) {
		out.Tokens = max(0, out.Tokens-s.Spent)
	}
	return out
}

// less does what Less does, and subtracts the rest of the lease as well.
func (d *Definition) less(out Out, r *Return, end, at time.Time) Out {
	if out = d.Less(out, r.Spent, at); r.leftover() {
		out = d.Less(out, Spent{r.Count, end}, at)
	}
	return out
}

// Return returns a row and its tokens that are out, after tokens came back to it at now. It fills
// the row to its capacity less the tokens that it owes. After its end, the rest of a lease loses
// its worth as fast as the row is refilled. A pause that empties the row also discards the rest of
// a lease. Tokens that were granted to a caller always come back, except to a window or slot that
// is over.
func (d *Definition) Return(s State, out Out, r *Return, now time.Time) (State, Out) {
	return d.kind().back(d, s, out, r, now)
}

// Owed returns how far below its capacity a row must stay at an instant, however many tokens come
// back to it. Up to the end of the tokens that are out, that is their number and the tokens
// refilled until then. Afterwards the rest of their leases loses its worth as fast as the row is
// refilled. The clock of a window stands still until the end.
func (d *Definition) Owed(out Out, now time.Time) float64 {
	switch {
	case out.Tokens <= 0:
		return 0
	case !d.Stepped():
		return max(0, out.Tokens+d.Rate*float64(out.Until.Sub(now))/float64(d.Period))
	case out.Until.After(now):
		return out.Tokens
	}
	return 0
}

// Forgets reports whether at an instant nothing is out, and no lease still counts.
func (d *Definition) Forgets(out Out, at time.Time) bool {
	if d.Stepped() || out.Tokens <= 0 {
		return d.Owed(out, at) == 0
	}
	return d.Owed(out, at) == 0 && !out.Until.Add(Grace).After(at)
}

// Inflow returns the tokens refilled in a time within which no prefetched token ends: none while
// the clock stands still, because prefetched tokens end with its next tick. A row from which tokens
// are prefetched for that time has that much less capacity.
func (d *Definition) Inflow(in time.Duration) float64 {
	if d.Stepped() {
		return 0
	}
	return d.Rate * float64(in) / float64(d.Period)
}

// End returns the end of tokens that are prefetched from a row with this ts. In a window or slot
// they end with it; otherwise they last as long as lasts.
func (d *Definition) End(ts, at time.Time, lasts time.Duration) time.Time {
	if d.Stepped() {
		return d.Next(ts)
	}
	return at.Add(lasts)
}

// CreditBeside credits a row that may have tokens out. It fills the row to its capacity less the
// tokens that it owes. In a sliding window, the slot of the tokens that are out keeps as many.
func (d *Definition) CreditBeside(s State, out Out, now time.Time, n float64) State {
	owed := d.Owed(out, now)
	if owed == 0 {
		return d.Credit(s, now, n)
	}
	settled := d.Refill(s, now)
	return d.Credit(settled, now, min(n, max(0, d.kind().room(d, settled, out, owed))))
}

// Full returns a row of key after a reset at now: full, less the tokens that it owes. If nothing is
// out it is Fresh, and no row need be stored.
func (d *Definition) Full(key string, s State, out Out, now time.Time) State {
	if d.Owed(out, now) == 0 {
		return d.Fresh(key, now)
	}
	return d.kind().full(d, key, s, out, now)
}

// ResumeBeside resumes a row that may have tokens out: see [Definition.Resume].
func (d *Definition) ResumeBeside(key string, s State, out Out, now time.Time) State {
	settled := d.Refill(s, now)
	if !s.Paused.After(now) {
		return settled
	}
	return d.kind().resume(d, key, settled, out, now)
}
