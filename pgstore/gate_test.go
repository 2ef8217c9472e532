package pgstore

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
)

func gateCall(t *testing.T, shards int) ratelimit.Call {
	t.Helper()
	limit := ratelimit.TokenBucket{Name: "l", Rate: 10, Period: time.Second, Shards: shards}
	call, err := ratelimit.NewCall(false, limit.For("k"))
	if err != nil {
		t.Fatal(err)
	}
	return call
}

// waitingAt is how many wait at the only gate.
func (g *gates) waitingAt() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, at := range g.open {
		return len(at.waiting)
	}
	return 0
}

// For the tests outside of the package: how many wait for the only row, and for
// a connection.
func (s *Store) Queued() int     { return s.gates.waitingAt() }
func (s *Store) Connecting() int { return int(s.connecting.Load()) }

// eventually polls for what another goroutine is about to do.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 10 s", what)
		}
	}
}

// Who came first goes first, and each has a shard of its own.
func TestGate(t *testing.T) {
	var g gates
	var memory shardMemory
	call := gateCall(t, 2)
	var inside []*pass
	for range 2 {
		p, err := g.enter(t.Context(), call, &memory)
		if err != nil {
			t.Fatal(err)
		}
		inside = append(inside, p)
	}
	if inside[0].shards[0] == inside[1].shards[0] {
		t.Errorf("two have shard %d", inside[0].shards[0])
	}
	order := make(chan int, 3)
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			p, err := g.enter(t.Context(), call, &memory)
			if err != nil {
				t.Error(err)
				return
			}
			order <- i
			p.leave()
		})
		eventually(t, "waits", func() bool { return g.waitingAt() == i+1 })
	}
	inside[0].leave()
	wg.Wait()
	for want := range 3 {
		if got := <-order; got != want {
			t.Errorf("got %d, want %d", got, want)
		}
	}
	inside[1].leave()
	if len(g.open) != 0 {
		t.Errorf("%d gates are kept, want none", len(g.open))
	}
}

// Who gives up leaves the queue, and passes a turn on that came all the same.
func TestGateGivenUp(t *testing.T) {
	var g gates
	var memory shardMemory
	call := gateCall(t, 1)
	for range 200 {
		p, err := g.enter(t.Context(), call, &memory)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if p, err := g.enter(ctx, call, &memory); err == nil {
				p.leave()
			}
		})
		wg.Go(func() {
			p, err := g.enter(t.Context(), call, &memory)
			if err != nil {
				t.Error(err)
				return
			}
			p.leave()
		})
		eventually(t, "both wait", func() bool { return g.waitingAt() == 2 })
		wg.Go(cancel) // at about the time of the turn
		p.leave()
		wg.Wait()
		if len(g.open) != 0 {
			t.Fatalf("%d gates are kept, want none", len(g.open))
		}
	}
}
