package edge

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// SlotStore is the part of a store that a [Gate] needs for limits in flight.
type SlotStore interface {
	Acquire(ctx context.Context, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (ratelimit.Slot, error)
	Release(ctx context.Context, slot ratelimit.Slot) error
	Keep(ctx context.Context, slot ratelimit.Slot, do func(ctx context.Context, slot ratelimit.Slot) error) error
}

// InFlight is a policy that holds a slot while a request is handled. Tier may be nil.
type InFlight[R any] struct {
	Limit ratelimit.InFlight
	Key   func(R) (string, error)
	Tier  func(R) (ratelimit.InFlight, error)
}

// CheckInFlight notes the faults of limits in flight, beside limits of other kinds, and returns
// the store's verbs for them.
func CheckInFlight(f *Faults, store Store, limits []ratelimit.InFlight, others []ratelimit.Limit) SlotStore {
	var names []string
	for _, l := range others {
		names = append(names, ratelimit.NameOf(l))
	}
	for _, l := range limits {
		if err := l.Validate(); err != nil {
			f.Add(err)
		}
		if slices.Contains(names, l.Name) {
			f.Add(&ratelimit.FieldError{Package: f.Package, Limit: l.Name, Field: "Name", Value: l.Name, Reason: "is that of two limits"})
		}
		names = append(names, l.Name)
	}
	slots, ok := store.(SlotStore)
	f.Must(ok || len(limits) == 0, "Store", "without slots", "must have Acquire, Release and Keep for policies in flight")
	return slots
}

// wants returns the slots that r is to have, which nobody has yet.
func (g *Gate[R, O]) wants(r R) (wants []ratelimit.Slot, err error) {
	for _, p := range g.InFlight {
		limit := p.Limit
		if p.Tier != nil {
			if limit, err = p.Tier(r); err != nil {
				return nil, err
			}
			if limit == (ratelimit.InFlight{}) {
				continue
			}
			if limit.Name != p.Limit.Name {
				return nil, &ratelimit.FieldError{Limit: p.Limit.Name, Field: "Tier", Value: limit.Name, Reason: "must be a copy of the policy's limit, of the same name"}
			}
		}
		key, err := p.Key(r)
		if err != nil {
			return nil, err
		}
		if g.Catalog != nil {
			limit = g.Catalog.InFlight(limit, key)
		}
		wants = append(wants, ratelimit.Slot{InFlight: limit, Key: key})
	}
	return wants, nil
}

// take takes the slots and the tokens of requests, or nothing, and returns the slot that was
// asked last. A refusal for want of a slot is an error, a *ratelimit.FullError.
func (g *Gate[R, O]) take(ctx context.Context, wants []ratelimit.Slot, requests []ratelimit.Request) (slots []ratelimit.Slot, last *ratelimit.Slot, result ratelimit.Result, err error) {
	bounded, cancel := context.WithTimeout(ctx, g.Timeout)
	defer cancel()
	if len(wants) == 0 {
		result, err = g.Store.Allow(bounded, requests...)
		return nil, nil, result, err
	}
	for i, w := range wants {
		var rates []ratelimit.Request
		if i == len(wants)-1 { // with the last slot, so that none is missing when they grant
			rates = requests
		}
		slot, err := g.Slots.Acquire(bounded, w.InFlight, w.Key, rates...)
		switch {
		case err == nil && slot.OK:
			slots, result = append(slots, slot), slot.Rates
			continue
		case err == nil && slot.Rates.Request.Limit != nil:
			result = slot.Rates // which refused
		case err == nil:
			err = slot.Err()
		}
		g.giveBack(ctx, slots)
		return nil, &wants[i], result, err
	}
	if len(requests) == 0 {
		result.OK = true
	}
	return slots, &slots[len(slots)-1], result, nil
}

// giveBack releases slots of a request that is not handled. A slot that cannot be released is
// free when its lease is over.
func (g *Gate[R, O]) giveBack(ctx context.Context, slots []ratelimit.Slot) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.Timeout)
	defer cancel()
	for _, s := range slots {
		_ = g.Slots.Release(ctx, s)
	}
}

// keep runs do while it keeps the slots, and returns the one that its error is about. The context
// of do ends when one is lost, but in shadow mode, in which nothing is to come of limits.
func (g *Gate[R, O]) keep(ctx context.Context, slots []ratelimit.Slot, do func(ctx context.Context)) (of *ratelimit.Slot, err error) {
	if len(slots) == 0 {
		do(ctx)
		return nil, nil
	}
	err = g.Slots.Keep(ctx, slots[0], func(kept context.Context, _ ratelimit.Slot) (err error) {
		if g.Shadow {
			kept = ctx
		}
		of, err = g.keep(kept, slots[1:], do)
		return err
	})
	if err != nil && of == nil {
		of = &slots[0]
	}
	return of, err
}

// SlotOf returns the slot that a request holds of a policy, by the name of its limit. ctx is
// that of [Pass.Do].
func SlotOf(ctx context.Context, policy string) (slot ratelimit.Slot, ok bool) {
	for c, _ := ctx.Value(chargeKey{}).(*charge); c != nil; c = c.outer {
		for _, s := range c.slots {
			if s.InFlight.Name == policy {
				return s, true
			}
		}
	}
	return slot, false
}

// FullWait returns after how long a client is to try again that was refused a slot: nobody knows
// when one is free, so after wait to twice that; and if its limit's mode refuses, when that ends.
func FullWait(slot ratelimit.Slot, wait time.Duration) time.Duration {
	spread := rand.N(wait)
	if slot.InFlight.Mode == ratelimit.ModeRefuse {
		wait = slot.NotBefore.Sub(slot.At)
	}
	return wait + spread
}
