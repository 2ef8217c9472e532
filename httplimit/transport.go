package httplimit

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/keyqueue"
	"github.com/pgratelimit/ratelimit/internal/mask"
)

const (
	defaultMaxWait  = 30 * time.Second
	defaultMaxTries = 4
	defaultMaxPause = time.Hour

	pauseTimeout = 5 * time.Second // of pausing the limit after a 429
	firstBackoff = time.Second     // after a 429 that does not say for how long
)

// TransportStore is what a [Transport] needs of a store to share a quota with other
// processes: a *pgstore.Store or a *memstore.Store.
type TransportStore interface {
	Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
	Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (time.Time, error)
}

// TransportConfig says what a [Transport] does.
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

	// MaxPause is the longest that a server is believed when it says how long not to
	// come back. The default is 1 hour.
	MaxPause time.Duration

	// Scope says which requests a server's word is about: those for which it returns the
	// same. The default is the URL's scheme and host.
	Scope func(*http.Request) string

	// Store and Limit space requests out by a limit of the client's own, which all
	// processes with the same store share: each try takes what Limit asks for, waiting
	// if need be, those of a process in turn; and a 429 pauses that limit for all. A
	// Capacity of 1 spaces requests evenly. A request without a Limit takes nothing. A
	// store that fails keeps the request from being sent. Both or neither.
	Store TransportStore
	Limit func(*http.Request) ratelimit.Request

	// Logger gets the faults of pausing. The default is slog.Default().
	Logger *slog.Logger
}

// Transport is an http.RoundTripper that keeps to what servers say of their limits: see
// [ReadAdvice].
//
// A 429, or a 503 with Retry-After, holds back all requests of its scope until the
// instant that it names. One that can be sent again is, by then, if MaxWait, MaxTries
// and the context's deadline allow: its method must be idempotent (or it must have an
// Idempotency-Key), and it must have no body, or a GetBody. Otherwise the response is
// returned as it is. A request that would have to be held back for longer than allowed
// is not sent: the error is a *[WaitError]. A response that says that nothing is left
// holds the next ones back too, but only if they may wait that long; otherwise
// they are sent, and it is for the server to refuse them.
//
// Transport is safe for concurrent use.
type Transport struct {
	config TransportConfig
	holds  holds
	turns  keyqueue.Queue[string] // of those who want tokens, by limit and key
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
	var f faults
	f.must(c.MaxWait >= 0, "MaxWait", c.MaxWait, "must not be negative")
	f.must(c.MaxTries >= 0, "MaxTries", c.MaxTries, "must not be negative")
	f.must(c.MaxPause >= 0 && c.MaxPause <= ratelimit.MaxSpan, "MaxPause", c.MaxPause, "must be at least 0 and at most ratelimit.MaxSpan")
	f.must((c.Store == nil) == (c.Limit == nil), "Store", c.Store, "must be given with Limit, and Limit with it")
	if err := f.err(); err != nil {
		return nil, err
	}
	if c.Base == nil {
		c.Base = http.DefaultTransport
	}
	if c.Scope == nil {
		c.Scope = func(r *http.Request) string { return r.URL.Scheme + "://" + r.URL.Host }
	}
	c.MaxWait = orDefault(c.MaxWait, defaultMaxWait)
	c.MaxTries = orDefault(c.MaxTries, defaultMaxTries)
	c.MaxPause = orDefault(c.MaxPause, defaultMaxPause)
	c.Logger = orDefault(c.Logger, slog.Default())
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
	budget := newBudget(req.Context(), t.config.MaxWait)
	scope, try := t.config.Scope(req), req
	for n := 1; ; n++ {
		if err := t.turn(try, scope, budget); err != nil {
			closeBody(try)
			return nil, err
		}
		resp, err := t.config.Base.RoundTrip(try)
		if err != nil {
			return nil, err
		}
		wait, refused := t.heed(try, scope, resp, n)
		if !refused || n == t.config.MaxTries || !budget.allows(wait) || !repeatable(req) {
			return resp, nil
		}
		if try, err = again(req); err != nil {
			return resp, nil // the body cannot be had again, so the answer stands
		}
		discard(resp.Body)
	}
}

// CloseIdleConnections closes those of the base.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.config.Base.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// turn waits until req may be sent: until its server wants to be asked again, and there
// is a token, for which it may have waited so long that the server has refused another
// request.
func (t *Transport) turn(req *http.Request, scope string, b *budget) error {
	if err := t.holdBack(scope, b); err != nil {
		return err
	}
	if t.config.Limit != nil {
		if request := t.config.Limit(req); request.Limit != nil {
			if err := t.take(request, b); err != nil {
				return err
			}
			return t.holdBack(scope, b)
		}
	}
	return nil
}

// holdBack waits until no server holds requests of the scope back.
func (t *Transport) holdBack(scope string, b *budget) error {
	for {
		h := t.holds.of(scope)
		wait := time.Until(h.refused)
		if wait >= b.left() {
			return &WaitError{Until: h.refused, Err: b.ctx.Err()}
		}
		if hinted := time.Until(h.exhausted); hinted < b.left() {
			wait = max(wait, hinted)
		}
		if wait <= 0 {
			return b.ctx.Err()
		}
		// Those that were held back together do not go together.
		if err := b.sleep(wait + rand.N(max(1, min(wait/10, b.left()-wait)))); err != nil {
			return err
		}
	}
}

// askers is how many requests of a process ask for the same tokens at a time. The others
// wait in turn, and do not ask: when one is refused, so would they be.
const askers = 4

