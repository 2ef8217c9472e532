package pgstore

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
	"github.com/pgratelimit/ratelimit/internal/table"
)

// Acquire takes a slot of the limit for key, or is refused when all are held: that is a
// [ratelimit.Slot] that is not OK, not an error. The slot is held for the limit's Lease, by the
// database's clock, even if the caller fails; release it when the work is done, and renew it
// before that if the work takes longer, or leave both to [Store.Keep]. After an error nothing
// is held, or a slot for a lease.
//
// It takes from rate limits as well, if there are any, as [Store.Allow] does. The slot is taken
// first, and given back if they refuse; then the Slot is not OK, and its Rates say why. Tokens
// that they granted are spent. When a process dies in between, the slot is held for a lease.
//
// It shares its statement with other calls, and waits for no transaction: a slot that a
// transaction has locked is passed over. Errors are [ratelimit.ErrInvalid],
// [ratelimit.ErrExceedsCapacity] of the rates, [ErrNotMigrated] and those of PostgreSQL and
// pgx. Without a deadline in ctx, Config.Timeout bounds it.
func (s *Store) Acquire(ctx context.Context, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (slot ratelimit.Slot, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbAcquire, ratelimit.FormOwn, rates...)
	defer func() { w.ToldSlot(named(slot, limit, key), err) }()
	of, err := s.inFlight(limit, key, rates)
	if err != nil {
		return ratelimit.Slot{}, err
	}
	return s.acquireNow(ctx, limit, of, rates)
}

// acquireNow is Acquire of a limit that has been looked at.
func (s *Store) acquireNow(ctx context.Context, limit ratelimit.InFlight, of decide.Key, rates []ratelimit.Request) (ratelimit.Slot, error) {
	if limit.Mode == ratelimit.ModeRefuse {
		return decide.SlotRefused(limit, of.Key, s.now()), nil
	}
	slot, err := s.flights.acquire(ctx, limit, of)
	return s.withRates(ctx, decide.SlotShadowed(slot), err, rates)
}

// AcquireWait is [Store.Acquire] that waits for a slot until ctx ends, and then returns the
// error of ctx; Config.Timeout bounds its statements and not the wait. Rates are asked when
// there is a slot, and are not waited for.
//
// The waiters of one process are served in order of arrival. A slot that is released in the
// process goes to the first of them, by the statement that releases it, for 4 seconds; then it
// is let go for the other processes. Besides, a process with waiters for a key looks ten times
// a second, once for all of them, and holds no connection meanwhile. [Store.Close] ends waits
// with [ErrClosed].
//
// In [ratelimit.ModeRefuse] and [ratelimit.ModeShadow] it is Acquire. Callers that wait already
// have come by the mode of then.
//
// Do not call it while you hold a transaction open.
func (s *Store) AcquireWait(ctx context.Context, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (slot ratelimit.Slot, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbAcquire, ratelimit.FormOwn, rates...)
	defer func() { w.ToldSlot(named(slot, limit, key), err) }()
	of, err := s.inFlight(limit, key, rates)
	if err != nil {
		return ratelimit.Slot{}, err
	}
	if limit.Mode > ratelimit.ModeEnforce { // in which nobody waits
		return s.acquireNow(ctx, limit, of, rates)
	}
	inner, end, err := s.work.whole(ctx)
	if err != nil {
		return ratelimit.Slot{}, err
	}
	defer end()
	slot, err = s.flights.await(inner, limit, of)
	if err != nil && ctx.Err() == nil && errors.Is(err, context.Canceled) {
		return ratelimit.Slot{}, ErrClosed
	}
	return s.withRates(inner, slot, err, rates)
}

// AcquireTx is [Store.Acquire] inside tx: the slot is held, and the tokens of the rates are
// spent, if and only if tx commits. Rolling back, to a savepoint before it too, gives both
// back. A refusal leaves tx usable, and the tokens of the rates are put back. The lease begins
// now, and not with the commit.
//
// It waits for the rows of rates as [Store.AllowTx] does, and for no slot: one that another
// open transaction has taken is passed over. To find one that is free it looks on another
// connection of the pool, if one is available, and otherwise in tx, where under SERIALIZABLE it
// counts as any SELECT. At REPEATABLE READ and SERIALIZABLE a slot that was taken or released
// after tx began is a 40001; run such a transaction again from its start. It leaves a savepoint
// open.
func (s *Store) AcquireTx(ctx context.Context, tx pgx.Tx, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (slot ratelimit.Slot, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbAcquire, ratelimit.FormTx, rates...)
	defer func() { w.ToldSlot(named(slot, limit, key), err) }()
	if err := s.usableIn(tx); err != nil {
		return ratelimit.Slot{}, err
	}
	of, err := s.inFlight(limit, key, rates)
	if err != nil {
		return ratelimit.Slot{}, err
	}
	if limit.Mode == ratelimit.ModeRefuse {
		return decide.SlotRefused(limit, key, s.now()), nil
	}
	var result ratelimit.Result
	ask := func() (granted bool, err error) {
		if len(rates) == 0 || result.OK {
			return true, nil
		}
		result, err = s.decideTx(ctx, tx, decide.All, false, rates)
		return result.OK, err
	}
	granted := true
	if limit.Mode == ratelimit.ModeShadow { // in which the rates alone can refuse
		granted, err = ask()
	}
	if slot = (ratelimit.Slot{InFlight: limit, Key: key}); granted && err == nil {
		slot, err = s.flights.acquireIn(ctx, tx, limit, of, ask)
		slot = decide.SlotShadowed(slot)
	}
	if err != nil {
		return ratelimit.Slot{}, err
	}
	slot.Rates = result
	if !slot.OK && result.OK { // another took the last slot meanwhile
		slot.Rates = ratelimit.Result{}
		if _, err := s.CancelTx(ctx, tx, result.Receipt); err != nil {
			return ratelimit.Slot{}, err
		}
	}
	return slot, nil
}

