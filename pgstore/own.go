package pgstore

import (
	"context"
	"hash/maphash"
	"slices"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/escrow"
)

// Decisions on their own share statements: while one is under way, the calls that
// arrive gather, and the next one decides all of them (package batch). They are
// decided in two ways.
//
//   - grant: one UPDATE takes from each row what its callers want together, if it
//     has enough for all of them. The row need not be read first.
//   - settle: rows are locked, read, decided in memory, in the order of arrival, and
//     written.
//
// In between the rows are read without a lock, to answer checks, and to refuse what
// cannot be granted: that writes and locks nothing.
//
// Neither waits for a row that somebody else has locked; such rows are passed over.
// Their callers go on in a queue for that row alone, which waits for it.

func newOwn(b *base) *own {
	o := &own{base: b, seed: maphash.MakeSeed(), locked: make(map[decide.Row]*lane)}
	for i := range o.lanes {
		l := &o.lanes[i]
		l.queue = batch.New(mostTogether, b.config.Timeout, func(ctx context.Context, tickets []*ticket) { o.serve(ctx, l, tickets) }, b.work.spawn)
	}
	o.together = o.inLane
	return o
}

// decide decides a call on its own.
func (o *own) decide(ctx context.Context, reserve, check bool, requests []ratelimit.Request) (result ratelimit.Result, err error) {
	if o == nil {
		return ratelimit.Result{}, (*base)(nil).usable()
	}
	var h *escrow.Holder
	if !check && len(requests) == 1 && o.hints.memory != nil {
		if err := ctx.Err(); err != nil {
			return result, err
		}
		if h = o.hints.memory.Seen(&requests[0]); fromMemory(h, reserve, requests[0].Count, &result) {
			return result, nil
		}
	}
	p := &pending{check: check, holder: h}
	if p.call, err = decide.NewIn(p.one[:0], reserve, requests...); err != nil {
		return ratelimit.Result{}, err
	}
	return o.decideCall(ctx, p)
}

// decideMade decides on its own a call that decide has made.
func (o *own) decideMade(ctx context.Context, call decide.Call, err error) (ratelimit.Result, error) {
	if o == nil {
		return ratelimit.Result{}, (*base)(nil).usable()
	}
	if err != nil {
		return ratelimit.Result{}, err
	}
	return o.decideCall(ctx, &pending{call: call})
}

func (o *own) decideCall(ctx context.Context, p *pending) (ratelimit.Result, error) {
	if o.pool == nil {
		return ratelimit.Result{}, ErrNoPool
	}
	if !p.check && p.holder == nil && o.hints.memory != nil {
		if err := ctx.Err(); err != nil {
			return ratelimit.Result{}, err
		}
		h := o.takeHeld(&p.call)
		rest := &p.call
		if h != nil {
			rest = &h.rest
		}
		if len(rest.Asks) > 1 && !rest.First {
			o.missed(rest)
		}
		if h != nil {
			return o.decideRest(ctx, h)
		}
	}
	return o.decideByRows(ctx, p)
}

// decideRest decides what was not in memory of a call.
func (o *own) decideRest(ctx context.Context, h *held) (rest ratelimit.Result, err error) {
	if !h.all() {
		if rest, err = o.decideByRows(ctx, &pending{call: h.rest}); err != nil || !rest.OK {
			h.putBack()
		}
	}
	if err != nil {
		return ratelimit.Result{}, err
	}
	return h.whole(rest), nil
}

func (o *own) decideByRows(ctx context.Context, p *pending) (ratelimit.Result, error) {
	if p.holder == nil && !p.check && len(p.call.Asks) == 1 {
		p.holder = o.hints.memory.Of(&p.call.Asks[0])
	}
	if p.holder != nil {
		if result, ok := refusedBefore(p); ok {
			return result, ctx.Err()
		}
	}
	if err := o.work.begin(); err != nil {
		return ratelimit.Result{}, err
	}
	defer o.work.end()
	if err := o.together(ctx, p); err != nil {
		return ratelimit.Result{}, o.gaveUp(p, err)
	}
	return p.result, p.err
}

// inLane has a call decided with those of its lane.
func (o *own) inLane(ctx context.Context, p *pending) error {
	_, err := o.laneOf(&p.call).queue.Do(ctx, p)
	return err
}

func (o *own) laneOf(call *decide.Call) *lane {
	return &o.lanes[maphash.Comparable(o.seed, call.Asks[0].Of())%lanes]
}

// serve decides the calls of a lane, but for those that go on in the queue of a
// locked row.
func (o *own) serve(ctx context.Context, l *lane, tickets []*ticket) {
	o.noteAll(tickets)
	tickets = o.redirect(o.serveHeld(tickets))
	if len(tickets) == 0 {
		return
	}
	if l.refusing {
		tickets = o.grantAhead(ctx, tickets)
	}
	o.await(o.decideAll(ctx, tickets, !l.refusing, nil))
	l.refusing = mostRefused(tickets)
}

