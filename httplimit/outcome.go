package httplimit

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"

	"github.com/pgratelimit/ratelimit"
)

// Outcome is how a request ended, for Policy.Counts.
type Outcome struct {
	Request *http.Request

	// Status is the response's status; 101 for a connection that was taken over. It is 0
	// when nothing was written and nobody knows: the client had gone. When nothing was
	// written before a panic it is 500.
	Status int

	// Panicked is true when the handler panicked.
	Panicked bool
}

// CountOnly counts the requests that end with one of the statuses, such as 401 for
// failed logins, and those of which nobody knows how they would have ended: when the
// client has gone, or the handler panicked.
func CountOnly(statuses ...int) func(Outcome) bool {
	return func(o Outcome) bool { return o.Status == 0 || o.Panicked || slices.Contains(statuses, o.Status) }
}

// CountExcept counts all requests but those that end with a status from first to last,
// such as 500 to 599. One whose handler panics is a 500.
func CountExcept(first, last int) func(Outcome) bool {
	return func(o Outcome) bool { return o.Status < first || o.Status > last }
}

// Used says how many tokens of a policy, named by its limit, the request has really
// used, such as the tokens of an answer, when that is known only in its course. When
// the handler is done, the difference to what was taken is given back, or taken
// whatever there is; the last call holds. A use that a policy does not count, by its
// Counts, is given back whole.
//
// An error is [ratelimit.ErrInvalid]: the count is none that a request may have (see
// Request.Validate), or ctx is not that of a request with such a policy, or the handler
// has returned. Then what was noted before holds. Used is safe for concurrent use. Where nothing was taken, since the policy does not apply, or the
// request was let through in shadow mode or because the store failed, it does nothing.
func Used(ctx context.Context, policy string, n float64) error {
	for c, _ := ctx.Value(chargeKey{}).(*charge); c != nil; c = c.outer {
		if p := c.of.policy(policy); p != nil {
			return c.use(p, n)
		}
	}
	return invalid("Policy", policy, "the request has none of that name")
}

type chargeKey struct{}

// charge is what a request has taken, and what it has used.
type charge struct {
	of      *Middleware
	outer   *charge            // of a middleware around that one
	receipt *ratelimit.Receipt // nil when nothing was taken
	taken   []ratelimit.Request

	mu   sync.Mutex
	used []float64 // of each that was taken
	done bool
}

// serve lets r through to next, and settles when that is done, panicked or not.
func (m *Middleware) serve(w http.ResponseWriter, r *http.Request, next http.Handler, result ratelimit.Result) {
	c := m.charge(r, result)
	r = r.WithContext(context.WithValue(r.Context(), chargeKey{}, c))
	if c.receipt == nil || !m.outcomes {
		defer m.settle(r, c, nil)
		next.ServeHTTP(w, r)
		return
	}
	rec := &recorder{ResponseWriter: w}
	panicked := true
	defer func() { m.settle(r, c, rec.outcome(r, panicked)) }()
	next.ServeHTTP(rec.writer(), r)
	panicked = false
}

func (m *Middleware) charge(r *http.Request, result ratelimit.Result) *charge {
	c := &charge{of: m, receipt: result.Receipt}
	c.outer, _ = r.Context().Value(chargeKey{}).(*charge)
	if c.receipt == nil {
		return c
	}
	for _, s := range result.Each() {
		c.taken = append(c.taken, s.Request)
		c.used = append(c.used, s.Request.Count)
	}
	return c
}

// policy is m's policy of that name, or nil.
func (m *Middleware) policy(name string) *Policy {
	for i := range m.config.Policies {
		if p := &m.config.Policies[i]; ratelimit.NameOf(p.Limit) == name {
			return p
		}
	}
	return nil
}

// use notes what was used of a policy, if the request has taken from it.
func (c *charge) use(policy *Policy, n float64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.done {
		return invalid("Used", n, "comes after the handler has returned")
	}
	at := slices.IndexFunc(c.taken, func(t ratelimit.Request) bool {
		return ratelimit.NameOf(t.Limit) == ratelimit.NameOf(policy.Limit)
	})
	request := policy.Limit.ForN("", n)
	if at >= 0 {
		request.Limit = c.taken[at].Limit // of the tier
	}
	var bad *ratelimit.FieldError
	if errors.As(request.Validate(), &bad) {
		return invalid("Used", n, bad.Reason)
	}
	if at >= 0 {
		c.used[at] = n
	}
	return nil
}

