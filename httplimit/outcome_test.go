package httplimit_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

var failures = ratelimit.TokenBucket{Name: "failures", Rate: 5, Period: time.Hour}

// A request takes before its handler runs, and what it took comes back after it, by how
// it ended.
func TestCountsByOutcome(t *testing.T) {
	write := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
	}
	logins, honest := httplimit.CountOnly(401, 403), httplimit.CountExcept(500, 599)
	for _, test := range []struct {
		name   string
		counts func(httplimit.Outcome) bool
		do     http.HandlerFunc
		gone   bool // the client, while the handler runs
		taken  float64
	}{
		{"a failed login", logins, write(401), false, 1},
		{"another", logins, write(403), false, 1},
		{"a login", logins, write(200), false, 0},
		{"nothing written", logins, func(http.ResponseWriter, *http.Request) {}, false, 0},
		{"only a body", logins, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }, false, 0},
		{"not changed", httplimit.CountExcept(304, 304), write(304), false, 0},
		{"changed", httplimit.CountExcept(304, 304), write(200), false, 1},
		{"early hints", logins, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(103); w.WriteHeader(401) }, false, 1},
		{"only early hints", logins, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(103) }, false, 0},
		{"the first status holds", logins, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401); w.WriteHeader(200) }, false, 1},
		{"a status after the body", logins, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok"); w.WriteHeader(401) }, false, 0},
		{"a status after a flush", logins, func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush(); w.WriteHeader(401) }, false, 0},
		{"a copied body", logins, func(w http.ResponseWriter, _ *http.Request) { io.Copy(w, strings.NewReader("ok")); w.WriteHeader(401) }, false, 0},
		{"the server's fault", honest, write(500), false, 0},
		{"not the server's fault", honest, write(404), false, 1},
		{"a panic", honest, func(http.ResponseWriter, *http.Request) { panic("!") }, false, 0},
		{"a panic in a login", logins, func(http.ResponseWriter, *http.Request) { panic("!") }, false, 1},
		{"a panic after the answer", logins, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(200); panic("!") }, false, 1},
		{"a panic to abort", honest, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, false, 0},
		{"gone before the answer", logins, func(http.ResponseWriter, *http.Request) {}, true, 1},
		{"gone before the answer, not a login", honest, func(http.ResponseWriter, *http.Request) {}, true, 1},
		{"gone, and failed", logins, write(401), true, 1},
		{"gone, but logged in", logins, write(200), true, 0},
	} {
		for _, inFlight := range [][]httplimit.InFlightPolicy{nil, {{Limit: calls}}} { // whose context tells nothing of the client
			store := memstore.New(newClock().Now)
			m := newMiddleware(t, store, httplimit.Config{
				Policies: []httplimit.Policy{{Limit: perMinute}, {Limit: failures, Counts: test.counts}}, InFlight: inFlight, Permits: store.Permits(),
			})
			ctx, leave := context.WithCancel(t.Context())
			during := 0.0
			h := m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				during = 5 - left(t, store, failures, "")
				if test.gone {
					leave()
				}
				test.do(w, r)
			}))
			func() {
				defer func() { recover() }() // as net/http does
				h.ServeHTTP(httptest.NewRecorder(), get("/").WithContext(ctx))
			}()
			leave()
			if taken := 5 - left(t, store, failures, ""); during != 1 || taken != test.taken {
				t.Errorf("%s: got %g taken while the handler ran, and %g after it, want 1 and %g", test.name, during, taken, test.taken)
			}
			if got := 3 - left(t, store, perMinute, ""); got != 1 {
				t.Errorf("%s: got %g taken from the policy that counts all, want 1", test.name, got)
			}
		}
	}
}

