package httplimit_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/memstore"
)

func TestNoTypeShowsKeys(t *testing.T) {
	var events, problems []any
	api := ratelimit.TokenBucket{Name: "api", Rate: 2, Period: time.Minute}
	config := httplimit.Config{
		Policies:        []httplimit.Policy{{Limit: api, Key: httplimit.ByHeader("X-Key"), Cost: httplimit.CostFromQuery("n", 1, 1)}},
		PartitionSecret: []byte(leak.Key),
		Observe:         func(_ context.Context, e ratelimit.Event) { events = append(events, e, &e) },
		Limits:          true,
		WriteProblem: func(w http.ResponseWriter, _ *http.Request, p *httplimit.Problem) {
			problems = append(problems, p, *p)
			p.Write(w)
		},
	}
	limit := newMiddleware(t, memstore.New(newClock().Now), config)
	h := limit.Handler(&answering{})
	for _, target := range []string{"/", "/?n=2", "/?n=3"} {
		h.ServeHTTP(httptest.NewRecorder(), get(target, "X-Key", leak.Key))
	}
	h.ServeHTTP(httptest.NewRecorder(), get("/", "X-Key", leak.Key+strings.Repeat("k", ratelimit.MaxKeyLength)))
	if len(events) != 8 || len(problems) != 6 {
		t.Fatalf("heard %d events and %d problems, want 4 and 3, twice", len(events), len(problems))
	}
	server := httptest.NewServer(&answering{status: http.StatusTooManyRequests})
	defer server.Close()
	transportConfig := httplimit.TransportConfig{MaxTries: 1, Scope: func(*http.Request) string { return leak.Key }}
	transport, err := httplimit.NewTransport(&transportConfig)
	must(t, err)
	if resp, err := transport.RoundTrip(get(server.URL)); err != nil || resp.Body.Close() != nil {
		t.Fatal(err)
	}
	addresses, err := httplimit.NewAddresses(nil)
	must(t, err)
	_, invalid := httplimit.New(memstore.New(nil), &httplimit.Config{PartitionSecret: []byte(leak.Key)})
	if invalid == nil {
		t.Fatal("want an error")
	}
	result, err := memstore.New(nil).Check(t.Context(), api.For(leak.Key))
	must(t, err)
	leak.Check(t, ".", map[string]any{
		"AddressConfig":   httplimit.AddressConfig{},
		"Addresses":       addresses,
		"Advice":          httplimit.Advice{Told: true, RetryAfter: time.Second},
		"Config":          append(events, config, &config), // and what its Observe hears
		"Fields":          httplimit.Draft11,
		"InFlightPolicy":  httplimit.InFlightPolicy{Limit: ratelimit.InFlight{Name: "calls", Limit: 1}},
		"LimitStatus":     httplimit.LimitsOf(result),
		"Middleware":      limit,
		"Outcome":         httplimit.Outcome{Request: get("/", "X-Key", leak.Key), Status: 200},
		"Policy":          config.Policies[0],
		"Problem":         problems,
		"RequestError":    []any{&httplimit.RequestError{Status: 400, Detail: "no X-Key"}, invalid},
		"Store":           memstore.New(nil),
		"Transport":       transport,
		"TransportConfig": transportConfig,
		"TransportStore":  memstore.New(nil),
		"WaitError":       &httplimit.WaitError{Until: noon, Err: (ratelimit.Result{Status: ratelimit.Status{Request: api.For(leak.Key)}}).Err()},
	})
	_, badCost := limit.Requests(get("/?n="+leak.Key, "X-Key", leak.Key))
	leak.Errors(t, ".", map[string]leak.Provoked{
		"RequestError": {Err: badCost},
		"WaitError":    {Err: &httplimit.WaitError{Until: noon, Err: (ratelimit.Result{Status: ratelimit.Status{Request: api.For(leak.Key)}}).Err()}},
	})
}
