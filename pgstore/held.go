package pgstore

import (
	"context"
	"slices"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
)

// What is decided from memory: package escrow has what is held, and the rules.

// fromMemory is the result of a call that was seen before, if it is in memory.
func (o *own) fromMemory(reserve bool, r *ratelimit.Request) (ratelimit.Result, bool) {
	h := o.hints.memory.Seen(r)
	if t, ok := h.Take(r.Count); ok {
		return t.Result(reserve), true
	}
	if reserve { // there may be debt to give
		return ratelimit.Result{}, false
	}
	return h.Refuse(r.Count)
}

// refusedBefore is the result of a call that is refused by what is remembered.
func refusedBefore(p *pending) (ratelimit.Result, bool) {
	state, at, ok := p.holder.Refusal()
	if !ok {
		return ratelimit.Result{}, false
	}
	result := p.call.Checked(decide.View{States: [][]ratelimit.State{{state}}, At: at})
	return result, !result.OK
}

// held is tokens that were taken out of memory for a call.
type held struct {
	call   *decide.Call
	rest   decide.Call     // for what was not in memory
	tokens []escrow.Tokens // of each of its asks; zero of one that was not
	stands []*decide.Stand // of those
}

// putBack puts the tokens back, which were not used.
func (h *held) putBack() {
	for i := range h.tokens {
		if h.stands[i] != nil {
			h.tokens[i].PutBack()
		}
	}
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
		t, ok := o.hints.memory.Of(a).Take(a.Count)
		if !ok {
			continue
		}
		if h == nil {
			h = &held{call: call, tokens: make([]escrow.Tokens, len(call.Asks)), stands: make([]*decide.Stand, len(call.Asks))}
		}
		h.tokens[i] = t
		h.stands[i] = t.Stand()
	}
	if h != nil {
		h.rest = call.Rest(h.stands)
	}
	return h
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
	return &held{call: call, tokens: []escrow.Tokens{t}, stands: []*decide.Stand{t.Stand()}}, nil
}

func (o *own) secureOne(ctx context.Context, call *decide.Call) (t escrow.Tokens, ok bool, err error) {
	a := &call.Asks[0]
	h := o.hints.memory.Of(a)
	if a.Count == 0 || !h.Holds() || o.work.begin() != nil {
		return t, false, nil // the caller's transaction takes from the row
	}
	defer o.work.end()
	p := &pending{call: decide.Call{Asks: []decide.Ask{*a}}, hold: true, holder: h}
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
		tokens, ok := p.holder.Take(p.call.Asks[0].Count)
		if ok {
			o.tellHeld(t, &tokens)
		}
		return ok
	})
}

func (o *own) tellHeld(t *ticket, tokens *escrow.Tokens) {
	if p := t.Value; p.hold {
		held := *tokens
		p.tokens = &held
	} else {
		p.result = tokens.Result(p.call.Reserve)
	}
	t.Finish()
}