// What a handler says that it has used replaces what was taken.
func TestUsed(t *testing.T) {
	tokens := ratelimit.TokenBucket{Name: "tokens", Rate: 1000, Period: time.Hour}
	for _, test := range []struct {
		name  string
		cost  float64
		do    func(ctx context.Context) error
		taken float64
	}{
		{"nothing said", 100, func(context.Context) error { return nil }, 100},
		{"less", 100, func(ctx context.Context) error { return httplimit.Used(ctx, "tokens", 64) }, 64},
		{"nothing used", 100, func(ctx context.Context) error { return httplimit.Used(ctx, "tokens", 0) }, 0},
		{"more", 100, func(ctx context.Context) error { return httplimit.Used(ctx, "tokens", 400.5) }, 400.5},
		{"more than there is", 100, func(ctx context.Context) error { return httplimit.Used(ctx, "tokens", 1500) }, 1500},
		{"after taking nothing", 0, func(ctx context.Context) error { return httplimit.Used(ctx, "tokens", 7) }, 7},
		{"twice", 100, func(ctx context.Context) error {
			return errors.Join(httplimit.Used(ctx, "tokens", 1), httplimit.Used(ctx, "tokens", 2))
		}, 2},
		{"and panicked", 100, func(ctx context.Context) error { httplimit.Used(ctx, "tokens", 3); panic("!") }, 3},
	} {
		store := memstore.New(newClock().Now)
		outer := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute}, {Limit: tokens, Cost: httplimit.Fixed(test.cost)}}})
		inner := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perDay, Counts: httplimit.CountExcept(500, 599)}}})
		var after context.Context
		h := outer.Handler(inner.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			after = r.Context()
			if err := test.do(r.Context()); err != nil {
				t.Errorf("%s: %v", test.name, err)
			}
		})))
		func() {
			defer func() { recover() }() // as net/http does
			h.ServeHTTP(httptest.NewRecorder(), get("/"))
		}()
		if got := 1000 - left(t, store, tokens, ""); got != test.taken {
			t.Errorf("%s: got %g taken, want %g", test.name, got, test.taken)
		}
		if got := 3 - left(t, store, perMinute, ""); got != 1 {
			t.Errorf("%s: got %g taken from the other policy, want 1", test.name, got)
		}
		if err := httplimit.Used(after, "tokens", 1); !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("%s: after the handler: got %v, want ErrInvalid", test.name, err)
		}
	}
}

// Where nothing was taken, Used does nothing.
func TestUsedOfNothing(t *testing.T) {
	none := func(*http.Request) (ratelimit.Limit, error) { return nil, nil }
	for store, config := range map[httplimit.Store]httplimit.Config{
		failing{}:         {Policies: []httplimit.Policy{{Limit: perMinute}}, FailOpen: true},
		memstore.New(nil): {Policies: []httplimit.Policy{{Limit: perMinute, Tier: none}}},
	} {
		serve(newMiddleware(t, store, config).Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if err := httplimit.Used(r.Context(), "per_minute", 1); err != nil {
				t.Errorf("got %v, want nil", err)
			}
		})), get("/"))
	}
}

// A count that Settle would not take is refused at once, and what was used of the other
// policies is settled.
func TestUsedChecksAsRequestsAreChecked(t *testing.T) {
	store := memstore.New(newClock().Now)
	large := rows
	large.Rate = 1e12 // of a tier: beside it 0.001 cannot be told apart
	m := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{
		{Limit: rows, Cost: httplimit.Fixed(10), Tier: func(*http.Request) (ratelimit.Limit, error) { return large, nil }},
		{Limit: failures},
	}})
	serve(m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		for _, err := range []error{httplimit.Used(r.Context(), "other", 1), httplimit.Used(context.Background(), "rows", 1)} {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("got %v, want ErrInvalid", err)
			}
		}
		for _, n := range []float64{5e-324, 1e-12, 1e-3, 1e13, math.NaN(), math.Inf(1), -1} {
			var field *ratelimit.FieldError
			if err := httplimit.Used(r.Context(), "rows", n); !errors.As(err, &field) || field.Field != "Used" {
				t.Errorf("%g: got %v, want an error about it", n, err)
			}
		}
		if err := errors.Join(httplimit.Used(r.Context(), "rows", 4), httplimit.Used(r.Context(), "failures", 0)); err != nil {
			t.Error(err)
		}
	})), get("/"))
	if got := 1e12 - left(t, store, large, ""); got != 4 {
		t.Errorf("%g rows were taken, want 4", got)
	}
	if got := left(t, store, failures, ""); got != failures.Rate {
		t.Errorf("%g failures are left, want all", got)
	}
}

// halfway is a store that grants, and fails to settle.
type halfway struct{ *memstore.Store }

func (halfway) Settle(context.Context, *ratelimit.Receipt, ...float64) (ratelimit.Result, error) {
	return ratelimit.Result{}, errDatabase
}

func TestSettleFails(t *testing.T) {
	store := memstore.New(newClock().Now)
	var events []ratelimit.Event
	m := newMiddleware(t, halfway{store}, httplimit.Config{
		Policies: []httplimit.Policy{{Limit: failures, Counts: httplimit.CountOnly(401)}},
		Observe:  func(_ context.Context, e ratelimit.Event) { events = append(events, e) },
	})
	wantStatus(t, serve(m.Handler(&answering{}), get("/")), 200)
	if len(events) != 2 || events[1].Verb != ratelimit.VerbSettle || events[1].Outcome != ratelimit.OutcomeFailed || events[1].Policy() != "failures" || !errors.Is(events[1].Err, errDatabase) {
		t.Errorf("got the events %+v, want a grant, and that settling failed", events)
	}
	if got := left(t, store, failures, ""); got != 4 {
		t.Errorf("%g are left, want 4: what was taken stays", got)
	}
}

