package httplimit

import (
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// TransportStore is what a [Transport] needs of a store to share a quota with other processes:
// Allow and Pause. A *pgstore.Store and a *memstore.Store have it.
type TransportStore = edge.WaitStore

// TransportConfig configures a [Transport].
type TransportConfig struct {
	// Base sends the requests. The default is http.DefaultTransport.
	Base http.RoundTripper

	// MaxWait bounds the waits of a request, before it is sent and between its tries. No wait
	// ends later than MaxWait after the request came, the time under way included. The default
	// is 30 seconds.
	MaxWait time.Duration

	// MaxTries is how often a request is sent at most; with 1 it is never repeated. The default
	// is 4.
	MaxTries int

	// MaxPause is the longest that a server's answer holds requests back, or pauses the limit
	// that processes share. When it is over, one request asks again. The default is 5 minutes.
	MaxPause time.Duration

	// Scope groups requests: a server's answer holds for all requests with the same Scope. The
	// default is the URL's scheme and host.
	Scope func(*http.Request) string

	// Store and Limit keep requests to a limit of the client's own, which all processes with
	// the same store share. Each try takes what Limit returns, and waits for it; requests of
	// one process take turns. A refusal by the server pauses that limit for all. A Capacity of
	// 1 spaces requests evenly. A zero Request takes nothing. If the store fails, the request
	// is not sent. Set both or neither.
	Store TransportStore
	Limit func(*http.Request) ratelimit.Request

	// Logger gets the faults of pausing. The default is slog.Default().
	Logger *slog.Logger
}

// Transport is an http.RoundTripper that waits as long as servers ask: see [ReadAdvice].
//
// A 429 is a refusal. So is a 403, 418, 420, 503 or 529 with a wait or with nothing left. A refusal
// holds back all requests of its scope until the instant that it names. Then one request is sent,
// and more after each success.
//
// A refused request is sent again within MaxWait, MaxTries and its deadline, if its method is
// idempotent or it has an Idempotency-Key, and if it has no body or a GetBody. Otherwise its
// response is returned. A request that would wait for too long is not sent: the error is a
// *[WaitError].
//
// Transport is safe for concurrent use. More:
// https://github.com/pgratelimit/ratelimit/blob/main/docs/http.md#a-client.
type Transport struct {
	config TransportConfig
	waiter edge.Waiter
}

// NewTransport makes a Transport. A nil config has all the defaults. An error is
// [ratelimit.ErrInvalid], and names every invalid field: it is a *[ratelimit.FieldError], or
// several joined.
func NewTransport(config *TransportConfig) (*Transport, error) {
	t := &Transport{}
	if config != nil {
		t.config = *config
	}
	c := &t.config
	t.waiter = edge.Waiter{
		Package: "httplimit", MaxWait: c.MaxWait, MaxTries: c.MaxTries, MaxPause: c.MaxPause, Store: c.Store, Logger: c.Logger,
		NotSent: func(until time.Time, err error) error { return &WaitError{until, err} },
	}
	f := edge.Faults{Package: "httplimit"}
	if t.waiter.Init(&f, c.Limit != nil); f.Err() != nil {
		return nil, f.Err()
	}
	if c.Base == nil {
		c.Base = http.DefaultTransport
	}
	if c.Scope == nil {
		c.Scope = func(r *http.Request) string { return r.URL.Scheme + "://" + r.URL.Host }
	}
	return t, nil
}

// String is for logs: without it they would show the keys that requests wait for.
func (t *Transport) String() string { return "httplimit.Transport" }

// WaitError is the error of a request that was not sent, because it would have waited for longer
// than TransportConfig.MaxWait or its context allow.
type WaitError struct {
	Until time.Time // when it is worth another try, on this machine's clock
	Err   error     // [ratelimit.ErrRefused] when its own limit had no tokens in time; else nil, or a context's error
}

func (e *WaitError) Error() string { return edge.NotSent("httplimit", e.Until, e.Err) }

// Unwrap returns e.Err.
func (e *WaitError) Unwrap() error { return e.Err }

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	if t == nil || t.config.Scope == nil {
		closeBody(req)
		return nil, edge.Invalid("httplimit", "Transport", nil, "must be made by NewTransport")
	}
	budget := t.waiter.Budget(req.Context())
	scope, try := t.config.Scope(req), req
	for n := 1; ; n++ {
		request := t.limit(try)
		round, err := t.waiter.Turn(budget, scope, request)
		if err != nil {
			closeBody(try)
			return nil, err
		}
		resp, err := t.config.Base.RoundTrip(try)
		if err != nil {
			return nil, err
		}
		answer := readAnswer(resp)
		wait := t.waiter.Heed(budget, scope, round, request, answer)
		if !answer.Refused || !t.waiter.Again(budget, wait, n) || !repeatable(req) {
			return resp, nil
		}
		if try, err = again(req); err != nil {
			return resp, nil // the body cannot be sent again, so the answer stands
		}
		discard(resp.Body)
	}
}

// limit returns what req takes from the client's own limit.
func (t *Transport) limit(req *http.Request) ratelimit.Request {
	if t.config.Limit == nil {
		return ratelimit.Request{}
	}
	return t.config.Limit(req)
}

const (
	statusCalm       = 420 // "enhance your calm"
	statusOverloaded = 529 // Anthropic's, for an overloaded server
)

// readAnswer reports whether a response is a refusal, whether it pauses the limit, and for how
// long.
func readAnswer(resp *http.Response) edge.Answer {
	advice := ReadAdvice(resp.Header, time.Now())
	a := edge.Answer{Exhausted: advice.Exhausted, Wait: advice.Reset}
	if advice.Told {
		a.Wait = advice.RetryAfter
	}
	switch resp.StatusCode {
	case http.StatusTooManyRequests:
		a.Refused, a.Pause = true, true
	case http.StatusForbidden, http.StatusTeapot, statusCalm:
		a.Refused = advice.Told || advice.Exhausted
		a.Pause = a.Refused
	case http.StatusServiceUnavailable, statusOverloaded:
		a.Refused = advice.Told || advice.Exhausted
		a.Pause = advice.Exhausted // otherwise the server is at fault, and no quota is used up
	}
	return a
}

// CloseIdleConnections closes those of the base.
func (t *Transport) CloseIdleConnections() {
	if t == nil {
		return
	}
	if c, ok := t.config.Base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// repeatable reports whether req can be sent again without being carried out twice.
func repeatable(req *http.Request) bool {
	if req.Body != nil && req.Body != http.NoBody && req.GetBody == nil {
		return false
	}
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return req.Header.Get("Idempotency-Key") != "" || req.Header.Get("X-Idempotency-Key") != ""
}

// again returns req for another try.
func again(req *http.Request) (*http.Request, error) {
	try := req.Clone(req.Context())
	if req.Body == nil || req.Body == http.NoBody {
		return try, nil
	}
	var err error
	try.Body, err = req.GetBody()
	return try, err
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		req.Body.Close()
	}
}

const (
	drainMost = 64 << 10
	drainTime = 100 * time.Millisecond
)

// discard reads the rest of a small body, so that its connection can be used again, and closes it.
// A body that is large or slow is closed before its end.
func discard(body io.ReadCloser) {
	timer := time.AfterFunc(drainTime, func() { body.Close() })
	io.CopyN(io.Discard, body, drainMost)
	if timer.Stop() {
		body.Close()
	}
}
