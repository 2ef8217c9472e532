package edge

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Store is the part of a store that a [Gate] needs.
type Store interface {
	Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
	Settle(ctx context.Context, receipt *ratelimit.Receipt, used ...float64) (ratelimit.Result, error)
}

// Gate decides on requests by policies. All fields but InFlight, Slots, Catalog and Observe are
// required. It is
// not to be changed once it is in use, and then safe for concurrent use.
type Gate[R, O any] struct {
	Package  string // for errors and logs
	Store    Store
	Policies []Policy[R, O]
	InFlight []InFlight[R]
	Slots    SlotStore // for InFlight
	Catalog  ratelimit.Catalog
	Timeout  time.Duration // of a decision, and of settling
	FailOpen bool
	Shadow   bool
	Observe  func(R, Event)
	Logger   *slog.Logger
	Fault    func(error) bool // is an error one of the request, rather than of the store?
}

// Ask decides on r, and tells Observe. The request is let through if the event has Passed; then
// its work is to be done by [Pass.Do].
func (g *Gate[R, O]) Ask(ctx context.Context, r R) (*Pass[R, O], Event) {
	pass := &Pass[R, O]{gate: g, r: r}
	requests, err := g.requests(r)
	var wants []ratelimit.Slot
	if err == nil {
		wants, err = g.wants(r)
	}
	if err == nil && len(requests) == 0 && len(wants) == 0 { // no policy applies
		return pass, Event{Decision: Granted, Passed: true, Shadow: g.Shadow}
	}
	var result ratelimit.Result
	if err == nil {
		pass.charge.slots, result, err = g.take(ctx, wants, requests)
	}
	e := g.event(result, err, append(keysOf(wants), requests...))
	e.Shadow = g.Shadow
	gone := ctx.Err() != nil // a client that has gone is not let through because its leaving failed the call
	e.Passed = g.Shadow || e.Decision == Granted || e.Decision == Failed && g.FailOpen && !gone
	g.tell(ctx, r, e)
	pass.took(result)
	return pass, e
}

// Requests returns the requests of the policies for r, in their order, without those that do
// not apply.
func (g *Gate[R, O]) Requests(r R) ([]ratelimit.Request, error) {
	requests, err := g.requests(r)
	if err != nil {
		return nil, err
	}
	return requests, nil
}

// requests is Requests, and with an error the limit of the policy that it is about.
func (g *Gate[R, O]) requests(r R) ([]ratelimit.Request, error) {
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

// event returns the event of a store's answer to requests.
func (g *Gate[R, O]) event(result ratelimit.Result, err error, requests []ratelimit.Request) Event {
	e := newEvent(g.Package, decisionOf(result, err, g.Fault), err, requests)
	e.Result = result
	return e
}

// EventOf returns the event of an error before or instead of a store's answer.
func (g *Gate[R, O]) EventOf(err error, requests []ratelimit.Request) Event {
	return g.event(ratelimit.Result{}, err, requests)
}

// Fail tells Observe and the log of an error before the store was asked, and returns its event.
func (g *Gate[R, O]) Fail(ctx context.Context, r R, err error) Event {
	e := g.EventOf(err, nil)
	g.tell(ctx, r, e)
	return e
}

// Answers returns the event of an error with which a handler has ended that took in a
// transaction of its own, and reports whether that is about the limits: then Observe has heard
// of it, and it is to be answered.
func (g *Gate[R, O]) Answers(r R, err error) (e Event, ok bool) {
	if err == nil {
		return e, false
	}
	if e = g.EventOf(err, nil); e.Decision == Failed {
		return e, false
	}
	if refused := (*ratelimit.RefusedError)(nil); errors.As(err, &refused) {
		e.Result, e.Err = refused.Result, nil
	}
	if g.Observe != nil {
		g.Observe(r, e)
	}
	return e, true
}

// faults is the log messages of decisions that are faults.
var faults = map[Decision]string{
	Failed:       "the limit could not be asked",
	SettleFailed: "what was taken could not be settled",
	LeaseLost:    "a slot was lost while its request was handled",
}

// tell tells the log of faults, and Observe of all.
func (g *Gate[R, O]) tell(ctx context.Context, r R, e Event) {
	if e.Decision == SettleFailed || e.Decision == LeaseLost || e.Decision == Failed && ctx.Err() == nil {
		g.Logger.ErrorContext(ctx, g.Package+": "+faults[e.Decision],
			slog.String("decision", e.Decision.String()), slog.Bool("passed", e.Passed), slog.String("error", e.errText()))
	}
	if g.Observe != nil {
		g.Observe(r, e)
	}
}

// policy returns the policy of a limit's name, or nil.
func (g *Gate[R, O]) policy(name string) *Policy[R, O] {
	for i := range g.Policies {
		if p := &g.Policies[i]; ratelimit.NameOf(p.Limit) == name {
			return p
		}
	}
	return nil
}

// limitOf returns the limit of that name, or nil.
func (g *Gate[R, O]) limitOf(name string) ratelimit.Limit {
	if p := g.policy(name); p != nil {
		return p.Limit
	}
	return nil
}
