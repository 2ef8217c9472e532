package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/batch"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// flights is the permits of limits of how many at once. A permit is tried by its number, which the
// process remembers; only when it knows of none that is free, it looks. Operations on permits
// gather while a statement is under way, as calls for tokens do: those of all keys together,
// since a statement for many costs little more than one for few.
type flights struct {
	*base
	ops     *batch.Queue[*permitCall]
	looks   *batch.Queue[*permitLooking] // beside, so that reading many permits delays nobody
	known   flight.Permits
	keepers flight.Renewers
}

// permitCall is an operation on a permit.
type permitCall struct {
	op  *table.PermitOp
	err error
}

// permitLooking is a look at a key's permits.
type permitLooking struct {
	look *table.PermitLook
	err  error
}

type permitTicket = batch.Ticket[*permitCall]

func newFlights(b *base) *flights {
	f := &flights{base: b}
	f.ops = batch.New(mostTogether, b.config.Timeout, f.serve, b.work.spawn)
	f.looks = batch.New(mostTogether, b.config.Timeout, f.serveLooks, b.work.spawn)
	return f
}

// lock is the advisory lock of a permit.
func (f *flights) lock(row decide.Row) int64 { return table.Lock(f.config.Schema, row) }

// make has an operation made. A permit that was taken for a caller that gave up is released.
func (f *flights) make(ctx context.Context, op *table.PermitOp) error {
	if !f.table.PassesOver() {
		return f.alone(ctx, "change a permit", func(ctx context.Context) error { return f.table.ChangePermit(ctx, f.pool, op, f.clock()) })
	}
	end, err := f.enter(ctx)
	if err != nil {
		return err
	}
	defer end()
	c := &permitCall{op: op}
	if _, err = f.ops.Do(ctx, c); err == nil {
		if c.err == nil || ctx.Err() == nil {
			return c.err
		}
		err = ctx.Err() // the statement was canceled, since nobody waited for it any more
	}
	return f.fault("change a permit", err)
}

// look looks at the permits of a key.
func (f *flights) look(ctx context.Context, look *table.PermitLook) error {
	if !f.table.PassesOver() {
		looks := []*table.PermitLook{look}
		return f.alone(ctx, "look", func(ctx context.Context) error { return f.table.LookAtPermits(ctx, f.pool, looks, f.clock()) })
	}
	end, err := f.enter(ctx)
	if err != nil {
		return err
	}
	defer end()
	c := &permitLooking{look: look}
	if _, err := f.looks.Do(ctx, c); err != nil {
		return f.fault("look", err)
	}
	return c.err
}

// serve makes the operations that gathered. When permits are taken, all waiters may give up, and
// the statement is still heard to its end: otherwise it would be unknown whether they are held.
func (f *flights) serve(ctx context.Context, tickets []*permitTicket) {
	if !slices.ContainsFunc(tickets, func(t *permitTicket) bool { return t.Value.takes() }) {
		f.makeAll(ctx, tickets)
		return
	}
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	made := make(chan struct{})
	f.work.spawn(func() {
		defer cancel()
		defer close(made)
		f.makeAll(inner, tickets)
	})
	select {
	case <-made:
	case <-ctx.Done():
		time.AfterFunc(silence(f.config.Timeout), cancel)
	}
}

// takes reports whether a permit that the operation takes must be released if it is not wanted.
func (c *permitCall) takes() bool { return c.op.Fence == 0 || c.op.Next }

// makeAll makes the operations of tickets, each row's first operation first.
func (f *flights) makeAll(ctx context.Context, tickets []*permitTicket) {
	for len(tickets) > 0 {
		tickets = slices.DeleteFunc(tickets, (*permitTicket).Gone)
		now, later := oneEach(tickets)
		f.change(ctx, now)
		for _, t := range now {
			f.finish(t)
		}
		tickets = later
	}
}

