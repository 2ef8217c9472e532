package httplimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// exampleClock stands still, so that examples say the same each time.
func exampleClock() time.Time { return noon }

// show sends a request and prints its answer.
func show(h http.Handler, r *http.Request) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	line := []string{strconv.Itoa(w.Code)}
	for _, name := range []string{"RateLimit", "Retry-After"} {
		if value := w.Header().Get(name); value != "" {
			line = append(line, name+": "+value)
		}
	}
	fmt.Println(strings.Join(line, "  "))
}

// account is the key of a context under which authenticated keeps whose request it is.
type account struct{}

// authenticated is what a service does before its limits: only those with an API key get
// through, and next is told whose it is.
func authenticated(next http.Handler) http.Handler {
	apiKeys := map[string]string{"k1": "ann", "k2": "bob"}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, ok := apiKeys[r.Header.Get("X-Api-Key")]
		if !ok {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), account{}, name)))
	})
}

// accountOf is the account that authenticated has found, "" if there is none.
func accountOf(r *http.Request) string {
	name, _ := r.Context().Value(account{}).(string)
	return name
}

// withKey is a request with an API key.
func withKey(key string) *http.Request {
	r := httptest.NewRequest("GET", "/", nil)
	r.Header.Set("X-Api-Key", key)
	return r
}

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") })

// The limits are those of the account that was authenticated, and not of a header that a
// client could choose.
func Example() {
	store := memstore.New(exampleClock) // or pgstore.New(pool, nil)
	byAccount := httplimit.Hashed(httplimit.BySubject(accountOf))
	limit, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{
		{Limit: ratelimit.TokenBucket{Name: "burst", Rate: 2, Period: time.Second}, Key: byAccount},
		{Limit: ratelimit.FixedWindow{Name: "daily", Rate: 1000, Period: 24 * time.Hour, Start: noon}, Key: byAccount},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	h := authenticated(limit.Handler(hello))
	for _, key := range []string{"k1", "k1", "k1", "made up"} {
		show(h, withKey(key))
	}
	// Output:
	// 200  RateLimit: "burst";r=1;t=1, "daily";r=999;t=86400
	// 200  RateLimit: "burst";r=0;t=1, "daily";r=998;t=86400
	// 429  RateLimit: "burst";r=0;t=1  Retry-After: 1
	// 401
}

// Customers with a plan of their own have a copy of the limit with other numbers.
func ExamplePolicy_tier() {
	standard := ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Minute}
	large := standard
	large.Rate = 100
	limit, err := httplimit.New(memstore.New(exampleClock), &httplimit.Config{Policies: []httplimit.Policy{{
		Limit: standard,
		Key:   httplimit.BySubject(accountOf),
		Tier: func(r *http.Request) (ratelimit.Limit, error) {
			if accountOf(r) == "bob" { // in a program, from the database
				return large, nil
			}
			return standard, nil
		},
	}}})
	if err != nil {
		fmt.Println(err)
		return
	}
	h := authenticated(limit.Handler(hello))
	for _, key := range []string{"k1", "k1", "k2", "k2"} {
		show(h, withKey(key))
	}
	// Output:
	// 200  RateLimit: "api";r=0;t=60
	// 429  RateLimit: "api";r=0;t=60  Retry-After: 60
	// 200  RateLimit: "api";r=99;t=1
	// 200  RateLimit: "api";r=98;t=1
}

// One export of a user at a time, over all processes, and ten an hour.
func ExampleInFlightPolicy() {
	exports := ratelimit.InFlight{Name: "exports", Limit: 1}
	perHour := ratelimit.TokenBucket{Name: "exports_per_hour", Rate: 10, Period: time.Hour}
	user := httplimit.ByHeader("X-User") // which authentication has checked
	store := memstore.New(nil)
	limit, err := httplimit.New(store, &httplimit.Config{
		Policies: []httplimit.Policy{{Limit: perHour, Key: user}},
		InFlight: []httplimit.InFlightPolicy{{Limit: exports, Key: user}},
		Permits:  store.Permits(),
	})
	if err != nil {
		log.Fatal(err)
	}
	ask := func(h http.HandlerFunc) int {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("X-User", "ann")
		w := httptest.NewRecorder()
		limit.Handler(h).ServeHTTP(w, r)
		return w.Code
	}
	done := func(http.ResponseWriter, *http.Request) {}
	ask(func(_ http.ResponseWriter, r *http.Request) {
		permit, _ := httplimit.PermitOf(r.Context(), "exports")
		fmt.Println("while", permit.InFlight.Name, "is held:", ask(done))
	})
	fmt.Println("then:", ask(done))
	// Output:
	// while exports is held: 429
	// then: 200
}

