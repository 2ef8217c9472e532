package keyqueue

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func enter(t *testing.T, q *Queue[string], key string, tickets int, choose func([]int) int) int {
	t.Helper()
	ticket, err := q.Enter(t.Context(), key, tickets, choose)
	if err != nil {
		t.Fatal(err)
	}
	return ticket
}

// wantEmpty wants nothing to be left of anybody.
func wantEmpty[K comparable](t *testing.T, q *Queue[K]) {
	t.Helper()
	if len(q.keys) != 0 {
		t.Errorf("%d keys are kept, want none", len(q.keys))
	}
}

func wantWaiting(t *testing.T, q *Queue[string], want int) {
	t.Helper()
	if got := q.Waiting(); got != want {
		t.Errorf("%d wait, want %d", got, want)
	}
}

// Who came first goes first, to whatever ticket is free.
func TestOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue[string]
		inside := []int{enter(t, &q, "k", 2, nil), enter(t, &q, "k", 2, nil)}
		if !slices.Equal(inside, []int{0, 1}) {
			t.Errorf("got tickets %d, want 0 and 1", inside)
		}
		type entry struct{ caller, ticket int }
		entered := make(chan entry, 4)
		for i := range 4 {
			go func() { entered <- entry{i, enter(t, &q, "k", 2, nil)} }()
			synctest.Wait()
		}
		wantWaiting(t, &q, 4)
		for i, ticket := range []int{1, 0, 0, 1} {
			q.Leave("k", ticket)
			synctest.Wait()
			wantWaiting(t, &q, 3-i)
			if got, want := <-entered, (entry{i, ticket}); got != want {
				t.Errorf("got caller and ticket %v, want %v", got, want)
			}
		}
		q.Leave("k", 0)
		q.Leave("k", 1)
		wantEmpty(t, &q)
	})
}

func TestChoose(t *testing.T) {
	var q Queue[string]
	var offered []int
	at := func(i int) func([]int) int {
		return func(free []int) int {
			offered = slices.Clone(free)
			return free[i]
		}
	}
	if got := enter(t, &q, "k", 4, at(2)); got != 2 || !slices.Equal(offered, []int{0, 1, 2, 3}) {
		t.Errorf("got %d of %d, want 2 of all four", got, offered)
	}
	if got := enter(t, &q, "k", 4, at(0)); got != 0 || !slices.Equal(offered, []int{0, 1, 3}) {
		t.Errorf("got %d of %d, want 0 of the other three", got, offered)
	}
	q.Leave("k", 2)
	if got := enter(t, &q, "k", 4, at(1)); got != 2 || !slices.Equal(offered, []int{1, 2, 3}) {
		t.Errorf("got %d of %d, want 2 of those that are free", got, offered)
	}
	q.Leave("k", 0)
	q.Leave("k", 2)
	wantEmpty(t, &q)
}

func TestGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var q Queue[string]
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		enter(t, &q, "k", 1, nil)
		gone := make(chan error, 1)
		go func() {
			_, err := q.Enter(ctx, "k", 1, nil)
			gone <- err
		}()
		synctest.Wait()
		entered := make(chan int, 1)
		go func() { entered <- enter(t, &q, "k", 1, nil) }()
		synctest.Wait()
		wantWaiting(t, &q, 2)
		if err := <-gone; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got error %v, want %v", err, context.DeadlineExceeded)
		}
		wantWaiting(t, &q, 1)
		q.Leave("k", 0)
		q.Leave("k", <-entered)
		if _, err := q.Enter(ctx, "k", 1, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got error %v of a context that is over, want %v", err, context.DeadlineExceeded)
		}
		wantEmpty(t, &q)
	})
}

// endsLate is a context that is over as soon as anybody has looked at it.
type endsLate struct {
	context.Context
	looked atomic.Bool
}

func (c *endsLate) Done() <-chan struct{} { return nil }

func (c *endsLate) Err() error {
	if c.looked.Swap(true) {
		return context.Canceled
	}
	return nil
}

// A ticket that comes when the context is over goes to the next, or is free.
func TestPassOn(t *testing.T) {
	for name, next := range map[string]bool{"to the next": true, "free": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var q Queue[string]
				enter(t, &q, "k", 1, nil)
				gone := make(chan error, 1)
				go func() {
					_, err := q.Enter(&endsLate{Context: t.Context()}, "k", 1, nil)
					gone <- err
				}()
				synctest.Wait()
				entered := make(chan int, 1)
				if next {
					go func() { entered <- enter(t, &q, "k", 1, nil) }()
					synctest.Wait()
				}
				q.Leave("k", 0)
				if err := <-gone; !errors.Is(err, context.Canceled) {
					t.Errorf("got error %v, want %v", err, context.Canceled)
				}
				if next {
					q.Leave("k", <-entered)
				}
				wantEmpty(t, &q)
			})
		})
	}
}

// Callers come, wait and give up: no ticket has two holders at a time, and none
// is lost.
func TestConcurrent(t *testing.T) {
	const callers, calls, keys, tickets = 16, 100, 2, 3
	var q Queue[int]
	var holders [keys][tickets]atomic.Int64
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range calls {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(100*time.Microsecond))
				key := rand.IntN(keys)
				ticket, err := q.Enter(ctx, key, tickets, func(free []int) int { return free[rand.IntN(len(free))] })
				if err == nil {
					if n := holders[key][ticket].Add(1); n != 1 {
						t.Errorf("%d hold ticket %d of key %d", n, ticket, key)
					}
					<-ctx.Done() // so that others wait
					holders[key][ticket].Add(-1)
					q.Leave(key, ticket)
				} else if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got error %v", err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	wantEmpty(t, &q)
}