// oneEach divides tickets into those for different rows, and the rest.
func oneEach(tickets []*permitTicket) (now, later []*permitTicket) {
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

// change has a statement make the operations of tickets. When the server reports an error of
// some, or a locked row could not be passed over, each half of them is made by itself, so that
// only the one at fault fails.
func (f *flights) change(ctx context.Context, tickets []*permitTicket) {
	if len(tickets) == 0 {
		return
	}
	ops := make([]*table.PermitOp, len(tickets))
	for i, t := range tickets {
		ops[i] = t.Value.op
	}
	err := f.retry(ctx, func() error { return f.table.ChangePermits(ctx, f.pool, ops, f.clock()) })
	switch {
	case err == nil:
		return
	case answered(err) && len(tickets) > 1:
		half := len(tickets) / 2
		f.change(ctx, tickets[:half])
		f.change(ctx, tickets[half:])
		return
	case code(err) == lockNotAvailable:
		ops[0].Done = table.PermitDone{}
		return
	}
	for _, t := range tickets {
		t.Value.err = f.fault("change a permit", err)
	}
}

// finish answers a ticket. If its caller has left, a permit that it took is released.
func (f *flights) finish(t *permitTicket) {
	if t.Finish() {
		return
	}
	c := t.Value
	if c.err != nil || !c.takes() || !c.op.Done.OK {
		return
	}
	back := &table.PermitOp{Row: c.op.Row, Fence: c.op.Done.Fence}
	f.work.spawn(func() {
		ctx, cancel := context.WithTimeout(context.Background(), rollbackTime)
		defer cancel()
		_ = f.retry(ctx, func() error { return f.table.ChangePermits(ctx, f.pool, []*table.PermitOp{back}, f.clock()) })
		f.known.Freed(back.Row.Key, back.Row.Shard)
	})
}

// serveLooks looks at the permits of keys, once for all callers that look at a key.
func (f *flights) serveLooks(ctx context.Context, tickets []*batch.Ticket[*permitLooking]) {
	first := make(map[decide.Key]*table.PermitLook)
	var looks []*table.PermitLook
	for _, t := range tickets {
		if look := t.Value.look; first[look.Key] == nil {
			first[look.Key] = look
			looks = append(looks, look)
		}
	}
	err := f.retry(ctx, func() error { return f.table.LookAtPermits(ctx, f.pool, looks, f.clock()) })
	for _, t := range tickets {
		if err != nil {
			t.Value.err = f.fault("look", err)
		} else if seen := first[t.Value.look.Key]; seen != t.Value.look {
			*t.Value.look = *seen
		}
	}
	for _, t := range tickets { // and then it is its caller's
		t.Finish()
	}
}

// acquire takes a permit that nobody holds, or is a refusal.
func (f *flights) acquire(ctx context.Context, limit ratelimit.InFlight, key decide.Key) (ratelimit.Permit, error) {
	s := search{flights: f, limit: limit, look: table.PermitLook{Key: key}}
	begun := time.Now()
	for {
		op, err := s.next(func(look *table.PermitLook) error { return f.look(ctx, look) })
		if op == nil {
			return s.refused(err)
		}
		if err := f.make(ctx, op); err != nil {
			s.missed(op)
			return ratelimit.Permit{}, err
		}
		if op.Done.OK {
			permit := permitOf(limit, op, s.asked)
			f.known.Taken(key, op.Row.Shard, permit.Ends())
			return permit, nil
		}
		s.missed(op)
		if len(s.vain) == 1 { // until here the queue has bounded it, which costs less
			var cancel context.CancelFunc
			ctx, cancel = f.timedFrom(ctx, begun)
			defer cancel()
		}
	}
}

// search is the search for a permit that is free.
type search struct {
	*flights
	limit ratelimit.InFlight
	look  table.PermitLook
	vain  []int // permits that were tried, and are not tried again
	asked time.Time
}

// next is the taking of the next permit to try; nil when none is left, or with an error.
func (s *search) next(look func(*table.PermitLook) error) (*table.PermitOp, error) {
	for {
		s.asked = time.Now()
		if choice, ok := s.known.Choose(s.look.Key, s.limit.Limit, s.asked); ok {
			row := decide.Row{Key: s.look.Key, Shard: choice.Number}
			return &table.PermitOp{Row: row, Lease: s.limit.LeaseOrDefault(), New: choice.New, Lock: s.lock(row)}, nil
		}
		seen := table.PermitLook{Key: s.look.Key} // of its own, as a caller that gives up does not wait for it
		err := look(&seen)
		if err != nil {
			return nil, err
		}
		if s.look = seen; !s.saw() {
			return nil, nil
		}
	}
}

// missed notes that a permit was tried in vain.
func (s *search) missed(op *table.PermitOp) {
	s.vain = append(s.vain, op.Row.Shard)
	s.known.Missed(op.Row.Key, op.Row.Shard)
}

// saw notes which permits are free by the look, and reports whether some are worth trying.
func (s *search) saw() (some bool) {
	there := make(map[int]bool, len(s.look.Permits))
	var free []flight.Choice
	for _, v := range s.look.Permits {
		there[v.Number] = true
		if v.Number < s.limit.Limit && !v.Until.After(s.look.At) && !v.Locked && !slices.Contains(s.vain, v.Number) {
			free = append(free, flight.Choice{Number: v.Number})
		}
	}
	for n := range s.limit.Limit {
		if !there[n] && !slices.Contains(s.vain, n) {
			free = append(free, flight.Choice{Number: n, New: true})
		}
	}
	return s.known.Observe(s.look.Key, free, s.asked)
}

// permitOf is the permit that an operation has taken or renewed.
func permitOf(limit ratelimit.InFlight, op *table.PermitOp, asked time.Time) ratelimit.Permit {
	return ratelimit.Permit{
		InFlight: limit, Key: op.Row.Key.Key, OK: true, Number: op.Row.Shard,
		Fence: op.Done.Fence, At: op.Done.At, Until: op.Done.Until, Asked: asked,
	}
}

// refused returns the refusal by the permits seen, unless there is an error. A permit without a
// holder is held by a transaction that has not committed, and may be free at once.
func (s *search) refused(err error) (ratelimit.Permit, error) {
	if err != nil {
		return ratelimit.Permit{}, err
	}
	permit := ratelimit.Permit{InFlight: s.limit, Key: s.look.Key.Key, At: s.look.At.UTC()}
	held := 0
	for _, v := range s.look.Permits {
		if v.Number < s.limit.Limit && v.Until.After(s.look.At) {
			if held++; held == 1 || v.Until.Before(permit.NotBefore) {
				permit.NotBefore = v.Until
			}
		}
	}
	if held < s.limit.Limit {
		permit.NotBefore = permit.At
	}
	return permit, nil
}

// rowOf is the row of a permit.
func rowOf(permit ratelimit.Permit) decide.Row {
	return decide.Row{Key: decide.Key{Name: permit.InFlight.Name, Key: permit.Key}, Shard: permit.Number}
}

// hold makes an operation on a permit that is held. If a transaction has its row locked, it
// waits for that.
func (f *flights) hold(ctx context.Context, op *table.PermitOp) error {
	begun := time.Now()
	ctx = f.holding(ctx)
	err := f.holdOnce(ctx, op)
	if !errors.Is(err, errHeld) {
		return err
	}
	ctx, cancel := f.timedFrom(ctx, begun)
	defer cancel()
	for pause := poll; errors.Is(err, errHeld); pause = min(2*pause, slowPoll) {
		if sleep(ctx, pause) == nil {
			err = f.holdOnce(ctx, op)
		}
		if ctx.Err() != nil && err != nil {
			return locked(op.Row.Key, ctx.Err())
		}
	}
	return err
}

// holding returns the context of operations on permits that are held, also when the Store is
// closed.
func (f *flights) holding(ctx context.Context) context.Context {
	return context.WithValue(ctx, &f.work, true)
}

// errHeld is the error of a permit that is held, and locked by a transaction.
var errHeld = errors.New("pgstore: the permit is locked")

// holdOnce is hold that does not wait.
func (f *flights) holdOnce(ctx context.Context, op *table.PermitOp) error {
	next := *op // a caller that gives up must not share it with the next attempt
	err := f.make(ctx, &next)
	if err != nil {
		return err
	}
	if *op = next; op.Done.OK {
		return nil
	}
	looking, cancel := f.timed(ctx)
	defer cancel()
	held, err := f.table.HoldsPermit(looking, f.pool, op, f.clock())
	switch {
	case err != nil:
		return f.fault("look", err)
	case held && f.table.PassesOver():
		return errHeld
	}
	return lost(op.Row)
}

func lost(row decide.Row) error {
	return fmt.Errorf("pgstore: limit %q, permit %d: %w", row.Name, row.Shard, ratelimit.ErrLeaseLost)
}

// release releases a permit, or hands it on to a waiter here.
func (f *flights) release(ctx context.Context, permit ratelimit.Permit) error {
	if permit.Shadowed {
		return nil
	}
	row, asked := rowOf(permit), time.Now()
	op := &table.PermitOp{Row: row, Fence: permit.Fence}
	next, hands := f.known.HandOn(row.Key, row.Shard, asked)
	if hands {
		op.Next, op.Lease = true, next.LeaseOrDefault()
	}
	err := f.hold(ctx, op)
	switch {
	case err != nil:
		f.known.Lost(row.Key, row.Shard)
		return err
	case hands:
		if taken := permitOf(next, op, asked); !f.known.Hand(row.Key, taken) {
			return f.release(ctx, taken)
		}
	case f.known.Waiting(row.Key) > 0:
		f.known.LetGo(row.Key, row.Shard)
	default:
		f.known.Freed(row.Key, row.Shard)
	}
	return nil
}

// lookAgain is how often a process with waiters looks whether a permit is free, on average.
const lookAgain = 100 * time.Millisecond

// await takes a permit, and waits for one until ctx is over. Only the first in line looks; the
// others are handed permits on, or have their turn.
func (f *flights) await(ctx context.Context, limit ratelimit.InFlight, key decide.Key) (ratelimit.Permit, error) {
	w, asks := f.known.Arrive(key, limit)
	defer func() {
		if handed, ok := f.known.Leave(w); ok { // beside the one that was found, or too late
			f.giveBack(ctx, handed)
		}
	}()
	if asks {
		if permit, err := f.acquire(ctx, limit, key); err != nil || permit.OK {
			return permit, err
		}
		f.known.Enter(w)
	}
	return f.inLine(ctx, w, limit, key)
}

// inLine is await of a waiter.
func (f *flights) inLine(ctx context.Context, w *flight.Waiter, limit ratelimit.InFlight, key decide.Key) (ratelimit.Permit, error) {
	again := time.NewTimer(time.Hour)
	defer again.Stop()
	for {
		select {
		case permit := <-w.Got:
			return permit, nil
		case <-ctx.Done():
			return ratelimit.Permit{}, ctx.Err()
		case now := <-w.Turn:
			if wait := time.Until(f.known.Look(key)); !now && wait > 0 {
				again.Reset(wait)
				continue
			}
		case <-again.C:
		}
		if !f.known.First(w) {
			continue
		}
		permit, err := f.acquire(ctx, limit, key)
		if err != nil || permit.OK {
			return permit, err
		}
		wait := lookAgain/2 + rand.N(lookAgain)
		if first := permit.NotBefore.Sub(permit.At); first > 0 && first < wait {
			wait = first + rand.N(lookAgain/8)
		}
		f.known.LookAgain(key, time.Now().Add(wait))
		again.Reset(wait)
	}
}

// giveBack releases a permit that nobody wants any more.
func (f *flights) giveBack(ctx context.Context, permit ratelimit.Permit) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
	defer cancel()
	_ = f.release(ctx, permit) // or it is free when its lease is over
}

