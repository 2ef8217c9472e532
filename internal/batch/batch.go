// Package batch serves calls in batches, like a database's group commit: while one batch is being
// served, calls gather for the next. An idle queue serves a call at once.
package batch

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// [Queue.Do] returns ErrUnfinished if serve ended or panicked without finishing or moving the
// call's ticket. It means a bug of serve.
var ErrUnfinished = errors.New("batch: serve ended without finishing the call")

// Queue serves calls in batches, one batch at a time, in order of arrival. It
// has no goroutine while it is idle. It is safe for concurrent use.
type Queue[T any] struct {
	most     int
	patience time.Duration
	serve    func(context.Context, []*Ticket[T])
	spawn    func(func())

	mu      sync.Mutex
	busy    bool // a batch is being served; its server will look at waiting afterwards
	serving []*Ticket[T]
	one     [1]*Ticket[T] // the batch of a ticket that is served alone
	waiting []*Ticket[T]
	timer   *time.Timer   // one for all tickets: a timer for each would cost more than the rest of its wait
	alarm   time.Duration // when the timer fires, since epoch; 0 if it is not set
}

// Instants are counted from epoch: reading only the monotonic clock takes half the time.
var epoch = time.Now()

// New returns a queue that serves at most most tickets at a time, at least one, with serve. A
// caller whose context has no deadline gives up after patience, if that is positive. The queue
// starts goroutines with spawn, or with go if spawn is nil.
//
// Before serve ends it must finish each ticket, or move it to another queue with [Queue.Join];
// tickets that are [Ticket.Gone] may be left. Other callers get [ErrUnfinished]. serve may change
// the slice.
//
// A lone call is served with its own context, on its caller's goroutine; if serve panics there, so
// does [Queue.Do]. For a batch, serve gets a context with the values of the first ticket's. It is
// canceled once every ticket has been finished, moved, or given up by its caller. So serve must
// resolve the last ticket only when it is done with that context, clean-up included. If serve
// panics or ends its goroutine, the queue goes on with the waiting tickets; the panic still ends
// the program, unless spawn recovers it.
func New[T any](most int, patience time.Duration, serve func(ctx context.Context, tickets []*Ticket[T]), spawn func(func())) *Queue[T] {
	if most < 1 {
		panic("batch: a batch must have room for a ticket")
	}
	if spawn == nil {
		spawn = func(f func()) { go f() }
	}
	return &Queue[T]{most: most, patience: patience, serve: serve, spawn: spawn}
}

// Do returns the ticket of a call when it is finished; its Value is then the caller's.
//
// If ctx ends first, Do returns its error and no ticket; after patience it returns
// context.DeadlineExceeded. A call that still waits is then not served. Otherwise serve may still
// be at work on it, so the caller must not touch what value points to.
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

// Join moves tickets from another queue's serve to the end of q, without waiting for them. Their
// callers go on waiting. Tickets that are moved together are served together, if a batch has room
// for them. q serves them on its own goroutine.
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

// Idle reports whether the queue serves nothing and nothing waits.
func (q *Queue[T]) Idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !q.busy
}

// occupy reports whether the queue was idle. Then t is served on its caller's goroutine, which must
// call next; otherwise t waits.
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

// watch sets the timer to a ticket's deadline, unless it fires earlier. The caller holds mu.
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

