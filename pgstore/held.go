package pgstore

import (
	"context"
	"slices"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
)

// What is decided from memory: package escrow has what is held, and the rules.

// fromMemory tells the result of a call for n tokens of a key that was seen before, if it
// is in memory.
func fromMemory(h *escrow.Holder, reserve bool, n float64, result *ratelimit.Result) (ok bool) {
	var t escrow.Tokens
	if h.Take(n, &t) {
		t.Result(reserve, result)
		return true
	}
	if reserve { // there may be debt to give
		return false
	}
	*result, ok = h.Refuse(n)
	return ok
}

// refusedBefore is the result of a call that is refused by what is remembered.
func refusedBefore(p *pending) (ratelimit.Result, bool) {
	state, at, ok := p.holder.Refusal()
	if !ok {
		return ratelimit.Result{}, false
	}
	result := p.call.Checked(decide.View{States: [][]bucket.State{{state}}, At: at})
	return result, !result.OK
}

// held is tokens that were taken out of memory for a call.
type held struct {
	reserve bool
	tokens  []escrow.Tokens // of each of its asks; zero of one that was not in memory
	call    *decide.Call    // nil if it may be, since all is in memory of a single ask
	rest    decide.Call     // for what was not in memory
}

// putBack puts the tokens back, which were not used.
func (h *held) putBack() {
	for i := range h.tokens {
		if h.tokens[i].Holder != nil {
			h.tokens[i].PutBack()
		}
	}
}

func (h *held) stands() []*decide.Stand {
	stands := make([]*decide.Stand, len(h.tokens))
	for i := range h.tokens {
		stands[i] = h.tokens[i].Stand()
	}
	return stands
}

// whole is the result of the whole call, by that of the rest.
func (h *held) whole(rest ratelimit.Result) (result ratelimit.Result) {
	if len(h.tokens) > 1 {
		return h.call.Whole(rest, h.stands())
	}
	h.tokens[0].Result(h.reserve, &result)
	return result
}

// all reports whether all of the call was in memory.
func (h *held) all() bool { return h != nil && len(h.rest.Asks) == 0 }

// missed has what a call takes from rows taken ahead for those who come later, unless the
// statement that grants it does that.
func (o *own) missed(call *decide.Call) {
	for i := range call.Asks {
		a := &call.Asks[i]
		o.hints.memory.Of(a).Miss(a.Count)
	}
}

// takeHeld takes out of memory what there is for a call, limit by limit; nil if there is
// nothing.
func (o *own) takeHeld(call *decide.Call) *held {
	if o.hints.memory == nil || call.First || call.AtMost() {
		return nil
	}
	var h *held
	for i := range call.Asks {
		a := &call.Asks[i]
		var t escrow.Tokens
		if !o.hints.memory.Of(a).Take(a.Count, &t) {
			continue
		}
		if h == nil {
			h = &held{reserve: call.Reserve, tokens: make([]escrow.Tokens, len(call.Asks)), call: call}
		}
		h.tokens[i] = t
	}
	if h != nil {
		h.rest = call.Rest(h.stands())
	}
	return h
}

// takeSeen is takeHeld for a call for one limit that was seen before.
func (o *own) takeSeen(reserve bool, requests []ratelimit.Request) *held {
	if len(requests) != 1 || o.hints.memory == nil {
		return nil
	}
	var t escrow.Tokens
	if !o.hints.memory.Seen(&requests[0]).Take(requests[0].Count, &t) {
		return nil
	}
	return &held{reserve: reserve, tokens: []escrow.Tokens{t}}
}

// secure is takeHeld for tokens that may be put back later. Those of a single limit are
// taken ahead for the call, if that can be.
func (o *own) secure(ctx context.Context, call *decide.Call) (*held, error) {
	h := o.takeHeld(call)
	switch {
	case o.hints.memory == nil:
		return nil, nil
	case h != nil:
		o.missed(&h.rest)
		return h, nil
	case len(call.Asks) > 1:
		o.missed(call)
		return nil, nil
	}
	t, ok, err := o.secureOne(ctx, call)
	if !ok {
		return nil, err
	}
	return &held{reserve: call.Reserve, tokens: []escrow.Tokens{t}}, nil
}

func (o *own) secureOne(ctx context.Context, call *decide.Call) (t escrow.Tokens, ok bool, err error) {
	a := &call.Asks[0]
	h := o.hints.memory.Of(a)
	if a.Count == 0 || !h.Holds() || o.work.begin() != nil {
		return t, false, nil // the caller's transaction takes from the row
	}
	defer o.work.end()
	p := callOf(a, toHold, h)
	p.call.Asks[0].Floor = 0 // debt is the row's to give
	if err := o.together(ctx, p); err != nil {
		return t, false, o.gaveUp(p, err)
	}
	if p.tokens == nil {
		return t, false, p.err
	}
	return *p.tokens, true, p.err
}

// serveHeld answers calls for which enough has been taken ahead since they came, and
// returns the others.
func (o *own) serveHeld(tickets []*ticket) []*ticket {
	if o.hints.memory == nil {
		return tickets
	}
	return slices.DeleteFunc(tickets, func(t *ticket) bool {
		p := t.Value
		if p.call.First || p.call.AtMost() { // which take from rows
			return false
		}
		if p.wants == ahead {
			return o.enough(t)
		}
		var tokens escrow.Tokens
		ok := p.holder.Take(p.call.Asks[0].Count, &tokens)
		if ok {
			o.tellHeld(t, &tokens)
		}
		return ok
	})
}

func (o *own) tellHeld(t *ticket, tokens *escrow.Tokens) {
	if p := t.Value; p.wants == toHold {
		held := *tokens
		p.tokens = &held
	} else {
		tokens.Result(p.call.Reserve, &p.result)
	}
	t.Finish()
}

// enough answers a call that wants more taken ahead, if there is no need any more, or no more
// to be had.
func (o *own) enough(t *ticket) bool {
	if order, _ := t.Value.holder.Order(0); order.Ahead > 0 {
		return false
	}
	t.Finish()
	return true
}
