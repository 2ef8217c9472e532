package memstore_test

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/memstore"
)

// Whatever a text says that is read as a receipt: to settle or cancel it is an error that
// is ErrInvalid, or leaves numbers that limits go on with.
func FuzzReceipt(f *testing.F) {
	t0 := time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)
	limits := []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "a", Rate: 10, Period: time.Second, Capacity: 100, Shards: 4},
		ratelimit.FixedWindow{Name: "b", Rate: 10, Period: time.Hour, Start: t0},
		ratelimit.SlidingWindow{Name: "c", Rate: 10, Period: time.Minute, Slots: 7},
	}
	for i, limit := range limits {
		s := memstore.New(func() time.Time { return t0 })
		result, err := s.Reserve(f.Context(), limit.ForN("k", 10), limits[(i+1)%3].ForN("k", 3))
		must(f, err)
		text, err := result.Receipt.MarshalText()
		must(f, err)
		for _, used := range []float64{0, 3, 1e6, -1, math.NaN(), math.Inf(1), 5e-324} {
			f.Add(string(text), used)
			f.Add(string(text[:len(text)-1]), used)
		}
	}
	f.Add("", 0.0)
	f.Fuzz(func(t *testing.T, text string, used float64) {
		var r ratelimit.Receipt
		if r.UnmarshalText([]byte(text)) != nil {
			return
		}
		now := t0
		s := memstore.New(func() time.Time { return now })
		for _, limit := range limits {
			must(t, errOf(s.Allow(t.Context(), limit.ForN("k", 5))))
		}
		result, err := s.Settle(t.Context(), &r, used)
		if err != nil && !errors.Is(err, ratelimit.ErrInvalid) {
			t.Fatalf("Settle() = %v, want ErrInvalid", err)
		}
		for _, status := range result.Each() {
			if math.IsNaN(status.Value) || math.IsInf(status.Value, 0) || status.RetryAfter < 0 || status.ResetAfter < 0 {
				t.Errorf("left %+v", status)
			}
		}
		if _, err := s.Cancel(t.Context(), &r); err != nil && !errors.Is(err, ratelimit.ErrInvalid) {
			t.Fatalf("Cancel() = %v, want ErrInvalid", err)
		}
		now = now.Add(time.Hour)
		for _, limit := range limits {
			if _, err := s.Allow(t.Context(), limit.For("k")); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		}
	})
}
