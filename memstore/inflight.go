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

// The verbs of limits of how many at once. A permit is a row: Value is its fence, and TS the end
// of its lease.

// Permits is the verbs of limits of how many at once. It is safe for concurrent use.
type Permits struct{ store *Store }

// Permits returns the verbs of limits of how many at once.
func (s *Store) Permits() Permits { return Permits{s} }

// Acquire takes a permit of the limit for key, or is refused when all are held: that is a Permit
// that is not OK, not an error. The permit is held for the limit's Lease, by the store's clock.
// Rate limits that are given are asked with it, all or nothing.
func (p Permits) Acquire(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error) {
	s := p.store
	limit, key := request.Limit, request.Key
	return s.own().acquire(ctx, limit, key, rates)
}

// AcquireTx is [Permits.Acquire] inside tx: the permit is held, and the tokens of the rates are
// spent, if and only if tx commits. A permit that another transaction has taken is passed over.
func (p Permits) AcquireTx(ctx context.Context, tx pgx.Tx, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error) {
	s := p.store
	limit, key := request.Limit, request.Key
	return s.in(tx).acquire(ctx, limit, key, rates)
}

// AcquireWait is [Permits.Acquire] that waits for a permit until ctx is over, first come, first
// served. It sleeps on the machine's clock, for as long as the store's says.
func (p Permits) AcquireWait(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (permit ratelimit.Permit, err error) {
	s := p.store
	limit, key := request.Limit, request.Key
	w := s.own().watch(ctx, ratelimit.VerbAcquire, rates...)
	w.Start()
	defer func() { w.ReportPermit(named(permit, limit, key), err) }()
	if limit.Mode == ratelimit.ModeRefuse { // in which nobody waits
		return s.own().tryAcquire(ctx, limit, key, rates)
	}
	return s.acquireWait(ctx, limit, key, rates)
}

func (s *Store) acquireWait(ctx context.Context, limit ratelimit.InFlight, key string, rates []ratelimit.Request) (ratelimit.Permit, error) {
	if err := s.own().usable(ctx); err != nil {
		return ratelimit.Permit{}, err
	}
	w, asks := s.flight.Arrive(decide.Key{Name: limit.Name, Key: key}, limit)
	defer s.flight.Leave(w)
	if asks {
		if permit, err := s.own().tryAcquire(ctx, s.flight.Limit(w), key, rates); err != nil || permit.OK || permit.NotBefore.IsZero() {
			return permit, err
		}
		s.flight.Enter(w)
	}
	var lease <-chan time.Time
	for {
		freed := s.released()
		if s.flight.First(w) {
			permit, err := s.own().tryAcquire(ctx, s.flight.Limit(w), key, rates)
			if err != nil || permit.OK || permit.NotBefore.IsZero() {
				return permit, err
			}
			lease = time.After(max(permit.NotBefore.Sub(permit.At), 10*time.Millisecond))
		} else {
			freed = nil
		}
		select {
		case <-w.Turn:
		case <-lease:
		case <-freed: // by a transaction that has ended
		case <-ctx.Done():
			return ratelimit.Permit{}, ctx.Err()
		}
	}
}

// released returns a channel that is closed when the next transaction ends.
func (s *Store) released() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.freed
}

// Renew has the permit's lease end a Lease from now, and returns it so. If it is not held any
// more that is [ratelimit.ErrLeaseLost], and nothing has changed.
func (p Permits) Renew(ctx context.Context, permit ratelimit.Permit) (renewed ratelimit.Permit, err error) {
	s := p.store
	w := s.own().watch(ctx, ratelimit.VerbRenew)
	defer func() { w.ReportPermit(permit, err) }()
	asked := time.Now()
	err = s.own().hold(ctx, permit, func(state *bucket.State, now time.Time) {
		permit.At, permit.Until, permit.Asked = now, now.Add(permit.InFlight.LeaseOrDefault()), asked
		state.TS = permit.Until
	})
	if err != nil {
		return ratelimit.Permit{}, err
	}
	return permit, nil
}

// Release releases the permit. If it is not held any more that is [ratelimit.ErrLeaseLost], and
// nothing has changed.
func (p Permits) Release(ctx context.Context, permit ratelimit.Permit) error {
	s := p.store
	return s.own().release(ctx, permit)
}

// ReleaseTx is [Permits.Release] inside tx: if that rolls back, the permit is held still.
func (p Permits) ReleaseTx(ctx context.Context, tx pgx.Tx, permit ratelimit.Permit) error {
	s := p.store
	return s.in(tx).release(ctx, permit)
}

