package httplimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// quotaExceeded is the problem type of a refusal that the draft registers.
const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// problem is a problem detail of RFC 9457.
type problem struct {
	Type     string   `json:"type,omitempty"` // absent is about:blank
	Title    string   `json:"title"`
	Status   int      `json:"status"`
	Detail   string   `json:"detail,omitempty"`
	Violated []string `json:"violated-policies,omitempty"`

	Limits []LimitStatus `json:"limits,omitempty"`
}

func (p problem) write(w http.ResponseWriter) {
	body, _ := json.Marshal(p) // of strings and an int, which cannot fail
	for _, name := range []string{"Content-Encoding", "Etag", "Last-Modified", "Cache-Control"} {
		w.Header().Del(name) // set for the answer that it replaces
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)+1))
	w.WriteHeader(p.Status)
	w.Write(append(body, '\n')) // the client may have gone
}

// Answer answers r if err is about its limits, and reports whether it did; any other error, the
// database's too, is left to the caller. It is for handlers that take in their own transaction,
// with the error that ended it: a refusal, which is result.Err(), becomes the same 429 as the
// middleware's, fields and all; a cost that can never be granted the same 413 or 422, and a
// *[RequestError] its own status.
func (m *Middleware) Answer(w http.ResponseWriter, r *http.Request, err error) bool {
	if err == nil {
		return false
	}
	e, ok := m.gate.Answers(r.Context(), r, err)
	if ok {
		m.answer(w, r, e)
	}
	return ok
}

// answer answers a request that is not let through.
func (m *Middleware) answer(w http.ResponseWriter, r *http.Request, e ratelimit.Event) {
	switch e.Outcome {
	case ratelimit.OutcomeRefused, ratelimit.OutcomePaused:
		m.refuse(w, r, e)
	case ratelimit.OutcomeTooLarge:
		tooLarge(e.Err, m.config.TooLarge).write(w)
	case ratelimit.OutcomeInvalid:
		badRequest(e.Err).write(w)
	default:
		m.fail(w, r, e.Err)
	}
}

func (m *Middleware) refuse(w http.ResponseWriter, r *http.Request, e ratelimit.Event) {
	m.setFields(w.Header(), e)
	after, p := m.refusal(e)
	w.Header().Set("Retry-After", strconv.FormatInt(after, 10))
	if m.config.Refused != nil {
		m.config.Refused(w, r, e)
		return
	}
	p.write(w)
}

// refusal is the problem of a refusal, and the wait in whole seconds, never too short.
func (m *Middleware) refusal(e ratelimit.Event) (after int64, p problem) {
	p = problem{Type: quotaExceeded, Title: "The request exceeds a quota", Status: http.StatusTooManyRequests}
	if e.Slot != nil {
		after = seconds(edge.FullWait(*e.Slot, m.config.FullRetryAfter))
		p.Detail = fmt.Sprintf("Too many requests are under way. Try again when one of them has ended, or in %d s.", after)
		if e.Slot.InFlight.Mode == ratelimit.ModeRefuse {
			p.Detail = fmt.Sprintf("Try again in %d s.", after)
		}
		p.Violated = []string{e.Slot.InFlight.Name}
		return after, p
	}
	after = seconds(edge.Jittered(e.Result, m.config.Jitter, m.config.MaxJitter))
	p.Detail = fmt.Sprintf("Try again in %d s.", after)
	for _, s := range edge.Told(e.Result) {
		if !s.OK {
			p.Violated = append(p.Violated, ratelimit.NameOf(s.Request.Limit))
		}
	}
	if m.config.Limits {
		p.Limits = LimitsOf(e.Result)
	}
	return after, p
}

func tooLarge(err error, status int) problem {
	p := problem{Title: "The request costs more than its limit ever grants", Status: status}
	var exceeds *ratelimit.ExceedsCapacityError
	if errors.As(err, &exceeds) {
		p.Detail = fmt.Sprintf("The request would take %g tokens from %q, which grants at most %g at once. Ask for less.",
			exceeds.Request.Count, ratelimit.NameOf(exceeds.Request.Limit), exceeds.Most)
	}
	return p
}

func badRequest(err error) problem {
	var request *RequestError
	if errors.As(err, &request) {
		status := request.Status
		if status < 400 || status > 499 {
			status = http.StatusBadRequest
		}
		return problem{Title: http.StatusText(status), Status: status, Detail: request.Detail}
	}
	p := problem{Title: "The request cannot be counted", Status: http.StatusBadRequest}
	var field *ratelimit.FieldError // of the key or the count; its value is not for the client
	if errors.As(err, &field) {
		p.Detail = fmt.Sprintf("The %s for limit %q %s.", lower[field.Field], field.Limit, field.Reason)
	}
	return p
}

// lower is how problems call the fields of a request.
var lower = map[string]string{"Key": "key", "Count": "cost"}

func (m *Middleware) fail(w http.ResponseWriter, r *http.Request, err error) {
	after := m.config.FailureRetryAfter + edge.Shift(r.RemoteAddr, m.config.FailureRetryAfter)
	w.Header().Set("Retry-After", strconv.FormatInt(seconds(after), 10))
	if m.config.Failed != nil {
		m.config.Failed(w, r, err)
		return
	}
	problem{
		Title:  http.StatusText(http.StatusServiceUnavailable),
		Status: http.StatusServiceUnavailable,
		Detail: "The request's limits could not be asked.",
	}.write(w)
}