// acquireIn takes a permit in a caller's transaction. An attempt stands behind a savepoint, or
// the permit's holder would have to wait for the transaction if it fails. Free permits are read on
// another connection, since reading in the transaction would abort others under SERIALIZABLE.
func (f *flights) acquireIn(ctx context.Context, tx pgx.Tx, limit ratelimit.InFlight, key decide.Key, before func() (granted bool, err error)) (ratelimit.Permit, error) {
	s := search{flights: f, limit: limit, look: table.PermitLook{Key: key}}
	for first := true; ; first = false {
		op, err := s.next(func(look *table.PermitLook) error { return f.lookBeside(ctx, tx, look) })
		if op == nil {
			return s.refused(err)
		}
		if first {
			if granted, err := before(); err != nil || !granted {
				f.known.Lost(key, op.Row.Shard)
				return ratelimit.Permit{InFlight: limit, Key: key.Key}, err
			}
		}
		if err := f.try(ctx, tx, op); err != nil {
			s.missed(op)
			return ratelimit.Permit{}, f.fault("take a permit", err)
		}
		if op.Done.OK { // nobody here learns how the transaction ends
			f.known.Lost(key, op.Row.Shard)
			return permitOf(limit, op, s.asked), nil
		}
		s.missed(op)
	}
}