// grantAhead serves those who want more taken ahead, which takes a grant, and returns the
// others.
func (o *own) grantAhead(ctx context.Context, tickets []*ticket) (others []*ticket) {
	var more []*ticket
	for _, t := range tickets {
		if t.Value.wants == ahead {
			more = append(more, t)
		} else {
			others = append(others, t)
		}
	}
	if len(more) > 0 {
		o.decideAll(ctx, more, true, nil)
	}
	return others
}

// decideAll decides calls, and returns those whose rows are locked by somebody else.
// If the database finds fault with a statement for many, each half of them is
// decided by itself, so that only the one at fault fails. A row that is to be
// waited for is await.
func (o *own) decideAll(ctx context.Context, tickets []*ticket, granting bool, await *decide.Row) (locked []*ticket) {
	left := tickets
	err := o.retry(ctx, func() (err error) {
		if granting {
			if left, err = o.grant(ctx, left, await); err != nil || len(left) == 0 {
				return err
			}
			granting = false
		}
		if left = unheld(left); len(left) == 0 {
			return nil
		}
		var sheet *decide.Sheet
		if left, sheet, err = o.read(ctx, left); err != nil || len(left) == 0 {
			return err
		}
		left, err = o.settle(ctx, left, sheet, await)
		return err
	})
	switch {
	case err == nil:
		return left
	case code(err) == lockNotAvailable && allWait(left):
		return left
	case answered(err) && !retriable(err) && len(left) > 1:
		half := len(left) / 2
		return append(o.decideAll(ctx, left[:half:half], granting, nil), o.decideAll(ctx, left[half:], granting, nil)...)
	}
	for _, t := range left {
		t.Value.result, t.Value.err = ratelimit.Result{}, err
		t.Finish()
	}
	return nil
}

// allWait reports whether of each call the row is known that it waits for.
func allWait(tickets []*ticket) bool {
	return !slices.ContainsFunc(tickets, func(t *ticket) bool { return t.Value.locked.Load() == nil })
}

// redirect moves the calls for locked rows to the queues of those, and returns the
// others.
func (o *own) redirect(tickets []*ticket) (left []*ticket) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.locked) == 0 {
		return tickets
	}
	for _, t := range tickets {
		row, ok := o.lockedRow(t.Value)
		switch {
		case !ok:
			left = append(left, t)
		case t.Value.wants != ahead:
			t.Value.locked.Store(&row)
			o.queueOf(row).Join(t)
		case o.queueOf(row).Idle(): // it does not wait; the row may be free
			left = append(left, t)
		default: // those who wait for the row take ahead as well
			t.Finish()
		}
	}
	return left
}

// lockedRow is a row of a call that is waited for. It needs mu.
func (o *own) lockedRow(p *pending) (row decide.Row, ok bool) {
	if p.check {
		return row, false
	}
	call := p.call.Head()
	for i := range call.Asks {
		a := &call.Asks[i]
		row = decide.Row{Key: a.Of()}
		l, ok := o.locked[row]
		switch {
		case !ok || a.Sharded(): // of which another may do
		case l.idle():
			delete(o.locked, row)
		default:
			return row, true
		}
	}
	return row, false
}

// await moves calls to the queues of the rows that they wait for.
func (o *own) await(tickets []*ticket) {
	if len(tickets) == 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, t := range tickets {
		row := *t.Value.locked.Load()
		o.mark(row)
		o.queueOf(row).Join(t)
	}
}

// queueOf is the queue of a row that is marked. It needs mu.
func (o *own) queueOf(row decide.Row) *batch.Queue[*pending] {
	l := o.locked[row]
	if l.queue == nil {
		l.queue = batch.New(mostTogether, 0, func(ctx context.Context, tickets []*ticket) { o.serveLocked(ctx, row, tickets) }, o.work.spawn)
	}
	return l.queue
}

// serveLocked decides the calls that wait for a row, as soon as it is free. While
// no connection may wait for it, it looks now and then.
func (o *own) serveLocked(ctx context.Context, row decide.Row, tickets []*ticket) {
	for w := o.waiting(0); len(tickets) > 0; {
		var left []*ticket
		_ = w.again(ctx, func(spared bool) error { // if ctx is over nobody is left
			var await *decide.Row
			if spared {
				await = &row
			}
			left = o.decideAll(ctx, tickets, true, await)
			return nil
		})
		tickets = tickets[:0]
		var others []*ticket
		for _, t := range left {
			switch {
			case t.Gone():
			case *t.Value.locked.Load() == row:
				tickets = append(tickets, t)
			default:
				others = append(others, t)
			}
		}
		o.await(others)
	}
}
