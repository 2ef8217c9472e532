package httplimit

import (
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// TransportStore is the part of a store that a [Transport] needs to share a quota with other
// processes, Allow and Pause: a *pgstore.Store or a *memstore.Store.
type TransportStore = edge.WaitStore

// TransportConfig configures a [Transport].
type TransportConfig struct {
	// Base sends the requests. The default is http.DefaultTransport.
	Base http.RoundTripper

	// MaxWait bounds the waits of a request, before it is sent and between its tries: none
	// lasts beyond MaxWait after the request came, time under way included. The default is
	// 30 seconds.
	MaxWait time.Duration

	// MaxTries is how often a request is sent at most. The default is 4; 1 never sends
	// one again.
	MaxTries int

	// MaxPause is the longest that anything a server says holds requests back or pauses the
	// limit of all processes. When it is over, one request asks again. The default is 5 minutes.
	MaxPause time.Duration

	// Scope says which requests a server's word is about: those for which it returns the
	// same. The default is the URL's scheme and host.
	Scope func(*http.Request) string

	// Store and Limit space requests out by a limit of the client's own, which all processes
	// with the same store share: each try takes the request of Limit, waiting if need be, those
	// of a process in turn; and a refusal pauses that limit for all. A Capacity of 1 spaces
	// requests evenly. A request without a Limit takes nothing. A store that fails keeps the
	// request from being sent. Both or neither.
	Store TransportStore
	Limit func(*http.Request) ratelimit.Request

	// Logger gets the faults of pausing. The default is slog.Default().
	Logger *slog.Logger
}

// Transport is an http.RoundTripper that heeds the limits that servers state: see [ReadAdvice].
//
// A 429 is a refusal. So is a 403, 418, 420, 503 or 529 that has Retry-After or says that nothing is
// left: GitHub refuses by 403, Binance by 418, and a 403 that is about rights has neither. A refusal
// holds back all requests of its scope until the instant that it names. Then one request is sent, and
// with each that is not refused more. If that one is refused too, the wait is longer each time, at
// least 50 ms, whatever the server says; after a refusal without a wait, or with one that is over, at
// least half a second.
//
// A refused request that can be sent again is, if MaxWait, MaxTries and the context's
// deadline allow: its method must be idempotent (or it must have an Idempotency-Key), and it
// must have no body, or a GetBody. Otherwise the response is returned as it is. A request that
// would have to be held back for longer than allowed is not sent: the error is a *[WaitError].
// A response that states that nothing is left holds the next requests back too, but only if
// they may wait that long; otherwise they are sent, and it is for the server to refuse them.
//
// Transport is safe for concurrent use.
type Transport struct {
	config TransportConfig
	waiter edge.Waiter
}

// NewTransport makes a Transport; a nil config has all the defaults. An error is
// [ratelimit.ErrInvalid], and tells all that is wrong: a *[ratelimit.FieldError], or several
// joined.
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

// WaitError is a request that was not sent, because it would have had to wait for
// longer than TransportConfig.MaxWait or its context allow.
type WaitError struct {
	Until time.Time // when it is worth another try, on this machine's clock
	Err   error     // [ratelimit.ErrRefused] when its own limit had no tokens in time; else nil, or a context's error
}

func (e *WaitError) Error() string {
	text := "httplimit: not sent: it would have to wait until " + e.Until.UTC().Format(time.RFC3339)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

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

// readAnswer reads the limits from a response.
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
