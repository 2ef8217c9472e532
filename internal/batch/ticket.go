package batch

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

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
