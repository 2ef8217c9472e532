package memstore

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/flight"
)

// The verbs of limits of how many at once. A slot is a row: Value is its fence, and TS the end
// of its lease.

// Acquire takes a slot of the limit for key, or is refused when all are held: that is a Slot
// that is not OK, not an error. The slot is held for the limit's Lease, by the store's clock.
// Rate limits that are given are asked with it, all or nothing.
func (s *Store) Acquire(ctx context.Context, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (ratelimit.Slot, error) {
	return s.own().acquire(ctx, limit, key, rates)
}

// AcquireTx is [Store.Acquire] inside tx: the slot is held, and the tokens of the rates are
// spent, if and only if tx commits. A slot that another transaction has taken is passed over.
func (s *Store) AcquireTx(ctx context.Context, tx pgx.Tx, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (ratelimit.Slot, error) {
	return s.in(tx).acquire(ctx, limit, key, rates)
}

// AcquireWait is [Store.Acquire] that waits for a slot until ctx is over, first come, first
// served. It sleeps on the machine's clock, for as long as the store's says.
func (s *Store) AcquireWait(ctx context.Context, limit ratelimit.InFlight, key string, rates ...ratelimit.Request) (slot ratelimit.Slot, err error) {
	w := s.own().watch(ctx, ratelimit.VerbAcquire, rates...)
	w.Start()
	defer func() { w.ToldSlot(named(slot, limit, key), err) }()
	if limit.Mode > ratelimit.ModeEnforce { // in which nobody waits
		return s.own().tryAcquire(ctx, limit, key, rates)
	}
	return s.acquireWait(ctx, limit, key, rates)
}

func (s *Store) acquireWait(ctx context.Context, limit ratelimit.InFlight, key string, rates []ratelimit.Request) (ratelimit.Slot, error) {
	if err := s.own().usable(ctx); err != nil {
		return ratelimit.Slot{}, err
	}
	w, asks := s.slots.Arrive(decide.Key{Name: limit.Name, Key: key}, limit)
	defer s.slots.Leave(w)
	if asks {
		if slot, err := s.own().tryAcquire(ctx, limit, key, rates); err != nil || slot.OK || slot.NotBefore.IsZero() {
			return slot, err
		}
		s.slots.Enter(w)
	}
	var lease <-chan time.Time
	for {
		freed := s.released()
		if s.slots.First(w) {
			slot, err := s.own().tryAcquire(ctx, limit, key, rates)
			if err != nil || slot.OK || slot.NotBefore.IsZero() {
				return slot, err
			}
			lease = time.After(max(slot.NotBefore.Sub(slot.At), 10*time.Millisecond))
		} else {
			freed = nil
		}
		select {
		case <-w.Turn:
		case <-lease:
		case <-freed: // by a transaction that has ended
		case <-ctx.Done():
			return ratelimit.Slot{}, ctx.Err()
		}
	}
}

// released returns a channel that is closed when the next transaction ends.
func (s *Store) released() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.freed
}

// Renew has the slot's lease end a Lease from now, and returns it so. If it is not held any
// more that is [ratelimit.ErrLeaseLost], and nothing has changed.
func (s *Store) Renew(ctx context.Context, slot ratelimit.Slot) (renewed ratelimit.Slot, err error) {
	w := s.own().watch(ctx, ratelimit.VerbRenew)
	defer func() { w.ToldSlot(slot, err) }()
	asked := time.Now()
	err = s.own().hold(ctx, slot, func(state *bucket.State, now time.Time) {
		slot.At, slot.Until, slot.Asked = now, now.Add(slot.InFlight.LeaseOrDefault()), asked
		state.TS = slot.Until
	})
	if err = decide.SlotLost(&slot, err); err != nil {
		return ratelimit.Slot{}, err
	}
	return slot, nil
}

// Release releases the slot. If it is not held any more that is [ratelimit.ErrLeaseLost], and
// nothing has changed.
func (s *Store) Release(ctx context.Context, slot ratelimit.Slot) error {
	return s.own().release(ctx, slot)
}

// ReleaseTx is [Store.Release] inside tx: if that rolls back, the slot is held still.
func (s *Store) ReleaseTx(ctx context.Context, tx pgx.Tx, slot ratelimit.Slot) error {
	return s.in(tx).release(ctx, slot)
}

// Keep runs do while it keeps the slot: it renews the lease at half of it, by the machine's
// clock, and releases the slot when do has ended. The context of do ends with
// [ratelimit.ErrLeaseLost] as its cause when the slot is lost.
func (s *Store) Keep(ctx context.Context, slot ratelimit.Slot, do func(ctx context.Context, slot ratelimit.Slot) error) error {
	if err := s.own().usable(ctx); err != nil {
		return err
	}
	return s.keepers.Keep(ctx, s, slot, do)
}

// Hold is [Store.AcquireWait] and [Store.Keep].
func (s *Store) Hold(ctx context.Context, limit ratelimit.InFlight, key string, do func(ctx context.Context, slot ratelimit.Slot) error) error {
	if do == nil {
		return &ratelimit.FieldError{Field: "Func", Value: nil, Reason: "must not be nil"}
	}
	slot, err := s.AcquireWait(ctx, limit, key)
	if err != nil {
		return err
	}
	return s.Keep(ctx, slot, do)
}

// Slots returns the slots of the limit that are held for key, in the order of their numbers.
func (s *Store) Slots(ctx context.Context, limit ratelimit.InFlight, key string) (slots []ratelimit.Slot, err error) {
	scope := s.own()
	if err := scope.noteInFlight(ctx, limit, key); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	for n := range ratelimit.MaxInFlight {
		state, ok := scope.get(slotRow(limit, key, n))
		if ok && state.TS.After(now) {
			slots = append(slots, ratelimit.Slot{InFlight: limit, Key: key, OK: true, Number: n, Fence: int64(state.Value), At: now, Until: state.TS})
		}
	}
	return slots, nil
}

// ResetSlots frees all slots of the limit for key: their holders find them lost.
func (s *Store) ResetSlots(ctx context.Context, limit ratelimit.InFlight, key string) error {
	scope := s.own()
	if err := scope.noteInFlight(ctx, limit, key); err != nil {
		return err
	}
	s.mu.Lock()
	for n := range ratelimit.MaxInFlight {
		if state, ok := scope.get(slotRow(limit, key, n)); ok {
			scope.put(slotRow(limit, key, n), bucket.State{Value: state.Value + 1})
		}
	}
	s.mu.Unlock()
	s.slots.Gone(decide.Key{Name: limit.Name, Key: key}, 0)
	return nil
}

// PruneSlots forgets the slots of the given limits that have been free for a minute, and says
// how many.
func (s *Store) PruneSlots(ctx context.Context, limits ...ratelimit.InFlight) (pruned int64, err error) {
	names := make(map[string]bool)
	for _, l := range limits {
		if err := s.own().noteInFlight(ctx, l, ""); err != nil {
			return 0, err
		}
		names[l.Name] = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.now().Add(-flight.IdleFor)
	for row, state := range s.rows {
		if names[row.Name] && !state.TS.After(before) && state.Value < float64(before.UnixMicro()) && s.held[slotLock(row)] == nil {
			delete(s.rows, row)
			pruned++
		}
	}
	return pruned, nil
}

func slotRow(limit ratelimit.InFlight, key string, number int) decide.Row {
	return decide.Row{Key: decide.Key{Name: limit.Name, Key: key}, Shard: number}
}

// slotLock returns the key by which a transaction locks a slot: no limit's key has a zero byte.
func slotLock(row decide.Row) decide.Key {
	return decide.Key{Name: row.Name, Key: row.Key.Key + "\x00" + strconv.Itoa(row.Shard)}
}

func (s scope) noteInFlight(ctx context.Context, limit ratelimit.InFlight, key string) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if err := limit.ValidateKey(key); err != nil {
		return err
	}
	return s.seen.NoteInFlight(limit.Name)
}

// acquire is tryAcquire, and reports the outcome to the observer.
func (s scope) acquire(ctx context.Context, limit ratelimit.InFlight, key string, rates []ratelimit.Request) (slot ratelimit.Slot, err error) {
	w := s.watch(ctx, ratelimit.VerbAcquire, rates...)
	defer func() { w.ToldSlot(named(slot, limit, key), err) }()
	return s.tryAcquire(ctx, limit, key, rates)
}

// named returns a slot with the limit and key of the call, also after an error.
func named(slot ratelimit.Slot, limit ratelimit.InFlight, key string) ratelimit.Slot {
	slot.InFlight, slot.Key = limit, key
	return slot
}

// tryAcquire takes a slot, and tokens from rate limits. The rates are decided first, when it is
// known that there is a slot, and put back if it is gone meanwhile.
func (s scope) tryAcquire(ctx context.Context, limit ratelimit.InFlight, key string, rates []ratelimit.Request) (ratelimit.Slot, error) {
	if err := s.noteInFlight(ctx, limit, key); err != nil {
		return ratelimit.Slot{}, err
	}
	if limit.Mode == ratelimit.ModeRefuse {
		return decide.SlotRefused(limit, key, s.now()), nil
	}
	if len(rates) == 0 {
		return s.takeSlot(limit, key, true)
	}
	if slot, err := s.takeSlot(limit, key, false); err != nil || !slot.OK {
		return slot, err
	}
	result, err := s.decide(ctx, decide.All, false, rates)
	if err != nil || !result.OK {
		return ratelimit.Slot{InFlight: limit, Key: key, At: result.At, Rates: result}, err
	}
	slot, err := s.takeSlot(limit, key, true)
	if err == nil && slot.OK {
		slot.Rates = result
		return slot, nil
	}
	if _, failed := s.cancel(ctx, result.Receipt); err == nil {
		err = failed
	}
	return slot, err
}

// takeSlot takes a free slot, or with take false only says that there is one. In ModeShadow there
// always is.
func (s scope) takeSlot(limit ratelimit.InFlight, key string, take bool) (ratelimit.Slot, error) {
	asked := time.Now()
	if err := s.lockOpen(); err != nil {
		return ratelimit.Slot{}, err
	}
	defer s.mu.Unlock()
	now := s.now()
	slot := ratelimit.Slot{InFlight: limit, Key: key, At: now}
	for n := range limit.Limit {
		row := slotRow(limit, key, n)
		state, ok := s.get(row)
		free := !ok || !state.TS.After(now)
		end := state.TS
		if holder := s.held[slotLock(row)]; free && holder != nil && holder != s.session {
			free, end = false, now // it may be at any time
		}
		if !free {
			if slot.NotBefore.IsZero() || end.Before(slot.NotBefore) {
				slot.NotBefore = end
			}
			continue
		}
		slot.OK, slot.Number, slot.NotBefore = true, n, time.Time{}
		if take {
			slot.Fence, slot.Until, slot.Asked = max(int64(state.Value)+1, now.UnixMicro()), now.Add(limit.LeaseOrDefault()), asked
			s.putSlot(row, bucket.State{Value: float64(slot.Fence), TS: slot.Until})
		}
		return slot, nil
	}
	return decide.SlotShadowed(slot), nil
}

// putSlot writes a slot, which is the transaction's from then on.
func (s scope) putSlot(row decide.Row, state bucket.State) {
	if top := s.top(); top != nil && s.held[slotLock(row)] == nil {
		s.held[slotLock(row)] = s.session
		top.keys = append(top.keys, slotLock(row))
	}
	s.put(row, state)
}

// hold changes a slot that is held, and waits while a transaction has it.
func (s scope) hold(ctx context.Context, slot ratelimit.Slot, change func(state *bucket.State, now time.Time)) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if err := slot.Validate(); err != nil {
		return err
	}
	if err := s.seen.NoteInFlight(slot.InFlight.Name); err != nil || slot.Shadowed {
		return err
	}
	row := slotRow(slot.InFlight, slot.Key, slot.Number)
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, lockTimeout)
		defer cancel()
	}
	s.mu.Lock()
	for s.held[slotLock(row)] != nil && s.held[slotLock(row)] != s.session {
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return fmt.Errorf("%w that has a slot of limit %q: %w", ErrLocked, slot.InFlight.Name, ctx.Err())
		}
		s.mu.Lock()
	}
	defer s.mu.Unlock()
	if err := s.open(); err != nil {
		return err
	}
	now := s.now()
	state, ok := s.get(row)
	if !ok || int64(state.Value) != slot.Fence || !state.TS.After(now) {
		return fmt.Errorf("memstore: limit %q, slot %d: %w", slot.InFlight.Name, slot.Number, ratelimit.ErrLeaseLost)
	}
	change(&state, now)
	s.putSlot(row, state)
	return nil
}

func (s scope) release(ctx context.Context, slot ratelimit.Slot) (err error) {
	w := s.watch(ctx, ratelimit.VerbRelease)
	defer func() { w.ToldSlot(slot, err) }()
	err = s.hold(ctx, slot, func(state *bucket.State, _ time.Time) { state.TS = time.Time{} })
	if err = decide.SlotLost(&slot, err); err != nil {
		return err
	}
	s.slots.Gone(decide.Key{Name: slot.InFlight.Name, Key: slot.Key}, slot.Number)
	s.keepers.Released(slot)
	return nil
}
