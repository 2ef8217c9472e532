package edge

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// CheckInFlight notes the faults of limits of how many at once. others are the limits of other
// kinds.
func CheckInFlight(f *Faults, permits PermitStore, limits []ratelimit.InFlight, others []ratelimit.Limit) {
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
	f.Must(permits != nil || len(limits) == 0, "Permits", nil, "must be set for policies in flight: it is the store's Permits()")
}

// wants returns the permits that r needs; N is 0 if it needs none.
func (g *Limiter[R, O]) wants(r R) (wants ratelimit.PermitRequest, err error) {
	for _, p := range g.InFlight {
		limit := p.Limit
		if p.Tier != nil {
			if limit, err = p.Tier(r); err != nil {
				return wants, err
			}
			if limit == (ratelimit.InFlight{}) {
				continue
			}
			if limit.Name != p.Limit.Name {
				return wants, &ratelimit.FieldError{Limit: p.Limit.Name, Field: "Tier", Value: limit.Name, Reason: "must be a copy of the policy's limit, of the same name"}
			}
		}
		key, err := p.Key(r)
		if err != nil {
			return wants, err
		}
		n := 1
		if p.Weight != nil {
			if n, err = p.Weight(r); err != nil {
				return wants, err
			}
		}
		if g.Catalog != nil {
			limit = g.Catalog.InFlight(limit, key)
		}
		if want := limit.ForN(key, n); wants.Limit.Name == "" {
			wants = want
		} else {
			wants = wants.And(want)
		}
	}
	return wants, nil
}

// take takes the permits, and tokens for requests: all or nothing. asked is the permit that the
// event is about. A refusal for want of a permit is a *ratelimit.FullError.
func (g *Limiter[R, O]) take(ctx context.Context, wants ratelimit.PermitRequest, requests []ratelimit.Request) (permits []ratelimit.Permit, asked *ratelimit.Permit, result ratelimit.Result, err error) {
	bounded, cancel := context.WithTimeout(ctx, g.Timeout)
	defer cancel()
	if wants.Limit.Name == "" {
		result, err = g.Store.Allow(bounded, requests...)
		return nil, nil, result, err
	}
	permit, err := g.Permits.Acquire(bounded, wants, requests...)
	switch {
	case err == nil && permit.OK:
		if result = permit.Rates; len(requests) == 0 {
			result.OK = true
		}
		permits = permit.Parts() // so the handler can release each by itself
		return permits, &permits[len(permits)-1], result, nil
	case err == nil && permit.Rates.Request.Limit != nil:
		result = permit.Rates // it refused
	case err == nil:
		return nil, &permit, result, permit.Err()
	}
	return nil, &ratelimit.Permit{InFlight: wants.Limit, Key: wants.Key, N: wants.N}, result, err
}

// giveBack releases the permits of a request that is not handled. If that fails, a permit is free
// when its lease ends.
func (g *Limiter[R, O]) giveBack(ctx context.Context, permits []ratelimit.Permit) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.Timeout)
	defer cancel()
	for _, s := range permits {
		_ = g.Permits.Release(ctx, s)
	}
}

// keep runs do and keeps the permits meanwhile. of is the permit that err is about. do's context
// ends if a permit is lost, but not in shadow mode, where limits have no effect.
func (g *Limiter[R, O]) keep(ctx context.Context, permits []ratelimit.Permit, do func(ctx context.Context)) (of *ratelimit.Permit, err error) {
	if len(permits) == 0 {
		do(ctx)
		return nil, nil
	}
	err = g.Permits.Keep(ctx, permits[0], func(kept context.Context, _ ratelimit.Permit) (err error) {
		if g.Shadow {
			kept = ctx
		}
		of, err = g.keep(kept, permits[1:], do)
		return err
	})
	if err != nil && of == nil {
		of = &permits[0]
	}
	return of, err
}

// FullWait returns how long a client without a permit should wait before the next try. Nobody knows
// when a permit is free, so that is wait to twice wait. If the limit's mode refuses, it is the time
// until the mode ends, and up to wait more.
func FullWait(permit ratelimit.Permit, wait time.Duration) time.Duration {
	spread := rand.N(wait)
	if permit.InFlight.Mode == ratelimit.ModeRefuse {
		wait = permit.NotBefore.Sub(permit.At)
	}
	return wait + spread
}
