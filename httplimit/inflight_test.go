package httplimit_test

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
)

// permitStore is a store of both sorts of limits.
type permitStore struct {
	ratelimit.Store
	Permits ratelimit.Permits
}

// inEach runs a test with memory and with PostgreSQL.
func inEach(t *testing.T, test func(t *testing.T, store permitStore)) {
	t.Run("memory", func(t *testing.T) {
		store := memstore.New(nil)
		test(t, permitStore{store, store.Permits()})
	})
	t.Run("PostgreSQL", func(t *testing.T) {
		store, _ := newStore(t, nil)
		test(t, permitStore{store, store.Permits()})
	})
}

var calls = ratelimit.InFlight{Name: "calls", Limit: 2, Lease: time.Minute}

var callsByUser = []httplimit.InFlightPolicy{{Limit: calls, Key: byUser}}

// held is how many permits of a key are held.
func held(t *testing.T, store ratelimit.Permits, limit ratelimit.InFlight, key string) int {
	t.Helper()
	permits, err := store.Held(context.WithoutCancel(t.Context()), limit, key)
	must(t, err)
	return len(permits)
}

// wantHeld waits until so many permits are held.
func wantHeld(t *testing.T, store ratelimit.Permits, limit ratelimit.InFlight, key string, want int) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		got := held(t, store, limit, key)
		if got == want {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d permits are held, want %d", got, want)
		}
	}
}

// gated is a handler whose requests wait until they are let go.
type gated struct {
	began chan *http.Request
	end   chan func()
}

func newGated() *gated { return &gated{make(chan *http.Request, 10), make(chan func())} }

func (g *gated) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.began <- r
	if do := <-g.end; do != nil {
		do()
	}
}

// begin has h handle a request in the background, which the gate then holds, and returns a
// channel with its response; with nil if it panicked.
func (g *gated) begin(h http.Handler, r *http.Request) <-chan *http.Response {
	done := make(chan *http.Response, 1)
	go func() {
		w := httptest.NewRecorder()
		defer func() {
			if recover() != nil {
				done <- nil
				return
			}
			done <- w.Result()
		}()
		h.ServeHTTP(w, r)
	}()
	select {
	case <-g.began:
	case resp := <-done: // it was not let through
		done <- resp
	}
	return done
}

// finish lets one request go, which does something before.
func (g *gated) finish(t *testing.T, do func()) {
	t.Helper()
	select {
	case g.end <- do:
	case <-time.After(10 * time.Second):
		t.Fatal("no request is under way")
	}
}

// An error of one of several policies is told by the name of that one.
func TestInFlightErrorsNameTheirPolicy(t *testing.T) {
	header := func(name string) func(*http.Request) (int, error) {
		return func(r *http.Request) (int, error) { return strconv.Atoi(cmp.Or(r.Header.Get(name), "1")) }
	}
	inEach(t, func(t *testing.T, store permitStore) {
		var told []string
		m := newMiddleware(t, store, httplimit.Config{
			Policies: []httplimit.Policy{{Limit: ratelimit.TokenBucket{Name: "hourly", Rate: 4, Period: time.Hour}, Cost: func(r *http.Request) (float64, error) {
				n, err := header("X-Cost")(r)
				return float64(n), err
			}}},
			InFlight: []httplimit.InFlightPolicy{
				{Limit: ratelimit.InFlight{Name: "all", Limit: 3}, Weight: header("X-All")},
				{Limit: ratelimit.InFlight{Name: "gpus", Limit: 3}, Weight: header("X-Gpus")},
			},
			Permits: store.Permits,
			Observe: func(_ context.Context, e ratelimit.Event) { told = append(told, e.Policy()+" "+string(e.Outcome)) },
		})
		h := m.Handler(http.NotFoundHandler())
		for _, test := range []struct{ header, value, want string }{
			{"X-Gpus", "heavy", "gpus failed"},
			{"X-Gpus", "0", "gpus invalid"},
			{"X-Gpus", "4", "gpus too_large"},
			{"X-All", "heavy", "all failed"},
			{"X-All", "4", "all too_large"},
			{"X-Cost", "5", "hourly too_large"},
			{"X-Cost", "heavy", "hourly failed"},
		} {
			if serve(h, get("/", test.header, test.value)); told[len(told)-1] != test.want {
				t.Errorf("%s %s: got %q, want %q", test.header, test.value, told[len(told)-1], test.want)
			}
		}
	})
}

