package edge

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/pgratelimit/ratelimit"
)

// Admission is the tokens and permits that a request that was let through has taken.
type Admission[R, O any] struct {
	gate   *Limiter[R, O]
	r      R
	charge charge
}

// took notes the tokens that a store has granted.
func (p *Admission[R, O]) took(result ratelimit.Result) {
	if p.charge.receipt = result.Receipt; result.Receipt == nil {
		return
	}
	for _, s := range result.Each() {
		p.charge.taken = append(p.charge.taken, s.Request)
		p.charge.used = append(p.charge.used, s.Request.Count)
	}
}

// ByOutcome reports whether it matters how the request ends.
func (p *Admission[R, O]) ByOutcome() bool {
	return p.charge.receipt != nil && slices.ContainsFunc(p.gate.Policies, func(q Policy[R, O]) bool { return q.Counts != nil })
}

// Do runs do while it keeps the permits that were taken, with a context in which [Use] and
// [PermitOf] find them, and which ends when a permit is lost. When do has ended, panicked or not,
// it gives back the tokens that were not used: by [Use], and those of requests that by outcome
// do not count. Outcome may be nil if the pass is not [Admission.ByOutcome].
//
// A permit can be lost before do begins, in a process that was stopped; then the failure is to be
// answered, do has not run, and ok is false.
func (p *Admission[R, O]) Do(ctx context.Context, do func(ctx context.Context), outcome func(panicked bool) O) (failure ratelimit.Event, ok bool) {
	g := p.gate
	p.charge.pkg, p.charge.limitOf = g.Package, g.limitOf
	p.charge.outer, _ = ctx.Value(chargeKey{}).(*charge)
	ran, panicked := false, true
	defer func() {
		if ran {
			p.settle(ctx, p.ended(outcome, panicked))
		} else {
			p.settle(ctx, func(ratelimit.Request) bool { return false })
		}
	}()
	work := func(ctx context.Context) {
		ran = true
		do(context.WithValue(ctx, chargeKey{}, &p.charge))
		panicked = false
	}
	permit, err := g.keep(ctx, p.charge.permits, work)
	switch {
	case ran && errors.Is(err, ratelimit.ErrLeaseLost):
		lost := g.event(ratelimit.Result{}, err, permit, nil)
		lost.Verb, lost.Outcome, lost.Passed = ratelimit.VerbRenew, ratelimit.OutcomeLost, true
		g.tell(ctx, p.r, lost)
	case !ran:
		failure = g.event(ratelimit.Result{}, err, permit, nil)
		g.giveBack(ctx, p.charge.permits)
		p.charge.permits = nil
		failure.Passed = g.FailOpen || g.Shadow
		g.tell(ctx, p.r, failure)
		if failure.Passed {
			work(ctx)
		}
	}
	return failure, ran
}

// ended returns which of the requests count, once the work has ended.
func (p *Admission[R, O]) ended(outcome func(panicked bool) O, panicked bool) (counts func(ratelimit.Request) bool) {
	if !p.ByOutcome() {
		return func(ratelimit.Request) bool { return true }
	}
	o := outcome(panicked)
	return func(t ratelimit.Request) bool {
		q := p.gate.policy(ratelimit.NameOf(t.Limit))
		return q.Counts == nil || q.Counts(o)
	}
}

// settle settles the tokens taken by those used, of the requests that count, even if the client
// has gone. If it fails, the tokens stay spent.
func (p *Admission[R, O]) settle(ctx context.Context, counts func(ratelimit.Request) bool) {
	g, used, differs := p.gate, p.charge.close(), false
	for i, t := range p.charge.taken {
		if !counts(t) {
			used[i] = 0
		}
		differs = differs || used[i] != t.Count
	}
	if !differs {
		return
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.Timeout)
	defer cancel()
	if _, err := g.Store.Settle(bounded, p.charge.receipt, used...); err != nil {
		e := g.event(ratelimit.Result{}, err, nil, p.charge.taken)
		e.Verb, e.Outcome, e.Passed = ratelimit.VerbSettle, ratelimit.OutcomeFailed, true
		g.tell(ctx, p.r, e)
	}
}

type chargeKey struct{}

// charge is the tokens that a request has taken, and those that it has used.
type charge struct {
	pkg     string
	limitOf func(name string) ratelimit.Limit // of the policies; nil without one
	outer   *charge                           // of a middleware around that one
	receipt *ratelimit.Receipt                // nil when nothing was taken
	taken   []ratelimit.Request
	permits []ratelimit.Permit

	mu   sync.Mutex
	used []float64 // of each that was taken
	done bool
}

// Use notes the tokens that a request has really used of a policy, by the name of its limit.
// ctx is that of [Admission.Do]; the error of another names the package that asks.
func Use(ctx context.Context, pkg, policy string, n float64) error {
	for c, _ := ctx.Value(chargeKey{}).(*charge); c != nil; c = c.outer {
		if limit := c.limitOf(policy); limit != nil {
			return c.use(limit, n)
		}
	}
	return Invalid(pkg, "Policy", policy, "the request has none of that name")
}

// use notes the tokens used of a limit, if the request has taken from it.
func (c *charge) use(limit ratelimit.Limit, n float64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return Invalid(c.pkg, "Used", n, "comes after the handler has returned")
	}
	at := slices.IndexFunc(c.taken, func(t ratelimit.Request) bool {
		return ratelimit.NameOf(t.Limit) == ratelimit.NameOf(limit)
	})
	if at >= 0 {
		limit = c.taken[at].Limit // of the tier
	}
	var bad *ratelimit.FieldError
	if errors.As(limit.ForN("", n).Validate(), &bad) {
		return Invalid(c.pkg, "Used", n, bad.Reason)
	}
	if at >= 0 {
		c.used[at] = n
	}
	return nil
}

// close ends the time in which the handler may report the tokens that it has used, and returns
// them.
func (c *charge) close() []float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = true
	return c.used
}
