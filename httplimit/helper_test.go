package httplimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

var noon = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)

// clock is a clock that only a test moves.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: noon} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) set(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = t
}

func (c *clock) add(d time.Duration) { c.set(c.Now().Add(d)) }

var discardLogs = slog.New(slog.NewTextHandler(io.Discard, nil))

func newMiddleware(t testing.TB, store httplimit.Store, config httplimit.Config) *httplimit.Middleware {
	t.Helper()
	if config.Logger == nil {
		config.Logger = discardLogs
	}
	m, err := httplimit.New(store, &config)
	must(t, err)
	return m
}

// answering is a handler that answers with a status and counts its requests.
type answering struct {
	status int
	served atomic.Int64
}

func (a *answering) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	a.served.Add(1)
	if a.status != 0 {
		w.WriteHeader(a.status)
	}
}

func get(target string, header ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, target, nil)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r
}

func serve(h http.Handler, r *http.Request) *http.Response {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func wantStatus(t *testing.T, resp *http.Response, want int) {
	t.Helper()
	if resp.StatusCode != want {
		body, _ := io.ReadAll(resp.Body)
		t.Fatalf("got status %d, want %d; body %s", resp.StatusCode, want, body)
	}
}

func wantHeader(t *testing.T, resp *http.Response, name, want string) {
	t.Helper()
	if got := resp.Header.Get(name); got != want {
		t.Errorf("%s: got %q, want %q", name, got, want)
	}
}

// problem is what a body of application/problem+json says.
type problem struct {
	Type, Title, Detail string
	Status              int
	Violated            []string `json:"violated-policies"`
}

func readProblem(t *testing.T, resp *http.Response) (p problem) {
	t.Helper()
	wantHeader(t, resp, "Content-Type", "application/problem+json")
	must(t, json.NewDecoder(resp.Body).Decode(&p))
	if p.Status != resp.StatusCode {
		t.Errorf("the problem's status is %d, the response's %d", p.Status, resp.StatusCode)
	}
	return p
}

// wantViolated wants a 429 that names the limits that refused.
func wantViolated(t *testing.T, resp *http.Response, limits ...string) {
	t.Helper()
	wantStatus(t, resp, 429)
	if p := readProblem(t, resp); !slices.Equal(p.Violated, limits) {
		t.Errorf("got the problem %+v, want one of %q", p, limits)
	}
}

func wantRetryAfter(t *testing.T, resp *http.Response, least, most int) {
	t.Helper()
	if after, err := strconv.Atoi(resp.Header.Get("Retry-After")); err != nil || after < least || after > most {
		t.Errorf("got Retry-After %q, want %d to %d", resp.Header.Get("Retry-After"), least, most)
	}
}

// left is how many tokens a limit has.
func left(t *testing.T, store *memstore.Store, limit ratelimit.Limit, key string) float64 {
	t.Helper()
	result, err := store.Check(context.Background(), limit.For(key))
	must(t, err)
	return result.Value
}

var errDatabase = errors.New("the database is down")

// failing is a store that answers with an error, once release is closed or the
// context ends; a nil release does not wait.
type failing struct{ release chan struct{} }

func (f failing) Allow(ctx context.Context, _ ...ratelimit.Request) (ratelimit.Result, error) {
	if f.release != nil {
		select {
		case <-f.release:
		case <-ctx.Done():
			return ratelimit.Result{}, ctx.Err()
		}
	}
	return ratelimit.Result{}, errDatabase
}

func (f failing) Settle(context.Context, *ratelimit.Receipt, ...float64) (ratelimit.Result, error) {
	return ratelimit.Result{}, errDatabase
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a function that returns a value as well.
func errOf[T any](_ T, err error) error { return err }