// expire gives up tickets after their deadlines, and sets the timer to the next deadline. It fires
// once per patience, however many calls there are.
func (q *Queue[T]) expire() {
	now := time.Since(epoch)
	var over []*Ticket[T]
	q.mu.Lock()
	q.alarm = 0
	for _, tickets := range [][]*Ticket[T]{q.waiting, q.serving} { // the end of serving begins the next batch, so look at waiting first
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

// next gives the queue to the waiting tickets, or frees it.
func (q *Queue[T]) next() {
	q.mu.Lock()
	q.serving, q.one[0] = nil, nil
	q.busy = len(q.waiting) > 0
	gathered := q.busy
	if !gathered {
		q.waiting = nil // it may be large
		if q.alarm != 0 {
			q.timer.Stop() // a set timer would keep a queue that nobody uses any more
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

// drain serves waiting tickets until none is left.
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

// letReturn lets callers that just got their answers call again: a call too late for the next batch
// waits for all of it. Each gets a turn of the scheduler, because after one turn this goroutine may
// go on at once, on another thread. An idle turn takes less than a microsecond; on a busy machine,
// moment bounds the wait.
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

// gather returns the next batch without tickets that were given up. It is empty only if no caller
// waits.
func (q *Queue[T]) gather() (ctx context.Context, p *pending, tickets []*Ticket[T]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p = new(pending)
	p.left.Store(1) // gather counts as one, since tickets can be given up meanwhile
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

// serveBatch serves tickets, and fails those that serve leaves.
func (q *Queue[T]) serveBatch(ctx context.Context, p *pending, tickets []*Ticket[T]) {
	defer func() {
		for _, t := range tickets {
			t.fail(p)
		}
	}()
	q.serve(ctx, slices.Clone(tickets)) // serve may change its slice
}

// Ticket is a call that waits to be served.
type Ticket[T any] struct {
	Value   T    // belongs to serve; once the ticket is finished, to the caller
	Refused bool // belongs to serve, also once the ticket is finished

	ctx      context.Context
	deadline time.Duration // since epoch, if its context has none; 0 for no bound

	mu       sync.Mutex
	state    state
	resolved chan struct{} // closed when state changes; nil until a caller waits
	pending  *pending      // of the batch that has the ticket; nil before and after that
}

type state uint8

const (
	waiting state = iota
	finished
	failed  // serve ended without finishing it
	expired // its deadline or its context ended first
)

// NewTicket returns a ticket outside of any queue, for tests of serve functions.
func NewTicket[T any](ctx context.Context, value T) *Ticket[T] {
	return &Ticket[T]{Value: value, ctx: ctx}
}

// Finish wakes the ticket's caller, to whom its Value then belongs, and reports true. If the caller
// has given up, or the ticket is finished already, it does nothing and reports false.
func (t *Ticket[T]) Finish() bool { return t.resolve(finished) }

// Finished reports whether the ticket has been finished.
func (t *Ticket[T]) Finished() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state == finished
}

// Gone reports whether the ticket's caller has given up, because its context or its patience ended.
// Such a ticket need not be finished.
func (t *Ticket[T]) Gone() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state == expired || t.ctx.Err() != nil
}

// wait waits until the ticket is resolved or its context ends.
func (t *Ticket[T]) wait() {
	if resolved := t.resolution(); resolved != nil {
		select {
		case <-resolved:
		case <-t.ctx.Done():
		}
	}
}

// resolution returns a channel that closes when the ticket is resolved. It is nil if the ticket is
// resolved already, as after a call that was served alone.
func (t *Ticket[T]) resolution() <-chan struct{} {
	t.mu.Lock()
	if t.state == waiting {
		t.resolved = make(chan struct{})
	}
	resolved := t.resolved
	t.mu.Unlock()
	return resolved
}

// result returns the results of Do after the wait. A finished ticket counts even if its context has
// ended by now.
func (t *Ticket[T]) result() (*Ticket[T], error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state == finished {
		return t, nil
	}
	if err := t.ctx.Err(); err != nil {
		t.state = expired
		t.leave()
		return nil, err
	}
	if t.state == expired {
		return nil, context.DeadlineExceeded
	}
	return nil, ErrUnfinished
}

// begin reports whether to serve the ticket, and then counts it in p.
func (t *Ticket[T]) begin(p *pending) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != waiting || t.ctx.Err() != nil {
		return false
	}
	if p != inline {
		p.left.Add(1)
	}
	t.pending = p
	return true
}

// move removes the ticket from its batch.
func (t *Ticket[T]) move() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave()
}

// fail ends the wait of a ticket that serve left in the batch of p.
func (t *Ticket[T]) fail(p *pending) {
	t.mu.Lock()
	left := t.pending != p
	t.mu.Unlock()
	if !left {
		t.resolve(failed)
	}
}

// resolve ends the wait unless it has ended, and reports whether it did. It wakes the caller after
// unlocking, since the caller needs the lock.
func (t *Ticket[T]) resolve(s state) bool {
	t.mu.Lock()
	if t.state != waiting {
		t.mu.Unlock()
		return false
	}
	t.state = s
	resolved := t.resolved
	t.leave()
	t.mu.Unlock()
	if resolved != nil {
		close(resolved)
	}
	return true
}

// leave removes the ticket from its batch's count, once. The caller holds mu.
func (t *Ticket[T]) leave() {
	p := t.pending
	t.pending = nil
	if p != nil && p != inline {
		p.done()
	}
}

// pending counts a batch's tickets that have a waiting caller. At 0 it cancels the batch's context.
type pending struct {
	left   atomic.Int64
	cancel context.CancelFunc // set before left can reach 0
}

// inline is the pending of a call served on its caller's goroutine. The context is the caller's, so
// it counts nothing.
var inline = new(pending)

func (p *pending) done() {
	if p.left.Add(-1) == 0 {
		p.cancel()
	}
}
