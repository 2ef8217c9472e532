package edge

import (
	"context"
	"errors"
	"slices"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// InFlight limits how many requests of a key are handled at a time, over all processes. A request
// holds its permits until its handler has returned or panicked. The lease is renewed meanwhile, also
// while the handler streams or works on for a client that has gone. If the database does not answer
// for a lease, the permit is lost, and the handler's context ends with the [context.Cause]
// [ratelimit.ErrLeaseLost]. The permits of a process that dies are free within a lease.
type InFlight[R any] struct {
	// Limit is the limit. Required. Its name is public like a Policy's, and differs from those
	// of all policies.
	Limit ratelimit.InFlight

	// Applies selects requests. The default, nil, is all of them.
	Applies func(R) bool

	// Key returns the key of a request. Nil is one key for all requests.
	Key func(R) (string, error)

	// Tier chooses the limit of a request: a copy of Limit with another number or lease, and
	// the same name. With a zero InFlight the policy does not apply to the request. An error is
	// answered like one of Key. The default, nil, is Limit for all.
	Tier func(R) (ratelimit.InFlight, error)

	// Weight returns how many permits a request takes, all or nothing. More permits than the
	// limit has are never granted. An error is answered like one of Key. The default, nil, is
	// one.
	Weight func(R) (int, error)
}

// checkInFlight notes faults of the policies in flight.
func (g *Limiter[R, O]) checkInFlight(f *Faults) {
	names := Names(g.Policies, nil)
	for _, p := range g.InFlight {
		l := p.Limit
		if err := l.Validate(); err != nil {
			f.Add(err)
		}
		if slices.Contains(names, l.Name) {
			f.Add(&ratelimit.FieldError{Package: f.Package, Limit: l.Name, Field: "Name", Value: l.Name, Reason: "is that of two limits"})
		}
		names = append(names, l.Name)
	}
	f.Must(g.Permits != nil || len(g.InFlight) == 0, "Permits", nil, "must be set for policies in flight: it is the store's Permits()")
}

// wants returns the permits that r needs; N is 0 if it needs none. With an error, Limit is that of the
// policy that failed.
func (g *Limiter[R, O]) wants(r R) (wants ratelimit.PermitRequest, err error) {
	for i := range g.InFlight {
		want, err := g.InFlight[i].request(r, g.Catalog)
		switch {
		case err != nil:
			return ratelimit.PermitRequest{Limit: g.InFlight[i].Limit}, err
		case want.Limit.Name == "":
		case wants.Limit.Name == "":
			wants = want
		default:
			wants = wants.And(want)
		}
	}
	return wants, nil
}

// request returns the permits of a policy that r needs; N is 0 if the policy does not apply.
func (p *InFlight[R]) request(r R, catalog ratelimit.Catalog) (want ratelimit.PermitRequest, err error) {
	if p.Applies != nil && !p.Applies(r) {
		return want, nil
	}
	limit := p.Limit
	if p.Tier != nil {
		if limit, err = p.Tier(r); err != nil || limit == (ratelimit.InFlight{}) {
			return want, err
		}
		if limit.Name != p.Limit.Name {
			return want, &ratelimit.FieldError{Limit: p.Limit.Name, Field: "Tier", Value: limit.Name, Reason: "must be a copy of the policy's limit, of the same name"}
		}
	}
	key, n := "", 1
	if p.Key != nil {
		if key, err = p.Key(r); err != nil {
			return want, err
		}
	}
	if p.Weight != nil {
		if n, err = p.Weight(r); err != nil {
			return want, err
		}
	}
	if catalog != nil {
		limit = catalog.InFlight(limit, key)
	}
	return limit.ForN(key, n), nil
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
	if never := (*ratelimit.ExceedsCapacityError)(nil); errors.As(err, &never) { // of a rate
		return nil, nil, result, err
	}
	about := watch.Asked(&wants, err)
	return nil, &about, result, err
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
