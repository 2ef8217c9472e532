// Package batch serves calls in batches, as databases do commits: while one
// batch is being served, the calls that arrive gather, and the next batch has
// them all. Nothing waits for company.
package batch

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"
)

// ErrUnfinished is returned by [Queue.Do] when serve ended, by returning or by a panic, and had
// neither finished nor moved the call's ticket. It means a bug of serve.
var ErrUnfinished = errors.New("batch: serve ended without finishing the call")

// Queue serves calls in batches, one batch at a time, in order of arrival. It
// has no goroutine while it is idle. It is safe for concurrent use.
type Queue[T any] struct {
	most     int
	patience time.Duration
	serve    func(context.Context, []*Ticket[T])
	spawn    func(func())

	mu      sync.Mutex
	busy    bool // somebody serves, and will look at waiting afterwards
	serving []*Ticket[T]
	one     [1]*Ticket[T] // the ticket being served, when it is served alone
	waiting []*Ticket[T]
	timer   *time.Timer   // for all tickets: one for each costs more than the rest of its wait
	alarm   time.Duration // since epoch, when the timer rings; 0 if it is not set
}

// epoch is the zero of instants: reading the monotonic clock alone takes half the time.
var epoch = time.Now()

// New returns a queue that serves at most most tickets at a time, one or more, with serve. A
// caller with a context without a deadline gives up after patience, if that is positive. The
// queue starts goroutines with spawn, or with go if spawn is nil.
//
// Before serve ends it must have finished each ticket or moved it to another
// queue with [Queue.Join], but for those that are [Ticket.Gone]. The callers of
// the others get [ErrUnfinished]. The slice is serve's to change.
//
// A call that meets no other is served with its own context, on its caller's goroutine; if
// serve panics there, so does [Queue.Do]. For all others serve gets a context with the values
// of the first ticket's, which is canceled as soon as no caller waits for this batch any more,
// because each ticket has been finished, moved, or given up by its caller. So the last ticket
// must not be resolved before serve is done with that context, clean-up included. If serve
// panics or ends the goroutine, the queue goes on with the waiting tickets; a panic ends the
// program all the same, unless spawn recovers it.
func New[T any](most int, patience time.Duration, serve func(ctx context.Context, tickets []*Ticket[T]), spawn func(func())) *Queue[T] {
	if most < 1 {
		panic("batch: a batch must have room for a ticket")
	}
	if spawn == nil {
		spawn = func(f func()) { go f() }
	}
	return &Queue[T]{most: most, patience: patience, serve: serve, spawn: spawn}
}

// Do returns the ticket of a call once it is finished, and then its Value is the caller's.
//
// If ctx ends before that, Do returns its error and no ticket, and context.DeadlineExceeded
// after patience. A call that was still waiting is not served any more. Otherwise serve may
// still be at work on it, so the caller must not touch anything that value points to.
func (q *Queue[T]) Do(ctx context.Context, value T) (*Ticket[T], error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	t := &Ticket[T]{Value: value, ctx: ctx}
	if _, ok := ctx.Deadline(); !ok && q.patience > 0 {
		t.deadline = time.Since(epoch) + q.patience
	}
	if q.occupy(t) {
		q.serveInline(t)
	}
	t.wait()
	return t.result()
}

// Join moves tickets that serve of another queue got, and has not finished, to
// the end of q, and does not wait for them. Their callers go on waiting where
// they are. Tickets that are moved together are served together, if a batch has
// room for them. q serves them on a goroutine of its own.
func (q *Queue[T]) Join(tickets ...*Ticket[T]) {
	for _, t := range tickets {
		t.move()
	}
	q.mu.Lock()
	idle := !q.busy
	q.busy = true
	q.waiting = append(q.waiting, tickets...)
	for _, t := range tickets {
		q.watch(t)
	}
	q.mu.Unlock()
	if idle {
		q.spawn(q.drain)
	}
}

// Idle reports whether nothing is being served and nobody waits.
func (q *Queue[T]) Idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !q.busy
}

// occupy reports whether the queue was idle, and now is the caller's, which must call next. If
// it was not, t is among those waiting.
func (q *Queue[T]) occupy(t *Ticket[T]) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.watch(t)
	if q.busy {
		q.waiting = append(q.waiting, t)
		return false
	}
	q.busy = true
	q.one[0] = t
	q.serving = q.one[:]
	return true
}

