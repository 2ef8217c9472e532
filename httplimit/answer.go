package httplimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
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
		return m.refusal(&e)
	case ratelimit.OutcomeTooLarge:
		return tooLarge(e.Err, m.config.TooLarge)
	case ratelimit.OutcomeInvalid:
		return badRequest(e.Err)
	}
	return Problem{
		Title:      http.StatusText(http.StatusServiceUnavailable),
		Status:     http.StatusServiceUnavailable,
		Detail:     "The request's limits could not be asked.",
		RetryAfter: m.limiter.FailureRetryAfter + edge.Shift(r.RemoteAddr, m.limiter.FailureRetryAfter),
	}
}

// refusal returns the problem of a request that was refused tokens or a permit.
func (m *Middleware) refusal(e *ratelimit.Event) Problem {
	wait, detail := m.limiter.RefusedFor(e), "Try again in %d s."
	if e.Permit != nil && e.Permit.InFlight.Mode != ratelimit.ModeRefuse {
		detail = "Too many requests are under way. Try again when one of them has ended, or in %d s."
	}
	p := Problem{
		Type: quotaExceeded, Title: "The request exceeds a quota", Status: http.StatusTooManyRequests,
		Detail: fmt.Sprintf(detail, seconds(wait)), RetryAfter: max(1, wait),
	}
	if e.Permit != nil {
		p.Violated = []string{e.Permit.InFlight.Name}
		return p
	}
	for _, s := range edge.Told(e.Result) {
		if !s.OK {
			p.Violated = append(p.Violated, ratelimit.NameOf(s.Request.Limit))
		}
	}
	if m.config.Limits {
		p.Limits = LimitsOf(e.Result)
	}
	return p
}

func tooLarge(err error, status int) Problem {
	p := Problem{Title: "The request costs more than its limit ever grants", Status: status}
	if would := edge.TooLarge(err); would != "" {
		p.Detail = "The request " + would + ". Ask for less."
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
	if field, ok := strings.CutPrefix(edge.Field(err), "the "); ok {
		p.Detail = "The " + field + "."
	}
	return p
}
