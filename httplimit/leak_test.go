package httplimit_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/leak"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
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

// The error of a row that somebody has locked names the limit and not the key, and so does what is
// logged of it.
func TestNoFaultShowsKeys(t *testing.T) {
	db := pgtest.New(t)
	store, err := pgstore.New(db.Pool, &pgstore.Config{Schema: db.Schema})
	must(t, err)
	defer store.Close()
	api := ratelimit.TokenBucket{Name: "api", Rate: 2, Period: time.Minute}
	must(t, errOf(store.Allow(t.Context(), api.For(leak.Key))))
	tx, err := db.Pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(t.Context())
	must(t, errOf(tx.Exec(t.Context(), "SELECT FROM "+db.Schema+".rate_limits FOR UPDATE")))
	var log bytes.Buffer
	var event ratelimit.Event
	limit := newMiddleware(t, store, httplimit.Config{
		Policies: []httplimit.Policy{{Limit: api, Key: httplimit.ByHeader("X-Key")}},
		Timeout:  time.Second,
		Observe:  func(_ context.Context, e ratelimit.Event) { event = e },
		Logger:   slog.New(slog.NewJSONHandler(&log, nil)),
	})
	limit.Handler(&answering{}).ServeHTTP(httptest.NewRecorder(), get("/", "X-Key", leak.Key))
	if !errors.Is(event.Err, pgstore.ErrLocked) || strings.Contains(event.Err.Error(), leak.Key) {
		t.Fatalf("got %v, want %v without the key", event.Err, pgstore.ErrLocked)
	}
	if text := log.String(); strings.Contains(text, leak.Key) || !strings.Contains(text, `row of limit \"api\"`) {
		t.Errorf("logged %s", text)
	}
	for _, text := range []string{event.String(), event.LogValue().String()} {
		if strings.Contains(text, leak.Key) || !strings.Contains(text, "locked a row") {
			t.Errorf("the event is %s", text)
		}
	}
}
