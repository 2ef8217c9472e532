// Chi has limits behind the router of go-chi/chi:
//
//	go run ./examples/chi
//
// A Middleware's Handler is what r.Use and r.With take. chi knows the pattern of a
// route only once it has routed, so a limit for each pattern goes on the route, with
// r.With. Do not use chi's RealIP before it: that believes headers which clients can
// send, while httplimit.Addresses believes proxies that you name.
package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

var (
	PerAddress = ratelimit.TokenBucket{Name: "per_address", Rate: 100, Period: time.Minute}
	PerRoute   = ratelimit.TokenBucket{Name: "per_route", Rate: 1, Period: time.Minute, Capacity: 2}
)

// routes returns the service; in production the store is pgstore's.
func routes(store httplimit.Store) (http.Handler, error) {
	addresses, err := httplimit.NewAddresses(&httplimit.AddressConfig{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}})
	if err != nil {
		return nil, err
	}
	all, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{{Limit: PerAddress, Key: addresses.Key}}})
	if err != nil {
		return nil, err
	}
	pattern := func(r *http.Request) (string, error) { return chi.RouteContext(r.Context()).RoutePattern(), nil }
	route, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{{Limit: PerRoute, Key: httplimit.Join(pattern, addresses.Key)}}})
	if err != nil {
		return nil, err
	}
	r := chi.NewRouter()
	r.Use(all.Handler)
	limited := r.With(route.Handler)
	limited.Get("/reports/{id}", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "report %s", chi.URLParam(r, "id")) })
	limited.Get("/exports/{id}", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "export %s", chi.URLParam(r, "id")) })
	return r, nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "chi:", err)
		os.Exit(1)
	}
}

// run asks for reports and exports, and checks the answers.
func run() error {
	h, err := routes(memstore.New(nil))
	if err != nil {
		return err
	}
	for _, step := range []struct {
		path string
		want int
	}{{"/reports/1", 200}, {"/reports/2", 200}, {"/reports/3", 429}, {"/exports/1", 200}} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, step.path, nil))
		fmt.Println(step.path, w.Code, w.Header().Values("RateLimit"))
		if w.Code != step.want {
			return fmt.Errorf("%s: got %d, want %d", step.path, w.Code, step.want)
		}
	}
	return nil
}
