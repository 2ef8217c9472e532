package permits

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// call is an operation on a permit.
type call struct {
	op  *table.PermitOp
	err error
}

// lookCall is a look at a key's permits.
type lookCall struct {
	look *table.PermitLook
	err  error
}

type ticket = batch.Ticket[*call]

// lock returns the advisory lock of a permit.
func (f *Permits) lock(row decide.Row) int64 { return table.Lock(f.Schema, row) }

// apply makes an operation. If the caller gives up, a permit that was taken for it is released.
func (f *Permits) apply(ctx context.Context, op *table.PermitOp) error {
	ops := f.ops
	if !f.table.PassesOver() || len(op.Rest) > 0 { // the statement is for one row, or for a set, so it serves this call alone
		ops = batch.New(1, f.Timeout, f.serve, f.Work.Spawn)
	}
	end, err := f.Enter(ctx)
	if err != nil {
		return err
	}
	defer end()
	c := &call{op: op}
	if _, err = ops.Do(ctx, c); err == nil {
		if c.err == nil || ctx.Err() == nil {
			return c.err
		}
		err = ctx.Err() // the statement was canceled after all its callers gave up
	}
	return f.FaultOf("change a permit of", op.Names(), err)
}

// look looks at the permits of a key.
func (f *Permits) look(ctx context.Context, look *table.PermitLook) error {
	if !f.table.PassesOver() {
		looks := []*table.PermitLook{look}
		return f.Standalone(ctx, "look", func(ctx context.Context) error { return f.table.LookAtPermits(ctx, f.Pool, looks, f.Clock()) })
	}
	end, err := f.Enter(ctx)
	if err != nil {
		return err
	}
	defer end()
	c := &lookCall{look: look}
	if _, err := f.looks.Do(ctx, c); err != nil {
		return f.FaultOf("look at", []string{look.Key.Name}, err)
	}
	return c.err
}

// serve makes the operations that gathered. If they take permits, the statement goes on after all
// callers have given up, for [conn.Conn.Silence] at most. Otherwise the process would not know
// whether it holds the permits.
func (f *Permits) serve(ctx context.Context, tickets []*ticket) {
	if !slices.ContainsFunc(tickets, func(t *ticket) bool { return t.Value.takes() }) {
		f.applyAll(ctx, tickets)
		return
	}
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	made := make(chan struct{})
	f.Work.Spawn(func() {
		defer cancel()
		defer close(made)
		f.applyAll(inner, tickets)
	})
	select {
	case <-made:
	case <-ctx.Done():
		time.AfterFunc(f.Silence(), cancel)
	}
}

// takes reports whether the operation takes a permit, which must be released if nobody wants it.
func (c *call) takes() bool { return c.op.Fence == 0 || c.op.Next }

// applyAll makes the operations of tickets. Operations on the same row are made one after another.
func (f *Permits) applyAll(ctx context.Context, tickets []*ticket) {
	for len(tickets) > 0 {
		tickets = slices.DeleteFunc(tickets, (*ticket).Gone)
		now, later := oneEach(tickets)
		f.change(ctx, now)
		for _, t := range now {
			f.finish(t)
		}
		tickets = later
	}
}

// oneEach returns tickets for different rows, and the rest.
func oneEach(tickets []*ticket) (now, later []*ticket) {
	rows := make(map[decide.Row]bool, len(tickets))
	for _, t := range tickets {
		if row := t.Value.op.Row; rows[row] {
			later = append(later, t)
		} else {
			rows[row] = true
			now = append(now, t)
		}
	}
	return now, later
}

// change makes the operations of tickets by one statement. If the server reports an error about
// their values, or a locked row could not be passed over, it makes each half by itself, so that
// only the operation at fault fails.
func (f *Permits) change(ctx context.Context, tickets []*ticket) {
	if len(tickets) == 0 {
		return
	}
	ops := make([]*table.PermitOp, len(tickets))
	for i, t := range tickets {
		ops[i] = t.Value.op
	}
	err := f.Retry(ctx, func() error {
		if len(ops[0].Rest) > 0 {
			return f.table.ChangePermitSet(ctx, f.Pool, ops[0].Set(), f.Clock())
		}
		if !f.table.PassesOver() {
			return f.table.ChangePermit(ctx, f.Pool, ops[0], f.Clock())
		}
		return f.table.ChangePermits(ctx, f.Pool, ops, f.Clock())
	})
	switch {
	case err == nil:
		return
	case (conn.OfValues(err) || conn.TimedOut(err)) && len(tickets) > 1:
		half := len(tickets) / 2
		f.change(ctx, tickets[:half])
		f.change(ctx, tickets[half:])
		return
	case conn.TimedOut(err):
		ops[0].Done = table.PermitDone{}
		return
	}
	for _, t := range tickets {
		t.Value.err = f.FaultOf("change a permit of", t.Value.op.Names(), err)
	}
}

// finish answers a ticket. If its caller has left, a permit that it took is released.
func (f *Permits) finish(t *ticket) {
	if t.Finish() {
		return
	}
	c := t.Value
	if c.err != nil || !c.takes() || !c.op.Done.OK || c.op.Done.Given {
		return
	}
	f.giveBack(held(askedOf(c.op), c.op, time.Now()))
}

// lookID names what a look reads: all permits of a key, or the next part of those below a Limit.
type lookID struct {
	key    decide.Key
	partOf int
}

func idOf(look *table.PermitLook) lookID { return lookID{look.Key, look.PartOf} }

// serveLooks looks at the permits of keys, once for all callers that look at the same permits. A
// first look at a part creates a row, so the looks are sorted: all processes visit keys in one
// order.
func (f *Permits) serveLooks(ctx context.Context, tickets []*batch.Ticket[*lookCall]) {
	first := make(map[lookID]*table.PermitLook)
	var looks []*table.PermitLook
	for _, t := range tickets {
		if look := t.Value.look; first[idOf(look)] == nil {
			first[idOf(look)] = look
			looks = append(looks, look)
		}
	}
	slices.SortFunc(looks, func(a, b *table.PermitLook) int {
		return cmp.Or(strings.Compare(a.Key.Name, b.Key.Name), strings.Compare(a.Key.Key, b.Key.Key))
	})
	err := f.Retry(ctx, func() error { return f.table.LookAtPermits(ctx, f.Pool, looks, f.Clock()) })
	for _, t := range tickets {
		if err != nil {
			t.Value.err = f.FaultOf("look at", []string{t.Value.look.Key.Name}, err)
		} else if seen := first[idOf(t.Value.look)]; seen != t.Value.look {
			*t.Value.look = *seen
		}
	}
	for _, t := range tickets { // afterwards the look belongs to the caller
		t.Finish()
	}
}
