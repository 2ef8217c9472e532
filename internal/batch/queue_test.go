package batch_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/pgratelimit/ratelimit/internal/batch"
)

// round is a batch that is being served. What serve does, the test does in its
// place, until it sends the last thing to do.
type round struct {
	ctx     context.Context
	tickets []*batch.Ticket[int]
	last    chan func()
}

func (r round) values() []int {
	var values []int
	for _, t := range r.tickets {
		values = append(values, t.Value)
	}
	return values
}

// finish answers each ticket that is left with its negative value.
func (r round) finish() {
	for _, t := range r.tickets {
		if !t.Finished() {
			t.Value = -t.Value
			t.Finish()
		}
	}
	r.end()
}

// end makes serve return.
func (r round) end() {
	r.last <- func() {}
}

// newQueue returns a queue, and where its rounds come out.
func newQueue(most int, spawn func(func())) (*batch.Queue[int], <-chan round) {
	rounds := make(chan round)
	return batch.New(most, 0, func(ctx context.Context, tickets []*batch.Ticket[int]) {
		r := round{ctx, tickets, make(chan func())}
		rounds <- r
		(<-r.last)()
	}, spawn), rounds
}

type answer struct {
	value int
	err   error
}

// ask has the queue serve values, each on a goroutine of its own, in this order.
// It returns once all of them are waiting.
func ask(ctx context.Context, q *batch.Queue[int], values ...int) []<-chan answer {
	var answers []<-chan answer
	for _, value := range values {
		c := make(chan answer, 1)
		answers = append(answers, c)
		go func() {
			t, err := q.Do(ctx, value)
			if err != nil {
				c <- answer{err: err}
				return
			}
			c <- answer{value: t.Value}
		}()
		synctest.Wait()
	}
	return answers
}

func wantAnswers(t *testing.T, answers []<-chan answer, want ...int) {
	t.Helper()
	for i, c := range answers {
		if got := <-c; got.err != nil || got.value != want[i] {
			t.Errorf("got %d, error %v, want %d", got.value, got.err, want[i])
		}
	}
}

func wantError(t *testing.T, c <-chan answer, want error) {
	t.Helper()
	if got := <-c; !errors.Is(got.err, want) {
		t.Errorf("got %d, error %v, want error %v", got.value, got.err, want)
	}
}

func wantValues(t *testing.T, r round, want ...int) {
	t.Helper()
	if got := r.values(); !slices.Equal(got, want) {
		t.Errorf("got a batch of %d, want %d", got, want)
	}
}

func noGoroutine(t *testing.T) func(func()) {
	return func(func()) { t.Error("a goroutine was started") }
}

type contextKey struct{}

func named(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, contextKey{}, name)
}

func TestAlone(t *testing.T) {
	ctx := named(t.Context(), "mine")
	var got context.Context
	q := batch.New(10, 0, func(ctx context.Context, tickets []*batch.Ticket[int]) {
		got = ctx
		tickets[0].Value++
		tickets[0].Finish()
	}, noGoroutine(t))
	for i := range 3 {
		ticket, err := q.Do(ctx, i)
		if err != nil || ticket.Value != i+1 {
			t.Fatalf("got %v, error %v, want %d", ticket, err, i+1)
		}
		if got != ctx {
			t.Errorf("served with %v, want the caller's own context", got)
		}
	}
}

// Those who come while others are served are served together, in the order in
// which they came.
func TestGather(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, rounds := newQueue(3, nil)
		first := ask(t.Context(), q, 1)
		r := <-rounds
		second := ask(named(t.Context(), "second"), q, 2)
		others := ask(t.Context(), q, 3, 4, 5, 6)
		wantValues(t, r, 1)
		r.finish()
		wantAnswers(t, first, -1)

		r = <-rounds
		wantValues(t, r, 2, 3, 4)
		if got := r.ctx.Value(contextKey{}); got != "second" {
			t.Errorf("got a context of %v, want one with the values of the first", got)
		}
		others = append(others, ask(t.Context(), q, 7)...)
		r.finish()
		r = <-rounds
		wantValues(t, r, 5, 6, 7)
		r.finish()
		wantAnswers(t, append(second, others...), -2, -3, -4, -5, -6, -7)
	})
}

func TestGoneBeforeBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, rounds := newQueue(2, nil)
		ended, cancel := context.WithCancel(t.Context())
		ask(t.Context(), q, 0)
		r := <-rounds
		gone := ask(ended, q, 1, 2)
		answers := ask(t.Context(), q, 3)
		gone = append(gone, ask(ended, q, 4)...)
		answers = append(answers, ask(t.Context(), q, 5)...)
		cancel()
		for _, c := range gone {
			wantError(t, c, context.Canceled)
		}
		if _, err := q.Do(ended, 6); !errors.Is(err, context.Canceled) {
			t.Errorf("got error %v, want %v", err, context.Canceled)
		}
		r.finish()
		r = <-rounds
		wantValues(t, r, 3, 5)
		r.finish()
		wantAnswers(t, answers, -3, -5)

		// When all have gone the queue is idle again.
		ended, cancel = context.WithCancel(t.Context())
		ask(t.Context(), q, 0)
		r = <-rounds
		ask(ended, q, 1)
		cancel()
		r.finish()
		synctest.Wait()
		answers = ask(t.Context(), q, 7)
		r = <-rounds
		if r.ctx != t.Context() {
			t.Errorf("got context %v, want that of the one caller", r.ctx)
		}
		r.finish()
		wantAnswers(t, answers, -7)
	})
}

// A batch's context is over when the last ticket has left, however it did, and
// not before.
func TestContextOver(t *testing.T) {
	const (
		finish = iota
		giveUp
		move
	)
	for name, ways := range map[string][]int{
		"finished":            {finish, finish},
		"given up":            {giveUp, giveUp},
		"moved":               {move, move},
		"finished, given up":  {finish, giveUp}, // nobody waits any more, though one was served
		"given up, finished":  {giveUp, finish},
		"moved, given up":     {move, giveUp},
		"given up, moved":     {giveUp, move},
		"moved, finished":     {move, finish},
		"all three ways":      {giveUp, finish, move},
		"all three ways back": {move, finish, giveUp},
		"one":                 {giveUp},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, rounds := newQueue(10, nil)
				other, otherRounds := newQueue(10, nil)
				ask(t.Context(), q, 0)
				r := <-rounds
				cancels := make([]context.CancelFunc, len(ways))
				for i := range ways {
					var ctx context.Context
					ctx, cancels[i] = context.WithCancel(t.Context())
					defer cancels[i]()
					ask(ctx, q, i+1)
				}
				r.finish()
				r = <-rounds
				for i, way := range ways {
					synctest.Wait()
					if r.ctx.Err() != nil {
						t.Errorf("over when %d of %d had left", i, len(ways))
					}
					switch way {
					case finish:
						r.tickets[i].Finish()
						cancels[i]() // counts once
					case giveUp:
						cancels[i]()
						synctest.Wait()
						if !r.tickets[i].Gone() {
							t.Error("not gone")
						}
						r.tickets[i].Finish() // counts once
					case move:
						other.Join(r.tickets[i])
						moved := <-otherRounds
						moved.finish() // counts there
					}
				}
				<-r.ctx.Done() // or nothing goes on, and synctest says so
				r.end()
			})
		})
	}
}

// Who gives up while it is served alone gets its answer if that was there before, and otherwise its
// own error.
func TestAloneOver(t *testing.T) {
	for finishes, want := range map[bool]error{true: nil, false: context.Canceled} {
		ctx, cancel := context.WithCancel(t.Context())
		q := batch.New(1, 0, func(_ context.Context, tickets []*batch.Ticket[int]) {
			if finishes {
				tickets[0].Finish()
			}
			cancel()
		}, noGoroutine(t))
		if _, err := q.Do(ctx, 5); !errors.Is(err, want) {
			t.Errorf("got error %v, want %v", err, want)
		}
	}
}

