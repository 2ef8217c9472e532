package httplimit_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
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

// An API key is a secret: the database gets its hash.
func ExampleHashed() {
	key := httplimit.Hashed(httplimit.ByHeader("X-Api-Key"))
	fmt.Println(key(withKey("k1")))
	// Output: arnx6499M4j0-dWG9m6Z_VQIDfLERvDlhmiwnAihbdA <nil>
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
