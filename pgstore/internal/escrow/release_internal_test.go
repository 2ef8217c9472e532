package escrow

import (
	"cmp"
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
		met    bool          // others, at the row
		value  float64       // of the row; 0 for 500
	}{
		"all is needed":                            {leases: []lease{{0, 10}}, use: 2, needed: 8, rings: 250 * ms},
		"hardly more than is needed":               {leases: []lease{{0, 10}}, use: 2, needed: 5, rings: 250 * ms},
		"more than is needed":                      {leases: []lease{{0, 10}}, use: 2, needed: 3, rings: 250 * ms, counts: []float64{5}, spent: 2},
		"nothing is needed":                        {leases: []lease{{0, 10}}, use: 2, rings: 250 * ms, counts: []float64{8}, spent: 2},
		"the newest first":                         {leases: []lease{{0, 10}, {100 * ms, 10}}, needed: 4, rings: 250 * ms, counts: []float64{10, 6}},
		"it is about to end":                       {leases: []lease{{0, 10}}, use: 2, needed: 8, rings: 900 * ms, counts: []float64{8}, spent: 2},
		"the first of two is about to end":         {leases: []lease{{0, 10}, {500 * ms, 20}}, use: 2, needed: 28, rings: 900 * ms, counts: []float64{8}, spent: 2},
		"nothing is left, and others are to come":  {leases: []lease{{0, 10}, {500 * ms, 20}}, use: 10, needed: 28, rings: 900 * ms},
		"nothing is left of the last one":          {leases: []lease{{0, 10}}, use: 10, needed: 10, rings: 900 * ms, counts: []float64{0}, spent: 10},
		"nothing was used, and nothing is left":    {rings: 900 * ms},
		"a full row":                               {leases: []lease{{0, 10}}, use: 2, value: 1000, rings: 900 * ms},
		"a row that others take from":              {leases: []lease{{0, 10}}, use: 2, met: true, value: 900, rings: 900 * ms, counts: []float64{8}, spent: 2},
		"nothing is left, and others take from it": {leases: []lease{{0, 10}}, use: 10, met: true, rings: 900 * ms, counts: []float64{0}, spent: 10},
		"nothing is left, and the row is full":     {leases: []lease{{0, 10}}, use: 10, value: 1000, rings: 900 * ms},
		"it is over":                               {leases: []lease{{0, 10}}, use: 2, needed: 8, rings: 1100 * ms, counts: []float64{8}, spent: 2},
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
			e := m.FindOrAdd(&call.Demands[0])
			e.mu.Lock()
			e.timerSet = true // so that the timer rings when the test does
			e.mu.Unlock()
			for _, l := range test.leases {
				now = noon.Add(l.after)
				e.CountDemand(50, 40)
				if test.met {
					e.Contended()
				}
				o := e.Plan(0, 0)
				o.Receive(Lease{Count: l.count, After: bucket.State{Value: cmp.Or(test.value, 500), TS: now}, At: now, End: now.Add(time.Second), Sent: now})
			}
			if test.use > 0 && !e.Take(test.use, false, new(Tokens)) {
				t.Fatal("nothing is held")
			}
			now = noon.Add(test.rings)
			at := m.config.moment()
			e.mu.Lock()
			e.sweep(at)
			e.release(test.needed, at)
			got = e.returns
			e.mu.Unlock()
			spent := 0.0
			for i, r := range got {
				if i >= len(test.counts) || r.Count != test.counts[i] {
					t.Errorf("returned %v, want %v", got, test.counts)
					break
				}
				spent += r.Spent.Spent
			}
			if len(got) != len(test.counts) || spent != test.spent {
				t.Errorf("returned %d times, and told %v, want %d times and %v", len(got), spent, len(test.counts), test.spent)
			}
		})
	}
}

// Who evicts all is not back before that is returned which a timer had taken out just before.
func TestEvictAllWaitsForTheTimer(t *testing.T) {
	noon := time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)
	rings, back := make(chan struct{}), make(chan float64, 1)
	m := New(Config{
		Lasts: time.Second, Clock: func() time.Time { return noon },
		Prefetch: func(*Entry) {}, GiveBack: func(r []Return) {
			close(rings)
			time.Sleep(20 * time.Millisecond) // EvictAll has all this time to be too early
			back <- r[0].Count
		},
	})
	call, err := decide.New(false, ratelimit.TokenBucket{Name: "l", Rate: 1, Period: time.Hour, Capacity: 1000}.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	e := m.FindOrAdd(&call.Demands[0])
	e.mu.Lock()
	e.timerSet = true // so that the timer rings when the test does
	e.mu.Unlock()
	e.CountDemand(50, 40)
	o := e.Plan(0, 0)
	o.Receive(Lease{Count: 10, After: bucket.State{Value: 500, TS: noon}, At: noon, End: noon.Add(time.Second), Sent: noon})
	go e.onTimer()
	<-rings
	if returns := m.EvictAll(); len(returns) != 0 {
		t.Errorf("got %+v, which the timer has taken out", returns)
	}
	select {
	case n := <-back:
		if n != 10 {
			t.Errorf("%v are back, want 10", n)
		}
	default:
		t.Error("nothing is back")
	}
}
