package httplimit_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// What the catalog says of a key holds from the next request on, over what Tier says, and is
// told in the fields.
func TestCatalog(t *testing.T) {
	limits, err := catalog.NewInMemory(&catalog.Config{Logger: discardLogs})
	must(t, err)
	must(t, limits.Publish(t.Context(), perMinute))
	premium := perMinute
	premium.Capacity = 100
	m := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{Catalog: limits, Policies: []httplimit.Policy{{
		Limit: perMinute, Key: byUser,
		Tier: func(r *http.Request) (ratelimit.Limit, error) {
			if r.Header.Get("X-User") == "premium" {
				return premium, nil
			}
			return perMinute, nil
		},
	}}})
	h := m.Handler(&answering{})
	wantPolicy := func(user, want string) {
		t.Helper()
		resp := serve(h, get("/", "X-User", user))
		wantStatus(t, resp, http.StatusOK)
		wantHeader(t, resp, "RateLimit-Policy", want)
	}
	wantPolicy("alice", `"per_minute";q=3;w=18`)
	wantPolicy("premium", `"per_minute";q=100;w=600`)
	must(t, errOf(limits.Set(t.Context(), "per_minute", "alice", catalog.Override{Rate: 100, Capacity: 50})))
	must(t, errOf(limits.Set(t.Context(), "per_minute", catalog.AllKeys, catalog.Override{Rate: 20})))
	wantPolicy("alice", `"per_minute";q=50;w=30`)
	wantPolicy("bob", `"per_minute";q=3;w=9`)
	wantPolicy("premium", `"per_minute";q=100;w=300`)

	requests, err := m.Requests(get("/", "X-User", "alice"))
	if err != nil || len(requests) != 1 || requests[0].Limit.Definition().Capacity != 50 {
		t.Errorf("for a handler's own transaction: got %v, %v", requests, err)
	}
}

func body(t *testing.T, resp *http.Response) string {
	t.Helper()
	text, err := io.ReadAll(resp.Body)
	must(t, err)
	return string(text)
}

// A policy in shadow answers nobody with 429, and no client is told of it; one in refuse answers
// all, and says nothing of those that were not asked.
func TestModes(t *testing.T) {
	limits, err := catalog.NewInMemory(&catalog.Config{Logger: discardLogs})
	must(t, err)
	ctx := t.Context()
	strict := ratelimit.FixedWindow{Name: "strict", Rate: 2, Period: time.Hour}
	must(t, limits.Publish(ctx, perMinute, strict))
	must(t, errOf(limits.Set(ctx, "strict", catalog.AllKeys, catalog.Override{Mode: ratelimit.ModeShadow})))
	h := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{Catalog: limits, Policies: []httplimit.Policy{
		{Limit: perMinute, Key: byUser}, {Limit: strict, Key: byUser},
	}}).Handler(&answering{})
	for range 3 { // of which strict would refuse the last
		resp := serve(h, get("/", "X-User", "alice"))
		wantStatus(t, resp, http.StatusOK)
		wantHeader(t, resp, "RateLimit-Policy", `"per_minute";q=3;w=18`)
	}
	resp := serve(h, get("/", "X-User", "alice"))
	wantStatus(t, resp, http.StatusTooManyRequests)
	if text := body(t, resp); strings.Contains(text, "strict") || !strings.Contains(text, "per_minute") {
		t.Errorf("got %s", text)
	}
	must(t, errOf(limits.Set(ctx, "strict", catalog.AllKeys, catalog.Override{Mode: ratelimit.ModeRefuse})))
	resp = serve(h, get("/", "X-User", "bob"))
	wantStatus(t, resp, http.StatusTooManyRequests)
	wantHeader(t, resp, "Retry-After", "60")
	wantHeader(t, resp, "RateLimit", `"strict";r=0;t=60`)
	if text := body(t, resp); !strings.Contains(text, "strict") || strings.Contains(text, "per_minute") {
		t.Errorf("got %s", text)
	}
}
