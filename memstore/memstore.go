// Package memstore keeps limits in memory: for unit tests of code that limits,
// for trying definitions out on a clock of one's own, and for tools that are
// one process. Its verbs are those of package pgstore and decide alike, call
// by call; only the transaction is missing.
package memstore

import (
	"context"
	"errors"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/internal/wait"
)

// Store is limits in memory. It is safe for concurrent use. A nil Store answers
// every verb with [ratelimit.ErrInvalid].
//
// The contexts of its verbs are looked at once, before anything changes.
type Store struct {
	clock func() time.Time
	seen  decide.Seen

	mu   sync.Mutex
	rows map[decide.Row]bucket.State
}

// New makes an empty store, in which every limit is full. A nil clock means
// time.Now.
func New(clock func() time.Time) *Store {
	if clock == nil {
		clock = time.Now
	}
	return &Store{clock: clock, rows: map[decide.Row]bucket.State{}}
}

// String is for logs: without it they would show the keys.
func (s *Store) String() string { return "memstore.Store" }

// Allow takes what is asked from all the limits, or refuses and takes from
// none. A refusal is a Result that is not OK, not an error; errors are
// [ratelimit.ErrInvalid] and [ratelimit.ErrExceedsCapacity], and change nothing.
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

// Take is Allow for callers who want an error unless it is granted: a refusal is
// [ratelimit.ErrRefused], as a *[ratelimit.RefusedError] with the result.
func (s *Store) Take(ctx context.Context, requests ...ratelimit.Request) error {
	result, err := s.Allow(ctx, requests...)
	if err != nil {
		return err
	}
	return result.Err()
}

