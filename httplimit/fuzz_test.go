package httplimit_test

import (
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// Whatever the limit of a policy is, and whatever a client says: the policy is refused at
// once with an error that is ErrInvalid, or requests get an answer whose fields can be
// read, are of that policy, and hold what the client is told by its status.
func FuzzPolicy(f *testing.F) {
	for _, name := range []string{"api", "", "é", `a"b\c`, "a\r\nX: 1", "\x00", strings.Repeat("x", 200), "a b,c;d=1"} {
		f.Add(name, 10.0, int64(time.Minute), 20.0, uint8(0), "alice", "3", 0.5)
	}
	f.Add("a", 1e12, int64(1), 1e-15, uint8(1), "\xff\x00\n", "1e999", 1.0)
	f.Add("a", 1e-9, int64(876000*time.Hour), 1e12, uint8(2), "", "-0", 0.0)
	f.Add("a", 0.1, int64(time.Second)+1, 0.0, uint8(1), strings.Repeat("k", 9000), "0x10", -1.0)
	f.Fuzz(func(t *testing.T, name string, rate float64, period int64, capacity float64, kind uint8, key, cost string, jitter float64) {
		var limit ratelimit.Limit = ratelimit.TokenBucket{Name: name, Rate: rate, Period: time.Duration(period), Capacity: capacity}
		switch kind % 3 {
		case 1:
			limit = ratelimit.FixedWindow{Name: name, Rate: rate, Period: time.Duration(period), Capacity: capacity}
		case 2:
			limit = ratelimit.SlidingWindow{Name: name, Rate: rate, Period: time.Duration(period)}
		}
		m, err := httplimit.New(memstore.New(newClock().Now), &httplimit.Config{
			Policies: []httplimit.Policy{{Limit: limit, Key: httplimit.ByHeader("X-Key"), Cost: httplimit.CostFromHeader("X-Cost", 0, 1)}},
			Fields:   httplimit.Draft11 | httplimit.Triple, PartitionSecret: []byte("secret"), Jitter: jitter,
		})
		if err != nil {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Fatalf("got %v, want ErrInvalid", err)
			}
			return
		}
		r := get("/")
		r.Header["X-Key"], r.Header["X-Cost"] = []string{key}, []string{cost}
		for range 3 {
			got := serve(m.Handler(&answering{}), r)
			wait, err := strconv.ParseInt(got.Header.Get("Retry-After"), 10, 64)
			switch got.StatusCode {
			case http.StatusBadRequest, http.StatusUnprocessableEntity:
				continue
			case http.StatusOK:
				if got.Header.Get("Retry-After") != "" {
					t.Errorf("granted with Retry-After %q", got.Header.Get("Retry-After"))
				}
			case http.StatusTooManyRequests:
				if err != nil || wait < 1 {
					t.Errorf("refused with Retry-After %q", got.Header.Get("Retry-After"))
				}
			default:
				t.Fatalf("status %d", got.StatusCode)
			}
			for _, field := range []string{"RateLimit-Policy", "RateLimit"} {
				wantField(t, got.Header, field, name)
			}
		}
	})
}

// wantField wants a field that is a list of one item, a policy's name, whose parameters
// are whole numbers from 0 on.
func wantField(t *testing.T, h http.Header, field, name string) {
	t.Helper()
	list, err := httpsfv.UnmarshalList(h.Values(field))
	if err != nil || len(list) != 1 {
		t.Fatalf("%s: %q: %v", field, h.Values(field), err)
	}
	item, ok := list[0].(httpsfv.Item)
	if !ok || item.Value != name {
		t.Fatalf("%s: %q, want an item for %q", field, h.Values(field), name)
	}
	for _, param := range item.Params.Names() {
		v, _ := item.Params.Get(param)
		if n, ok := v.(int64); slices.Contains([]string{"q", "w", "r", "t"}, param) && (!ok || n < 0) {
			t.Errorf("%s: %q has %s of %v", field, h.Values(field), param, v)
		}
	}
}
