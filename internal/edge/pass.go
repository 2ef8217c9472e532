package edge

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/pgratelimit/ratelimit"
)

// Pass is what a request that was let through has taken.
type Pass[R, O any] struct {
	gate   *Gate[R, O]
	r      R
	charge charge
}

// took notes what a store has granted.
func (p *Pass[R, O]) took(result ratelimit.Result) {
	if p.charge.receipt = result.Receipt; result.Receipt == nil {
		return
	}
	for _, s := range result.Each() {
		p.charge.taken = append(p.charge.taken, s.Request)
		p.charge.used = append(p.charge.used, s.Request.Count)
	}
}

// ByOutcome reports whether it matters how the request ends.
func (p *Pass[R, O]) ByOutcome() bool {
	return p.charge.receipt != nil && slices.ContainsFunc(p.gate.Policies, func(q Policy[R, O]) bool { return q.Counts != nil })
}

// Do runs do with a context in which [Use] finds what was taken. When do has ended, panicked
// or not, it gives back what was not used: what do itself said, and what by outcome does not
// count. Outcome may be nil if the pass is not [Pass.ByOutcome].
func (p *Pass[R, O]) Do(ctx context.Context, do func(ctx context.Context), outcome func(panicked bool) O) {
	p.charge.pkg, p.charge.limitOf = p.gate.Package, p.gate.limitOf
	p.charge.outer, _ = ctx.Value(chargeKey{}).(*charge)
	panicked := true
	defer func() { p.settle(ctx, outcome, panicked) }()
	do(context.WithValue(ctx, chargeKey{}, &p.charge))
	panicked = false
}

// settle brings what was taken to what was used. A client that has gone does not keep it from
// that. If it fails, what was taken stays.
func (p *Pass[R, O]) settle(ctx context.Context, outcome func(panicked bool) O, panicked bool) {
	g, used, differs := p.gate, p.charge.close(), false
	var o O
	if p.ByOutcome() {
		o = outcome(panicked)
	}
	for i, t := range p.charge.taken {
		if q := g.policy(ratelimit.NameOf(t.Limit)); q.Counts != nil && !q.Counts(o) {
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
		e := newEvent(SettleFailed, err, p.charge.taken)
		e.Passed = true
		g.tell(ctx, p.r, e)
	}
}

type chargeKey struct{}

// charge is what a request has taken, and what it has used.
type charge struct {
	pkg     string
	limitOf func(name string) ratelimit.Limit // of the policies; nil without one
	outer   *charge                           // of a middleware around that one
	receipt *ratelimit.Receipt                // nil when nothing was taken
	taken   []ratelimit.Request

	mu   sync.Mutex
	used []float64 // of each that was taken
	done bool
}

// Use notes what a request has really used of a policy, by the name of its limit. ctx is
// that of [Pass.Do]; the error of another names the package that asks.
func Use(ctx context.Context, pkg, policy string, n float64) error {
	for c, _ := ctx.Value(chargeKey{}).(*charge); c != nil; c = c.outer {
		if limit := c.limitOf(policy); limit != nil {
			return c.use(limit, n)
		}
	}
	return Invalid(pkg, "Policy", policy, "the request has none of that name")
}

// use notes what was used of a limit, if the request has taken from it.
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

// close ends the time in which the handler may say what it has used, and returns that.
func (c *charge) close() []float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = true
	return c.used
}
