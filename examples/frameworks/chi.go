// Package frameworks has limits behind the routers of go-chi/chi and labstack/echo, and in front of
// the handlers of connectrpc.com/connect, to copy from. Each function returns a service; in
// production its store is pgstore's.
package frameworks

import (
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/go-chi/chi/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

var (
	perAddress = ratelimit.TokenBucket{Name: "per_address", Rate: 100, Period: time.Minute}
	perPattern = ratelimit.TokenBucket{Name: "per_pattern", Rate: 1, Period: time.Minute, Capacity: 2}
)

// Chi has a Middleware's Handler where r.Use and r.With take one. chi knows the pattern of a
// route only once it has routed, so a limit for each pattern goes on the route, with
// r.With. Do not use chi's RealIP before it: that believes headers which clients can
// send, while httplimit.Addresses believes proxies that you name.
func Chi(store httplimit.Store) (http.Handler, error) {
	addresses, err := httplimit.NewAddresses(&httplimit.AddressConfig{Trusted: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}})
	if err != nil {
		return nil, err
	}
	all, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{{Limit: perAddress, Key: addresses.Key}}})
	if err != nil {
		return nil, err
	}
	pattern := func(r *http.Request) (string, error) { return chi.RouteContext(r.Context()).RoutePattern(), nil }
	route, err := httplimit.New(store, &httplimit.Config{Policies: []httplimit.Policy{{Limit: perPattern, Key: httplimit.Join(pattern, addresses.Key)}}})
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
