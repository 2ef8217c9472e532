package ratelimit

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/internal/valid"
)

// Many equal pieces of work need one reservation only: of n · c tokens the first c are
// refilled first, and so on. When is a matter of arithmetic.

// Instants returns when each of n equal pieces of work may run that were reserved together, the
// earliest first: the instants of n reservations made one after the other, to the microsecond.
// (With several rows for a key, those would have chosen rows by themselves.) A sliding window
// counts all of them in one slot, whose start is the instant of each. The last is r's RetryAt.
// r must be granted, by Reserve in this process; of any other result all are at RetryAt. It is
// nil for n below 1.
func (r Result) Instants(n int) []time.Time {
	if n < 1 {
		return nil
	}
	instants := slices.Repeat([]time.Time{r.At}, n)
	for _, p := range r.portions() {
		if p.Request.Mode == ModeShadow { // which puts nothing off
			continue
		}
		due := p.At
		for i := range n {
			due = bucket.Later(due, p.due(p.Taken*float64(i+1)/float64(n), due))
			instants[i] = bucket.Later(instants[i], due)
		}
	}
	return instants
}

// Split divides a reservation among pieces of work, the first to be due first. A part is
// how many tokens it has of each limit, in the order of r.Each. Every piece gets a result as if
// it had been reserved by itself, one after the other, with RetryAt and a receipt of its
// own; do not settle that of r as well. Parts that are not all that r has taken, and an r
// that was not granted, are [ErrInvalid]. It is pure, and r should come from Reserve in
// this process: for the parts of any other the RetryAt is that of r.
func (r Result) Split(parts ...[]float64) ([]Result, error) {
	if !r.OK {
		return nil, &FieldError{Field: "Result", Value: r.OK, Reason: "must be granted"}
	}
	portions := r.portions()
	if err := areTokens(parts, len(portions)); err != nil {
		return nil, err
	}
	for k, p := range portions {
		if err := p.mayBe(parts, k); err != nil {
			return nil, err
		}
	}
	each := make([][]Status, len(parts))
	paid := make([][]receipt.Payment, len(parts))
	for k, p := range portions {
		due, sum := p.At, 0.0
		for i, part := range parts {
			sum += part[k]
			if i+1 == len(parts) {
				sum = p.Taken // without the rounding of the sum
			}
			due = bucket.Later(due, p.due(sum, due))
			each[i] = append(each[i], p.part(part[k], sum, due))
			paid[i] = append(paid[i], p.pay(part[k], i+1 == len(parts))...)
		}
	}
	results := make([]Result, len(parts))
	for i := range results {
		results[i].Status = lead(each[i])
		if r.Several != nil {
			results[i].Several = each[i]
		}
		if r.Receipt != nil {
			results[i].Receipt = receipt.Part(r.Receipt, paid[i])
		}
	}
	return results, nil
}

// lead returns the status of several that a result has: of those that are enforced the last that
// is due; and whether one that is not would have been put off.
func lead(each []Status) (s Status) {
	enforced := slices.DeleteFunc(slices.Clone(each), func(s Status) bool { return s.Request.Mode == ModeShadow })
	if len(enforced) > 0 {
		s = lastDue(enforced)
	} else {
		s = lastDue(each)
		s.OK, s.RetryAfter, s.RetryAt = true, 0, s.At
	}
	s.Shadowed = slices.ContainsFunc(each, func(s Status) bool { return s.Shadowed })
	return s
}

// lastDue returns the status of several that is due last.
func lastDue(each []Status) Status {
	last := each[0]
	for _, s := range each[1:] {
		waits := (s.RetryAfter > 0 || last.RetryAfter > 0) && !s.RetryAt.Equal(last.RetryAt)
		if waits && s.RetryAt.After(last.RetryAt) || !waits && s.Remaining < last.Remaining {
			last = s
		}
	}
	return last
}

// portion is the share of one limit in the tokens that a result took.
type portion struct {
	Status
	shard    *bucket.Definition
	payments []receipt.Payment
	left     []receipt.Left // nil if it is not known
	next     int            // payment to divide
	spent    float64        // of that
}

// portions returns those of r, in the order of Each.
func (r Result) portions() []*portion {
	each := r.Each()
	portions := make([]*portion, len(each))
	for k, s := range each {
		portions[k] = &portion{Status: s, shard: shardOf(s.Request.Limit)}
	}
	if r.Receipt == nil {
		return portions
	}
	left := receipt.Lefts(r.Receipt)
	for i, payment := range receipt.Payments(r.Receipt) {
		p := portions[payment.Place]
		p.payments = append(p.payments, payment)
		if left != nil {
			p.left = append(p.left, left[i])
		}
	}
	return portions
}

