package httplimit_test

import (
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

var rows = ratelimit.TokenBucket{Name: "rows", Rate: 1000, Period: time.Hour}

// What a client states as its cost is no way round the limit.
func TestStatedCost(t *testing.T) {
	for _, test := range []struct {
		query  string
		status int
		taken  float64
	}{
		{"", 200, 100},
		{"rows=", 200, 100},
		{"rows=20", 200, 20},
		{"rows=0020", 200, 20},
		{"rows=0", 200, 10},
		{"rows=1001", 413, 0},
		{"rows=1" + strings.Repeat("0", 400), 413, 0},
		// Whatever one parser reads otherwise than another one.
		{"rows=many", 400, 0},
		{"rows=1,000", 400, 0},
		{"rows=%2020%20", 400, 0},
		{"rows=%2B20", 400, 0},
		{"rows=2.5", 400, 0},
		{"rows=1e2", 400, 0},
		{"rows=0x1p-3", 400, 0},
		{"rows=1_0", 400, 0},
		{"rows=1e-400", 400, 0},
		{"rows=%D9%A1", 400, 0}, // a digit of another script
		{"rows=-1", 400, 0},
		{"rows=NaN", 400, 0},
		{"rows=1&rows=1000", 400, 0},
		{"rows=1%&rows=1000", 400, 0},
		{"rows=1;rows=1000", 400, 0},
	} {
		store := memstore.New(newClock().Now)
		m := newMiddleware(t, store, httplimit.Config{
			Policies: []httplimit.Policy{{Limit: rows, Cost: httplimit.CostFromQuery("rows", 10, 100)}},
			TooLarge: http.StatusRequestEntityTooLarge,
		})
		r := get("/")
		r.URL.RawQuery = test.query
		resp := serve(m.Handler(&answering{}), r)
		wantStatus(t, resp, test.status)
		if got := 1000 - left(t, store, rows, ""); got != test.taken {
			t.Errorf("%q took %g, want %g", test.query, got, test.taken)
		}
		if test.status != 200 {
			if p := readProblem(t, resp); p.Detail == "" {
				t.Errorf("%q: the problem does not say what is wrong: %+v", test.query, p)
			}
			wantHeader(t, resp, "Retry-After", "")
		}
	}
}

func TestCostFromHeader(t *testing.T) {
	cost := httplimit.CostFromHeader("x-cost", 1, 5)
	for _, test := range []struct {
		header []string
		want   float64 // 0 is an error
	}{
		{nil, 5},
		{[]string{"X-Cost", "3"}, 3},
		{[]string{"X-Cost", "0"}, 1},
		{[]string{"X-Cost", "0.1"}, 0},
		{[]string{"X-Cost", " 3"}, 0},
		{[]string{"X-Cost", "3", "X-Cost", "4"}, 0},
		{[]string{"X-Cost", "-3"}, 0},
	} {
		got, err := cost(get("/", test.header...))
		if got != test.want || (err != nil) != (test.want == 0) {
			t.Errorf("%q: got %g, %v, want %g", test.header, got, err, test.want)
		}
	}
}

// What a function of the program's own returns is bounded too.
func TestCostByFunction(t *testing.T) {
	for _, test := range []struct {
		cost   float64
		status int
	}{
		{0, 200},
		{1, 200},
		{1001, 422},
		{math.Inf(1), 422},
		{1e13, 422},
		{-1, 400},
		{math.NaN(), 400},
		{math.Inf(-1), 400},
		{math.SmallestNonzeroFloat64, 400},
	} {
		m := newMiddleware(t, memstore.New(newClock().Now), httplimit.Config{Policies: []httplimit.Policy{{Limit: rows, Cost: httplimit.Fixed(test.cost)}}})
		if got := serve(m.Handler(&answering{}), get("/")).StatusCode; got != test.status {
			t.Errorf("a cost of %g: got %d, want %d", test.cost, got, test.status)
		}
	}
}

// Whatever a client states, it is refused, or costs at least what it must.
func FuzzCost(f *testing.F) {
	for _, s := range []string{
		"", "rows=1", "rows=-1", "rows=1e999", "rows=NaN", "rows=0x1p-2", "rows=1&rows=2", "rows=%00", "rows=1_0",
		"rows=١", "rows=+7", "%zz", "rows=1;rows=2", "rows=.5", "rows=-0", "rows=1e-400", "Rows=3", "rows=\n5",
	} {
		f.Add(s)
	}
	cost := httplimit.CostFromQuery("rows", 10, 100)
	f.Fuzz(func(t *testing.T, query string) {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.URL.RawQuery = query
		n, err := cost(r)
		if err != nil {
			return
		}
		if !(n >= 10) || math.IsInf(n, 0) {
			t.Fatalf("%q costs %g, want at least 10, and finite", query, n)
		}
		values, err := url.ParseQuery(query)
		if err != nil || len(values["rows"]) > 1 {
			t.Fatalf("%q costs %g, though a handler may read another value", query, n)
		}
		if want, err := strconv.ParseFloat(strings.TrimSpace(values.Get("rows")), 64); err == nil && n < want && n < math.MaxFloat64 {
			t.Fatalf("%q costs %g, but asks for %g", query, n, want)
		}
		if want, err := strconv.ParseInt(values.Get("rows"), 0, 64); err == nil && n < float64(want) {
			t.Fatalf("%q costs %g, but asks for %d", query, n, want)
		}
	})
}
