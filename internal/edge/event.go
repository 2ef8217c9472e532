package edge

import (
	"context"
	"errors"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// classes knows the errors of any store.
var classes *watch.Observer

// event returns the event of a store's answer to requests, or of an error. permit is the permit
// that the answer is about, or nil.
func (g *Limiter[R, O]) event(result ratelimit.Result, err error, permit *ratelimit.Permit, requests []ratelimit.Request) ratelimit.Event {
	e := ratelimit.Event{Verb: ratelimit.VerbAllow, Door: g.Package, Shadow: g.Shadow, Outcome: g.outcome(&result, err), Result: result}
	var full *ratelimit.FullError
	var refused *ratelimit.RefusedError
	switch {
	case errors.As(err, &full):
		e.Permit = &full.Permit
	case errors.As(err, &refused):
		e.Result = refused.Result
	case err != nil:
		e.Permit, e.Requests, e.Err, e.ErrorClass = permit, requests, err, classes.Class(err)
		if e.Outcome == ratelimit.OutcomeInvalid {
			e.ErrorClass = "invalid"
		}
	case result.Request.Limit == nil:
		e.Permit = permit
	}
	if e.Permit != nil {
		e.Verb = ratelimit.VerbAcquire
	}
	return e
}

// outcome returns the outcome of a store's answer, or of an error.
func (g *Limiter[R, O]) outcome(result *ratelimit.Result, err error) ratelimit.Outcome {
	var field *ratelimit.FieldError
	switch {
	case err == nil, errors.Is(err, ratelimit.ErrRefused):
		return classes.Outcome(result, err)
	case errors.Is(err, ratelimit.ErrExceedsCapacity):
		return ratelimit.OutcomeTooLarge
	case g.Fault(err):
		return ratelimit.OutcomeInvalid
	case errors.As(err, &field) && (field.Field == "Key" || field.Field == "Count" || field.Field == "N"):
		return ratelimit.OutcomeInvalid
	}
	return ratelimit.OutcomeFailed
}

type askedKey struct{}

// Asked returns the request that an event is about, from the context of Limiter.Observe. In another
// context it returns the zero R.
func Asked[R any](ctx context.Context) (r R) {
	r, _ = ctx.Value(askedKey{}).(R)
	return r
}

// Refused reports whether a request was refused for want of tokens or of a permit.
func Refused(e *ratelimit.Event) bool {
	return e.Outcome == ratelimit.OutcomeRefused || e.Outcome == ratelimit.OutcomePaused
}
