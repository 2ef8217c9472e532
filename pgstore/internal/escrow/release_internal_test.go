package escrow

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

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
