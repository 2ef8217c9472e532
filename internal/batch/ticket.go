package batch

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Ticket is one call that waits to be served.
type Ticket[T any] struct {
	Value T // serve's, and once the ticket is finished the caller's

	ctx      context.Context
	deadline time.Time // of a caller whose context has none; zero if it waits for as long as it takes

	mu      sync.Mutex
	state   state
	settled chan struct{} // closed when the state is no longer waiting; nil until somebody waits for that
	pending *pending      // of the batch that has the ticket; nil while none has, or once the ticket has left it
}

type state uint8

const (
	waiting state = iota
	finished
	failed // serve ended without finishing it
)

// Context returns the context of the ticket's caller.
func (t *Ticket[T]) Context() context.Context {
	return t.ctx
}

// Finish wakes the ticket's caller, whose Value is from then on. Only the first
// call does anything.
func (t *Ticket[T]) Finish() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state == waiting {
		t.settle(finished)
	}
}

// Finished reports whether the ticket has been finished.
func (t *Ticket[T]) Finished() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state == finished
}

// Gone reports whether the ticket's caller has given up, since its context or its
// patience is over. Such a ticket need not be finished.
func (t *Ticket[T]) Gone() bool { return t.over() != nil }

// over returns the error of a caller whose context or patience is over.
func (t *Ticket[T]) over() error {
	if err := t.ctx.Err(); err != nil {
		return err
	}
	if !t.deadline.IsZero() && !time.Now().Before(t.deadline) {
		return context.DeadlineExceeded
	}
	return nil
}

// wait waits until the ticket is settled, or its context or patience is over.
func (t *Ticket[T]) wait(timers *sync.Pool) (*Ticket[T], error) {
	if settled := t.settling(); settled != nil {
		t.await(settled, timers)
	}
	return t.result()
}

// await returns when the ticket is settled, or its context or patience is over.
func (t *Ticket[T]) await(settled <-chan struct{}, timers *sync.Pool) {
	if t.deadline.IsZero() {
		select {
		case <-settled:
		case <-t.ctx.Done():
		}
		return
	}
	timer, ok := timers.Get().(*time.Timer)
	if !ok {
		timer = time.NewTimer(time.Until(t.deadline))
	} else {
		timer.Reset(time.Until(t.deadline))
	}
	defer func() {
		timer.Stop()
		timers.Put(timer)
	}()
	select {
	case <-settled:
	case <-t.ctx.Done():
	case <-timer.C:
	}
}

// settling returns a channel that is closed when the ticket is settled, nil if
// it is already. A call that is served alone is, and needs no channel.
func (t *Ticket[T]) settling() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != waiting {
		return nil
	}
	t.settled = make(chan struct{})
	return t.settled
}

// result returns what Do does once the wait is over. What is finished is
// finished, even if the context is over by now.
func (t *Ticket[T]) result() (*Ticket[T], error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state == finished {
		return t, nil
	}
	if err := t.over(); err != nil {
		t.leave()
		return nil, err
	}
	return nil, ErrUnfinished
}

// begin reports whether the ticket is to be served, and then counts it in p.
func (t *Ticket[T]) begin(p *pending) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state != waiting || t.over() != nil {
		return false
	}
	p.left.Add(1)
	t.pending = p
	return true
}

// move takes the ticket out of the batch that has it.
func (t *Ticket[T]) move() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave()
}

// fail settles the ticket if it is still in the batch of p.
func (t *Ticket[T]) fail(p *pending) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pending == p {
		t.settle(failed)
	}
}

// settle ends the wait. It needs mu.
func (t *Ticket[T]) settle(s state) {
	t.state = s
	if t.settled != nil {
		close(t.settled)
	}
	t.leave()
}

// leave takes the ticket out of its batch's count, once. It needs mu.
func (t *Ticket[T]) leave() {
	p := t.pending
	t.pending = nil
	if p != nil && p != alone {
		p.done()
	}
}

// pending counts the tickets for which somebody still waits for a batch, and
// cancels the batch's context when there are none.
type pending struct {
	left   atomic.Int64
	cancel context.CancelFunc // set before left can become 0
}

// alone stands for the batch of a call that is served on its caller's goroutine.
// Its context is the caller's, so there is nothing to count.
var alone = new(pending)

func (p *pending) done() {
	if p.left.Add(-1) == 0 {
		p.cancel()
	}
}