// take takes from the client's own limit, waiting if need be. It asks again rather than
// reserve: what was reserved before a pause would all be due at its end.
func (t *Transport) take(request ratelimit.Request, b *budget) error {
	ctx, cancel := context.WithDeadline(b.ctx, b.end)
	defer cancel()
	turn := identity(request)
	place, err := t.turns.Enter(ctx, turn, askers, nil)
	if err != nil {
		return b.over(err)
	}
	defer t.turns.Leave(turn, place)
	for {
		result, err := t.config.Store.Allow(ctx, request)
		switch {
		case err != nil:
			return b.over(fmt.Errorf("httplimit: not sent: its limit could not be asked: %w", err))
		case result.OK:
			return nil
		case result.RetryAfter >= b.left():
			return &WaitError{Until: time.Now().Add(result.RetryAfter), Err: result.Err()}
		}
		if err := b.sleep(result.RetryAfter); err != nil {
			return err
		}
	}
}

// heed notes what a response says, and returns for how long it refuses, if it does.
func (t *Transport) heed(req *http.Request, scope string, resp *http.Response, n int) (wait time.Duration, refused bool) {
	advice := ReadAdvice(resp.Header, time.Now())
	switch {
	case advice.Told:
		wait = advice.RetryAfter
	case advice.Reset > 0:
		wait = advice.Reset
	case resp.StatusCode == http.StatusTooManyRequests:
		wait = backoff(n)
	}
	wait = min(wait, t.config.MaxPause)
	refused = resp.StatusCode == http.StatusTooManyRequests ||
		resp.StatusCode == http.StatusServiceUnavailable && advice.Told
	switch until := time.Now().Add(wait); {
	case refused:
		t.holds.set(scope, hold{refused: until})
	case advice.Exhausted:
		t.holds.set(scope, hold{exhausted: until})
	}
	if resp.StatusCode == http.StatusTooManyRequests {
		t.pause(req, wait)
	}
	return wait, refused
}

// backoff is 1, 2, 4 … seconds, less up to a half.
func backoff(n int) time.Duration {
	most := firstBackoff << min(n-1, 10)
	return most/2 + rand.N(most/2)
}

// pause pauses the client's own limit, in the name of all who share it: the request's
// context does not keep it from that.
func (t *Transport) pause(req *http.Request, lasts time.Duration) {
	if t.config.Limit == nil || lasts <= 0 {
		return
	}
	request := t.config.Limit(req)
	if request.Limit == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(req.Context()), pauseTimeout)
	defer cancel()
	if _, err := t.config.Store.Pause(ctx, request.Limit, request.Key, lasts.Truncate(time.Microsecond)); err != nil {
		t.config.Logger.ErrorContext(ctx, "httplimit: the limit could not be paused after a 429",
			slog.String("limit", ratelimit.NameOf(request.Limit)), slog.String("error", mask.Error(err, []ratelimit.Request{request})))
	}
}

// repeatable reports whether req can be sent again without doing twice what it asks for.
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

// again is req for another try.
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

// discard reads what is left of a small body, so that its connection can be used
// again, and closes it. A body that does not come to its end is closed under way.
func discard(body io.ReadCloser) {
	timer := time.AfterFunc(drainTime, func() { body.Close() })
	io.CopyN(io.Discard, body, drainMost)
	if timer.Stop() {
		body.Close()
	}
}

// budget is how long a request may still wait.
type budget struct {
	ctx context.Context
	end time.Time
}

func newBudget(ctx context.Context, most time.Duration) *budget {
	end := time.Now().Add(most)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	return &budget{ctx, end}
}

func (b *budget) left() time.Duration { return time.Until(b.end) }

// over is err, or if it came because the budget is used up, what that is to the caller.
func (b *budget) over(err error) error {
	switch {
	case b.ctx.Err() != nil:
		return b.ctx.Err()
	case b.left() <= 0:
		return &WaitError{Until: time.Now(), Err: err}
	}
	return err
}

func (b *budget) allows(wait time.Duration) bool { return wait < b.left() }

// sleep waits for d, or until the request's context ends.
func (b *budget) sleep(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return b.ctx.Err()
	case <-b.ctx.Done():
		return b.ctx.Err()
	}
}

// hold is until when requests are held back: because the server has refused one, or
// because it has said that the next would be refused.
type hold struct{ refused, exhausted time.Time }

// over reports whether nothing is held back at now.
func (h hold) over(now time.Time) bool { return !h.refused.After(now) && !h.exhausted.After(now) }

// holds is the holds that are not over, by scope. The zero value is ready for use.
type holds struct {
	mu      sync.Mutex
	byScope map[string]hold
	sweep   int // how many there may be before those that are over are looked for
}

func (hs *holds) of(scope string) hold {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return hs.byScope[scope]
}

// set has h hold, and what holds for longer.
func (hs *holds) set(scope string, h hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.byScope == nil {
		hs.byScope, hs.sweep = map[string]hold{}, minSweep
	}
	was := hs.byScope[scope]
	hs.byScope[scope] = hold{latest(was.refused, h.refused), latest(was.exhausted, h.exhausted)}
	if len(hs.byScope) > hs.sweep {
		now := time.Now()
		maps.DeleteFunc(hs.byScope, func(_ string, h hold) bool { return h.over(now) })
		hs.sweep = max(minSweep, 2*len(hs.byScope))
	}
}

const minSweep = 64

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