// A request holds as many permits as it weighs.
func TestInFlightWeight(t *testing.T) {
	inEach(t, func(t *testing.T, store permitStore) {
		weighs := func(r *http.Request) (int, error) { return strconv.Atoi(r.Header.Get("X-Weight")) }
		limit := ratelimit.InFlight{Name: "gpus", Limit: 4, Lease: time.Minute}
		m := newMiddleware(t, store, httplimit.Config{Permits: store.Permits, InFlight: []httplimit.InFlightPolicy{{Limit: limit, Weight: weighs}}})
		g := newGated()
		h := m.Handler(g)
		done := g.begin(h, get("/", "X-Weight", "3"))
		wantHeld(t, store.Permits, limit, "", 3)
		for weight, want := range map[string]int{"2": 429, "5": 422, "0": 400} {
			wantStatus(t, serve(h, get("/", "X-Weight", weight)), want)
		}
		g.finish(t, nil)
		<-done
		wantHeld(t, store.Permits, limit, "", 0)
	})
}

// A request holds its permits until its handler has returned or panicked. A refusal of any policy leaves nothing
// taken of the others.
func TestInFlight(t *testing.T) {
	inEach(t, func(t *testing.T, store permitStore) {
		all := ratelimit.InFlight{Name: "all", Limit: 3, Lease: time.Minute}
		hourly := ratelimit.TokenBucket{Name: "hourly", Rate: 4, Period: time.Hour}
		m := newMiddleware(t, store, httplimit.Config{
			Policies: []httplimit.Policy{{Limit: hourly, Key: byUser}},
			InFlight: append([]httplimit.InFlightPolicy{{Limit: all}}, callsByUser...),
			Permits:  store.Permits,
		})
		g := newGated()
		h := m.Handler(g)
		want := func(allHeld, annHeld int, tokens float64) {
			t.Helper()
			wantHeld(t, store.Permits, all, "", allHeld)
			wantHeld(t, store.Permits, calls, "ann", annHeld)
			result, err := store.Check(t.Context(), hourly.For("ann"))
			if err != nil || result.Remaining != int64(tokens) {
				t.Errorf("%d tokens are left, %v, want %g", result.Remaining, err, tokens)
			}
		}
		refused := func(user, by string) *http.Response {
			t.Helper()
			resp := serve(h, get("/", "X-User", user))
			wantViolated(t, resp, by)
			return resp
		}
		done := []<-chan *http.Response{g.begin(h, get("/", "X-User", "ann")), g.begin(h, get("/", "X-User", "ann"))}
		want(2, 2, 2)
		resp := refused("ann", "calls")
		wantHeader(t, resp, "RateLimit-Policy", `"calls";q=2;qu="concurrent-requests"`)
		wantHeader(t, resp, "RateLimit", `"calls";r=0`)
		wantRetryAfter(t, resp, 1, 2)
		want(2, 2, 2)
		done = append(done, g.begin(h, get("/", "X-User", "bob")))
		refused("cid", "all")
		g.finish(t, nil)
		g.finish(t, func() { panic("of the handler") })
		g.finish(t, nil)
		for i, d := range done {
			if resp := <-d; resp != nil && resp.StatusCode != 200 {
				t.Errorf("request %d: got %d", i, resp.StatusCode)
			}
		}
		want(0, 0, 2)
		for range 2 {
			d := g.begin(h, get("/", "X-User", "ann"))
			g.finish(t, nil)
			wantHeader(t, <-d, "RateLimit-Policy", `"hourly";q=4;w=3600`)
		}
		refused("ann", "hourly")
		want(0, 0, 0)
	})
}

