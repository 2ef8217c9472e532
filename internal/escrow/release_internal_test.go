package escrow

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// What is returned when the timer rings, of leases of a second that were brought at instants,
// and what the row is told besides.
func TestRelease(t *testing.T) {
	noon := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	type lease struct {
		after time.Duration
		count float64
	}
	const ms = time.Millisecond
	for name, test := range map[string]struct {
		leases []lease
		use    float64       // that is used at once
		needed float64       // until the end of a lease
		rings  time.Duration // after noon
		counts []float64     // of the returns
		spent  float64       // that the row is told
	}{
		"all is needed":                           {leases: []lease{{0, 10}}, use: 2, needed: 8, rings: 250 * ms},
		"hardly more than is needed":              {leases: []lease{{0, 10}}, use: 2, needed: 5, rings: 250 * ms},
		"more than is needed":                     {leases: []lease{{0, 10}}, use: 2, needed: 3, rings: 250 * ms, counts: []float64{5}, spent: 2},
		"nothing is needed":                       {leases: []lease{{0, 10}}, use: 2, rings: 250 * ms, counts: []float64{8}, spent: 2},
		"the newest first":                        {leases: []lease{{0, 10}, {100 * ms, 10}}, needed: 4, rings: 250 * ms, counts: []float64{10, 6}},
		"it is about to end":                      {leases: []lease{{0, 10}}, use: 2, needed: 8, rings: 900 * ms, counts: []float64{8}, spent: 2},
		"the first of two is about to end":        {leases: []lease{{0, 10}, {500 * ms, 20}}, use: 2, needed: 28, rings: 900 * ms, counts: []float64{8}, spent: 2},
		"nothing is left, and others are to come": {leases: []lease{{0, 10}, {500 * ms, 20}}, use: 10, needed: 28, rings: 900 * ms},
		"nothing is left of the last one":         {leases: []lease{{0, 10}}, use: 10, needed: 10, rings: 900 * ms, counts: []float64{0}, spent: 10},
		"nothing was used, and nothing is left":   {rings: 900 * ms},
		"it is over":                              {leases: []lease{{0, 10}}, use: 2, needed: 8, rings: 1100 * ms, counts: []float64{8}},
	} {
		t.Run(name, func(t *testing.T) {
			now := noon
			var got []Return
			m := New(Config{
				Lasts: time.Second, Clock: func() time.Time { return now },
				Prefetch: func(*Entry) {}, GiveBack: func(r []Return) { got = append(got, r...) },
			})
			call, err := decide.New(false, ratelimit.TokenBucket{Name: "l", Rate: 1, Period: time.Hour, Capacity: 1000}.For("k"))
			if err != nil {
				t.Fatal(err)
			}
			e := m.Of(&call.Asks[0])
			e.mu.Lock()
			e.ticking = true // so that the timer rings when the test does
			e.mu.Unlock()
			for _, l := range test.leases {
				now = noon.Add(l.after)
				e.Note(50, 40, 0)
				o := e.Order(0, 0)
				o.Arrived(Lease{Count: l.count, After: bucket.State{Value: 500, TS: now}, At: now, End: now.Add(time.Second), Sent: now})
			}
			if test.use > 0 && !e.Take(test.use, false, new(Tokens)) {
				t.Fatal("nothing is held")
			}
			now = noon.Add(test.rings)
			at := m.moment()
			e.mu.Lock()
			e.live(at)
			e.release(test.needed, at)
			got = e.returns
			e.mu.Unlock()
			spent := 0.0
			for i, r := range got {
				if i >= len(test.counts) || r.Count != test.counts[i] {
					t.Errorf("returned %v, want %v", got, test.counts)
					break
				}
				spent += r.Spent
			}
			if len(got) != len(test.counts) || spent != test.spent {
				t.Errorf("returned %d times, and told %v, want %d times and %v", len(got), spent, len(test.counts), test.spent)
			}
		})
	}
}
