package batch

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// Callers that need several turns of the scheduler before they call again are in the next batch;
// but where others go on running, the moment ends the wait. On one thread a turn is one of all.
func TestLetReturn(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	const callers = 64
	q := New(callers, 0, func(context.Context, []*Ticket[int]) {}, nil)
	q.busy = true
	for range callers {
		go func() {
			for range 3 {
				runtime.Gosched()
			}
			q.occupy(NewTicket(context.Background(), 0))
		}()
	}
	q.letReturn(callers, time.Hour)
	if !q.waits(callers) {
		t.Errorf("fewer than %d callers wait", callers)
	}

	var turns atomic.Int64
	go func() {
		for turns.Add(1) < 10000 {
			runtime.Gosched()
		}
	}()
	q.letReturn(1000, 0)
	if turns := turns.Load(); turns > 100 {
		t.Errorf("waited for %d turns", turns)
	}
}
