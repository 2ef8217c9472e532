package httplimit_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// told is the limits of a response's JSON.
func told(t *testing.T, w *httptest.ResponseRecorder) []map[string]any {
	t.Helper()
	var body struct {
		Limits []map[string]any `json:"limits"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
		t.Fatalf("%v in %q", err, w.Body)
	}
	return body.Limits
}

func TestStatusHandler(t *testing.T) {
	c := newClock()
	store := memstore.New(c.Now)
	m := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute, Key: byUser}, {Limit: perDay, Key: byUser}}})
	must(t, store.Take(t.Context(), perMinute.ForN("alice", 2)))
	must(t, errOf(store.Pause(t.Context(), perDay, "alice", time.Hour)))
	for range 2 { // it takes nothing
		w := httptest.NewRecorder()
		m.StatusHandler(store).ServeHTTP(w, get("/limits", "X-User", "alice"))
		limits := told(t, w)
		if w.Code != http.StatusOK || w.Header().Get("Cache-Control") != "no-store" || len(limits) != 2 {
			t.Fatalf("got %d, %v, %s", w.Code, w.Header(), w.Body)
		}
		at := float64(noon.UnixMilli())
		for name, want := range map[string]any{
			"name": "per_minute", "kind": "token bucket", "rate": 10.0, "period": 60_000.0, "capacity": 3.0,
			"value": 1.0, "at": at, "fullAt": at + 12_000, "pausedUntil": 0.0,
		} {
			if got := limits[0][name]; got != want {
				t.Errorf("%s: got %v, want %v", name, got, want)
			}
		}
		if got, want := limits[1]["pausedUntil"], at+3_600_000; got != want {
			t.Errorf("paused until %v, want %v", got, want)
		}
		if strings.Contains(w.Body.String(), "alice") {
			t.Errorf("the key is in %s", w.Body)
		}
	}
}

func TestStatusHandlerOfBadRequests(t *testing.T) {
	store := memstore.New(newClock().Now)
	config := httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute, Key: byUser}}}
	m := newMiddleware(t, store, config)
	ask := func(status httplimit.StatusStore, r *http.Request) int {
		w := httptest.NewRecorder()
		m.StatusHandler(status).ServeHTTP(w, r)
		return w.Code
	}
	if got := ask(store, get("/limits")); got != http.StatusBadRequest {
		t.Errorf("without a key: got %d, want 400", got)
	}
	if got := ask(store, httptest.NewRequest(http.MethodPost, "/limits", nil)); got != http.StatusMethodNotAllowed {
		t.Errorf("POST: got %d, want 405", got)
	}
	broken := unanswering{errors.New("the database does not answer")}
	if got := ask(broken, get("/limits", "X-User", "alice")); got != http.StatusServiceUnavailable {
		t.Errorf("a store that fails: got %d, want 503", got)
	}
	config.Policies[0].Tier = func(*http.Request) (ratelimit.Limit, error) { return nil, nil }
	m = newMiddleware(t, store, config)
	w := httptest.NewRecorder()
	m.StatusHandler(broken).ServeHTTP(w, get("/limits"))
	if w.Code != http.StatusOK || w.Body.String() != "{\"limits\":[]}\n" {
		t.Errorf("no policy applies: got %d, %q", w.Code, w.Body)
	}
}

// A refusal's problem tells what the limits have if it is told to, and otherwise does not.
func TestProblemTellsLimits(t *testing.T) {
	for _, tell := range []bool{false, true} {
		store := memstore.New(newClock().Now)
		m := newMiddleware(t, store, httplimit.Config{Policies: []httplimit.Policy{{Limit: perMinute, Key: byUser}}, Limits: tell})
		must(t, store.Take(t.Context(), perMinute.ForN("alice", 3)))
		w := httptest.NewRecorder()
		m.Handler(&answering{}).ServeHTTP(w, get("/", "X-User", "alice"))
		limits := told(t, w)
		if w.Code != http.StatusTooManyRequests || (len(limits) == 1) != tell {
			t.Errorf("Limits %v: got %d, %s", tell, w.Code, w.Body)
		}
		if tell && limits[0]["value"] != 0.0 {
			t.Errorf("got %v, want a value of 0", limits[0])
		}
	}
}

func TestPredictJSIsSmall(t *testing.T) {
	if n := len(httplimit.PredictJS); n == 0 || n >= 3000 {
		t.Errorf("predict.js has %d bytes, want less than 3000", n)
	}
}

// unanswering is a store that does not answer.
type unanswering struct{ err error }

func (u unanswering) Check(context.Context, ...ratelimit.Request) (ratelimit.Result, error) {
	return ratelimit.Result{}, u.err
}
