package edge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// classes knows the errors of any store.
var classes *watch.Observer

// Store is the part of a store that a [Limiter] needs.
type Store interface {
	Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
	Settle(ctx context.Context, receipt *ratelimit.Receipt, used ...float64) (ratelimit.Result, error)
}

// PermitStore is the part of a store that a [Limiter] needs for limits of how many at once.
type PermitStore interface {
	Acquire(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error)
	Release(ctx context.Context, permit ratelimit.Permit) error
	Keep(ctx context.Context, permit ratelimit.Permit, do func(ctx context.Context, permit ratelimit.Permit) error) error
}

// Limiter decides on requests by policies. Package, Store and Fault are required. Do not change it
// after Init; then it is safe for concurrent use.
type Limiter[R, O any] struct {
	Package  string // for errors and logs
	Store    Store
	Policies []Policy[R, O]
	InFlight []InFlight[R]
	Permits  PermitStore // for InFlight
	Catalog  ratelimit.Catalog

	Jitter            float64
	MaxJitter         time.Duration
	Timeout           time.Duration // of a decision, and of settling
	FailureRetryAfter time.Duration
	FullRetryAfter    time.Duration

	FailOpen bool
	Shadow   bool
	Observe  ratelimit.Observe // its context serves [Asked]
	Logger   *slog.Logger
	Fault    func(error) bool // reports whether an error comes from the request, and not from the store
}

// Init notes faults and sets defaults.
func (g *Limiter[R, O]) Init(f *Faults) {
	g.Policies, g.InFlight = slices.Clone(g.Policies), slices.Clone(g.InFlight)
	f.Must(g.Store != nil, "Store", nil, "must not be nil")
	g.checkLimits(f)
	g.checkInFlight(f)
	f.Must(g.Jitter >= 0 && g.Jitter <= 1, "Jitter", g.Jitter, "must be between 0 and 1")
	for _, d := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"MaxJitter", &g.MaxJitter, 30 * time.Second},
		{"Timeout", &g.Timeout, time.Second},
		{"FailureRetryAfter", &g.FailureRetryAfter, 5 * time.Second},
		{"FullRetryAfter", &g.FullRetryAfter, time.Second},
	} {
		f.Must(*d.value >= 0, d.name, *d.value, "must not be negative")
		*d.value = cmp.Or(*d.value, d.def)
	}
	g.Logger = cmp.Or(g.Logger, slog.Default())
}