// Renew has the slot's lease end a Lease from now, and returns it so. If it is not held any
// more, since its lease is over or it was released or reset, that is
// [ratelimit.ErrLeaseLost], and nothing has changed. If a transaction has it locked that is
// about to release it, Renew waits for that, until ctx is over; without a deadline for
// Config.Timeout, and the error is [ErrLocked].
func (s *Store) Renew(ctx context.Context, slot ratelimit.Slot) (renewed ratelimit.Slot, err error) {
	w := s.parts().watch(ctx, ratelimit.VerbRenew, ratelimit.FormOwn)
	defer func() { w.ToldSlot(slot, err) }()
	if err := s.held(slot); err != nil {
		return ratelimit.Slot{}, err
	}
	asked := time.Now()
	op := &table.SlotOp{Row: rowOf(slot), Fence: slot.Fence, Lease: slot.InFlight.LeaseOrDefault()}
	if !slot.Shadowed {
		err = decide.SlotLost(&slot, s.flights.hold(ctx, op))
	}
	switch {
	case err != nil:
		return ratelimit.Slot{}, err
	case slot.Shadowed:
		return slot, nil
	}
	slot.At, slot.Until, slot.Asked = op.Done.At, op.Done.Until, asked
	s.flights.known.Took(op.Row.Key, slot.Number, slot.Ends())
	return slot, nil
}

// Release releases the slot. If somebody waits for one in this process, the same statement
// takes it for the first of them. If it is not held any more, that is
// [ratelimit.ErrLeaseLost], and nothing has changed: to release twice does no harm. For one
// that is locked it waits as [Store.Renew] does.
func (s *Store) Release(ctx context.Context, slot ratelimit.Slot) (err error) {
	w := s.parts().watch(ctx, ratelimit.VerbRelease, ratelimit.FormOwn)
	defer func() { w.ToldSlot(slot, err) }()
	if err := s.held(slot); err != nil {
		return err
	}
	if err := decide.SlotLost(&slot, s.flights.release(ctx, slot)); err != nil {
		return err
	}
	s.flights.keepers.Released(slot)
	return nil
}

// ReleaseTx is [Store.Release] inside tx, for the transaction that finishes the work: if that
// rolls back, the slot is held still. An [ratelimit.ErrLeaseLost] leaves tx usable: roll back,
// or somebody else does the same work. So a transaction that commits has held its slot until
// then. At REPEATABLE READ and SERIALIZABLE a slot that was renewed after tx began is a 40001.
func (s *Store) ReleaseTx(ctx context.Context, tx pgx.Tx, slot ratelimit.Slot) (err error) {
	w := s.parts().watch(ctx, ratelimit.VerbRelease, ratelimit.FormTx)
	defer func() { w.ToldSlot(slot, err) }()
	if err := s.usableIn(tx); err != nil {
		return err
	}
	if err := s.held(slot); err != nil {
		return err
	}
	if err := decide.SlotLost(&slot, s.flights.releaseIn(ctx, tx, slot)); err != nil {
		return err
	}
	s.flights.keepers.Released(slot)
	return nil
}

// Keep runs do while it keeps the slot: it renews the lease at half of it, also when ctx is
// over and do still at work, and releases the slot when do has returned, panicked, or ended its
// goroutine. A slot that is not OK is its
// refusal as an error, and runs nothing.
//
// The context of do ends with [ratelimit.ErrLeaseLost] as its [context.Cause] when the lease is
// lost, at the latest when it would have ended by this machine's clock, counted from before the
// database was asked; and then the error is ErrLeaseLost, joined with that of do. In a process
// that was stopped past its lease, the context's Err says so at once. A slot that do has
// released itself, or in a transaction, is not lost. A release that fails is no error, since
// the slot is free when the lease is over.
func (s *Store) Keep(ctx context.Context, slot ratelimit.Slot, do func(ctx context.Context, slot ratelimit.Slot) error) error {
	if err := s.usable(); err != nil {
		return err
	}
	return s.flights.keepers.Keep(ctx, s, slot, do)
}