// The permit is held for as long as the handler works, also when the client has gone, and its
// context with it.
func TestInFlightOutlivesItsClient(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	inEach(t, func(t *testing.T, store permitStore) {
		t.Parallel()
		limit := ratelimit.InFlight{Name: "calls", Limit: 1, Lease: time.Second} // for which a busy machine does not stop
		m := newMiddleware(t, store, httplimit.Config{Permits: store.Permits, InFlight: []httplimit.InFlightPolicy{{Limit: limit}}})
		g := newGated()
		server := httptest.NewServer(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, "data: 1\n\n")
			w.(http.Flusher).Flush()
			g.ServeHTTP(w, r)
		})))
		defer server.Close()
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
		must(t, err)
		resp, err := server.Client().Do(req)
		must(t, err)
		if line, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil || line != "data: 1\n" {
			t.Errorf("got %q, %v of the stream", line, err)
		}
		served := <-g.began
		leave()
		resp.Body.Close()
		<-served.Context().Done()
		for end := time.Now().Add(2 * limit.Lease); time.Now().Before(end); time.Sleep(limit.Lease / 10) {
			if permit, err := store.Permits.Acquire(t.Context(), limit.For("")); err != nil || permit.OK {
				t.Errorf("got %v, %v while the handler works, want a refusal", permit, err)
				break
			}
		}
		g.finish(t, nil)
		wantHeld(t, store.Permits, limit, "", 0)
	})
}

// A handler that has lost its permit is told, by its context and why.
func TestInFlightLost(t *testing.T) {
	inEach(t, func(t *testing.T, store permitStore) {
		t.Parallel()
		limit := ratelimit.InFlight{Name: "calls", Limit: 1, Lease: 200 * time.Millisecond}
		for _, shadow := range []bool{false, true} {
			var heard []ratelimit.Outcome
			m := newMiddleware(t, store, httplimit.Config{
				InFlight: []httplimit.InFlightPolicy{{Limit: limit}}, Permits: store.Permits, Shadow: shadow,
				Observe: func(_ context.Context, e ratelimit.Event) { heard = append(heard, e.Outcome) },
			})
			resp := serve(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if err := store.Permits.Reset(t.Context(), limit, ""); err != nil {
					t.Error(err)
				}
				if shadow {
					time.Sleep(limit.Lease)
					if err := r.Context().Err(); err != nil {
						t.Errorf("in shadow mode: got %v", err)
					}
					return
				}
				<-r.Context().Done()
				if cause := context.Cause(r.Context()); !errors.Is(cause, ratelimit.ErrLeaseLost) {
					t.Errorf("the context ended because of %v, want ErrLeaseLost", cause)
				}
				w.WriteHeader(http.StatusServiceUnavailable)
			})), get("/"))
			if !shadow {
				wantStatus(t, resp, 503)
			}
			if got := fmt.Sprint(heard); got != "[granted lost]" {
				t.Errorf("heard %s, want granted and lost", got)
			}
		}
	})
}

// Of several permits the event names the one that is missing, and the one that was lost.
func TestInFlightEvents(t *testing.T) {
	store := memstore.New(nil)
	limits := []ratelimit.InFlight{{Name: "outer", Limit: 3, Lease: 200 * time.Millisecond}, {Name: "inner", Limit: 1, Lease: 200 * time.Millisecond}}
	var heard []string
	m := newMiddleware(t, store, httplimit.Config{
		InFlight: []httplimit.InFlightPolicy{{Limit: limits[0]}, {Limit: limits[1]}}, Permits: store.Permits(),
		Observe: func(ctx context.Context, e ratelimit.Event) {
			if e.Permit == nil || httplimit.RequestOf(ctx) == nil {
				t.Errorf("heard %v, want one of a permit and a request", e)
			}
			heard = append(heard, fmt.Sprintf("%s %s %t %s %s", e.Verb, e.Outcome, e.Passed, e.Policy(), e.ErrorClass))
		},
	})
	var h http.Handler
	h = m.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		wantStatus(t, serve(h, get("/")), 429)
		if err := store.Permits().Reset(t.Context(), limits[1], ""); err != nil {
			t.Error(err)
		}
		<-r.Context().Done()
	}))
	serve(h, get("/"))
	want := []string{"acquire granted true inner ", "acquire refused false inner ", "renew lost true inner lease_lost"}
	if !slices.Equal(heard, want) {
		t.Errorf("heard %q, want %q", heard, want)
	}
}

