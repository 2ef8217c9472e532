package httplimit_test

import (
	"net/http"
	"testing"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// What the catalog says of a key holds from the next request on, over what Tier says, and is
// told in the fields.
func TestCatalog(t *testing.T) {
	limits, err := catalog.NewInMemory(&catalog.Config{Logger: discardLogs})
	if err != nil {
		t.Fatal(err)
	}
	if err := limits.Publish(t.Context(), perMinute); err != nil {
		t.Fatal(err)
	}
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
	if err := limits.Set(t.Context(), "per_minute", "alice", catalog.Override{Rate: 100, Capacity: 50}); err != nil {
		t.Fatal(err)
	}
	if err := limits.SetAll(t.Context(), "per_minute", catalog.Override{Rate: 20}); err != nil {
		t.Fatal(err)
	}
	wantPolicy("alice", `"per_minute";q=50;w=30`)
	wantPolicy("bob", `"per_minute";q=3;w=9`)
	wantPolicy("premium", `"per_minute";q=100;w=300`)

	requests, err := m.Requests(get("/", "X-User", "alice"))
	if err != nil || len(requests) != 1 || requests[0].Limit.Definition().Capacity != 50 {
		t.Errorf("for a handler's own transaction: got %v, %v", requests, err)
	}
}
