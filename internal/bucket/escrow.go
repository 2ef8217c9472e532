package bucket

import (
	"math"
	"time"
)

// Out is the tokens of a row that are in the memories of processes: tokens that they have
// prefetched and may still use or return, and the latest end of them.
type Out struct {
	Tokens float64
	Until  time.Time
}

// Grace is for how long after its end a row counts a lease, so that tokens used of it, or
// returned, can be taken off those that are out. Any time is safe. With a shorter one more of
// them stay counted, until nothing is out for once.
const Grace = time.Second

// Spent is tokens of leases that a process has used since it told the row last. They are not out
// any more.
type Spent struct {
	Spent    float64
	SpentEnd time.Time // of the lease of these that ends first
}

// Return is tokens that come back to their row from memory.
type Return struct {
	Count float64   // tokens; may be 0, to report only spent tokens
	Taken time.Time // ts of the row when they were taken
	End   time.Time // of the lease that they are left of; zero for tokens that a caller was told of
	Known time.Time // an instant that is past, by the clock of the process; zero if it knows none
	Spent
}

// past returns the latest instant that is known to be past: the clock may have been set back, and
// the row's instant with it, as a pause was ended.
func (r *Return) past(s State, now time.Time) time.Time { return Later(Later(now, s.TS), r.Known) }

// leftover reports whether the tokens are left of a lease, and not those of a caller.
func (r *Return) leftover() bool { return !r.End.IsZero() }

// Fades returns how long a return is of use, at most, that is for a lease that lasted as long as
// lasts.
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

// Counted returns until when a lease that ends at an instant is counted for certain among the
// tokens that are out; zero for none.
func (d *Definition) Counted(end time.Time) time.Time {
	if end.IsZero() || d.Stepped() {
		return end
	}
	return end.Add(Grace)
}

// Less returns the tokens that are out less those that were spent, if these are still counted at
// an instant.
func (d *Definition) Less(out Out, s Spent, at time.Time) Out {
	if d.Counted(s.SpentEnd).After(at) {
		out.Tokens = max(0, out.Tokens-s.Spent)
	}
	return out
}

// less is Less of a return, whose lease ends at an instant, also by the tokens left of that.
func (d *Definition) less(out Out, r *Return, end, at time.Time) Out {
	if out = d.Less(out, r.Spent, at); r.leftover() {
		out = d.Less(out, Spent{r.Count, end}, at)
	}
	return out
}

// Return returns a row, and the tokens of it that are out, after tokens came back to it at now:
// it is filled to its capacity less the tokens that it owes. What is left of a lease is worth
// less after its end, by the tokens refilled since. A pause swallows it, unless it leaves the row as
// it is. Tokens that a caller was told of are never too late, but in a fixed window: there nothing
// comes back once the window is over.
func (d *Definition) Return(s State, out Out, r *Return, now time.Time) (State, Out) {
	return d.kind().back(d, s, out, r, now)
}

// Owed returns how much below its capacity a row must stay at an instant, however many tokens
// are returned to it. Until the end of the tokens that are out, that is their number and the
// tokens refilled until then. After it, leftovers still to be returned lose their worth as fast
// as the row is refilled. The clock of a window stands still until the end.
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

// Forgets reports whether at an instant nothing is out, and no tokens that were out can be
// taken off any more.
func (d *Definition) Forgets(out Out, at time.Time) bool {
	if d.Stepped() || out.Tokens <= 0 {
		return d.Owed(out, at) == 0
	}
	return d.Owed(out, at) == 0 && !out.Until.Add(Grace).After(at)
}

// Inflow returns the tokens refilled in a time in which no prefetched token ends. That is
// nothing while the clock stands still, since they end with its next tick. So the capacity of a
// row from which tokens are prefetched for that time is less by it.
func (d *Definition) Inflow(in time.Duration) float64 {
	if d.Stepped() {
		return 0
	}
	return d.Rate * float64(in) / float64(d.Period)
}

// End returns when tokens end that were prefetched at an instant from a row with that ts, if
// they may be held for a time: with the window or slot in which they were taken, or if the
// clock does not stand still, after that time.
func (d *Definition) End(ts, at time.Time, lasts time.Duration) time.Time {
	if d.Stepped() {
		return d.Next(ts)
	}
	return at.Add(lasts)
}

// CreditBeside is [Definition.Credit] for a row that may have tokens out: the row is filled to
// its capacity less the tokens that it owes. Of a sliding window's slots, the one in which the
// tokens that are out end keeps as many.
func (d *Definition) CreditBeside(s State, out Out, now time.Time, n float64) State {
	owed := d.Owed(out, now)
	if owed == 0 {
		return d.Credit(s, now, n)
	}
	settled := d.Refill(s, now)
	return d.Credit(settled, now, min(n, max(0, d.kind().room(d, settled, out, owed))))
}

// Full returns a row of key that was in a state and is reset at now: full, but for the tokens
// that it owes. If nothing is out it is Fresh, for which no row need be stored.
func (d *Definition) Full(key string, s State, out Out, now time.Time) State {
	if d.Owed(out, now) == 0 {
		return d.Fresh(key, now)
	}
	return d.kind().full(d, key, s, out, now)
}

// ResumeBeside is [Definition.Resume] for a row of which something may be out.
func (d *Definition) ResumeBeside(key string, s State, out Out, now time.Time) State {
	settled := d.Refill(s, now)
	if !s.Paused.After(now) {
		return settled
	}
	return d.kind().resume(d, key, settled, out, now)
}