// Keep runs do while it keeps the permit: it renews the lease at half of it, by the machine's
// clock, and releases the permit when do has ended. The context of do ends with
// [ratelimit.ErrLeaseLost] as its cause when the permit is lost.
func (p Permits) Keep(ctx context.Context, permit ratelimit.Permit, do func(ctx context.Context, permit ratelimit.Permit) error) error {
	s := p.store
	if err := s.own().usable(ctx); err != nil {
		return err
	}
	return s.keepers.Keep(ctx, p, permit, do)
}

// Hold is [Permits.AcquireWait] and [Permits.Keep].
func (p Permits) Hold(ctx context.Context, request ratelimit.PermitRequest, do func(ctx context.Context, permit ratelimit.Permit) error) error {
	if do == nil {
		return &ratelimit.FieldError{Field: "Func", Value: nil, Reason: "must not be nil"}
	}
	permit, err := p.AcquireWait(ctx, request)
	if err != nil {
		return err
	}
	return p.Keep(ctx, permit, do)
}

// Held returns the permits of the limit that are held for key, in the order of their numbers.
func (p Permits) Held(ctx context.Context, limit ratelimit.InFlight, key string) (permits []ratelimit.Permit, err error) {
	s := p.store
	scope := s.own()
	if err := scope.noteInFlight(ctx, limit, key); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	for n := range ratelimit.MaxInFlight {
		state, ok := scope.get(permitRow(limit, key, n))
		if ok && state.TS.After(now) {
			permits = append(permits, ratelimit.Permit{InFlight: limit, Key: key, OK: true, Number: n, Fence: int64(state.Value), At: now, Until: state.TS})
		}
	}
	return permits, nil
}

// Reset frees all permits of the limit for key: their holders find them lost.
func (p Permits) Reset(ctx context.Context, limit ratelimit.InFlight, key string) error {
	s := p.store
	scope := s.own()
	if err := scope.noteInFlight(ctx, limit, key); err != nil {
		return err
	}
	s.mu.Lock()
	for n := range ratelimit.MaxInFlight {
		if state, ok := scope.get(permitRow(limit, key, n)); ok {
			scope.put(permitRow(limit, key, n), bucket.State{Value: state.Value + 1})
		}
	}
	s.mu.Unlock()
	s.flight.Lost(decide.Key{Name: limit.Name, Key: key}, 0)
	return nil
}

// Prune forgets the permits of the given limits that have been free for a minute, and says
// how many.
func (p Permits) Prune(ctx context.Context, limits ...ratelimit.InFlight) (pruned int64, err error) {
	return p.prune(ctx, limits, func(row decide.Row) { delete(p.store.rows, row) })
}

// Prunable returns how many permits Prune would forget at this moment, and forgets none.
func (p Permits) Prunable(ctx context.Context, limits ...ratelimit.InFlight) (permits int64, err error) {
	return p.prune(ctx, limits, func(decide.Row) {})
}

// prune calls each for every permit that Prune forgets, and returns their number.
func (p Permits) prune(ctx context.Context, limits []ratelimit.InFlight, each func(decide.Row)) (permits int64, err error) {
	s := p.store
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
		if names[row.Name] && !state.TS.After(before) && state.Value < float64(before.UnixMicro()) && s.held[permitLock(row)] == nil {
			each(row)
			permits++
		}
	}
	return permits, nil
}

func permitRow(limit ratelimit.InFlight, key string, number int) decide.Row {
	return decide.Row{Key: decide.Key{Name: limit.Name, Key: key}, Shard: number}
}