// failingPermits are permits that cannot be asked for.
type failingPermits struct{ ratelimit.Permits }

func (failingPermits) Acquire(context.Context, ratelimit.PermitRequest, ...ratelimit.Request) (ratelimit.Permit, error) {
	return ratelimit.Permit{}, errDatabase
}

func TestInFlightStoreFails(t *testing.T) {
	for _, open := range []bool{false, true} {
		m := newMiddleware(t, memstore.New(nil), httplimit.Config{InFlight: callsByUser, Permits: failingPermits{}, FailOpen: open})
		next := &answering{}
		resp := serve(m.Handler(next), get("/", "X-User", "ann"))
		if served := next.served.Load() == 1; served != open || (resp.StatusCode == 503) == open {
			t.Errorf("fail open %v: got %d, served %v", open, resp.StatusCode, served)
		}
	}
}

// A permit whose lease is over before its handler begins, in a process that was stopped, is
// renewed, or the request is not handled.
func TestInFlightLostBeforeTheHandler(t *testing.T) {
	hourly := ratelimit.TokenBucket{Name: "hourly", Rate: 4, Period: time.Hour}
	for _, open := range []bool{false, true} {
		store := memstore.New(nil)
		m := newMiddleware(t, store, httplimit.Config{
			Policies: []httplimit.Policy{{Limit: hourly}}, InFlight: []httplimit.InFlightPolicy{{Limit: calls}}, Permits: stopped{store.Permits()}, FailOpen: open,
		})
		next := &answering{}
		resp := serve(m.Handler(next), get("/"))
		tokens := 3.0
		if !open {
			wantStatus(t, resp, 503)
			tokens = 4
		}
		if served := next.served.Load() == 1; served != open {
			t.Errorf("fail open %v: served %v", open, served)
		}
		if got := left(t, store, hourly, ""); math.Abs(got-tokens) > 0.01 {
			t.Errorf("fail open %v: %g tokens are left, want %g", open, got, tokens)
		}
	}
}

// stopped are the permits of a process that is stopped past the lease after each Acquire.
type stopped struct{ ratelimit.Permits }

func (s stopped) Acquire(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error) {
	permit, err := s.Permits.Acquire(ctx, request, rates...)
	permit.Asked = permit.Asked.Add(-2 * request.Limit.LeaseOrDefault())
	return permit, errors.Join(err, s.Reset(ctx, request.Limit, request.Key))
}

func TestInFlightShadow(t *testing.T) {
	store := memstore.New(nil)
	var heard []ratelimit.Event
	m := newMiddleware(t, store, httplimit.Config{
		InFlight: callsByUser, Permits: store.Permits(), Shadow: true,
		Observe: func(_ context.Context, e ratelimit.Event) { heard = append(heard, e) },
	})
	g := newGated()
	h := m.Handler(g)
	for range 3 {
		defer func(done <-chan *http.Response) { <-done }(g.begin(h, get("/", "X-User", "ann")))
	}
	defer func() {
		for range 3 {
			g.finish(t, nil)
		}
	}()
	if e := heard[2]; e.Outcome != ratelimit.OutcomeRefused || !e.Passed || !e.Shadow || e.Permit == nil || e.Policy() != "calls" || e.Err != nil {
		t.Errorf("heard %v, want a refusal for want of a permit that passed", e)
	}
}