// A handler can do through the middleware what it can without.
func TestWriterKeepsItsMethods(t *testing.T) {
	m := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{Policies: []httplimit.Policy{{Limit: rows, Counts: httplimit.CountOnly(101)}}})
	through := func(w http.ResponseWriter, do func(http.ResponseWriter)) {
		m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { do(w) })).ServeHTTP(w, get("/"))
	}
	for _, test := range []struct {
		name            string
		w               http.ResponseWriter
		flushes, hijack bool
	}{
		{"plain", plainWriter{}, false, false},
		{"flushes", flushWriter{}, true, false},
		{"hijacks", hijackWriter{}, false, true},
		{"both", bothWriter{}, true, true},
	} {
		through(test.w, func(w http.ResponseWriter) {
			f, flushes := w.(http.Flusher)
			h, hijacks := w.(http.Hijacker)
			if flushes != test.flushes || hijacks != test.hijack {
				t.Errorf("%s: flushes %v, hijacks %v, want %v, %v", test.name, flushes, hijacks, test.flushes, test.hijack)
			}
			if flushes {
				f.Flush()
			}
			if hijacks {
				if _, _, err := h.Hijack(); !errors.Is(err, errHijack) {
					t.Errorf("%s: got %v, want the wrapped writer's answer", test.name, err)
				}
			}
			if err := w.(http.Pusher).Push("/style.css", nil); !errors.Is(err, http.ErrNotSupported) {
				t.Errorf("%s: pushing: got %v, want that it is not supported", test.name, err)
			}
			err := http.NewResponseController(w).SetWriteDeadline(time.Time{})
			if !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("%s: got %v, want ErrUnsupported of the wrapped writer", test.name, err)
			}
		})
	}
}

// What is pushed or written as a string reaches the wrapped writer as such, and counts as
// an answer.
func TestWriterPushesAndWritesStrings(t *testing.T) {
	var status int
	m := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{Policies: []httplimit.Policy{{
		Limit: rows, Counts: func(o httplimit.Outcome) bool { status = o.Status; return true },
	}}})
	w := &http2Writer{}
	m.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := w.(http.Pusher).Push("/style.css", &http.PushOptions{Method: "GET"}); err != nil {
			t.Error(err)
		}
		if n, err := io.WriteString(w, "hello"); n != 5 || err != nil {
			t.Errorf("got %d, %v", n, err)
		}
		w.WriteHeader(500) // too late
	})).ServeHTTP(w, get("/"))
	if w.pushed != "/style.css GET" || w.text != "hello" || status != 200 {
		t.Errorf("pushed %q, wrote %q, status %d", w.pushed, w.text, status)
	}
}

// http2Writer has what net/http's writer has over HTTP/2.
type http2Writer struct {
	flushWriter
	pushed, text string
}

func (w *http2Writer) WriteString(s string) (int, error) { w.text += s; return len(s), nil }

func (w *http2Writer) Push(target string, opts *http.PushOptions) error {
	w.pushed = target + " " + opts.Method
	return nil
}

var errHijack = errors.New("no connection here")

type plainWriter struct{}

func (plainWriter) Header() http.Header         { return http.Header{} }
func (plainWriter) Write(p []byte) (int, error) { return len(p), nil }
func (plainWriter) WriteHeader(int)             {}

type flushWriter struct{ plainWriter }

func (flushWriter) Flush() {}

type hijackWriter struct{ plainWriter }

func (hijackWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, errHijack }

type bothWriter struct {
	flushWriter
	hijackWriter
}

func (bothWriter) Header() http.Header         { return http.Header{} }
func (bothWriter) Write(p []byte) (int, error) { return len(p), nil }
func (bothWriter) WriteHeader(int)             {}

// A connection that was taken over counts, and holds its permit until its handler returns.
func TestHijacked(t *testing.T) {
	store := memstore.New(newClock().Now)
	h := newMiddleware(t, store, httplimit.Config{
		Policies: []httplimit.Policy{{Limit: failures, Counts: httplimit.CountOnly(101)}},
		InFlight: []httplimit.InFlightPolicy{{Limit: calls}}, Permits: store.Permits(),
	}).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(rw, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\ntaken")
		rw.Flush()
		io.Copy(io.Discard, rw)
	}))
	served := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(served)
		h.ServeHTTP(w, r)
	}))
	defer server.Close()
	resp, err := server.Client().Get(server.URL)
	must(t, err)
	if text := body(t, resp); text != "taken" || held(t, store.Permits(), calls, "") != 1 {
		t.Errorf("got %q, and %d permits are held, want 1", text, held(t, store.Permits(), calls, ""))
	}
	server.Client().CloseIdleConnections()
	<-served
	if got := left(t, store, failures, ""); got != 4 || held(t, store.Permits(), calls, "") != 0 {
		t.Errorf("%g are left, and %d permits are held, want 4 and none", got, held(t, store.Permits(), calls, ""))
	}
}
