// Package watch reports the verbs of a store to Config.Observe.
package watch

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Observer calls a function with each decision. A nil Observer does nothing.
type Observer struct {
	observe ratelimit.Observe
	class   func(error) string
}

// New returns an Observer, or nil without a function. class returns the class of errors that only
// this store has, and "" for all others.
func New(observe ratelimit.Observe, class func(error) string) *Observer {
	if observe == nil {
		return nil
	}
	return &Observer{observe: observe, class: class}
}

// Watch measures one verb. The zero Watch reports nothing.
type Watch struct {
	observer *Observer
	ctx      context.Context
	verb     ratelimit.Verb
	requests []ratelimit.Request
	began    time.Time

	Form ratelimit.Form
	Effort

	// Outcome returns the outcome where the answer alone does not say.
	Outcome ratelimit.Outcome
}

// Effort is the time a decision waited, and the statements it took.
type Effort struct {
	Queued         time.Duration
	Batch, Retries int
}

// Begin starts to measure a verb. Without an observer it costs nothing.
func (o *Observer) Begin(ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, requests []ratelimit.Request) (w Watch) {
	if o == nil {
		return w
	}
	w.BeginLater(o, ctx, verb, form, requests)
	w.began = time.Now()
	return w
}

// BeginLater is for verbs that memory may answer: the time counts from [Watch.Start]. It fills w in
// place, which is faster than to copy a Watch, and copies the requests, which keeps the callers'
// off the heap.
func (w *Watch) BeginLater(o *Observer, ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, requests []ratelimit.Request) {
	if o != nil {
		w.observer, w.ctx, w.verb, w.Form, w.requests = o, ctx, verb, form, slices.Clone(requests)
	}
}

// Add adds the effort of one statement, since a call in modes may need several. The batch is that
// of the last one.
func (w *Watch) Add(e Effort) {
	w.Queued, w.Retries, w.Batch = w.Queued+e.Queued, w.Retries+e.Retries, e.Batch
}

// InMemory notes that memory has answered the verb.
func (w *Watch) InMemory() {
	if w != nil {
		w.Form = ratelimit.FormMemory
	}
}

// Start starts the time of a verb, unless it runs already, and returns now; without an observer it
// returns the zero time.
func (w *Watch) Start() (now time.Time) {
	if w == nil || w.observer == nil {
		return now
	}
	now = time.Now()
	if w.began.IsZero() {
		w.began = now
	}
	return now
}

// Report reports a verb that returned a result.
func (w *Watch) Report(result *ratelimit.Result, err error) {
	if w.observer != nil {
		w.report(result, nil, err)
	}
}

// ReportError reports a verb without a result; it is for defer.
func (w *Watch) ReportError(err *error) {
	if w.observer != nil {
		w.report(nil, nil, *err)
	}
}

// ReportPermit reports a verb of permits.
func (w *Watch) ReportPermit(permit ratelimit.Permit, err error) {
	if w.observer != nil {
		its := permit // only then on the heap
		w.report(nil, &its, err)
	}
}

// ReportAcquire reports a verb that acquires permits: after an error, that of Asked.
func (w *Watch) ReportAcquire(permit ratelimit.Permit, asked *ratelimit.PermitRequest, err error) {
	if w.observer != nil && permit.InFlight.Name == "" {
		permit = Asked(asked, err)
	}
	w.ReportPermit(permit, err)
}

// Asked returns what is told of a call for permits that has ended with an error: the limit and key that
// the error is about, or the first that were asked.
func Asked(asked *ratelimit.PermitRequest, err error) ratelimit.Permit {
	about := *asked
	var never *ratelimit.ExceedsLimitError
	var field *ratelimit.FieldError
	for _, part := range asked.More {
		if errors.As(err, &never) && never.Request.Limit.Name == part.Limit.Name && never.Request.Key == part.Key ||
			errors.As(err, &field) && field.Limit == part.Limit.Name && field.Limit != asked.Limit.Name {
			about = part
			break
		}
	}
	return ratelimit.Permit{InFlight: about.Limit, Key: about.Key, N: about.N}
}

// ReportReceipt reports a verb that settles a receipt.
func (w *Watch) ReportReceipt(r *ratelimit.Receipt, result *ratelimit.Result, err error) {
	if w.observer == nil {
		return
	}
	w.requests = nil
	for _, p := range receipt.Payments(r) {
		if limit := ratelimit.Definition(p.Definition).Limit(); limit != nil {
			w.requests = append(w.requests, limit.ForN(p.Key, p.Tokens))
		}
	}
	w.report(result, nil, err)
}

