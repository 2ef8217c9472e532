package httplimit

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"slices"

	"github.com/pgratelimit/ratelimit/internal/edge"
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

// CountExcept counts all requests but those that end with a status from first to last, such as
// 500 to 599. A panic of the handler is a 500.
func CountExcept(first, last int) func(Outcome) bool {
	return func(o Outcome) bool { return o.Status < first || o.Status > last }
}

// Used notes how many tokens of a policy, named by its limit, the request has really used, such
// as the tokens of an answer, when that is known only in its course. When the handler is done,
// the difference to the tokens taken is given back, or taken unconditionally; the last call
// holds. A use that a policy does not count, by its Counts, is given back whole.
//
// An error is [ratelimit.ErrInvalid]: the count is not one that a request may have (see
// Request.Validate), or ctx is not that of a request with such a policy, or the handler has
// returned. Then the count noted before holds. Used is safe for concurrent use. Where nothing
// was taken, since the policy does not apply, or the request was let through in shadow mode or
// because the store failed, it does nothing.
func Used(ctx context.Context, policy string, n float64) error {
	return edge.Use(ctx, "httplimit", policy, n)
}

// recorder is a ResponseWriter that records the status. It can flush and be hijacked if the wrapped
// writer can, also by http.ResponseController. It always has Push and WriteString.
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

// WriteString avoids a copy if the wrapped writer does.
func (rec *recorder) WriteString(s string) (int, error) {
	rec.implicit()
	return io.WriteString(rec.ResponseWriter, s)
}

// Push returns http.ErrNotSupported if the wrapped writer does not support it, as on a
// connection to a client that has disabled it.
func (rec *recorder) Push(target string, opts *http.PushOptions) error {
	if p, ok := rec.ResponseWriter.(http.Pusher); ok {
		return p.Push(target, opts)
	}
	return http.ErrNotSupported
}

// Unwrap lets http.ResponseController reach everything that the wrapped writer can do.
func (rec *recorder) Unwrap() http.ResponseWriter { return rec.ResponseWriter }

func (rec *recorder) implicit() {
	if rec.status == 0 {
		rec.status = http.StatusOK
	}
}

// outcome returns how a request ended that was served as r. gone says whether its client has gone.
// The context of r cannot say that, since it also ends when a permit is lost.
func (rec *recorder) outcome(r *http.Request, panicked, gone bool) Outcome {
	o := Outcome{Request: r, Status: rec.status, Panicked: panicked}
	switch {
	case o.Status != 0:
	case panicked:
		o.Status = http.StatusInternalServerError
	case !gone:
		o.Status = http.StatusOK
	}
	return o
}

// flusher and hijacker add to a recorder what its wrapped writer can do.
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

// writer returns rec with the methods that the wrapped writer has, since handlers look for them by
// their interfaces.
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