// permitLock returns the key by which a transaction locks a permit: no limit's key has a zero byte.
func permitLock(row decide.Row) decide.Key {
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
func (s scope) acquire(ctx context.Context, limit ratelimit.InFlight, key string, rates []ratelimit.Request) (permit ratelimit.Permit, err error) {
	w := s.watch(ctx, ratelimit.VerbAcquire, rates...)
	defer func() { w.ReportPermit(named(permit, limit, key), err) }()
	s.flight.Meet(decide.Key{Name: limit.Name, Key: key}, limit)
	return s.tryAcquire(ctx, limit, key, rates)
}

// named returns a permit with the limit and key of the call, also after an error.
func named(permit ratelimit.Permit, limit ratelimit.InFlight, key string) ratelimit.Permit {
	permit.InFlight, permit.Key = limit, key
	return permit
}

// tryAcquire takes a permit, and tokens from rate limits. The rates are decided first, when it is
// known that there is a permit, and put back if it is gone meanwhile.
func (s scope) tryAcquire(ctx context.Context, limit ratelimit.InFlight, key string, rates []ratelimit.Request) (ratelimit.Permit, error) {
	if err := s.noteInFlight(ctx, limit, key); err != nil {
		return ratelimit.Permit{}, err
	}
	if limit.Mode == ratelimit.ModeRefuse {
		return decide.PermitRefused(limit, key, s.now()), nil
	}
	if len(rates) == 0 {
		return s.takePermit(limit, key, true)
	}
	if permit, err := s.takePermit(limit, key, false); err != nil || !permit.OK {
		return permit, err
	}
	result, err := s.decide(ctx, decide.All, false, rates)
	if err != nil || !result.OK {
		return ratelimit.Permit{InFlight: limit, Key: key, At: result.At, Rates: result}, err
	}
	permit, err := s.takePermit(limit, key, true)
	if err == nil && permit.OK {
		permit.Rates = result
		return permit, nil
	}
	if _, failed := s.cancel(ctx, result.Receipt); err == nil {
		err = failed
	}
	return permit, err
}

// takePermit takes a free permit, or with take false only says that there is one.
func (s scope) takePermit(limit ratelimit.InFlight, key string, take bool) (ratelimit.Permit, error) {
	asked := time.Now()
	if err := s.lockOpen(); err != nil {
		return ratelimit.Permit{}, err
	}
	defer s.mu.Unlock()
	now := s.now()
	permit := ratelimit.Permit{InFlight: limit, Key: key, At: now}
	for n := range limit.Limit {
		row := permitRow(limit, key, n)
		state, ok := s.get(row)
		free := !ok || !state.TS.After(now)
		end := state.TS
		if holder := s.held[permitLock(row)]; free && holder != nil && holder != s.session {
			free, end = false, now // it may be at any time
		}
		if !free {
			if permit.NotBefore.IsZero() || end.Before(permit.NotBefore) {
				permit.NotBefore = end
			}
			continue
		}
		permit.OK, permit.Number, permit.NotBefore = true, n, time.Time{}
		if take {
			permit.Fence, permit.Until, permit.Asked = max(int64(state.Value)+1, now.UnixMicro()), now.Add(limit.LeaseOrDefault()), asked
			s.putPermit(row, bucket.State{Value: float64(permit.Fence), TS: permit.Until})
		}
		return permit, nil
	}
	return permit, nil
}

// putPermit writes a permit, which is the transaction's from then on.
func (s scope) putPermit(row decide.Row, state bucket.State) {
	if top := s.top(); top != nil && s.held[permitLock(row)] == nil {
		s.held[permitLock(row)] = s.session
		top.keys = append(top.keys, permitLock(row))
	}
	s.put(row, state)
}

// hold changes a permit that is held, and waits while a transaction has it.
func (s scope) hold(ctx context.Context, permit ratelimit.Permit, change func(state *bucket.State, now time.Time)) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if err := permit.Validate(); err != nil {
		return err
	}
	if err := s.seen.NoteInFlight(permit.InFlight.Name); err != nil {
		return err
	}
	row := permitRow(permit.InFlight, permit.Key, permit.Number)
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, lockTimeout)
		defer cancel()
	}
	s.mu.Lock()
	for s.held[permitLock(row)] != nil && s.held[permitLock(row)] != s.session {
		freed := s.freed
		s.mu.Unlock()
		select {
		case <-freed:
		case <-ctx.Done():
			return fmt.Errorf("%w that has a permit of limit %q: %w", ErrLocked, permit.InFlight.Name, ctx.Err())
		}
		s.mu.Lock()
	}
	defer s.mu.Unlock()
	if err := s.open(); err != nil {
		return err
	}
	now := s.now()
	state, ok := s.get(row)
	if !ok || int64(state.Value) != permit.Fence || !state.TS.After(now) {
		return fmt.Errorf("memstore: limit %q, permit %d: %w", permit.InFlight.Name, permit.Number, ratelimit.ErrLeaseLost)
	}
	change(&state, now)
	s.putPermit(row, state)
	return nil
}

func (s scope) release(ctx context.Context, permit ratelimit.Permit) (err error) {
	w := s.watch(ctx, ratelimit.VerbRelease)
	defer func() { w.ReportPermit(permit, err) }()
	err = s.hold(ctx, permit, func(state *bucket.State, _ time.Time) { state.TS = time.Time{} })
	if err != nil {
		return err
	}
	s.flight.Lost(decide.Key{Name: permit.InFlight.Name, Key: permit.Key}, permit.Number)
	s.keepers.Released(permit)
	return nil
}