func (w *Watch) report(result *ratelimit.Result, permit *ratelimit.Permit, err error) {
	e := ratelimit.Event{
		Verb: w.verb, Form: w.Form, Outcome: w.Outcome, Permit: permit,
		Queued: w.Queued, Batch: w.Batch, Retries: w.Retries,
	}
	if e.Outcome == "" {
		e.Outcome = w.observer.outcome(result, permit, err)
	}
	if isFault(e.Outcome, err) {
		e.Err, e.ErrorClass = err, w.observer.Class(err)
	}
	if result != nil {
		e.Result = *result
	}
	settles := w.verb == ratelimit.VerbSettle || w.verb == ratelimit.VerbCancel
	if settles || e.Result.Request.Limit == nil {
		e.Requests = w.requests
	}
	if !w.began.IsZero() {
		e.Took = time.Since(w.began)
	}
	w.observer.observe(w.ctx, e)
}

// isFault reports whether an event with this outcome carries an error: refusals do not, except of a
// receipt that was settled before.
func isFault(outcome ratelimit.Outcome, err error) bool {
	refused := outcome == ratelimit.OutcomeRefused || outcome == ratelimit.OutcomePaused
	return err != nil && (!refused || errors.Is(err, ratelimit.ErrSettled))
}

// Outcome returns the outcome of an answer. A verb without results passes nil.
func (o *Observer) Outcome(result *ratelimit.Result, err error) ratelimit.Outcome {
	return o.outcome(result, nil, err)
}

func (o *Observer) outcome(result *ratelimit.Result, permit *ratelimit.Permit, err error) ratelimit.Outcome {
	switch {
	case err != nil:
		return o.outcomeOf(err)
	case result != nil && !result.OK:
		return refusal(result)
	case permit != nil && !permit.OK:
		return ratelimit.OutcomeRefused
	}
	return ratelimit.OutcomeGranted
}

// outcomeOf returns the outcome of a call that ended with an error.
func (o *Observer) outcomeOf(err error) ratelimit.Outcome {
	var refused *ratelimit.RefusedError
	switch {
	case errors.As(err, &refused):
		return refusal(&refused.Result)
	case errors.Is(err, ratelimit.ErrSettled), errors.Is(err, ratelimit.ErrRefused):
		return ratelimit.OutcomeRefused
	case errors.Is(err, ratelimit.ErrLeaseLost):
		return ratelimit.OutcomeLost
	}
	switch o.Class(err) {
	case "too_large":
		return ratelimit.OutcomeTooLarge
	case "invalid":
		return ratelimit.OutcomeInvalid
	case OutcomeUnknown:
		return ratelimit.OutcomeUnknown
	}
	return ratelimit.OutcomeFailed
}

func refusal(r *ratelimit.Result) ratelimit.Outcome {
	if r.PausedUntil.After(r.At) {
		return ratelimit.OutcomePaused
	}
	return ratelimit.OutcomeRefused
}

// The classes that decide the outcome.
const (
	OutcomeUnknown = "outcome_unknown" // whether it committed is unknown
	Silent         = "silent"          // nothing was asked: the database is known to be silent
)

// Class returns an error's class, one of a few.
func (o *Observer) Class(err error) string {
	if err == nil {
		return ""
	}
	if o != nil && o.class != nil {
		if class := o.class(err); class != "" {
			return class
		}
	}
	return class(err)
}

func class(err error) string {
	var own interface{ ErrorClass() string } // of package fallback
	if errors.As(err, &own) {
		return own.ErrorClass()
	}
	for _, c := range []struct {
		is    error
		class string
	}{
		{ratelimit.ErrExceedsCapacity, "too_large"},
		{ratelimit.ErrInvalid, "invalid"},
		{ratelimit.ErrSettled, "settled"},
		{ratelimit.ErrLeaseLost, "lease_lost"},
		{context.DeadlineExceeded, "deadline_exceeded"}, // before those of connections: it is a net.Error
		{context.Canceled, "canceled"},
	} {
		if errors.Is(err, c.is) {
			return c.class
		}
	}
	var server interface{ SQLState() string }
	if errors.As(err, &server) && len(server.SQLState()) == 5 {
		return server.SQLState()
	}
	var network net.Error
	if errors.As(err, &network) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return "connection"
	}
	return "other"
}
