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

	// Status is the response's status; 101 if the handler took the connection over. If nothing
	// was written, it is 500 after a panic, and 0 if the client had gone.
	Status int

	// Panicked is true when the handler panicked.
	Panicked bool
}

// CountOnly counts the requests that end with one of the statuses, such as 401 for failed logins.
// It also counts those whose end is unknown, since the client had gone or the handler panicked.
func CountOnly(statuses ...int) func(Outcome) bool {
	return func(o Outcome) bool { return o.Status == 0 || o.Panicked || slices.Contains(statuses, o.Status) }
}

// CountExcept counts all requests except those that end with a status from first to last, such as
// 500 to 599. A panic of the handler counts as a 500.
func CountExcept(first, last int) func(Outcome) bool {
	return func(o Outcome) bool { return o.Status < first || o.Status > last }
}

// Used notes how many tokens the request has really used of a policy, named by its limit, when that
// is known only while the handler works. After the handler, the difference to the tokens taken is
// given back, or taken even without enough tokens. The last call holds. If Counts does not count
// the request, all its tokens go back.
//
// The error is [ratelimit.ErrInvalid] if the count is invalid (see Request.Validate), if ctx is not
// that of a request with such a policy, or if the handler has returned. The count noted before then
// holds. If nothing was taken, Used does nothing: the policy does not apply, or the request was let
// through in shadow or because the store failed. Used is safe for concurrent use.
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

// outcome returns how the request r ended. gone says whether its client has gone. The context of r
// cannot say that, since it also ends when a permit is lost.
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