// Hold is [Store.AcquireWait] and [Store.Keep]: it runs do with a slot, for which it waits
// until ctx is over. To wait for a shorter time than do may take, call the two.
func (s *Store) Hold(ctx context.Context, limit ratelimit.InFlight, key string, do func(ctx context.Context, slot ratelimit.Slot) error) error {
	if do == nil {
		return errNilFunc
	}
	slot, err := s.AcquireWait(ctx, limit, key)
	if err != nil {
		return err
	}
	return s.Keep(ctx, slot, do)
}

// Slots returns the slots of the limit that are held for key, in the order of their numbers;
// also those from Limit on, which it had when they were taken. They can be renewed and
// released. It locks nothing, and does not see uncommitted changes.
func (s *Store) Slots(ctx context.Context, limit ratelimit.InFlight, key string) (slots []ratelimit.Slot, err error) {
	of, err := s.inFlight(limit, key, nil)
	if err != nil {
		return nil, err
	}
	look := &table.SlotLook{Key: of}
	if err := s.flights.look(ctx, look); err != nil {
		return nil, err
	}
	for _, v := range look.Slots {
		if v.Until.After(look.At) {
			slots = append(slots, ratelimit.Slot{InFlight: limit, Key: key, OK: true, Number: v.Number, Fence: v.Fence, At: look.At.UTC(), Until: v.Until})
		}
	}
	return slots, nil
}

// ResetSlots frees all slots of the limit for key: their holders find them lost when they
// renew or release them, and may be at work still.
func (s *Store) ResetSlots(ctx context.Context, limit ratelimit.InFlight, key string) error {
	of, err := s.inFlight(limit, key, nil)
	if err != nil {
		return err
	}
	err = s.alone(ctx, "reset slots", func(ctx context.Context) error { return s.table.ResetSlots(ctx, s.pool, of) })
	s.flights.known.Forget(of)
	return err
}

// PruneSlots deletes the rows of slots of the given limits that have been free for a minute,
// and says how many. It is for limits with many keys, of which each has up to Limit rows that
// stay. It passes over rows that somebody has locked, and may run at any time. A slot's fence
// grows also when its row was deleted, unless the server's clock was set back by more than a
// minute since.
func (s *Store) PruneSlots(ctx context.Context, limits ...ratelimit.InFlight) (deleted int64, err error) {
	if err := s.usable(); err != nil {
		return 0, err
	}
	for _, l := range limits {
		if _, err := s.inFlight(l, "", nil); err != nil {
			return 0, err
		}
	}
	for _, l := range limits {
		for more := true; more; {
			err := s.alone(ctx, "prune slots", func(ctx context.Context) error {
				now, err := table.Now(ctx, s.pool, s.clock())
				if err != nil {
					return err
				}
				n, err := s.table.PruneSlots(ctx, s.pool, l.Name, now.Add(-flight.IdleFor), s.table.Batch())
				deleted, more = deleted+n, n >= int64(s.table.Batch())
				return err
			})
			if err != nil {
				return deleted, err
			}
		}
	}
	return deleted, nil
}

// named is a slot with the limit and key that were asked, also after an error.
func named(slot ratelimit.Slot, limit ratelimit.InFlight, key string) ratelimit.Slot {
	slot.InFlight, slot.Key = limit, key
	return slot
}

// inFlight is the key of a limit's slots, once it has been looked at and noted.
func (s *Store) inFlight(limit ratelimit.InFlight, key string, rates []ratelimit.Request) (decide.Key, error) {
	if err := s.usable(); err != nil {
		return decide.Key{}, err
	}
	if err := limit.ValidateKey(key); err != nil {
		return decide.Key{}, err
	}
	if len(rates) > 0 {
		if _, err := s.call(decide.All, false, rates); err != nil {
			return decide.Key{}, err
		}
	}
	return decide.Key{Name: limit.Name, Key: key}, s.seen.NoteInFlight(limit.Name)
}

// held is the error of a slot that nobody can hold.
func (s *Store) held(slot ratelimit.Slot) error {
	if err := s.usable(); err != nil {
		return err
	}
	if err := slot.Validate(); err != nil {
		return err
	}
	return s.seen.NoteInFlight(slot.InFlight.Name)
}

// withRates takes from rate limits for the holder of a slot, which is given back unless they
// grant.
func (s *Store) withRates(ctx context.Context, slot ratelimit.Slot, err error, rates []ratelimit.Request) (ratelimit.Slot, error) {
	if err != nil || !slot.OK || len(rates) == 0 {
		return slot, err
	}
	result, err := s.Allow(ctx, rates...)
	if err == nil && result.OK {
		slot.Rates = result
		return slot, nil
	}
	s.flights.giveBack(ctx, slot)
	if err != nil {
		return ratelimit.Slot{}, err
	}
	return ratelimit.Slot{InFlight: slot.InFlight, Key: slot.Key, At: slot.At, Rates: result}, nil
}