// Serving goes on in another queue, and the first one is free for others.
func TestJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var spawned atomic.Int64
		q, rounds := newQueue(10, nil)
		other, otherRounds := newQueue(10, func(f func()) {
			spawned.Add(1)
			go f()
		})
		// From a call that is served alone, to a queue that is idle.
		first := ask(t.Context(), q, 1)
		r := <-rounds
		other.Join(r.tickets...)
		moved := <-otherRounds
		wantValues(t, moved, 1)
		if got := spawned.Load(); got != 1 {
			t.Errorf("%d goroutines were started, want 1", got)
		}
		// From several, to a queue that is busy.
		answers := ask(t.Context(), q, 2, 3, 4)
		r.end()
		r = <-rounds
		r.tickets[1].Finish()
		other.Join(r.tickets[0], r.tickets[2])
		fifth := ask(t.Context(), other, 5)
		r.end()
		moved.finish()
		wantAnswers(t, first, -1)
		moved = <-otherRounds
		wantValues(t, moved, 2, 4, 5)
		moved.finish()
		wantAnswers(t, append(answers, fifth...), -2, 3, -4, -5)
	})
}

// A caller whom serve forgets does not wait for ever.
func TestUnfinished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, rounds := newQueue(10, nil)
		forgotten := ask(t.Context(), q, 1)
		r := <-rounds
		answers := ask(t.Context(), q, 2, 3)
		forgotten = append(forgotten, ask(t.Context(), q, 4)...)
		ctx, cancel := context.WithCancel(t.Context())
		gone := ask(ctx, q, 5)
		r.end()
		wantError(t, forgotten[0], batch.ErrUnfinished)
		r = <-rounds
		r.tickets[0].Finish()
		q.Join(r.tickets[1])
		late := r.tickets[2]
		clear(r.tickets) // they are serve's
		cancel()
		r.end()
		wantError(t, forgotten[1], batch.ErrUnfinished)
		wantError(t, gone[0], context.Canceled)
		late.Finish()
		if late.Finished() {
			t.Error("finished after it had failed")
		}
		r = <-rounds
		wantValues(t, r, 3)
		r.finish()
		wantAnswers(t, answers, 2, -3)
	})
}

// Whatever ends serve, the queue goes on with the others.
func TestServeBreaksOff(t *testing.T) {
	for name, breakOff := range map[string]func(){
		"panic":  func() { panic("oops") },
		"goexit": runtime.Goexit,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var recovered []any // whatever ends a goroutine, nil for Goexit
				record := func(f func()) func() {
					return func() {
						returned := false
						defer func() {
							if r := recover(); !returned {
								recovered = append(recovered, r)
							}
						}()
						f()
						returned = true
					}
				}
				q, rounds := newQueue(10, func(f func()) { go record(f)() })
				go record(func() { _, _ = q.Do(t.Context(), 1) })()
				r := <-rounds
				answers := ask(t.Context(), q, 2, 3)
				r.last <- breakOff // on its caller's goroutine
				r = <-rounds
				wantValues(t, r, 2, 3)
				r.tickets[0].Finish()
				answers = append(answers, ask(t.Context(), q, 4)...)
				r.last <- breakOff // on the queue's
				wantError(t, answers[1], batch.ErrUnfinished)
				r = <-rounds
				wantValues(t, r, 4)
				r.finish()
				wantAnswers(t, []<-chan answer{answers[0], answers[2]}, 2, -4)
				synctest.Wait()
				if len(recovered) != 2 || recovered[0] != recovered[1] || (recovered[0] == nil) != (name == "goexit") {
					t.Errorf("got %v from the two goroutines", recovered)
				}
				answers = ask(t.Context(), q, 5)
				r = <-rounds
				if r.ctx != t.Context() {
					t.Error("the queue is still busy")
				}
				r.finish()
				wantAnswers(t, answers, -5)
			})
		})
	}
}

