package memstore

import (
	"context"
	"fmt"
	"slices"
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
// that is not OK, not an error. Several are taken all or nothing. The permit is held for the limit's Lease, by the store's clock.
// Rate limits that are given are asked with it, all or nothing.
func (p Permits) Acquire(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error) {
	return p.store.own().acquire(ctx, &request, rates)
}

// AcquireTx is [Permits.Acquire] inside tx: the permit is held, and the tokens of the rates are
// spent, if and only if tx commits. A permit that another transaction has taken is passed over.
func (p Permits) AcquireTx(ctx context.Context, tx pgx.Tx, request ratelimit.PermitRequest, rates ...ratelimit.Request) (ratelimit.Permit, error) {
	return p.store.in(tx).acquire(ctx, &request, rates)
}

// AcquireWait is [Permits.Acquire] that waits for a permit until ctx is over, first come, first
// served. It sleeps on the machine's clock, for as long as the store's says.
func (p Permits) AcquireWait(ctx context.Context, request ratelimit.PermitRequest, rates ...ratelimit.Request) (permit ratelimit.Permit, err error) {
	s := p.store
	w := s.own().watch(ctx, ratelimit.VerbAcquire, rates...)
	w.Start()
	defer func() { w.ReportAcquire(permit, &request, err) }()
	if err := s.own().noteRequest(ctx, &request); err != nil {
		return ratelimit.Permit{}, err
	}
	if refused, ok := decide.PermitRefused(request.Parts(), s.now()); ok { // nobody waits
		return refused, nil
	}
	return s.acquireWait(ctx, &request, rates)
}

func (s *Store) acquireWait(ctx context.Context, request *ratelimit.PermitRequest, rates []ratelimit.Request) (ratelimit.Permit, error) {
	w, asks := s.flight.Arrive(request.Parts()...)
	defer s.flight.Leave(w)
	if asks {
		if permit, err := s.own().tryAcquire(ctx, s.flight.Wants(w), rates); err != nil || permit.OK || permit.NotBefore.IsZero() {
			return permit, err
		}
		s.flight.Enter(w)
	}
	var lease <-chan time.Time
	for {
		freed := s.released()
		if s.flight.First(w) {
			permit, err := s.own().tryAcquire(ctx, s.flight.Wants(w), rates)
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
	asked, parts := time.Now(), permit.Parts()
	if err := s.own().hold(ctx, permit, func(row decide.Row, state *bucket.State, now time.Time) {
		for i := range parts {
			if p := &parts[i]; row.Name == p.InFlight.Name && row.Key.Key == p.Key {
				p.At, p.Until, p.Asked = now, now.Add(p.InFlight.LeaseOrDefault()), asked
				state.TS = p.Until
			}
		}
	}); err != nil {
		return ratelimit.Permit{}, err
	}
	renewed, renewed.With = parts[0], slices.Clip(parts[1:])
	if len(parts) == 1 {
		renewed.With = nil
	}
	return renewed, nil
}

// Release releases the permit. If it is not held any more that is [ratelimit.ErrLeaseLost], and
// nothing has changed.
func (p Permits) Release(ctx context.Context, permit ratelimit.Permit) error {
	return p.store.own().release(ctx, permit)
}

// ReleaseTx is [Permits.Release] inside tx: if that rolls back, the permit is held still.
func (p Permits) ReleaseTx(ctx context.Context, tx pgx.Tx, permit ratelimit.Permit) error {
	return p.store.in(tx).release(ctx, permit)
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

// Hold calls [Permits.AcquireWait], and then [Permits.Keep].
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

// Reset frees all permits of the limit for key. Their holders find them lost.
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

// noteRequest looks at a request, and notes the names of its limits.
func (s scope) noteRequest(ctx context.Context, request *ratelimit.PermitRequest) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	return s.seen.NotePermits(request)
}

// acquire takes permits for a caller that does not wait, and reports the outcome to the observer. While
// the first in line collects several permits, what is free is not for others.
func (s scope) acquire(ctx context.Context, request *ratelimit.PermitRequest, rates []ratelimit.Request) (permit ratelimit.Permit, err error) {
	w := s.watch(ctx, ratelimit.VerbAcquire, rates...)
	defer func() { w.ReportAcquire(permit, request, err) }()
	if err := s.noteRequest(ctx, request); err != nil {
		return ratelimit.Permit{}, err
	}
	for _, r := range request.Parts() {
		key := decide.Key{Name: r.Limit.Name, Key: r.Key}
		s.flight.Meet(key, r.Limit)
		if r.Limit.Mode != ratelimit.ModeRefuse && s.flight.Collects(key) {
			now := s.now()
			return ratelimit.Permit{InFlight: r.Limit, Key: r.Key, N: r.N, At: now, NotBefore: now}, nil
		}
	}
	return s.tryAcquire(ctx, request.Parts(), rates)
}

// tryAcquire takes permits, and tokens from rate limits. The rates are decided first, when it is
// known that there are permits, and put back if they are gone meanwhile.
func (s scope) tryAcquire(ctx context.Context, asked []ratelimit.PermitRequest, rates []ratelimit.Request) (ratelimit.Permit, error) {
	if refused, ok := decide.PermitRefused(asked, s.now()); ok {
		return refused, nil
	}
	for _, r := range asked {
		if err := r.Fits(); err != nil { // with a Limit that is smaller by now
			return ratelimit.Permit{}, err
		}
	}
	if len(rates) == 0 {
		return s.takePermits(asked, true)
	}
	if permit, err := s.takePermits(asked, false); err != nil || !permit.OK {
		return permit, err
	}
	result, err := s.decide(ctx, decide.All, false, rates)
	if err != nil || !result.OK {
		return ratelimit.Permit{InFlight: asked[0].Limit, Key: asked[0].Key, N: asked[0].N, At: result.At, Rates: result}, err
	}
	permit, err := s.takePermits(asked, true)
	if err == nil && permit.OK {
		permit.Rates = result
		return permit, nil
	}
	if _, failed := s.cancel(ctx, result.Receipt); err == nil {
		err = failed
	}
	return permit, err
}

// takePermits takes free permits, all that are asked or none, or with take false only says that they
// are there.
func (s scope) takePermits(asked []ratelimit.PermitRequest, take bool) (ratelimit.Permit, error) {
	began := time.Now()
	if err := s.lockOpen(); err != nil {
		return ratelimit.Permit{}, err
	}
	defer s.mu.Unlock()
	now := s.now()
	free := make([][]int, len(asked))
	for i, r := range asked {
		var notBefore time.Time
		if free[i], notBefore = s.freePermits(r, now); len(free[i]) < r.N {
			return ratelimit.Permit{InFlight: r.Limit, Key: r.Key, N: r.N, At: now, NotBefore: notBefore}, nil
		}
	}
	permits := make([]ratelimit.Permit, len(asked))
	for i, r := range asked {
		permits[i] = ratelimit.Permit{InFlight: r.Limit, Key: r.Key, N: r.N, OK: true, Number: free[i][0], At: now}
		if take {
			s.takeNumbers(&permits[i], free[i], began)
		}
	}
	if len(permits) > 1 {
		permits[0].With = permits[1:]
	}
	return permits[0], nil
}

// freePermits returns the first free permits of a limit, as many as are asked, and if there are fewer the
// first instant at which so many may be free.
func (s scope) freePermits(r ratelimit.PermitRequest, now time.Time) (free []int, notBefore time.Time) {
	var ends []time.Time
	for n := range r.Limit.Limit {
		row := permitRow(r.Limit, r.Key, n)
		state, ok := s.get(row)
		switch {
		case ok && state.TS.After(now):
			ends = append(ends, state.TS)
		case s.isOthers(permitLock(row)):
			ends = append(ends, now) // it may be at any time
		default:
			if free = append(free, n); len(free) == r.N {
				return free, notBefore
			}
		}
	}
	slices.SortFunc(ends, time.Time.Compare)
	return free, ends[r.N-len(free)-1]
}

// takeNumbers takes permits for a lease from a permit's At on.
func (s scope) takeNumbers(permit *ratelimit.Permit, numbers []int, began time.Time) {
	permit.Until, permit.Asked = permit.At.Add(permit.InFlight.LeaseOrDefault()), began
	for i, n := range numbers {
		row := permitRow(permit.InFlight, permit.Key, n)
		state, _ := s.get(row)
		fence := max(int64(state.Value)+1, permit.At.UnixMicro())
		if s.putPermit(row, bucket.State{Value: float64(fence), TS: permit.Until}); i == 0 {
			permit.Fence = fence
		} else {
			permit.More = append(permit.More, ratelimit.PermitNumber{Number: n, Fence: fence})
		}
	}
}

// putPermit writes a permit, which is the transaction's from then on.
func (s scope) putPermit(row decide.Row, state bucket.State) {
	if top := s.top(); top != nil && s.held[permitLock(row)] == nil {
		s.held[permitLock(row)] = s.session
		top.keys = append(top.keys, permitLock(row))
	}
	s.put(row, state)
}

// heldRow is the row of one permit of several, with its fence.
type heldRow struct {
	decide.Row
	fence int64
}

func rowsOf(permit *ratelimit.Permit) (rows []heldRow) {
	for _, p := range permit.Parts() {
		rows = append(rows, heldRow{permitRow(p.InFlight, p.Key, p.Number), p.Fence})
		for _, m := range p.More {
			rows = append(rows, heldRow{permitRow(p.InFlight, p.Key, m.Number), m.Fence})
		}
	}
	return rows
}

// hold changes permits that are held, all or none, and waits while a transaction has one.
func (s scope) hold(ctx context.Context, permit ratelimit.Permit, change func(row decide.Row, state *bucket.State, now time.Time)) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	if err := permit.Validate(); err != nil {
		return err
	}
	for _, p := range permit.Parts() {
		if err := s.seen.NoteInFlight(p.InFlight.Name); err != nil {
			return err
		}
	}
	rows := rowsOf(&permit)
	err := s.await(ctx, func() string {
		if slices.ContainsFunc(rows, func(row heldRow) bool { return s.isOthers(permitLock(row.Row)) }) {
			return fmt.Sprintf("a permit of limit %q", permit.InFlight.Name)
		}
		return ""
	})
	if err != nil {
		return err
	}
	defer s.mu.Unlock()
	now := s.now()
	for _, row := range rows {
		if state, ok := s.get(row.Row); !ok || int64(state.Value) != row.fence || !state.TS.After(now) {
			return fmt.Errorf("memstore: limit %q, permit %d: %w", row.Name, row.Shard, ratelimit.ErrLeaseLost)
		}
	}
	for _, row := range rows {
		state, _ := s.get(row.Row)
		change(row.Row, &state, now)
		s.putPermit(row.Row, state)
	}
	return nil
}

func (s scope) release(ctx context.Context, permit ratelimit.Permit) (err error) {
	w := s.watch(ctx, ratelimit.VerbRelease)
	defer func() { w.ReportPermit(permit, err) }()
	err = s.hold(ctx, permit, func(_ decide.Row, state *bucket.State, _ time.Time) { state.TS = time.Time{} })
	if err != nil {
		return err
	}
	for _, row := range rowsOf(&permit) {
		s.flight.Lost(row.Key, row.Shard)
	}
	s.keepers.Released(permit)
	return nil
}
