package memory

import (
	"context"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
)

// Claim holds the tokens of a call that were held, until [Claim.End], and the rest of the call, for
// rows. It is nil if no tokens were held.
type Claim struct {
	Rest decide.Call

	call   *decide.Call
	tokens []escrow.Tokens // of each limit; zero if they were not held
}

// All reports whether all of the call was held.
func (c *Claim) All() bool { return len(c.Rest.Demands) == 0 }

// claim takes the held tokens of a call out of memory. For a call with several limits it has the
// missing tokens prefetched for later calls; the statement that grants a single limit prefetches by
// itself.
func (m *Memory) claim(call *decide.Call) *Claim {
	c := &Claim{call: call}
	for i := range call.Demands {
		a := &call.Demands[i]
		var t escrow.Tokens
		if entry := m.entryOf(a); !entry.Take(a.Count, true, &t) {
			if len(call.Demands) > 1 {
				entry.Miss(a.Count)
			}
			continue
		}
		if c.tokens == nil {
			c.tokens = make([]escrow.Tokens, len(call.Demands))
		}
		c.tokens[i] = t
	}
	if c.tokens == nil {
		return nil
	}
	c.Rest = call.Remainder(c.balances())
	return c
}

// Claim claims the tokens of a transaction's call. If the tokens of a single limit are missing, and
// prefetching pays, a statement of its own grants them and prefetches. If that refuses, so is the
// call: refused is its result.
func (m *Memory) Claim(ctx context.Context, call *decide.Call) (c *Claim, refused ratelimit.Result, err error) {
	c = m.claim(call)
	if c != nil || len(call.Demands) != 1 {
		return c, refused, nil
	}
	a := call.Demands[0]
	tokens, entry := &escrow.Tokens{}, m.entryOf(&a)
	if !m.WorthPrefetching(call) {
		entry.CountDemand(a.Count, 1)
		return c, refused, nil // the transaction takes from the row
	}
	a.Floor = 0 // only the row gives debt
	p := &engine.Pending{Call: decide.Call{Demands: []decide.Demand{a}}}
	Attach(p, entry, tokens)
	result, err := m.engine.Decide(ctx, nil, p)
	switch {
	case err != nil:
		return nil, refused, err
	case result.OK:
		return &Claim{call: call, tokens: []escrow.Tokens{*tokens}}, refused, nil
	case call.Reserve:
		return c, refused, nil
	}
	return nil, result, nil
}

// WorthPrefetching reports whether a call should have a statement of its own, which prefetches.
func (m *Memory) WorthPrefetching(call *decide.Call) bool {
	if len(call.Demands) != 1 {
		return false
	}
	a := &call.Demands[0]
	return a.Count > 0 && a.Count <= a.Definition.Capacity && m.entryOf(a).WorthPrefetching()
}

// End ends the claim with its call or transaction: the tokens are spent or put back.
func (c *Claim) End(spent bool) {
	for i := range c.tokens {
		if spent {
			c.tokens[i].Spend()
		} else {
			c.tokens[i].PutBack()
		}
	}
}

func (c *Claim) balances() []*decide.Balance {
	balances := make([]*decide.Balance, len(c.call.Demands))
	for i := range c.tokens {
		balances[i] = c.tokens[i].Balance()
	}
	return balances
}

// Result returns the result of the whole call, of which the rest has a result.
func (c *Claim) Result(rest ratelimit.Result) (result ratelimit.Result) {
	if len(c.tokens) > 1 {
		return c.call.Join(rest, c.balances())
	}
	c.tokens[0].Result(c.call.Reserve, &result)
	return result
}