// watch sets the timer to a ticket's deadline, unless it rings before. It needs mu.
func (q *Queue[T]) watch(t *Ticket[T]) {
	if t.deadline == 0 || q.alarm != 0 && q.alarm <= t.deadline {
		return
	}
	q.alarm = t.deadline
	if q.timer == nil {
		q.timer = time.AfterFunc(q.alarm-time.Since(epoch), q.expire)
	} else {
		q.timer.Reset(q.alarm - time.Since(epoch))
	}
}

// expire gives up the tickets whose deadline is over, and sets the timer to the first of the
// others. It rings once per patience, however many calls there are.
func (q *Queue[T]) expire() {
	now := time.Since(epoch)
	var over []*Ticket[T]
	q.mu.Lock()
	q.alarm = 0
	for _, tickets := range [][]*Ticket[T]{q.waiting, q.serving} { // the end of serving begins the next batch
		for _, t := range tickets {
			if t.deadline == 0 || now < t.deadline {
				q.watch(t)
			} else {
				over = append(over, t)
			}
		}
	}
	q.mu.Unlock()
	for _, t := range over {
		t.resolve(expired)
	}
}

// next hands the queue on to the waiting tickets, or frees it.
func (q *Queue[T]) next() {
	q.mu.Lock()
	q.serving, q.one[0] = nil, nil
	q.busy = len(q.waiting) > 0
	gathered := q.busy
	if !gathered {
		q.waiting = nil // may be large
		if q.alarm != 0 {
			q.timer.Stop() // nobody is left to wake; and it would keep a queue that is not used any more
			q.alarm = 0
		}
	}
	q.mu.Unlock()
	if gathered {
		q.spawn(q.drain)
	}
}

func (q *Queue[T]) serveInline(t *Ticket[T]) {
	defer q.next()
	ctx, p := t.ctx, inline
	if t.deadline != 0 {
		p = new(pending)
		ctx, p.cancel = context.WithCancel(ctx)
		defer p.cancel()
	}
	if t.begin(p) {
		q.serveBatch(ctx, p, q.one[:])
	}
}

// drain serves the waiting tickets until there are none.
func (q *Queue[T]) drain() {
	defer q.next() // also when serve panics or ends the goroutine
	answered, took := 1, time.Duration(0)
	for {
		q.letReturn(answered, took/16)
		ctx, p, tickets := q.gather()
		if answered = len(tickets); answered == 0 {
			return
		}
		begun := time.Now()
		q.serveBatch(ctx, p, tickets)
		took = time.Since(begun)
	}
}

// letReturn lets callers that just got their answers call again, if they are ready to: one that
// comes too late for the next batch waits for all of it. They have a turn of the scheduler each,
// since after the first it may go on here at once, on another thread than theirs. A turn takes less
// than a microsecond if nothing else is to run; if much is, the moment ends the wait.
func (q *Queue[T]) letReturn(answered int, moment time.Duration) {
	begun := time.Now()
	for range answered {
		runtime.Gosched()
		if q.waits(answered) || time.Since(begun) > moment {
			return
		}
	}
}

// waits reports whether at least n tickets wait.
func (q *Queue[T]) waits(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) >= n
}

// gather returns the next batch, without the tickets given up. It is empty only if no caller
// waits.
func (q *Queue[T]) gather() (ctx context.Context, p *pending, tickets []*Ticket[T]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p = new(pending)
	p.left.Store(1) // of gather itself, since tickets can be given up while it counts
	n := 0
	for ; n < len(q.waiting) && len(tickets) < q.most; n++ {
		if t := q.waiting[n]; t.begin(p) {
			tickets = append(tickets, t)
		}
	}
	q.waiting = slices.Delete(q.waiting, 0, n)
	q.serving = tickets
	if len(tickets) == 0 {
		return nil, nil, nil
	}
	ctx, p.cancel = context.WithCancel(context.WithoutCancel(tickets[0].ctx))
	p.done()
	return ctx, p, tickets
}

// serveBatch serves tickets, and fails those that serve leaves behind.
func (q *Queue[T]) serveBatch(ctx context.Context, p *pending, tickets []*Ticket[T]) {
	defer func() {
		for _, t := range tickets {
			t.fail(p)
		}
	}()
	q.serve(ctx, slices.Clone(tickets)) // serve may delete from its own
}
