// Package memstore keeps limits in memory: for unit tests of code that limits,
// for trying definitions out on a clock of one's own, and for tools that are
// one process. Its verbs are those of package pgstore and decide alike, call
// by call; only what PostgreSQL is there for is missing, the transaction.
package memstore

import (
	"context"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Store is limits in memory. It is safe for concurrent use. A limit's Shards
// are ignored: there is one lock, so there is nothing to spread.
//
// The contexts of its verbs are looked at once, before anything changes.
type Store struct {
	clock func() time.Time

	mu   sync.Mutex
	rows map[row]ratelimit.State
}

type row struct{ name, key string }

// New makes an empty store, in which every limit is full. A nil clock means
// time.Now.
func New(clock func() time.Time) *Store {
	if clock == nil {
		clock = time.Now
	}
	return &Store{clock: clock, rows: map[row]ratelimit.State{}}
}

// Allow takes what is asked from all the limits, or refuses and takes from
// none. A refusal is a Result that is not OK, not an error; errors are
// [ratelimit.ErrInvalid] and [ratelimit.ErrNever], and change nothing.
func (s *Store) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.take(ctx, false, requests)
}

// Reserve takes what is asked from all the limits, going into debt down to
// MaxReserved if need be, or refuses and takes from none. When the result is
// OK, the work may run at its RetryAt; do not ask again.
func (s *Store) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.take(ctx, true, requests)
}

// Check is what Allow would say. It takes nothing.
func (s *Store) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.check(ctx, false, requests)
}

// CheckReserve is what Reserve would say. It takes nothing.
func (s *Store) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.check(ctx, true, requests)
}

func (s *Store) take(ctx context.Context, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	call, err := newCall(ctx, reserve, requests)
	if err != nil {
		return ratelimit.Result{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock()
	result, after := call.Decide(now, s.states(call, now))
	if after == nil {
		return result, nil
	}
	payments := make([]ratelimit.Payment, len(after))
	for i, a := range call.Asks {
		s.rows[row{a.Definition.Name, a.Key}] = after[i]
		payments[i] = ratelimit.Payment{Limit: a.Limit, Key: a.Key, Tokens: a.Count}
	}
	result.Receipt = ratelimit.NewReceipt(payments)
	return result, nil
}

func (s *Store) check(ctx context.Context, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	call, err := newCall(ctx, reserve, requests)
	if err != nil {
		return ratelimit.Result{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock()
	return call.Check(now, s.states(call, now)), nil
}

func newCall(ctx context.Context, reserve bool, requests []ratelimit.Request) (ratelimit.Call, error) {
	if err := ctx.Err(); err != nil {
		return ratelimit.Call{}, err
	}
	return ratelimit.NewCall(reserve, requests...)
}

func (s *Store) states(call ratelimit.Call, now time.Time) []ratelimit.State {
	states := make([]ratelimit.State, len(call.Asks))
	for i, a := range call.Asks {
		states[i] = s.state(a.Definition, a.Key, now)
	}
	return states
}

func (s *Store) state(d ratelimit.Definition, key string, now time.Time) ratelimit.State {
	if state, ok := s.rows[row{d.Name, key}]; ok {
		return state
	}
	return d.Fresh(key, now)
}

// Reset forgets the request's limit and key: full again, debt and pause gone.
// The request's count does not matter.
func (s *Store) Reset(ctx context.Context, r ratelimit.Request) error {
	return s.edit(ctx, r, func(d ratelimit.Definition, _ time.Time) {
		delete(s.rows, row{d.Name, r.Key})
	})
}

// Credit gives the request's count back to its limit, capped at the capacity,
// and says what there is then.
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (status ratelimit.Status, err error) {
	err = s.edit(ctx, r, func(d ratelimit.Definition, now time.Time) {
		after := d.Credit(s.state(d, r.Key, now), now, r.Count)
		s.rows[row{d.Name, r.Key}] = after
		status = ratelimit.Credited(r, []ratelimit.State{after}, now)
	})
	return status, err
}

// Pause lets nothing come in to the request's limit and key before until, and
// what is there is gone; debt stays. It reports false, and does nothing, when
// until is not in the future. The request's count does not matter.
func (s *Store) Pause(ctx context.Context, r ratelimit.Request, until time.Time) (paused bool, err error) {
	err = s.edit(ctx, r, func(d ratelimit.Definition, now time.Time) {
		if paused = until.After(now); paused {
			s.rows[row{d.Name, r.Key}] = d.Pause(s.state(d, r.Key, now), now, until)
		}
	})
	return paused, err
}

// edit runs change under the lock for a request that was found sound.
func (s *Store) edit(ctx context.Context, r ratelimit.Request, change func(ratelimit.Definition, time.Time)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := r.Validate(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	change(r.Limit.Definition(), s.clock())
	return nil
}

// Cancel gives back exactly what the result's call took, capped at each
// limit's capacity. It reports false, and does nothing, when the result took
// nothing or was cancelled before.
func (s *Store) Cancel(ctx context.Context, result ratelimit.Result) (cancelled bool, err error) {
	if err := ctx.Err(); err != nil || result.Receipt == nil {
		return false, err
	}
	err = result.Receipt.Redeem(func(mark string) (string, error) {
		if mark != "" {
			return mark, nil
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		now := s.clock()
		for _, p := range result.Receipt.Payments() {
			d := p.Limit.Definition()
			s.rows[row{d.Name, p.Key}] = d.Credit(s.state(d, p.Key, now), now, p.Tokens)
		}
		cancelled = true
		return "cancelled", nil
	})
	return cancelled, err
}

// Prune forgets the rows of the given limits that are full, and so mean the
// same as no row; it says how many. Rows in debt or paused stay.
func (s *Store) Prune(ctx context.Context, limits ...ratelimit.Limit) (int64, error) {
	definitions := make(map[string]ratelimit.Definition, len(limits))
	for _, l := range limits {
		if err := l.For("").Validate(); err != nil {
			return 0, err
		}
		definitions[l.Definition().Name] = l.Definition()
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now, pruned := s.clock(), int64(0)
	for r, state := range s.rows {
		if d, ok := definitions[r.name]; ok && d.Idle(r.key, state, now) {
			delete(s.rows, r)
			pruned++
		}
	}
	return pruned, nil
}