// Before a limit is put in force, shadow mode tells what it would do. All requests pass.
func ExampleConfig_shadow() {
	limit, err := httplimit.New(memstore.New(exampleClock), &httplimit.Config{
		Policies: []httplimit.Policy{{Limit: ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Minute}, Key: httplimit.BySubject(accountOf)}},
		Shadow:   true,
		Observe:  func(_ context.Context, e ratelimit.Event) { fmt.Println(e) },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	h := authenticated(limit.Handler(hello))
	show(h, withKey("k1"))
	show(h, withKey("k1"))
	// Output:
	// allow (httplimit) granted in shadow mode: 1 of "api": ok, 0 of 1 left
	// 200
	// allow (httplimit) refused in shadow mode: 1 of "api": refused, retry after 1m, 0 of 1 left
	// 200
}

// Observe counts outcomes, and logs the refusals. The key is in no log that does not ask for it.
func ExampleConfig_observe() {
	log := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.TimeKey {
				return slog.Attr{} // which is not the same each time
			}
			return a
		},
	}))
	outcomes := map[ratelimit.Outcome]int{} // a program has counters, which are safe for concurrent use
	limit, err := httplimit.New(memstore.New(exampleClock), &httplimit.Config{
		Policies: []httplimit.Policy{{Limit: ratelimit.TokenBucket{Name: "api", Rate: 2, Period: time.Minute}, Key: httplimit.BySubject(accountOf)}},
		Observe: func(ctx context.Context, e ratelimit.Event) {
			outcomes[e.Outcome]++
			if e.Outcome == ratelimit.OutcomeRefused {
				log.WarnContext(ctx, "refused", "path", httplimit.RequestOf(ctx).URL.Path, "limit", e.Policy(), "retry_after", e.Result.RetryAfter)
			}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	h := authenticated(limit.Handler(hello))
	for range 3 {
		h.ServeHTTP(httptest.NewRecorder(), withKey("k1"))
	}
	fmt.Println(outcomes[ratelimit.OutcomeGranted], outcomes[ratelimit.OutcomeRefused])
	// Output:
	// level=WARN msg=refused path=/ limit=api retry_after=30s
	// 2 1
}

// An API key is a secret: the database gets its hash.
func ExampleHashed() {
	key := httplimit.Hashed(httplimit.ByHeader("X-Api-Key"))
	fmt.Println(key(withKey("k1")))
	// Output: arnx6499M4j0-dWG9m6Z_VQIDfLERvDlhmiwnAihbdA <nil>
}

// What a server says of its limits, in whichever form.
func ExampleReadAdvice() {
	for _, header := range []http.Header{
		{"Retry-After": {"30"}},
		{"Ratelimit": {`"burst";r=0;t=5, "daily";r=900;t=3600`}},
		{"X-Ratelimit-Remaining": {"7"}, "X-Ratelimit-Reset": {"12"}},
		{"X-Ratelimit-Remaining-Tokens": {"0"}, "X-Ratelimit-Reset-Tokens": {"6m0s"}},
	} {
		advice := httplimit.ReadAdvice(header, noon)
		fmt.Println(advice.RetryAfter, advice.Exhausted, advice.Reset)
	}
	// Output:
	// 30s false 0s
	// 0s true 5s
	// 0s false 12s
	// 0s true 6m0s
}

// Behind a load balancer in 10.0.0.0/8, signed-in users have a limit each, and the rest
// one for each address.
func ExampleNewAddresses() {
	addresses, err := httplimit.NewAddresses(&httplimit.AddressConfig{
		Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	user := httplimit.BySubject(func(r *http.Request) string { u, _, _ := r.BasicAuth(); return u }) // checked before
	key := httplimit.FirstOf(user, addresses.Key)

	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "10.1.2.3:4711"
	r.Header.Set("X-Forwarded-For", "1.2.3.4, 198.51.100.7") // the first is what the client made up
	fmt.Println(key(r))
	r.SetBasicAuth("ann", "")
	fmt.Println(key(r))
	// Output:
	// 1:198.51.100.7/32 <nil>
	// 0:ann <nil>
}

// Only failed logins count, and the counts are nobody's business. Nobody is authenticated
// yet, so the key is account and address together: an account that somebody guesses at is
// not locked for its owner.
func ExampleCountOnly() {
	addresses, err := httplimit.NewAddresses(nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	name := func(r *http.Request) string { name, _, _ := r.BasicAuth(); return name }
	limit, err := httplimit.New(memstore.New(exampleClock), &httplimit.Config{
		Policies: []httplimit.Policy{{
			Limit:  ratelimit.TokenBucket{Name: "failed_logins", Rate: 2, Period: time.Hour},
			Key:    httplimit.Join(httplimit.BySubject(name), addresses.Key),
			Counts: httplimit.CountOnly(http.StatusUnauthorized),
		}},
		Fields: httplimit.NoFields,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	logIn := limit.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, password, _ := r.BasicAuth(); password != "correct horse" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	for _, password := range []string{"correct horse", "battery", "correct horse", "staple", "correct horse"} {
		r := httptest.NewRequest("POST", "/login", nil)
		r.SetBasicAuth("ann", password)
		show(logIn, r)
	}
	// Output:
	// 200
	// 401
	// 200
	// 401
	// 429  Retry-After: 1800
}

// A request takes what it may use at most, and pays for what it has used.
func ExampleUsed() {
	store := memstore.New(exampleClock)
	tokens := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 1000, Period: time.Minute}
	limit, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{
		{Limit: tokens, Cost: httplimit.CostFromQuery("max_tokens", 1, 500)},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	h := limit.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := httplimit.Used(r.Context(), "llm_tokens", 64); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}))
	show(h, httptest.NewRequest("GET", "/?max_tokens=800", nil))
	show(h, httptest.NewRequest("GET", "/?max_tokens=800", nil))
	show(h, httptest.NewRequest("GET", "/?max_tokens=2000", nil))
	// Output:
	// 200  RateLimit: "llm_tokens";r=200;t=1
	// 200  RateLimit: "llm_tokens";r=136;t=1
	// 422
}

// All processes with the same store share a quota with a third party, and are paused
// together when that says 429.
func ExampleTransport_store() {
	partner := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/busy" {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(http.StatusTooManyRequests)
		}
	}))
	defer partner.Close()
	quota := ratelimit.TokenBucket{Name: "partner", Rate: 100, Period: time.Minute}
	store := memstore.New(exampleClock) // in a program pgstore's, which processes share
	process := func() *http.Client {
		transport, err := httplimit.NewTransport(&httplimit.TransportConfig{
			Store: store,
			Limit: func(*http.Request) ratelimit.Request { return quota.For("") },
		})
		if err != nil {
			panic(err)
		}
		return &http.Client{Transport: transport}
	}
	one, other := process(), process()
	for _, call := range []struct {
		client *http.Client
		path   string
	}{{one, "/"}, {one, "/busy"}, {other, "/"}} {
		resp, err := call.client.Get(partner.URL + call.path)
		var wait *httplimit.WaitError
		switch {
		case errors.As(err, &wait):
			fmt.Println("not sent:", errors.Is(err, ratelimit.ErrRefused))
		case err != nil:
			fmt.Println(err)
		default:
			resp.Body.Close()
			fmt.Println(resp.StatusCode)
		}
	}
	// Output:
	// 200
	// 429
	// not sent: true
}

// The client waits as long as the server says, and asks again.
func ExampleTransport() {
	limit, err := httplimit.New(memstore.New(nil), &httplimit.Config{Policies: []httplimit.Policy{
		{Limit: ratelimit.TokenBucket{Name: "api", Rate: 1, Period: time.Second}},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	server := httptest.NewServer(limit.Handler(http.NotFoundHandler()))
	defer server.Close()

	transport, err := httplimit.NewTransport(&httplimit.TransportConfig{MaxWait: 10 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: transport}
	for i := range 2 {
		resp, err := client.Get(server.URL + "/" + strconv.Itoa(i))
		if err != nil {
			fmt.Println(err)
			return
		}
		resp.Body.Close()
		fmt.Println(resp.StatusCode)
	}
	// Output:
	// 404
	// 404
}