// try makes an operation in a transaction, which leaves nothing there if it is in vain.
func (f *flights) try(ctx context.Context, tx pgx.Tx, op *table.PermitOp) error {
	var batch pgx.Batch
	batch.Queue("SAVEPOINT " + savepoint)
	f.table.QueuePermit(&batch, op, f.clock())
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil || op.Done.OK {
		return err
	}
	var undo pgx.Batch
	undo.Queue("ROLLBACK TO SAVEPOINT " + savepoint)
	undo.Queue("RELEASE SAVEPOINT " + savepoint)
	return tx.SendBatch(ctx, &undo).Close()
}

// lookBeside looks on another connection, if there is one to be had.
func (f *flights) lookBeside(ctx context.Context, tx pgx.Tx, look *table.PermitLook) error {
	if f.pool != nil {
		if stat := f.pool.Stat(); stat.AcquiredConns() < stat.MaxConns() {
			return f.look(f.holding(ctx), look)
		}
	}
	return f.table.LookAtPermitsIn(ctx, tx, look, f.clock())
}

// releaseIn releases a permit in a caller's transaction.
func (f *flights) releaseIn(ctx context.Context, tx pgx.Tx, permit ratelimit.Permit) error {
	if permit.Shadowed {
		return nil
	}
	op := &table.PermitOp{Row: rowOf(permit), Fence: permit.Fence}
	op.Lock = f.lock(op.Row)
	var batch pgx.Batch
	f.table.QueuePermit(&batch, op, f.clock())
	switch err := tx.SendBatch(ctx, &batch).Close(); {
	case err != nil:
		return f.fault("release a permit", err)
	case !op.Done.OK:
		return lost(op.Row)
	}
	return nil
}
