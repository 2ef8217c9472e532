package batch

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Ticket is one call that waits to be served.
type Ticket[T any] struct {
	Value   T    // serve's, and once the ticket is finished the caller's
	Refused bool // serve's, also once the ticket is finished

	ctx      context.Context
	deadline time.Duration // since epoch, of a caller without one in its context; 0 if it waits without bound

	mu       sync.Mutex
	state    state
	resolved chan struct{} // closed when the state is no longer waiting; nil until somebody waits for that
	pending  *pending      // of the batch that has the ticket; nil while none has, or once the ticket has left it
}

type state uint8

const (
	waiting state = iota
	finished
	failed  // serve ended without finishing it
	expired // its deadline was over first, or its context
)

// NewTicket returns a ticket that is in no queue, for tests of functions that serve.
func NewTicket[T any](ctx context.Context, value T) *Ticket[T] {
	return &Ticket[T]{Value: value, ctx: ctx}
}

// Finish wakes the ticket's caller, which owns its Value from then on, and reports true. If the
// caller has given up, or the ticket has been finished before, it does nothing, and reports false.
func (t *Ticket[T]) Finish() bool { return t.resolve(finished) }

// Finished reports whether the ticket has been finished.
func (t *Ticket[T]) Finished() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state == finished
}

// Gone reports whether the ticket's caller has given up, since its context or its
// patience is over. Such a ticket need not be finished.
func (t *Ticket[T]) Gone() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state == expired || t.ctx.Err() != nil
}

// wait waits until the ticket is resolved, or its context is over.
func (t *Ticket[T]) wait() {
	if resolved := t.resolution(); resolved != nil {
		select {
		case <-resolved:
		case <-t.ctx.Done():
		}
	}
}

// resolution returns a channel that is closed when the ticket is resolved, nil if
// it is already. A call that is served alone is, and needs no channel.
func (t *Ticket[T]) resolution() <-chan struct{} {
	t.mu.Lock()
	if t.state == waiting {
		t.resolved = make(chan struct{})
	}
	resolved := t.resolved
	t.mu.Unlock()
	return resolved
}

// result returns the result of Do once the wait is over. A finished ticket is returned even if
// the context has ended by now.
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

// begin reports whether the ticket is to be served, and then counts it in p.
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

// move takes the ticket out of the batch that has it.
func (t *Ticket[T]) move() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave()
}

// fail settles the ticket if it is still in the batch of p.
func (t *Ticket[T]) fail(p *pending) {
	t.mu.Lock()
	left := t.pending != p
	t.mu.Unlock()
	if !left {
		t.resolve(failed)
	}
}

// resolve ends the wait, if nothing has ended it yet, and reports whether it did. The caller is
// woken outside of the lock, for which it would have to wait.
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

// leave takes the ticket out of its batch's count, once. It needs mu.
func (t *Ticket[T]) leave() {
	p := t.pending
	t.pending = nil
	if p != nil && p != inline {
		p.done()
	}
}

// pending counts the tickets for which somebody still waits for a batch, and
// cancels the batch's context when there are none.
type pending struct {
	left   atomic.Int64
	cancel context.CancelFunc // set before left can become 0
}

// inline stands for the batch of a call that is served on its caller's goroutine.
// Its context is the caller's, so there is nothing to count.
var inline = new(pending)

func (p *pending) done() {
	if p.left.Add(-1) == 0 {
		p.cancel()
	}
}
