package memory

import (
	"context"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/escrow"
)

// Claim is the tokens of a call that were held, and the rest of it, for rows. A nil Claim has none.
type Claim struct {
	Rest decide.Call

	reserve bool
	call    *decide.Call    // nil if all is held, of a single limit
	tokens  []escrow.Tokens // of each limit; zero of one that is not held. Nil if none is
}

// None reports whether nothing of the call was held.
func (c *Claim) None() bool { return c == nil || c.tokens == nil }

// All reports whether all of the call was held.
func (c *Claim) All() bool { return !c.None() && len(c.Rest.Demands) == 0 }

// claim takes the held tokens of a call out of memory, limit by limit, until [Claim.End]. For
// several limits, missing tokens are prefetched for later calls: for one, the statement that grants
// it prefetches.
func (m *Memory) claim(call *decide.Call) *Claim {
	if m == nil {
		return nil
	}
	c := &Claim{reserve: call.Reserve, call: call}
	for i := range call.Demands {
		a := &call.Demands[i]
		var t escrow.Tokens
		if !m.entryOf(a).Take(a.Count, true, &t) {
			continue
		}
		if c.tokens == nil {
			c.tokens = make([]escrow.Tokens, len(call.Demands))
		}
		c.tokens[i] = t
	}
	rest := call
	if c.tokens != nil {
		c.Rest = call.Remainder(c.balances())
		rest = &c.Rest
	}
	if len(call.Demands) > 1 {
		for i := range rest.Demands {
			a := &rest.Demands[i]
			m.entryOf(a).Miss(a.Count)
		}
	}
	return c
}

// ClaimHeld claims the tokens of a transaction's call for one limit that is remembered; nil if they
// are not held.
func (m *Memory) ClaimHeld(reserve bool, requests []ratelimit.Request) *Claim {
	if m == nil || len(requests) != 1 {
		return nil
	}
	var t escrow.Tokens
	if !m.Remembered(&requests[0]).Take(requests[0].Count, true, &t) {
		return nil
	}
	return &Claim{reserve: reserve, tokens: []escrow.Tokens{t}}
}

// Claim claims the tokens of a transaction's call. The missing tokens of a single limit are granted
// on their own, if it is worth prefetching with them; if that is refused, so is the call: refused is
// its result then.
func (m *Memory) Claim(ctx context.Context, call *decide.Call) (c *Claim, refused ratelimit.Result, err error) {
	c = m.claim(call)
	if m == nil || !c.None() || len(call.Demands) != 1 {
		return c, refused, nil
	}
	a := call.Demands[0]
	tokens, entry := &escrow.Tokens{}, m.entryOf(&a)
	if !m.WorthPrefetching(call) {
		entry.CountDemand(a.Count, 1)
		return c, refused, nil // the transaction takes from the row
	}
	a.Floor = 0 // debt is the row's to give
	p := &engine.Pending{Call: decide.Call{Demands: []decide.Demand{a}}}
	Attach(p, entry, tokens)
	result, err := m.engine.Decide(ctx, nil, p)
	switch {
	case err != nil:
		return nil, refused, err
	case result.OK:
		return &Claim{reserve: call.Reserve, tokens: []escrow.Tokens{*tokens}}, refused, nil
	case call.Reserve:
		return c, refused, nil
	}
	return nil, result, nil
}

// WorthPrefetching reports whether a call is worth a statement of its own, which prefetches.
func (m *Memory) WorthPrefetching(call *decide.Call) bool {
	if m == nil || len(call.Demands) != 1 {
		return false
	}
	a := &call.Demands[0]
	return a.Count > 0 && a.Count <= a.Definition.Capacity && m.entryOf(a).WorthPrefetching()
}

// End notes that the call or transaction is over that has the tokens: unless they are spent, they
// are put back.
func (c *Claim) End(spent bool) {
	if c.None() {
		return
	}
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

// Result returns the result of the whole call, by that of the rest.
func (c *Claim) Result(rest ratelimit.Result) (result ratelimit.Result) {
	if len(c.tokens) > 1 {
		return c.call.Join(rest, c.balances())
	}
	c.tokens[0].Result(c.reserve, &result)
	return result
}

// granted keeps the tokens that a row has granted to a transaction, which may put them back.
func (h *attachment) granted(count float64, after bucket.State, at time.Time) {
	if h.received != nil {
		*h.tokens = h.received.Tokens(count, after)
		return
	}
	*h.tokens = h.entry.Granted(count, after, at)
}
