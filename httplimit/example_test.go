package httplimit_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
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

func Example() {
	store := memstore.New(exampleClock) // or pgstore.New(pool, nil)
	limit, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{
		{Limit: ratelimit.TokenBucket{Name: "burst", Rate: 2, Period: time.Second}, Key: httplimit.ByHeader("X-Api-Key")},
		{Limit: ratelimit.FixedWindow{Name: "daily", Rate: 1000, Period: 24 * time.Hour, Start: noon}, Key: httplimit.ByHeader("X-Api-Key")},
	}})
	if err != nil {
		fmt.Println(err)
		return
	}
	h := limit.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	for range 3 {
		r := httptest.NewRequest("GET", "/", nil)
		r.Header.Set("X-Api-Key", "k1")
		show(h, r)
	}
	// Output:
	// 200  RateLimit: "burst";r=1;t=1, "daily";r=999;t=86400
	// 200  RateLimit: "burst";r=0;t=1, "daily";r=998;t=86400
	// 429  RateLimit: "burst";r=0;t=1  Retry-After: 1
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

// Only failed logins count, and the counts are nobody's business.
func ExampleCountOnly() {
	limit, err := httplimit.New(memstore.New(exampleClock), &httplimit.Config{
		Policies: []httplimit.Policy{{
			Limit:  ratelimit.TokenBucket{Name: "failed_logins", Rate: 2, Period: time.Hour},
			Key:    httplimit.ByHeader("X-Account"),
			Counts: httplimit.CountOnly(http.StatusUnauthorized),
		}},
		Fields: httplimit.NoFields,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	logIn := limit.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Password") != "correct horse" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	for _, password := range []string{"correct horse", "battery", "correct horse", "staple", "correct horse"} {
		r := httptest.NewRequest("POST", "/login", nil)
		r.Header.Set("X-Account", "ann")
		r.Header.Set("X-Password", password)
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
