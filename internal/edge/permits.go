package edge

import (
	"context"
	"errors"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

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