// close ends the time in which the handler may say what it has used, and returns that.
func (c *charge) close() []float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done = true
	return c.used
}

// settle brings what r has taken to what it has used. A client that has gone does not
// keep it from that. If it fails, what was taken stays.
func (m *Middleware) settle(r *http.Request, c *charge, o *Outcome) {
	used, differs := c.close(), false
	for i, t := range c.taken {
		p := m.policy(ratelimit.NameOf(t.Limit))
		if o != nil && p.Counts != nil && !p.Counts(*o) {
			used[i] = 0
		}
		differs = differs || used[i] != t.Count
	}
	if !differs {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), m.config.Timeout)
	defer cancel()
	if _, err := m.store.Settle(ctx, c.receipt, used...); err != nil {
		e := failed(SettleFailed, err, c.taken)
		e.Passed = true
		m.observe(r, e)
	}
}

// recorder is a ResponseWriter that knows the status. It can flush and be hijacked,
// also by http.ResponseController, if the one that it wraps can; and it can push and be
// written strings to, in any case.
type recorder struct {
	http.ResponseWriter
	status int
}

func (rec *recorder) WriteHeader(status int) {
	if rec.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) { // others are interim
		rec.status = status
	}
	rec.ResponseWriter.WriteHeader(status)
}

func (rec *recorder) Write(p []byte) (int, error) {
	rec.implicit()
	return rec.ResponseWriter.Write(p)
}

// ReadFrom lets the server send files by the kernel's own means.
func (rec *recorder) ReadFrom(src io.Reader) (int64, error) {
	rec.implicit()
	return io.Copy(rec.ResponseWriter, src)
}

// WriteString does without a copy if the wrapped writer does.
func (rec *recorder) WriteString(s string) (int, error) {
	rec.implicit()
	return io.WriteString(rec.ResponseWriter, s)
}

// Push is http.ErrNotSupported if the wrapped writer has none, as on a connection whose
// client wants none.
func (rec *recorder) Push(target string, opts *http.PushOptions) error {
	if p, ok := rec.ResponseWriter.(http.Pusher); ok {
		return p.Push(target, opts)
	}
	return http.ErrNotSupported
}

// Unwrap is for http.ResponseController, with which a handler reaches all that the
// wrapped writer can do.
func (rec *recorder) Unwrap() http.ResponseWriter { return rec.ResponseWriter }

func (rec *recorder) implicit() {
	if rec.status == 0 {
		rec.status = http.StatusOK
	}
}

// outcome is how the request has ended.
func (rec *recorder) outcome(r *http.Request, panicked bool) *Outcome {
	o := &Outcome{Request: r, Status: rec.status, Panicked: panicked}
	switch {
	case o.Status != 0:
	case panicked:
		o.Status = http.StatusInternalServerError
	case r.Context().Err() == nil:
		o.Status = http.StatusOK
	}
	return o
}

// flusher and hijacker are what a recorder can do if the wrapped writer can.
type flusher struct {
	rec   *recorder
	inner http.Flusher
}

func (f flusher) Flush() {
	f.rec.implicit()
	f.inner.Flush()
}

type hijacker struct {
	rec   *recorder
	inner http.Hijacker
}

func (h hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := h.inner.Hijack()
	if err == nil && h.rec.status == 0 {
		h.rec.status = http.StatusSwitchingProtocols
	}
	return conn, rw, err
}

// writer is rec with the methods that the wrapped writer has, for handlers that ask
// for them by their interfaces.
func (rec *recorder) writer() http.ResponseWriter {
	f, flushes := rec.ResponseWriter.(http.Flusher)
	h, hijacks := rec.ResponseWriter.(http.Hijacker)
	switch {
	case flushes && hijacks:
		return struct {
			*recorder
			flusher
			hijacker
		}{rec, flusher{rec, f}, hijacker{rec, h}}
	case flushes:
		return struct {
			*recorder
			flusher
		}{rec, flusher{rec, f}}
	case hijacks:
		return struct {
			*recorder
			hijacker
		}{rec, hijacker{rec, h}}
	}
	return rec
}
