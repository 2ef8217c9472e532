package pgstore

import (
	"cmp"
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/permits"
)

// Permits has the verbs of limits of how many at once, which [ratelimit.InFlight] defines. It is
// safe for concurrent use.
type Permits struct{ store *Store }

// Permits returns the verbs of limits of how many at once.
func (s *Store) Permits() Permits { return Permits{s} }

// Acquire takes a permit of the request's limit for its key, or all permits of a request for several.
// If too few are free, it takes none: the [ratelimit.Permit] is not OK, and the error is nil. The
// permit is held for the limit's Lease, by the database's clock, even if the caller fails. Release it
// when the work is done, and renew it before the lease ends; [Permits.Keep] does both.
//
// It takes from rates as well, as [Store.Allow] does. The permit is taken first, and released if a
// rate refuses; then the Permit is not OK, and its Rates say why. If the process dies in between, the
// permit is held for a lease. Releasing a permit gives no tokens back.
//
// It shares its statement with other calls, and waits for no transaction: it passes over a permit
// that a transaction has locked. Errors are [ratelimit.ErrInvalid], [ratelimit.ErrExceedsCapacity]
// (of the rates, or of more permits than the limit has), [ErrNotMigrated] and those of PostgreSQL
// and pgx. After an error a permit may be held until its lease ends. Without a deadline in ctx,
// Config.Timeout bounds the call.
func (p Permits) Acquire(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (permit ratelimit.Permit, err error) {
	s := p.store
	return s.acquire(ctx, ratelimit.FormOwn, s.usable(), request, rates, func(asked []ratelimit.PermitRequest) (ratelimit.Permit, error) {
		permit, err := s.permits.Acquire(ctx, asked)
		return s.withRates(ctx, permit, err, rates)
	})
}

// AcquireWait is [Permits.Acquire], and waits for a permit until ctx ends; the error is then that
// of ctx. Config.Timeout bounds its statements and not the wait. It asks rates once it has a
// permit, and does not wait for them.
//
// Waiters of one process are served in order of arrival, also when a later one wants fewer permits.
// A permit released in the process goes to the first of them, in the statement that releases it.
// After 4 seconds of that, other processes get it. A process with waiters for a key looks ten times
// a second, once for all of them. Waiting holds no connection. [Store.Close] ends waits with
// [ErrClosed].
//
// Large requests are not passed over by other processes: one waiter at a time, of all processes,
// collects the permits of a key. A request for permits of several limits holds none while it waits,
// and gets them when all are free at once.
//
// In [ratelimit.ModeRefuse] it does not wait. Callers that wait already go on.
//
// Do not call it while you hold a transaction open.
func (p Permits) AcquireWait(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (permit ratelimit.Permit, err error) {
	s := p.store
	return s.acquire(ctx, ratelimit.FormOwn, s.usable(), request, rates, func([]ratelimit.PermitRequest) (ratelimit.Permit, error) {
		inner, end, err := s.conn.Work.BeginSpan(ctx)
		if err != nil {
			return ratelimit.Permit{}, err
		}
		defer end()
		permit, err := s.permits.Await(inner, request)
		if err != nil && ctx.Err() == nil && errors.Is(err, context.Canceled) {
			return ratelimit.Permit{}, conn.ErrClosed
		}
		return s.withRates(inner, permit, err, rates)
	})
}

// AcquireTx is [Permits.Acquire] inside tx: the permit is held, and the tokens of the rates are
// spent, if and only if tx commits. Rolling back, to a savepoint before it too, gives both
// back. A refusal leaves tx usable, and the tokens of the rates are put back. The lease begins
// now, and not with the commit.
//
// It waits for the rows of rates as [Store.AllowTx] does, and for no permit: one that another
// open transaction has taken is passed over. To find one that is free it looks on another
// connection of the pool, if one is available, and otherwise in tx, where under SERIALIZABLE it
// counts as any SELECT. At REPEATABLE READ and SERIALIZABLE a permit that was taken or released
// after tx began is a 40001; run such a transaction again from its start. It leaves a savepoint
// open.
func (p Permits) AcquireTx(ctx context.Context, tx pgx.Tx, request ratelimit.PermitRequest, rates ...ratelimit.Request) (permit ratelimit.Permit, err error) {
	s := p.store
	return s.acquire(ctx, ratelimit.FormTx, s.usableIn(tx), request, rates, func(asked []ratelimit.PermitRequest) (ratelimit.Permit, error) {
		var result ratelimit.Result
		permit, err := s.permits.AcquireIn(ctx, tx, asked, func() (granted bool, err error) {
			if len(rates) == 0 || result.OK {
				return true, nil
			}
			result, err = s.decideTx(ctx, tx, decide.All, false, rates)
			return result.OK, err
		})
		if err != nil {
			return ratelimit.Permit{}, err
		}
		permit.Rates = result
		if !permit.OK && result.OK { // another took the last permit meanwhile
			permit.Rates = ratelimit.Result{}
			if _, err := s.CancelTx(ctx, tx, result.Receipt); err != nil {
				return ratelimit.Permit{}, err
			}
		}
		return permit, nil
	})
}

// acquire runs do for the parts of a request, unless it is invalid, or refused by a mode.
func (s *Store) acquire(ctx context.Context, form ratelimit.Form, invalid error, request ratelimit.PermitRequest, rates []ratelimit.Request, do func(asked []ratelimit.PermitRequest) (ratelimit.Permit, error)) (permit ratelimit.Permit, err error) {
	w := s.watch(ctx, ratelimit.VerbAcquire, form, rates...)
	defer func() { w.ReportAcquire(permit, &request, err) }()
	if invalid != nil {
		return ratelimit.Permit{}, invalid
	}
	if err := s.known.Definitions.NotePermits(&request); err != nil {
		return ratelimit.Permit{}, err
	}
	if len(rates) > 0 {
		if _, err := s.known.Definitions.Call(decide.All, false, nil, rates); err != nil {
			return ratelimit.Permit{}, err
		}
	}
	asked := request.Parts()
	if refused, ok := decide.PermitRefused(asked, s.conn.Instant()); ok {
		return refused, nil
	}
	return do(asked)
}

// Renew makes the permit's lease end one Lease from now, and returns the renewed permit. If the
// permit is no longer held, because its lease is over or it was released or reset, the error is
// [ratelimit.ErrLeaseLost], and nothing has changed. If a transaction that releases it has it
// locked, Renew waits until ctx ends, or without a deadline for Config.Timeout; the error is then
// [ErrLocked].
func (p Permits) Renew(ctx context.Context, permit ratelimit.Permit) (renewed ratelimit.Permit, err error) {
	s := p.store
	w := s.watch(ctx, ratelimit.VerbRenew, ratelimit.FormOwn)
	defer func() { w.ReportPermit(permit, err) }()
	if err := s.held(permit); err != nil {
		return ratelimit.Permit{}, err
	}
	return s.permits.Renew(ctx, permit)
}

// Release releases the permit. If callers in this process wait for one, the same statement takes it
// for the first of them. If the permit is no longer held, the error is [ratelimit.ErrLeaseLost],
// and nothing has changed: to release twice does no harm. It waits for a locked permit as
// [Permits.Renew] does.
func (p Permits) Release(ctx context.Context, permit ratelimit.Permit) (err error) {
	return p.store.release(ctx, ratelimit.FormOwn, nil, permit, func() error { return p.store.permits.Release(ctx, permit) })
}

// ReleaseTx is [Permits.Release] inside tx, for the transaction that finishes the work: if tx rolls
// back, the permit is still held. An [ratelimit.ErrLeaseLost] leaves tx usable. Roll it back, since
// another holder may do the same work. So a transaction that commits has held its permit until
// then. At REPEATABLE READ and SERIALIZABLE a permit that was renewed after tx began is a 40001.
func (p Permits) ReleaseTx(ctx context.Context, tx pgx.Tx, permit ratelimit.Permit) (err error) {
	return p.store.release(ctx, ratelimit.FormTx, p.store.usableIn(tx), permit, func() error { return p.store.permits.ReleaseIn(ctx, tx, permit) })
}

// release runs do for a permit, unless the call is invalid, and notes that its holder has released it.
func (s *Store) release(ctx context.Context, form ratelimit.Form, invalid error, permit ratelimit.Permit, do func() error) (err error) {
	w := s.watch(ctx, ratelimit.VerbRelease, form)
	defer func() { w.ReportPermit(permit, err) }()
	if err := cmp.Or(invalid, s.held(permit)); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	s.permits.Released(permit)
	return nil
}

// ReleaseFunc is [Permits.ReleaseTx] in a transaction of its own, at READ COMMITTED, and then runs
// do in it, for example to start what waits for the permit. Both happen, or neither. It waits for
// locked permits until ctx ends. An [ratelimit.ErrLeaseLost] runs nothing.
func (p Permits) ReleaseFunc(ctx context.Context, permit ratelimit.Permit, do func(tx pgx.Tx) error) (err error) {
	s := p.store
	w := s.watch(ctx, ratelimit.VerbRelease, ratelimit.FormTx)
	defer func() { w.ReportPermit(permit, err) }()
	if err := s.held(permit); err != nil {
		return err
	}
	if do == nil {
		return errNilFunc
	}
	if s.conn.Pool == nil {
		return ErrNoPool
	}
	return s.permits.ReleaseFunc(ctx, permit, do)
}

// Keep runs do while it holds the permit. It renews the lease when half of it is over, also if ctx has
// ended and do is still at work. It releases the permit when do has returned, panicked or ended its
// goroutine. If the permit is not OK, Keep returns its refusal as an error and does not run do.
//
// If the lease is lost, the context of do ends with [ratelimit.ErrLeaseLost] as its [context.Cause],
// and Keep returns ErrLeaseLost joined with the error of do. That happens at the latest when the lease
// ends by this machine's clock, counted from before the database was asked. In a process that was
// stopped past its lease, the context's Err reports it at once. A permit that do has released itself
// is not lost. A failed release is not an error, since the permit is free when the lease ends.
func (p Permits) Keep(ctx context.Context, permit ratelimit.Permit, do func(ctx context.Context, permit ratelimit.Permit) error) error {
	s := p.store
	if err := s.usable(); err != nil {
		return err
	}
	return s.permits.Keep(ctx, p, permit, do)
}

// Hold is [Permits.AcquireWait] and [Permits.Keep]: it runs do with a permit, for which it waits
// until ctx is over. To wait for a shorter time than do may take, call the two yourself.
func (p Permits) Hold(ctx context.Context, request ratelimit.PermitRequest, do func(ctx context.Context, permit ratelimit.Permit) error) error {
	if do == nil {
		return errNilFunc
	}
	permit, err := p.AcquireWait(ctx, request)
	if err != nil {
		return err
	}
	return p.Keep(ctx, permit, do)
}

// Held returns the permits of the limit that are held for key, in the order of their numbers,
// including those taken while Limit was larger. They can be renewed and released. It locks nothing,
// and does not see uncommitted changes.
func (p Permits) Held(ctx context.Context, limit ratelimit.InFlight, key string) (permits []ratelimit.Permit, err error) {
	s := p.store
	of, err := s.inFlight(limit, key)
	if err != nil {
		return nil, err
	}
	return s.permits.Held(ctx, limit, of)
}

// Reset frees all permits of the limit for key: their holders find them lost when they
// renew or release them, and may be at work still.
func (p Permits) Reset(ctx context.Context, limit ratelimit.InFlight, key string) error {
	s := p.store
	of, err := s.inFlight(limit, key)
	if err != nil {
		return err
	}
	return s.permits.Reset(ctx, of)
}

// Prune deletes the rows of permits of the given limits that have been free for a minute, and
// returns how many it deleted. It is for limits with many keys, since each key keeps up to Limit
// rows. It passes over locked rows, and may run at any time. A permit's fence grows also when its
// row was deleted, unless the server's clock was set back by more than a minute since.
func (p Permits) Prune(ctx context.Context, limits ...ratelimit.InFlight) (deleted int64, err error) {
	return p.prune(ctx, limits, (*permits.Permits).Prune)
}

// Prunable returns how many rows Prune would delete at this moment, and deletes none.
func (p Permits) Prunable(ctx context.Context, limits ...ratelimit.InFlight) (rows int64, err error) {
	return p.prune(ctx, limits, (*permits.Permits).Prunable)
}

// prune prunes each limit's name, or counts what that would delete.
func (p Permits) prune(ctx context.Context, limits []ratelimit.InFlight, each func(*permits.Permits, context.Context, string) (int64, error)) (rows int64, err error) {
	s := p.store
	if err := s.usable(); err != nil {
		return 0, err
	}
	for _, l := range limits {
		if _, err := s.inFlight(l, ""); err != nil {
			return 0, err
		}
	}
	for _, l := range limits {
		n, err := each(s.permits, ctx, l.Name)
		if rows += n; err != nil {
			return rows, err
		}
	}
	return rows, nil
}

// inFlight checks and notes a limit, and returns the key of its permits.
func (s *Store) inFlight(limit ratelimit.InFlight, key string) (decide.Key, error) {
	if err := s.usable(); err != nil {
		return decide.Key{}, err
	}
	if err := limit.ValidateKey(key); err != nil {
		return decide.Key{}, err
	}
	return decide.Key{Name: limit.Name, Key: key}, s.known.Definitions.NoteInFlight(limit.Name)
}

// held returns the error of a permit that cannot be held, and notes its limits.
func (s *Store) held(permit ratelimit.Permit) error {
	if err := s.usable(); err != nil {
		return err
	}
	if err := permit.Validate(); err != nil {
		return err
	}
	for _, p := range permit.With {
		if err := s.known.Definitions.NoteInFlight(p.InFlight.Name); err != nil {
			return err
		}
	}
	return s.known.Definitions.NoteInFlight(permit.InFlight.Name)
}

// withRates takes from rates for the holder of a permit. Unless they grant, it gives the permit
// back.
func (s *Store) withRates(ctx context.Context, permit ratelimit.Permit, err error, rates []ratelimit.Request) (ratelimit.Permit, error) {
	if err != nil || !permit.OK || len(rates) == 0 {
		return permit, err
	}
	result, err := s.Allow(ctx, rates...)
	if err == nil && result.OK {
		permit.Rates = result
		return permit, nil
	}
	s.permits.GiveBack(ctx, permit)
	if err != nil {
		return ratelimit.Permit{}, err
	}
	return ratelimit.Permit{InFlight: permit.InFlight, Key: permit.Key, N: permit.N, At: permit.At, Rates: result}, nil
}
