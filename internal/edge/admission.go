package edge

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/pgratelimit/ratelimit"
)

// Admission holds the tokens and permits of an admitted request.
type Admission[R, O any] struct {
	limiter *Limiter[R, O]
	r       R
	charge  charge
}

// Ask decides on r and reports the event. A request whose event has Passed goes on: run its work by
// [Admission.Do].
func (g *Limiter[R, O]) Ask(ctx context.Context, r R) (*Admission[R, O], ratelimit.Event) {
	admission := &Admission[R, O]{limiter: g, r: r}
	requests, err := g.Requests(r)
	var wants ratelimit.PermitRequest
	var permit *ratelimit.Permit
	if err == nil {
		if wants, err = g.wants(r); err != nil {
			permit = &ratelimit.Permit{InFlight: wants.Limit}
		}
	}
	if err == nil && len(requests) == 0 && wants.Limit.Name == "" { // no policy applies
		return admission, ratelimit.Event{Door: g.Package, Outcome: ratelimit.OutcomeGranted, Passed: true, Shadow: g.Shadow}
	}
	var result ratelimit.Result
	if err == nil {
		admission.charge.permits, permit, result, err = g.take(ctx, wants, requests)
	}
	e := g.event(result, err, permit, requests)
	gone := ctx.Err() != nil // a client that leaves makes the call fail; that does not let it pass
	e.Passed = g.Shadow || e.Outcome == ratelimit.OutcomeGranted || e.Outcome == ratelimit.OutcomeFailed && g.FailOpen && !gone
	g.tell(ctx, r, e)
	admission.took(result)
	return admission, e
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

// ByOutcome reports whether the request's outcome decides what it costs.
func (p *Admission[R, O]) ByOutcome() bool {
	return p.charge.receipt != nil && slices.ContainsFunc(p.limiter.Policies, func(q Policy[R, O]) bool { return q.Counts != nil })
}

// Do runs do and keeps the permits meanwhile. In do's context, [Use] and [PermitOf] find what was
// taken; it ends if a permit is lost. After do, even if it panics, Do gives back tokens: those
// beyond what [Use] reported, and those whose policy does not count the outcome. outcome may be nil
// unless [Admission.ByOutcome].
//
// A permit can be lost before do begins, if the process was stopped. Then do runs only with
// FailOpen or Shadow. Otherwise ok is false, and the caller answers the failure.
func (p *Admission[R, O]) Do(ctx context.Context, do func(ctx context.Context), outcome func(panicked bool) O) (failure ratelimit.Event, ok bool) {
	g := p.limiter
	p.charge.pkg, p.charge.limitOf = g.Package, func(name string) ratelimit.Limit {
		if q := g.policy(name); q != nil {
			return q.Limit
		}
		return nil
	}
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

// ended returns a function that reports whether a request's tokens count, by the outcome of the
// work.
func (p *Admission[R, O]) ended(outcome func(panicked bool) O, panicked bool) (counts func(ratelimit.Request) bool) {
	if !p.ByOutcome() {
		return func(ratelimit.Request) bool { return true }
	}
	o := outcome(panicked)
	return func(t ratelimit.Request) bool {
		q := p.limiter.policy(ratelimit.NameOf(t.Limit))
		return q.Counts == nil || q.Counts(o)
	}
}

// settle returns the tokens that were not used, or whose request does not count, even if the client
// has gone. If that fails they stay spent.
func (p *Admission[R, O]) settle(ctx context.Context, counts func(ratelimit.Request) bool) {
	g, used, differs := p.limiter, p.charge.close(), false
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

// charge holds the tokens that a request has taken, and those that it has used.
type charge struct {
	pkg     string
	limitOf func(name string) ratelimit.Limit // finds the limit of a policy of this middleware; nil if there is none
	outer   *charge                           // of an outer middleware
	receipt *ratelimit.Receipt                // nil if nothing was taken
	taken   []ratelimit.Request
	permits []ratelimit.Permit

	mu   sync.Mutex
	used []float64 // in the order of taken
	done bool
}

// Use reports the tokens that a request really used of a policy, named by its limit. ctx is the
// context of [Admission.Do]. In another context it returns an error that names pkg.
func Use(ctx context.Context, pkg, policy string, n float64) error {
	for c, _ := ctx.Value(chargeKey{}).(*charge); c != nil; c = c.outer {
		if limit := c.limitOf(policy); limit != nil {
			return c.use(limit, n)
		}
	}
	return Invalid(pkg, "Policy", policy, "the request has none of that name")
}

// PermitOf returns the permit that a request holds, by the name of the policy's limit. ctx is the
// context of [Admission.Do].
func PermitOf(ctx context.Context, policy string) (permit ratelimit.Permit, ok bool) {
	for c, _ := ctx.Value(chargeKey{}).(*charge); c != nil; c = c.outer {
		for _, s := range c.permits {
			if s.InFlight.Name == policy {
				return s, true
			}
		}
	}
	return permit, false
}

// use notes the tokens used of a limit that the request may have taken from.
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
		limit = c.taken[at].Limit // the tier's limit
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

// close ends the time in which the handler may report used tokens, and returns them.
func (c *charge) close() []float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = true
	return c.used
}
