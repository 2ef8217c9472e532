package edge

import (
	"context"
	"log/slog"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// Store is the part of a store that a [Limiter] needs.
type Store interface {
	Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
	Settle(ctx context.Context, receipt *ratelimit.Receipt, used ...float64) (ratelimit.Result, error)
}

// Limiter decides on requests by policies. All fields but InFlight, Permits, Catalog and Observe are
// required. It is not to be changed once it is in use, and then safe for concurrent use.
type Limiter[R, O any] struct {
	Package  string // for errors and logs
	Store    Store
	Policies []Policy[R, O]
	InFlight []InFlight[R]
	Permits  PermitStore // for InFlight
	Catalog  ratelimit.Catalog
	Timeout  time.Duration // of a decision, and of settling
	FailOpen bool
	Shadow   bool
	Observe  ratelimit.Observe // with a context for [Asked]
	Logger   *slog.Logger
	Fault    func(error) bool // is an error one of the request, rather than of the store?
}

// Ask decides on r, and tells Observe. The request is let through if the event has Passed; then
// its work is to be done by [Admission.Do].
func (g *Limiter[R, O]) Ask(ctx context.Context, r R) (*Admission[R, O], ratelimit.Event) {
	pass := &Admission[R, O]{gate: g, r: r}
	requests, err := g.requests(r)
	var wants ratelimit.PermitRequest
	var permit *ratelimit.Permit
	if err == nil {
		if wants, err = g.wants(r); err != nil {
			permit = &ratelimit.Permit{InFlight: wants.Limit}
		}
	}
	if err == nil && len(requests) == 0 && wants.Limit.Name == "" { // no policy applies
		return pass, ratelimit.Event{Door: g.Package, Outcome: ratelimit.OutcomeGranted, Passed: true, Shadow: g.Shadow}
	}
	var result ratelimit.Result
	if err == nil {
		pass.charge.permits, permit, result, err = g.take(ctx, wants, requests)
	}
	e := g.event(result, err, permit, requests)
	gone := ctx.Err() != nil // a client that has gone is not let through because its leaving failed the call
	e.Passed = g.Shadow || e.Outcome == ratelimit.OutcomeGranted || e.Outcome == ratelimit.OutcomeFailed && g.FailOpen && !gone
	g.tell(ctx, r, e)
	pass.took(result)
	return pass, e
}

// Requests returns the requests of the policies for r, in their order, without those that do
// not apply.
func (g *Limiter[R, O]) Requests(r R) ([]ratelimit.Request, error) {
	requests, err := g.requests(r)
	if err != nil {
		return nil, err
	}
	return requests, nil
}

// requests is Requests, and with an error the limit of the policy that it is about.
func (g *Limiter[R, O]) requests(r R) ([]ratelimit.Request, error) {
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

// EventOf returns the event of an error before or instead of a store's answer, and tells nobody.
func (g *Limiter[R, O]) EventOf(err error) ratelimit.Event {
	return g.event(ratelimit.Result{}, err, nil, nil)
}

// Fail tells Observe and the log of an error before the store was asked, and returns its event.
func (g *Limiter[R, O]) Fail(ctx context.Context, r R, err error) ratelimit.Event {
	e := g.EventOf(err)
	g.tell(ctx, r, e)
	return e
}

// Answers returns the event of an error with which a handler has ended that took in a
// transaction of its own, and reports whether that is about the limits: then Observe has heard
// of it, and it is to be answered.
func (g *Limiter[R, O]) Answers(ctx context.Context, r R, err error) (e ratelimit.Event, ok bool) {
	if e = g.EventOf(err); e.Outcome == ratelimit.OutcomeFailed {
		return e, false
	}
	g.tell(ctx, r, e)
	return e, true
}

// Granted tells Observe of what a handler took in a transaction of its own, once that has committed,
// by the store's answer or, where that is not known, by the requests; and returns the event.
func (g *Limiter[R, O]) Granted(ctx context.Context, r R, result ratelimit.Result, requests []ratelimit.Request) ratelimit.Event {
	e := ratelimit.Event{
		Verb: ratelimit.VerbAllow, Door: g.Package, Outcome: ratelimit.OutcomeGranted, Passed: true,
		Result: result, Requests: requests,
	}
	g.tell(ctx, r, e)
	return e
}

// fault returns the log's message of an event that is a fault, "" of any other. A silence has one
// line of package fallback, and none for each request.
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

// tell tells the log of faults, and Observe of all.
func (g *Limiter[R, O]) tell(ctx context.Context, r R, e ratelimit.Event) {
	if text := fault(ctx, &e); text != "" {
		g.Logger.ErrorContext(ctx, g.Package+": "+text,
			slog.String("policy", e.Policy()), slog.Bool("passed", e.Passed), slog.String("error", e.ErrorText()))
	}
	if g.Observe != nil {
		g.Observe(context.WithValue(ctx, askedKey{}, r), e)
	}
}

// policy returns the policy of a limit's name, or nil.
func (g *Limiter[R, O]) policy(name string) *Policy[R, O] {
	for i := range g.Policies {
		if p := &g.Policies[i]; ratelimit.NameOf(p.Limit) == name {
			return p
		}
	}
	return nil
}

// limitOf returns the limit of that name, or nil.
func (g *Limiter[R, O]) limitOf(name string) ratelimit.Limit {
	if p := g.policy(name); p != nil {
		return p.Limit
	}
	return nil
}