// checkLimits notes faults of the policies.
func (g *Limiter[R, O]) checkLimits(f *Faults) {
	n := len(g.Policies)
	f.Must(n <= ratelimit.MaxRequests && (n > 0 || len(g.InFlight) > 0), "Policies", n, fmt.Sprintf("must be 1 to %d", ratelimit.MaxRequests))
	limits := make([]ratelimit.Limit, n)
	for i, p := range g.Policies {
		limits[i] = p.Limit
	}
	if err := ratelimit.Validate(limits...); err != nil {
		f.Add(err)
		return
	}
	for i, p := range g.Policies {
		d := limits[i].Definition()
		if d.Capacity == 0 {
			f.Add(&ratelimit.FieldError{Package: f.Package, Limit: d.Name, Field: "Capacity", Value: 0.0, Reason: "can never grant a request"})
		}
		if !(p.Above >= 0 && p.Above <= 1) {
			f.Add(&ratelimit.FieldError{Package: f.Package, Limit: d.Name, Field: "Above", Value: p.Above, Reason: "must be a share of the capacity, from 0 to 1"})
		}
	}
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

// RefusedFor returns how long a client that was refused should wait, with jitter.
func (g *Limiter[R, O]) RefusedFor(e *ratelimit.Event) time.Duration {
	if e.Permit != nil {
		return g.fullFor(e.Permit)
	}
	wait := e.Result.RetryAfter
	identity := Identity(ratelimit.NameOf(e.Result.Request.Limit), e.Result.Request.Key)
	return wait + Shift(identity, min(g.MaxJitter, time.Duration(g.Jitter*float64(wait))))
}

// fullFor returns a random wait of one to two FullRetryAfter, since no permit says when it will be
// free. If the limit's mode refuses, it is the time until the mode ends, and up to FullRetryAfter
// more.
func (g *Limiter[R, O]) fullFor(permit *ratelimit.Permit) time.Duration {
	wait := g.FullRetryAfter
	if permit.InFlight.Mode == ratelimit.ModeRefuse {
		wait = permit.NotBefore.Sub(permit.At)
	}
	return wait + rand.N(g.FullRetryAfter)
}

// Requests returns what r takes, in the order of the policies, without policies that do not apply.
// Beside an error it returns the limit of the policy with the fault.
func (g *Limiter[R, O]) Requests(r R) ([]ratelimit.Request, error) {
	requests := make([]ratelimit.Request, 0, len(g.Policies))
	for i := range g.Policies {
		request, err := g.Policies[i].request(r, g.Catalog)
		if err != nil {
			return []ratelimit.Request{{Limit: g.Policies[i].Limit}}, err
		}
		if request.Limit != nil {
			requests = append(requests, request)
		}
	}
	return requests, nil
}

// EventOf returns the event of an error, without reporting it.
func (g *Limiter[R, O]) EventOf(err error) ratelimit.Event {
	return g.event(ratelimit.Result{}, err, nil, nil)
}

// Fail reports an error that came before the store was asked, and returns its event.
func (g *Limiter[R, O]) Fail(ctx context.Context, r R, err error) ratelimit.Event {
	e := g.EventOf(err)
	g.tell(ctx, r, e)
	return e
}

// Answers returns the event of an error from a handler that took in its own transaction. If the
// error is about the limits, it reports the event and returns true: the middleware then answers the
// client.
func (g *Limiter[R, O]) Answers(ctx context.Context, r R, err error) (e ratelimit.Event, ok bool) {
	if e = g.EventOf(err); e.Outcome == ratelimit.OutcomeFailed {
		return e, false
	}
	g.tell(ctx, r, e)
	return e, true
}

// Granted reports and returns the event of what a handler took in its own transaction, after
// COMMIT. It has the store's result, or where that is unknown, the requests.
func (g *Limiter[R, O]) Granted(ctx context.Context, r R, result ratelimit.Result, requests []ratelimit.Request) ratelimit.Event {
	e := ratelimit.Event{
		Verb: ratelimit.VerbAllow, Door: g.Package, Outcome: ratelimit.OutcomeGranted, Passed: true,
		Result: result, Requests: requests,
	}
	g.tell(ctx, r, e)
	return e
}

// fault returns the log line for an event, or "" if the event is no fault. Package fallback logs a
// silence once, so the requests during it log nothing.
func fault(ctx context.Context, e *ratelimit.Event) string {
	switch {
	case e.ErrorClass == watch.Silent:
		return ""
	case e.Outcome == ratelimit.OutcomeLost:
		return "a permit was lost while its request was handled"
	case e.Verb == ratelimit.VerbSettle:
		return "what was taken could not be settled"
	case e.Outcome == ratelimit.OutcomeFailed && ctx.Err() == nil:
		return "the limit could not be asked"
	}
	return ""
}

// tell logs a fault, and reports the event to Observe.
func (g *Limiter[R, O]) tell(ctx context.Context, r R, e ratelimit.Event) {
	if text := fault(ctx, &e); text != "" {
		g.Logger.ErrorContext(ctx, g.Package+": "+text,
			slog.String("policy", e.Policy()), slog.Bool("passed", e.Passed), slog.String("error", e.ErrorText()))
	}
	if g.Observe != nil {
		g.Observe(context.WithValue(ctx, askedKey{}, r), e)
	}
}

// policy returns the policy whose limit has a name, or nil.
func (g *Limiter[R, O]) policy(name string) *Policy[R, O] {
	for i := range g.Policies {
		if p := &g.Policies[i]; ratelimit.NameOf(p.Limit) == name {
			return p
		}
	}
	return nil
}

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
