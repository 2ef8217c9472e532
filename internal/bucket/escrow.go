package bucket

import "time"

// Out is what processes hold of a row in their memories: tokens that the row has not, and
// that are used, or returned, until an instant.
type Out struct {
	Tokens float64
	Until  time.Time // the latest end of them; before it nothing is forgotten
}

// At returns what is out at an instant: nothing once all of it has ended.
func (o Out) At(now time.Time) Out {
	if o.Until.After(now) {
		return o
	}
	return Out{}
}

// Inflow returns what is refilled in a time in which no prefetched token ends. That is
// nothing while the clock stands still, since they end with its next tick. So the capacity
// of a row from which tokens are prefetched for that time is less by it.
func (d *Definition) Inflow(in time.Duration) float64 {
	if d.Stands() > 0 {
		return 0
	}
	return d.Rate * float64(in) / float64(d.Period)
}

// End returns when tokens end that were prefetched at an instant from a row whose ts is
// ts then, if they may be held for a time: with the window or slot in which they were
// taken, or if the clock does not stand still, after that time.
func (d *Definition) End(ts, at time.Time, lasts time.Duration) time.Time {
	if d.Stands() > 0 {
		return d.Next(ts)
	}
	return at.Add(lasts)
}

// RefundBeside is [Definition.Refund] for a row of which something may be out: no more
// comes back than what is below the capacity together with what is out and what is
// refilled until that ends. A sliding window's slots keep as much as is out.
func (d *Definition) RefundBeside(s State, out Out, now time.Time, n float64, slot int64) State {
	if out.At(now) == (Out{}) {
		return d.Refund(s, now, n, slot)
	}
	settled := d.Settle(s, now)
	return d.Refund(settled, now, d.fitting(settled, out, n), slot)
}

// CreditBeside is [Definition.Credit] for a row of which something may be out, with the
// bound of [Definition.RefundBeside].
func (d *Definition) CreditBeside(s State, out Out, now time.Time, n float64) State {
	if out.At(now) == (Out{}) {
		return d.Credit(s, now, n)
	}
	settled := d.Settle(s, now)
	return d.Credit(settled, now, d.fitting(settled, out, n))
}

// fitting is what of n can come back to a settled state beside what is out.
func (d *Definition) fitting(settled State, out Out, n float64) float64 {
	return min(n, max(0, d.kind().room(d, settled, out)))
}

// Full returns a row of key that was reset at now: as a fresh one, but for what is out and
// what is refilled until that ends. If nothing is out it is Fresh, for which no row need be
// stored.
func (d *Definition) Full(key string, out Out, now time.Time) State {
	if out.At(now) == (Out{}) {
		return d.Fresh(key, now)
	}
	return d.kind().owing(d, key, out, now)
}