// due returns when a number of tokens of p are there, which is not before from.
func (p *portion) due(tokens float64, from time.Time) time.Time {
	switch {
	case p.left == nil || p.shard.Slotted(): // which counts all of it in one slot
		return p.RetryAt
	case len(p.left) == 1:
		return p.dueInRow(tokens)
	}
	slack := bucket.Tolerance(tokens, p.Taken, p.Capacity) / 2
	least, most := from.UnixMicro(), bucket.Later(from, p.RetryAt).UnixMicro()
	for least < most {
		middle := least + (most-least)/2
		if p.refilled(time.UnixMicro(middle).UTC()) < tokens-slack {
			least = middle + 1
		} else {
			most = middle
		}
	}
	return time.UnixMicro(least).UTC()
}

// dueInRow is due for tokens that were taken from one row.
func (p *portion) dueInRow(tokens float64) time.Time {
	left := p.left[0]
	s := bucket.State{Value: left.Value + (p.Taken - tokens), TS: left.TS, Paused: left.Paused}
	if s.Value < -bucket.Tolerance(s.Value, tokens, p.shard.Capacity) {
		return p.shard.When(s, 0)
	}
	return bucket.Later(bucket.Later(p.At, s.TS), s.Paused)
}

// refilled returns how many of p's tokens are there at an instant.
func (p *portion) refilled(at time.Time) (sum float64) {
	for i, left := range p.left {
		if left.Paused.After(at) || left.TS.After(at) {
			continue
		}
		s := p.shard.Refill(bucket.State{Value: left.Value, TS: left.TS}, at)
		sum += min(max(0, p.payments[i].Tokens+min(0, s.Value)), p.payments[i].Tokens)
	}
	return sum
}

// part returns the status of a part of p that is due at an instant; before is how much it
// and those before it take.
func (p *portion) part(tokens, before float64, due time.Time) Status {
	s := p.Status
	if s.Request.Count = tokens; !s.OK { // ModeShadow, which has taken nothing
		return s
	}
	s.Taken = tokens
	s.RetryAt, s.RetryAfter = due, due.Sub(s.At)
	s.Shadowed = s.Shadowed && s.RetryAfter > 0
	if p.shard.Slotted() && p.RetryAfter > 0 { // then the value is a time
		return s
	}
	if rest := p.Taken - before; rest > 0 {
		s.Value += rest
		s.Remaining = int64(max(0, math.Floor(s.Value+bucket.Tolerance(s.Value, 1, s.Capacity))))
	}
	s.Before = s.Value + tokens
	return s
}

// pay returns the payments of the next part of p; of the last one all that there are still.
func (p *portion) pay(tokens float64, last bool) (paid []receipt.Payment) {
	for p.next < len(p.payments) {
		payment := p.payments[p.next]
		there := payment.Tokens - p.spent
		if !last && tokens < there {
			payment.Tokens = tokens
			p.spent += tokens
			return append(paid, payment)
		}
		payment.Tokens = there
		tokens -= there
		paid = append(paid, payment)
		if p.next++; p.next == len(p.payments) || !last && tokens <= 0 {
			p.spent = 0
			break
		}
		p.spent = 0
	}
	if len(paid) == 0 && len(p.payments) > 0 { // each limit has its place in a receipt
		payment := p.payments[len(p.payments)-1]
		payment.Tokens = 0
		paid = append(paid, payment)
	}
	return paid
}

// areTokens returns the error of parts that are not tokens of each of the limits.
func areTokens(parts [][]float64, limits int) error {
	for i, part := range parts {
		none := func(v float64) bool { return valid.Amount(v) != "" }
		if len(part) != limits || slices.ContainsFunc(part, none) {
			return &FieldError{Field: fmt.Sprintf("Parts[%d]", i), Value: part, Reason: fmt.Sprintf("must be the tokens of each of the result's %d limits", limits)}
		}
	}
	return nil
}

// mayBe returns the error of parts that do not add up to the tokens that p has taken; k is the
// place of p.
func (p *portion) mayBe(parts [][]float64, k int) error {
	if !p.OK { // ModeShadow, which has taken nothing
		return nil
	}
	sum := 0.0
	for _, part := range parts {
		sum += part[k]
	}
	if slack := bucket.Tolerance(sum, p.Taken, 0) * float64(1+len(parts)); math.Abs(sum-p.Taken) > slack {
		return &FieldError{Field: "Parts", Value: sum, Reason: fmt.Sprintf("must have all %g tokens that were taken from limit %s", p.Taken, quoteShort(NameOf(p.Request.Limit)))}
	}
	return nil
}

// WaitError is a Wait that ended before its reservation was due, since its context
// ended, or would have. It is Err, which is mostly a context's error. The reservation was
// given back; if that failed, the store's error is joined with this one.
type WaitError struct {
	Result Result        // of the reservation
	Wait   time.Duration // that was left
	Err    error
}

func (e *WaitError) Error() string {
	return fmt.Sprintf("ratelimit: limit %s: the wait has %v to go: %v", quoteShort(NameOf(e.Result.Request.Limit)), e.Wait, e.Err)
}

// Unwrap returns e.Err.
func (e *WaitError) Unwrap() error { return e.Err }
