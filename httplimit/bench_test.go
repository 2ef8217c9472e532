package httplimit_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// BenchmarkMiddleware is what the middleware costs besides the store: with one in memory.
func BenchmarkMiddleware(b *testing.B) {
	plenty := ratelimit.TokenBucket{Name: "plenty", Rate: 1, Period: time.Microsecond, Capacity: 1e9}
	empty := ratelimit.TokenBucket{Name: "empty", Rate: 1, Period: 24 * time.Hour}
	for _, bench := range []struct {
		name   string
		limit  ratelimit.Limit
		config httplimit.Config
	}{
		{"granted", plenty, httplimit.Config{}},
		{"granted, no fields", plenty, httplimit.Config{Fields: httplimit.NoFields}},
		{"refused", empty, httplimit.Config{}},
		{"refused, no fields", empty, httplimit.Config{Fields: httplimit.NoFields}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			bench.config.Policies = []httplimit.Policy{{Limit: bench.limit, Key: byUser}}
			h := newMiddleware(b, memstore.New(nil), bench.config).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			r, w := get("/", "X-User", "ann"), &discardWriter{header: http.Header{}}
			b.ReportAllocs()
			for b.Loop() {
				clear(w.header)
				h.ServeHTTP(w, r)
			}
		})
	}
}

type discardWriter struct{ header http.Header }

func (w *discardWriter) Header() http.Header       { return w.header }
func (*discardWriter) Write(p []byte) (int, error) { return len(p), nil }
func (*discardWriter) WriteHeader(int)             {}