// AllowAtMost takes as many whole tokens as there are, up to the request's count, and
// says in the result's Taken how many. It is refused when there is not one. A count
// below 1 is [ratelimit.ErrInvalid].
func (s *Store) AllowAtMost(ctx context.Context, r ratelimit.Request) (ratelimit.Result, error) {
	if err := s.usable(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	call, err := decide.NewAtMost(r)
	return s.takeCall(call, err)
}

// AllowFirst takes from the first limit in the order of the requests that can grant what
// is asked of it, and from no other. The result is about that limit. When all refuse,
// RetryAfter is the shortest wait. A request that its limit can never grant is passed
// over; two for one limit and key are [ratelimit.ErrInvalid].
func (s *Store) AllowFirst(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	if err := s.usable(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	call, err := decide.NewFirst(requests...)
	return s.takeCall(call, err)
}

// Wait reserves what is asked, and returns when the reservation is due. If a limit has
// been paused while it slept, it sleeps until the pause is over. If ctx ends first, or
// its deadline is nearer than the wait, the reservation is given back and the error is a
// *[ratelimit.WaitError]. A refusal is [ratelimit.ErrRefused]. It sleeps on the machine's
// clock, for as long as the store's says: tests are best in a bubble of testing/synctest.
func (s *Store) Wait(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return wait.Wait(ctx, s, requests...)
}

func (s *Store) take(ctx context.Context, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	if err := s.usable(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	call, err := decide.New(reserve, requests...)
	return s.takeCall(call, err)
}

// takeCall decides a call that decide has made.
func (s *Store) takeCall(call decide.Call, err error) (ratelimit.Result, error) {
	if call, err = s.noted(call, err); err != nil {
		return ratelimit.Result{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	view := s.view(&call)
	changes, ok := call.Plan(view)
	if !ok {
		return call.Refused(view), nil
	}
	s.make(changes)
	return call.Receipted(changes, decide.View{States: s.states(&call, view.At), At: view.At}, "", nil), nil
}

func (s *Store) check(ctx context.Context, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	call, err := s.call(ctx, reserve, requests)
	if err != nil {
		return ratelimit.Result{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return call.Checked(s.view(&call)), nil
}

// CheckEach is Check for many requests, each by itself and not all or nothing, in their
// order; at most [ratelimit.MaxChecks] of them.
func (s *Store) CheckEach(ctx context.Context, requests ...ratelimit.Request) ([]ratelimit.Status, error) {
	if err := s.usable(ctx); err != nil {
		return nil, err
	}
	call, err := s.noted(decide.NewChecks(requests...))
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return call.CheckedEach(s.view(&call)), nil
}

// Rows returns what there is of each of a limit's keys that has a row, in the order of the keys' bytes. Of a Status see Value, Share, PausedUntil and
// FullAt; OK is false while there is debt or a pause.
func (s *Store) Rows(ctx context.Context, limit ratelimit.Limit, page ratelimit.Page) iter.Seq2[ratelimit.Status, error] {
	return func(yield func(ratelimit.Status, error) bool) {
		if err := errors.Join(s.usable(ctx), decide.BadPage(limit, page)); err != nil {
			yield(ratelimit.Status{}, err)
			return
		}
		for _, status := range s.listed(limit, page) {
			if !yield(status, nil) {
				return
			}
		}
	}
}

func (s *Store) listed(limit ratelimit.Limit, page ratelimit.Page) (statuses []ratelimit.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []string
	for row := range s.rows {
		if row.Name == ratelimit.NameOf(limit) && strings.HasPrefix(row.Key.Key, page.Prefix) && (page.After == "" || row.Key.Key > page.After) {
			keys = append(keys, row.Key.Key)
		}
	}
	slices.Sort(keys)
	keys = slices.Compact(keys)
	if page.Most > 0 {
		keys = keys[:min(page.Most, len(keys))]
	}
	now := s.now()
	for _, key := range keys {
		a := decide.Ask{Request: limit.For(key), Definition: bucket.Definition(limit.Definition())}
		statuses = append(statuses, decide.Shown(limit, key, s.of(&a, now), now))
	}
	return statuses
}

// call is a call whose limits the store has seen, on a store and in a context
// that are good for it.
func (s *Store) call(ctx context.Context, reserve bool, requests []ratelimit.Request) (decide.Call, error) {
	if err := s.usable(ctx); err != nil {
		return decide.Call{}, err
	}
	return s.noted(decide.New(reserve, requests...))
}

// noted is a call, noting its definitions.
func (s *Store) noted(call decide.Call, err error) (decide.Call, error) {
	if err == nil {
		err = s.seen.NoteCall(&call)
	}
	return call, err
}

func (s *Store) usable(ctx context.Context) error {
	if s == nil || s.clock == nil {
		return &ratelimit.FieldError{Field: "Store", Value: s, Reason: "must come from memstore.New"}
	}
	return ctx.Err()
}

// now is the instant that decides.
func (s *Store) now() time.Time { return s.clock().Truncate(time.Microsecond) }

func (s *Store) view(call *decide.Call) decide.View {
	now := s.now()
	return decide.View{States: s.states(call, now), At: now}
}

func (s *Store) states(call *decide.Call, now time.Time) [][]bucket.State {
	states := make([][]bucket.State, len(call.Asks))
	for i := range call.Asks {
		states[i] = s.of(&call.Asks[i], now)
	}
	return states
}

// of is the states of all shards of an ask.
func (s *Store) of(a *decide.Ask, now time.Time) []bucket.State {
	states := make([]bucket.State, a.Definition.Shards)
	for shard := range states {
		states[shard] = s.state(a.Definition.Shard(), decide.Row{Key: a.Of(), Shard: shard}, now)
	}
	return states
}

func (s *Store) state(d *bucket.Definition, row decide.Row, now time.Time) bucket.State {
	if state, ok := s.rows[row]; ok {
		return state
	}
	return d.Fresh(row.Key.Key, now)
}

func (s *Store) make(changes []decide.Change) {
	for i := range changes {
		s.rows[changes[i].Row] = changes[i].After
	}
}

// Reset forgets the limit's state for key: full again, debt and pause gone.
func (s *Store) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.edit(ctx, limit, key, func(a *decide.Ask, _ time.Time) {
		for shard := range ratelimit.MaxShards {
			delete(s.rows, decide.Row{Key: a.Of(), Shard: shard})
		}
	})
}

// Credit gives the request's count back to its limit, capped at the capacity,
// and says what there is then.
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (status ratelimit.Status, err error) {
	if err := r.Validate(); err != nil {
		return ratelimit.Status{}, err
	}
	err = s.edit(ctx, r.Limit, r.Key, func(a *decide.Ask, now time.Time) {
		states, each := s.of(a, now), a.Definition.Shard()
		for shard, n := range a.Fill(states, r.Count, now) {
			states[shard] = each.Credit(states[shard], now, n)
			s.rows[decide.Row{Key: a.Of(), Shard: shard}] = states[shard]
		}
		status = decide.Credited(r, states, now)
	})
	return status, err
}

// Pause empties the limit for key, and for a duration nothing can be allowed and
// nothing is refilled; debt stays, and so does what a sliding window's slots hold. What is credited or cancelled meanwhile can be
// reserved, and allowed after the pause. The later of two pauses holds. It returns
// the instant at which the pause ends.
func (s *Store) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	if err := decide.BadPause(limit, lasts); err != nil {
		return time.Time{}, err
	}
	err = s.edit(ctx, limit, key, func(a *decide.Ask, now time.Time) {
		until = s.change(a, now, func(d *bucket.Definition, state bucket.State) bucket.State {
			return d.Pause(state, now, now.Add(lasts))
		})
	})
	return until, err
}

// PauseAll is Pause for the limits and keys of several requests, whose counts do not
// matter: all of them, or on an error none. It returns the last of the instants at which
// their pauses end.
func (s *Store) PauseAll(ctx context.Context, lasts time.Duration, requests ...ratelimit.Request) (until time.Time, err error) {
	questions := slices.Clone(requests)
	for i := range questions {
		questions[i].Count = 0
	}
	call, err := s.call(ctx, false, questions)
	if err != nil {
		return time.Time{}, err
	}
	if err := decide.BadPause(requests[0].Limit, lasts); err != nil {
		return time.Time{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	for i := range call.Asks {
		end := s.change(&call.Asks[i], now, func(d *bucket.Definition, state bucket.State) bucket.State {
			return d.Pause(state, now, now.Add(lasts))
		})
		if end.After(until) {
			until = end
		}
	}
	return until, nil
}

// Resume ends a pause that is not over: the value stays, a token bucket refills
// from now on, and a fixed window has its own edges back. Without a pause it
// changes nothing.
func (s *Store) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.edit(ctx, limit, key, func(a *decide.Ask, now time.Time) {
		s.change(a, now, func(d *bucket.Definition, state bucket.State) bucket.State {
			return d.Resume(key, state, now)
		})
	})
}

// change changes all shards of an ask, and returns until when the last of them
// is paused.
func (s *Store) change(a *decide.Ask, now time.Time, to func(*bucket.Definition, bucket.State) bucket.State) (paused time.Time) {
	for shard, state := range s.of(a, now) {
		after := to(a.Definition.Shard(), state)
		s.rows[decide.Row{Key: a.Of(), Shard: shard}] = after
		if after.Paused.After(paused) {
			paused = after.Paused
		}
	}
	return paused
}

// edit runs change under the lock for a limit and key that were found sound.
func (s *Store) edit(ctx context.Context, limit ratelimit.Limit, key string, change func(a *decide.Ask, now time.Time)) error {
	call, err := s.call(ctx, false, []ratelimit.Request{{Limit: limit, Key: key}})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&call.Asks[0], s.now())
	return nil
}

// Settle replaces what a call took by what was really used: a count for each of its
// limits, in the order of the call. What was not used goes back to where it came from;
// what was used besides is taken whatever there is, below MaxReserved too. The result
// says what there is then, and is OK; while there is debt or a pause its RetryAt is when
// that is over. A receipt that was settled or cancelled before is
// [ratelimit.ErrSettled]; counts that cannot be, and a receipt of nothing, are
// [ratelimit.ErrInvalid].
func (s *Store) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (ratelimit.Result, error) {
	if err := s.usable(ctx); err != nil {
		return ratelimit.Result{}, err
	}
	return s.settle(ctx, r, append([]float64{}, used...))
}

// Cancel gives back exactly what a call took. It reports false, and does nothing, when
// the receipt is nil or of a call that took nothing, or was settled or cancelled before.
func (s *Store) Cancel(ctx context.Context, r *ratelimit.Receipt) (cancelled bool, err error) {
	if err := s.usable(ctx); err != nil || len(receipt.Payments(r)) == 0 {
		return false, err
	}
	_, err = s.settle(ctx, r, nil)
	if errors.Is(err, ratelimit.ErrSettled) {
		return false, nil
	}
	return err == nil, err
}

func (s *Store) settle(ctx context.Context, r *ratelimit.Receipt, used []float64) (result ratelimit.Result, err error) {
	settlement, err := s.seen.Settle(r, used)
	if err != nil {
		return ratelimit.Result{}, err
	}
	err = receipt.Redeem(ctx, r, func(mark string) (string, error) {
		if mark != "" {
			return mark, ratelimit.ErrSettled
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		now := s.now()
		states := make([]bucket.State, len(settlement.Changes))
		for i := range settlement.Changes {
			c := &settlement.Changes[i]
			states[i] = s.state(&c.Definition, c.Row, now)
		}
		settlement.Spread(settlement.Changes, states, now)
		for i := range settlement.Changes {
			c := &settlement.Changes[i]
			if _, ok := s.rows[c.Row]; ok || c.Count > 0 { // no row is full already
				s.rows[c.Row] = c.Settle(s.state(&c.Definition, c.Row, now), now)
			}
		}
		result = settlement.Result(decide.View{States: s.states(&settlement.Call, now), At: now})
		return "settled", nil
	})
	return result, err
}

// Prune forgets the rows of the given limits that mean the same as no row: that
// are full, have been for a minute, and are not paused, by every definition of
// their name that is given or that the store has seen. It says how many.
func (s *Store) Prune(ctx context.Context, limits ...ratelimit.Limit) (int64, error) {
	if err := s.usable(ctx); err != nil {
		return 0, err
	}
	names, err := s.seen.NoteAll(limits)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now, pruned := s.now(), int64(0)
	for row, state := range s.rows {
		if names[row.Name] && decide.Idle(s.seen.Of(row.Name), row.Key.Key, state, now) {
			delete(s.rows, row)
			pruned++
		}
	}
	return pruned, nil
}