// A limit that is switched off is a 429 that says for how long.
func TestInFlightRefusedByMode(t *testing.T) {
	inEach(t, func(t *testing.T, store permitStore) {
		m := newMiddleware(t, store, httplimit.Config{Permits: store.Permits, InFlight: []httplimit.InFlightPolicy{{
			Limit: calls, Key: callsByUser[0].Key,
			Tier: func(*http.Request) (ratelimit.InFlight, error) {
				limit := calls.In(ratelimit.ModeRefuse)
				limit.RefusedUntil = time.Now().Add(time.Hour)
				return limit, nil
			},
		}}})
		resp := serve(m.Handler(http.NotFoundHandler()), get("/", "X-User", "ann"))
		wantStatus(t, resp, 429)
		wantRetryAfter(t, resp, 3598, 3602)
		wantViolated(t, resp, "calls")
	})
}

// A handler releases its permit in the transaction that does its work.
func TestInFlightReleasedInTransaction(t *testing.T) {
	store, db := newStore(t, nil)
	var heard []ratelimit.Outcome
	m := newMiddleware(t, store, httplimit.Config{
		InFlight: callsByUser,
		Permits:  store.Permits(),
		Observe:  func(_ context.Context, e ratelimit.Event) { heard = append(heard, e.Outcome) },
	})
	resp := serve(m.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		permit, ok := httplimit.PermitOf(r.Context(), "calls")
		if _, other := httplimit.PermitOf(r.Context(), "other"); !ok || other {
			t.Errorf("PermitOf: got %v and for another policy %v", ok, other)
		}
		err := pgx.BeginFunc(r.Context(), db.Pool, func(tx pgx.Tx) error { return store.Permits().ReleaseTx(r.Context(), tx, permit) })
		if err != nil {
			t.Error(err)
		}
		wantHeld(t, store.Permits(), calls, "ann", 0)
	})), get("/", "X-User", "ann"))
	wantStatus(t, resp, 200)
	if fmt.Sprint(heard) != "[granted]" {
		t.Errorf("heard %v, want that it was granted", heard)
	}
}

func TestInFlightTier(t *testing.T) {
	m := newMiddleware(t, memstore.New(nil), httplimit.Config{Permits: memstore.New(nil).Permits(), InFlight: []httplimit.InFlightPolicy{{
		Limit: calls,
		Tier: func(r *http.Request) (ratelimit.InFlight, error) {
			limit := calls
			switch r.URL.Path {
			case "/none":
				limit = ratelimit.InFlight{}
			case "/other":
				limit.Name = "other"
			case "/bad":
				return limit, &httplimit.RequestError{Status: 403, Detail: "no plan"}
			default:
				limit.Limit = 1
			}
			return limit, nil
		},
	}}})
	g := newGated()
	h := m.Handler(g)
	first, free := g.begin(h, get("/")), g.begin(h, get("/none"))
	for path, status := range map[string]int{"/": 429, "/other": 503, "/bad": 403} {
		wantStatus(t, serve(h, get(path)), status)
	}
	g.finish(t, nil)
	g.finish(t, nil)
	wantStatus(t, <-first, 200)
	wantStatus(t, <-free, 200)
}

func TestNewFindsFaultsInFlight(t *testing.T) {
	named := func(name string) []httplimit.InFlightPolicy {
		return []httplimit.InFlightPolicy{{Limit: ratelimit.InFlight{Name: name, Limit: 1}}}
	}
	for want, config := range map[string]httplimit.Config{
		"Limit":           {InFlight: []httplimit.InFlightPolicy{{Limit: ratelimit.InFlight{Name: "a"}}}},
		"printable ASCII": {InFlight: named("größe")},
		"two limits":      {InFlight: append(named("a"), named("a")...)},
		`"per_minute"`:    {InFlight: named("per_minute"), Policies: []httplimit.Policy{{Limit: perMinute}}},
		"FullRetryAfter":  {InFlight: named("a"), FullRetryAfter: -1},
	} {
		if _, err := httplimit.New(memstore.New(nil), &config); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want ErrInvalid with %q", err, want)
		}
	}
	if _, err := httplimit.New(memstore.New(nil), &httplimit.Config{InFlight: named("a")}); !errors.Is(err, ratelimit.ErrInvalid) || !strings.Contains(err.Error(), "Permits") {
		t.Errorf("without permits: got %v", err)
	}
}
