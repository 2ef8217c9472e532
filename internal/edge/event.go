package edge

import (
	"encoding/json"
	"errors"
	"log/slog"
	"slices"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/mask"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// Decision is the decision of a middleware on a request.
type Decision uint8

// The decisions, as the packages that export them say.
const (
	Granted Decision = iota + 1
	Refused
	TooLarge
	BadRequest
	Failed
	SettleFailed
	LeaseLost
)

// String returns the decision in words, such as "too large".
func (d Decision) String() string {
	names := [...]string{"none", "granted", "refused", "too large", "bad request", "failed", "settle failed", "lease lost"}
	if int(d) < len(names) {
		return names[d]
	}
	return "unknown"
}

// Event is a decision and its result. Logged, printed and in JSON it is without the keys of the
// limits: [ratelimit.LogKeys] has those of its Result, and Err may name one.
type Event struct {
	Decision Decision
	Passed   bool             // was the request let through?
	Shadow   bool             // was it only in shadow mode?
	Result   ratelimit.Result // of Granted and Refused
	Err      error            // of the others, and of a refusal for want of a slot

	text  string // of Err, without keys
	door  string
	asked []ratelimit.Request
}

// Told returns the event as stores tell theirs, with the package for its Door: for a function
// that hears both, such as that of otellimit. Its policy is known of errors, too.
func (e Event) Told() ratelimit.Event {
	told := ratelimit.Event{
		Verb: ratelimit.VerbAllow, Door: e.door, Outcome: ratelimit.OutcomeFailed, Passed: e.Passed, Shadow: e.Shadow,
		Result: e.Result, Requests: e.asked, Err: e.Err, ErrorClass: classes.Class(e.Err),
	}
	switch e.Decision {
	case Granted, Refused:
		told.Outcome, told.Requests = classes.Outcome(&e.Result, nil), nil
	case TooLarge:
		told.Outcome = ratelimit.OutcomeTooLarge
	case BadRequest:
		told.Outcome, told.ErrorClass = ratelimit.OutcomeInvalid, "invalid"
	case SettleFailed:
		told.Verb = ratelimit.VerbSettle
	case LeaseLost:
		told.Verb, told.Outcome = ratelimit.VerbRenew, ratelimit.OutcomeLost
	}
	return told
}

// classes knows what the errors of any store are.
var classes *watch.Observer

// newEvent returns the event of an error about requests, if there is one.
func newEvent(door string, decision Decision, err error, requests []ratelimit.Request) Event {
	asked := slices.DeleteFunc(slices.Clone(requests), func(r ratelimit.Request) bool { return r.Limit == nil }) // of slots there is the key alone
	return Event{Decision: decision, Err: err, text: mask.Error(err, requests), door: door, asked: asked}
}

// String returns the event in a line.
func (e Event) String() string {
	text := e.Decision.String()
	if e.Shadow {
		text += " in shadow mode"
	}
	switch {
	case e.Err != nil:
		text += ": " + e.errText()
	case e.Result.Request.Limit != nil:
		text += ": " + e.Result.String()
	}
	return text
}

// LogValue returns the event as a group.
func (e Event) LogValue() slog.Value {
	attrs := []slog.Attr{
		slog.String("decision", e.Decision.String()),
		slog.Bool("passed", e.Passed),
		slog.Bool("shadow", e.Shadow),
	}
	if e.Result.Request.Limit != nil {
		attrs = append(attrs, slog.Any("result", e.Result))
	}
	if e.Err != nil {
		attrs = append(attrs, slog.String("error", e.errText()))
	}
	return slog.GroupValue(attrs...)
}

// MarshalJSON returns the event as a JSON object.
func (e Event) MarshalJSON() ([]byte, error) {
	object := struct {
		Decision string            `json:"decision"`
		Passed   bool              `json:"passed"`
		Shadow   bool              `json:"shadow"`
		Result   *ratelimit.Result `json:"result,omitempty"`
		Error    string            `json:"error,omitempty"`
	}{e.Decision.String(), e.Passed, e.Shadow, nil, e.errText()}
	if e.Result.Request.Limit != nil {
		object.Result = &e.Result
	}
	return json.Marshal(object)
}

// errText is the text of Err: also of an event that a test has made.
func (e Event) errText() string {
	if e.text == "" {
		return mask.Error(e.Err, nil)
	}
	return e.text
}

// decisionOf returns the decision of a store's answer, or of an error before it. fault reports
// whether an error is of the request.
func decisionOf(result ratelimit.Result, err error, fault func(error) bool) Decision {
	var field *ratelimit.FieldError
	switch {
	case err == nil && result.OK:
		return Granted
	case err == nil, errors.Is(err, ratelimit.ErrRefused):
		return Refused
	case errors.Is(err, ratelimit.ErrExceedsCapacity):
		return TooLarge
	case fault(err):
		return BadRequest
	case errors.As(err, &field) && (field.Field == "Key" || field.Field == "Count"):
		return BadRequest
	}
	return Failed
}
