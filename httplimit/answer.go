package httplimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// quotaExceeded is the problem type of a refusal that the draft registers.
const quotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// Problem is the answer to a request that is not let through, a problem detail of RFC 9457. Its
// JSON is sent to the client.
type Problem struct {
	Type     string        `json:"type,omitempty"` // absent is about:blank
	Title    string        `json:"title"`
	Status   int           `json:"status"`
	Detail   string        `json:"detail,omitempty"`
	Violated []string      `json:"violated-policies,omitempty"` // the limits that refused
	Limits   []LimitStatus `json:"limits,omitempty"`            // with Config.Limits

	RetryAfter time.Duration   `json:"-"` // as in Retry-After, in whole seconds; 0 when no wait helps
	Event      ratelimit.Event `json:"-"` // the decision; its Err may hold details that a client must not see
}

// Write writes p as application/problem+json.
func (p *Problem) Write(w http.ResponseWriter) {
	body, _ := json.Marshal(p) // of strings and finite numbers, which cannot fail
	for _, name := range []string{"Content-Encoding", "Etag", "Last-Modified", "Cache-Control"} {
		w.Header().Del(name) // set for the answer that it replaces
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)+1))
	w.WriteHeader(p.Status)
	w.Write(append(body, '\n')) // the client may have gone
}

// Answer answers r if err is about its limits, and reports whether it did. It leaves any other
// error, such as the database's, to the caller. Handlers that take in their own transaction call it
// with the error that ended the transaction. A refusal, which is result.Err(), becomes the
// middleware's 429 with its fields. A cost that can never be granted becomes its 413 or 422, and a
// *[RequestError] becomes its own status.
func (m *Middleware) Answer(w http.ResponseWriter, r *http.Request, err error) bool {
	if err == nil {
		return false
	}
	e, ok := m.limiter.Answers(r.Context(), r, err)
	if ok {
		m.answer(w, r, e)
	}
	return ok
}

// answer answers a request that is not let through.
func (m *Middleware) answer(w http.ResponseWriter, r *http.Request, e ratelimit.Event) {
	m.setFields(w.Header(), e)
	p := m.problem(r, e)
	p.Event = e
	if p.RetryAfter > 0 {
		after := seconds(p.RetryAfter)
		p.RetryAfter = time.Duration(after) * time.Second
		w.Header().Set("Retry-After", strconv.FormatInt(after, 10))
	}
	if m.config.WriteProblem != nil {
		m.config.WriteProblem(w, r, &p)
		return
	}
	p.Write(w)
}

// problem returns the problem of a decision.
func (m *Middleware) problem(r *http.Request, e ratelimit.Event) Problem {
	switch e.Outcome {
	case ratelimit.OutcomeRefused, ratelimit.OutcomePaused:
		if e.Permit != nil {
			return m.tooMany(*e.Permit)
		}
		return m.refusal(e.Result)
	case ratelimit.OutcomeTooLarge:
		return tooLarge(e.Err, m.config.TooLarge)
	case ratelimit.OutcomeInvalid:
		return badRequest(e.Err)
	}
	return Problem{
		Title:      http.StatusText(http.StatusServiceUnavailable),
		Status:     http.StatusServiceUnavailable,
		Detail:     "The request's limits could not be asked.",
		RetryAfter: m.config.FailureRetryAfter + edge.Shift(r.RemoteAddr, m.config.FailureRetryAfter),
	}
}

// refused returns the problem of a refusal, with a wait, which is never 0.
func refused(wait time.Duration, detail string) Problem {
	return Problem{
		Type: quotaExceeded, Title: "The request exceeds a quota", Status: http.StatusTooManyRequests,
		Detail: fmt.Sprintf(detail, seconds(wait)), RetryAfter: max(1, wait),
	}
}

// tooMany returns the problem of a request that was refused this permit.
func (m *Middleware) tooMany(permit ratelimit.Permit) Problem {
	detail := "Too many requests are under way. Try again when one of them has ended, or in %d s."
	if permit.InFlight.Mode == ratelimit.ModeRefuse {
		detail = "Try again in %d s."
	}
	p := refused(edge.FullWait(permit, m.config.FullRetryAfter), detail)
	p.Violated = []string{permit.InFlight.Name}
	return p
}

// refusal returns the problem of a request that was refused tokens.
func (m *Middleware) refusal(result ratelimit.Result) Problem {
	p := refused(edge.Jittered(result, m.config.Jitter, m.config.MaxJitter), "Try again in %d s.")
	for _, s := range edge.Told(result) {
		if !s.OK {
			p.Violated = append(p.Violated, ratelimit.NameOf(s.Request.Limit))
		}
	}
	if m.config.Limits {
		p.Limits = LimitsOf(result)
	}
	return p
}

func tooLarge(err error, status int) Problem {
	p := Problem{Title: "The request costs more than its limit ever grants", Status: status}
	var exceeds *ratelimit.ExceedsCapacityError
	if errors.As(err, &exceeds) {
		p.Detail = fmt.Sprintf("The request would take %g tokens from %q, which grants at most %g at once. Ask for less.",
			exceeds.Request.Count, ratelimit.NameOf(exceeds.Request.Limit), exceeds.Most)
	}
	return p
}

func badRequest(err error) Problem {
	var request *RequestError
	if errors.As(err, &request) {
		status := request.Status
		if status < 400 || status > 499 {
			status = http.StatusBadRequest
		}
		return Problem{Title: http.StatusText(status), Status: status, Detail: request.Detail}
	}
	p := Problem{Title: "The request cannot be counted", Status: http.StatusBadRequest}
	var field *ratelimit.FieldError // of the key or the count; its value is not for the client
	if errors.As(err, &field) {
		p.Detail = fmt.Sprintf("The %s for limit %q %s.", lower[field.Field], field.Limit, field.Reason)
	}
	return p
}

// lower is how problems call the fields of a request.
var lower = map[string]string{"Key": "key", "Count": "cost", "N": "weight"}