// counter is a call, and how often it was served.
type counter struct {
	answer int
	served atomic.Int64
}

// Callers come, wait, give up and ask again while their tickets move: each is
// served once at most, and each that is told so was.
func TestConcurrent(t *testing.T) {
	const callers, calls = 16, 50
	var goroutines sync.WaitGroup
	second := batch.New(4, 0, func(_ context.Context, tickets []*batch.Ticket[*counter]) {
		for _, ticket := range tickets {
			ticket.Value.answer = 2
			ticket.Value.served.Add(1)
			ticket.Finish()
		}
	}, goroutines.Go)
	first := batch.New(5, 0, func(_ context.Context, tickets []*batch.Ticket[*counter]) {
		for _, ticket := range tickets {
			if rand.IntN(2) == 0 {
				second.Join(ticket)
				continue
			}
			ticket.Value.answer = 1
			ticket.Value.served.Add(1)
			ticket.Finish()
		}
	}, goroutines.Go)
	queues := []*batch.Queue[*counter]{first, second}
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range calls {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(200*time.Microsecond))
				c := new(counter)
				ticket, err := queues[rand.IntN(2)].Do(ctx, c)
				cancel()
				if err != nil && !errors.Is(err, context.DeadlineExceeded) || err == nil && ticket.Value != c {
					t.Errorf("got ticket %v, error %v", ticket, err)
				}
				if served := c.served.Load(); served > 1 || err == nil && (served != 1 || c.answer == 0) {
					t.Errorf("served %d times, error %v", served, err)
				}
			}
		})
	}
	wg.Wait()
	goroutines.Wait() // ends, since idle queues have none
}

// A caller whose context has no deadline gives up when its patience is over, and so
// does the batch that only it waits for.
func TestPatience(t *testing.T) {
	const patience = time.Second
	synctest.Test(t, func(t *testing.T) {
		var ended []error
		q := batch.New(10, patience, func(ctx context.Context, tickets []*batch.Ticket[int]) {
			<-ctx.Done()
			ended = append(ended, ctx.Err())
		}, nil)
		begun := time.Now()
		var calls sync.WaitGroup
		for i := range 3 { // the first is served alone, the others wait behind it
			calls.Go(func() {
				if _, err := q.Do(t.Context(), i); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("call %d: error %v, want %v", i, err, context.DeadlineExceeded)
				}
				if got := time.Since(begun); got != patience {
					t.Errorf("call %d: gave up after %v, want %v", i, got, patience)
				}
			})
			synctest.Wait()
		}
		calls.Wait()
		synctest.Wait()
		if len(ended) != 1 || !q.Idle() {
			t.Errorf("%d batches were served, idle %v; want that of the first call only, and idle", len(ended), q.Idle())
		}

		// A deadline of the caller's own counts instead.
		ctx, cancel := context.WithTimeout(t.Context(), 5*patience)
		defer cancel()
		begun = time.Now()
		if _, err := q.Do(ctx, 0); !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != 5*patience {
			t.Errorf("error %v after %v, want the context's after %v", err, time.Since(begun), 5*patience)
		}
	})
}

// A queue that is not used any more does not stay until a patience is over.
func TestIdleQueueIsForgotten(t *testing.T) {
	queues := make([]weak.Pointer[batch.Queue[int]], 100)
	for i := range queues {
		q := batch.New(10, time.Hour, func(_ context.Context, tickets []*batch.Ticket[int]) { tickets[0].Finish() }, nil)
		if _, err := q.Do(t.Context(), i); err != nil {
			t.Fatal(err)
		}
		queues[i] = weak.Make(q)
	}
	kept := 0
	for range 10 {
		runtime.GC()
		kept = 0
		for _, q := range queues {
			if q.Value() != nil {
				kept++
			}
		}
	}
	if kept > len(queues)/10 {
		t.Errorf("%d of %d queues are kept", kept, len(queues))
	}
}
