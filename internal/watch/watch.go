// Package watch tells Config.Observe of the verbs of a store.
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

// Observer tells a function of each decision. A nil Observer tells nobody.
type Observer struct {
	observe ratelimit.Observe
	class   func(error) string
}

// New returns an observer, nil without a function. class returns the class of an error that only this
// store has, "" of any other.
func New(observe ratelimit.Observe, class func(error) string) *Observer {
	if observe == nil {
		return nil
	}
	return &Observer{observe: observe, class: class}
}

// Watch is a verb under way. The zero Watch tells nobody.
type Watch struct {
	observer *Observer
	ctx      context.Context
	verb     ratelimit.Verb
	requests []ratelimit.Request
	began    time.Time

	Form ratelimit.Form
	Effort

	// Outcome is how it ended, if the answer does not tell.
	Outcome ratelimit.Outcome
}

// Effort is the wait for a decision, and the statements that it took.
type Effort struct {
	Queued         time.Duration
	Batch, Retries int
}

// Begin watches a verb from now on. Without an observer it costs nothing.
func (o *Observer) Begin(ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, requests []ratelimit.Request) (w Watch) {
	if o == nil {
		return w
	}
	w.BeginLater(o, ctx, verb, form, requests)
	w.began = time.Now()
	return w
}

// BeginLater is Begin of a verb that may be answered from memory: its time begins with
// [Watch.Start]. It fills the zero Watch in place, since such a verb takes less than a copy of
// some Watches, and keeps a copy of the requests, or those of all callers would be on the heap.
func (w *Watch) BeginLater(o *Observer, ctx context.Context, verb ratelimit.Verb, form ratelimit.Form, requests []ratelimit.Request) {
	if o != nil {
		w.observer, w.ctx, w.verb, w.Form, w.requests = o, ctx, verb, form, slices.Clone(requests)
	}
}

// On reports whether somebody is told.
func (w *Watch) On() bool { return w != nil && w.observer != nil }

// Add adds the effort of a statement: a call in modes may need several. The batch is the last one's.
func (w *Watch) Add(e Effort) {
	w.Queued, w.Retries, w.Batch = w.Queued+e.Queued, w.Retries+e.Retries, e.Batch
}

// Start begins the time of a verb, unless it has begun, and returns the instant of now; zero if
// nobody is told.
func (w *Watch) Start() (now time.Time) {
	if !w.On() {
		return now
	}
	now = time.Now()
	if w.began.IsZero() {
		w.began = now
	}
	return now
}

// Report tells of a verb that has a result.
func (w *Watch) Report(result *ratelimit.Result, err error) {
	switch {
	case w.observer == nil:
	case err == nil && result.OK && w.Outcome == "":
		w.granted(result)
	default:
		w.report(result, nil, err)
	}
}

// granted is report of most calls.
func (w *Watch) granted(result *ratelimit.Result) {
	var e ratelimit.Event
	e.Verb, e.Form, e.Outcome = w.verb, w.Form, ratelimit.OutcomeGranted
	e.Result = *result
	e.Queued, e.Batch, e.Retries = w.Queued, w.Batch, w.Retries
	if !w.began.IsZero() {
		e.Took = time.Since(w.began)
	}
	w.observer.observe(w.ctx, e)
}

// ReportError is Report of a verb without one, for defer.
func (w *Watch) ReportError(err *error) {
	if w.observer != nil {
		w.report(nil, nil, *err)
	}
}

// ReportPermit is Report of a verb of permits.
func (w *Watch) ReportPermit(permit ratelimit.Permit, err error) {
	if w.observer != nil {
		its := permit // on the heap only if somebody is told
		w.report(nil, &its, err)
	}
}

// ReportReceipt is Tell of a verb that settles a receipt.
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

// isFault reports whether an event with an outcome tells of an error: a refusal is none, but that
// of a receipt that was settled before.
func isFault(outcome ratelimit.Outcome, err error) bool {
	refused := outcome == ratelimit.OutcomeRefused || outcome == ratelimit.OutcomePaused
	return err != nil && (!refused || errors.Is(err, ratelimit.ErrSettled))
}

// Outcome returns that of an answer. A nil result is one that the verb does not have.
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

// The classes that decide what is told.
const (
	OutcomeUnknown = "outcome_unknown" // nobody knows whether it is committed
	Silent         = "silent"          // nobody was asked, since the database is known to be silent
)

// Class returns the class of an error, of which there are few.
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
