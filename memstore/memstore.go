// Package memstore keeps limits in memory: for unit tests of code that limits,
// for trying definitions out on a clock of one's own, and for tools that are
// one process. Its verbs are those of package pgstore and decide alike, call
// by call.
//
// Code that takes in a transaction is tested with one of [Store.Begin], which needs no
// database: its tokens are spent with its commit, and given back by its rollback, to a
// savepoint too. [Store.Join] does the same for the transaction of a fake that knows SQL. Until
// it ends, the limits' keys that a transaction has taken from are its own, and others wait for
// them, as they do for rows in PostgreSQL; they see nothing of it. All waits are on channels
// and timers, so tests in a bubble of testing/synctest do not sleep.
//
// Transactions are not isolated in any other way, so nothing fails with 40001, and AllowFunc
// runs its function once.
package memstore

import (
	"context"
	"errors"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/wait"
)

// Allow takes the count of each request from its limit, or refuses and takes from none. A
// refusal is a Result that is not OK, not an error; errors are [ratelimit.ErrInvalid] and
// [ratelimit.ErrExceedsCapacity], and change nothing.
func (s *Store) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.own().decide(ctx, decide.All, false, requests)
}

// Reserve takes the count of each request from its limit, going into debt down to MaxReserved
// if need be, or refuses and takes from none. When the result is OK, the work may run at its
// RetryAt; do not ask again. A limit without MaxReserved refuses no reservation, however far
// ahead it is due.
func (s *Store) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.own().decide(ctx, decide.All, true, requests)
}

// Check returns the result that Allow would return. It takes nothing.
func (s *Store) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.own().decide(ctx, decide.Look, false, requests)
}

// CheckReserve returns the result that Reserve would return. It takes nothing.
func (s *Store) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.own().decide(ctx, decide.Look, true, requests)
}

// Take is Allow for callers that want an error unless it is granted: a refusal is
// [ratelimit.ErrRefused], as a *[ratelimit.RefusedError] with the result.
func (s *Store) Take(ctx context.Context, requests ...ratelimit.Request) error {
	_, err := ratelimit.Granted(s.Allow(ctx, requests...))
	return err
}

// AllowAtMost takes as many whole tokens as there are, up to the request's count, and
// says in the result's Taken how many. It is refused when there is not one. A count
// below 1 is [ratelimit.ErrInvalid].
func (s *Store) AllowAtMost(ctx context.Context, r ratelimit.Request) (ratelimit.Result, error) {
	return s.own().decide(ctx, decide.AtMost, false, []ratelimit.Request{r})
}

// AllowFirst takes from the first limit in the order of the requests that can grant its
// request, and from no other. The result is about that limit. When all refuse, RetryAfter is
// the shortest wait. A request that its limit can never grant is passed over; two for one limit
// and key are [ratelimit.ErrInvalid].
func (s *Store) AllowFirst(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.own().decide(ctx, decide.First, false, requests)
}

// Wait reserves for all requests, and returns when the reservation is due. If a limit has been
// paused while it slept, it sleeps until the pause is over. If ctx ends first, or its deadline
// is nearer than the wait, the reservation is given back and the error is a
// *[ratelimit.WaitError]. A refusal is [ratelimit.ErrRefused]. It sleeps on the machine's
// clock, for the duration by the store's: tests are best in a bubble of testing/synctest.
func (s *Store) Wait(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return wait.Wait(ctx, s, requests...)
}

// CheckEach is Check for many requests, each by itself and not all or nothing, in their
// order; at most [ratelimit.MaxChecks] of them.
func (s *Store) CheckEach(ctx context.Context, requests ...ratelimit.Request) ([]ratelimit.Status, error) {
	scope := s.own()
	if err := scope.usable(ctx); err != nil {
		return nil, err
	}
	if decide.Moded(requests) {
		return decide.EachByMode(s.now(), requests, func(left []ratelimit.Request) ([]ratelimit.Status, error) {
			return s.CheckEach(ctx, left...)
		})
	}
	call, err := decide.NewChecks(requests...)
	if err == nil {
		err = scope.seen.NoteCall(&call)
	}
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return call.CheckedEach(scope.view(&call)), nil
}

// Rows returns the status of each of a limit's keys that has a row, in the order of the keys'
// bytes. Of a Status see Value, Share, PausedUntil and FullAt; OK is false while there is debt
// or a pause.
func (s *Store) Rows(ctx context.Context, limit ratelimit.Limit, page ratelimit.Page) iter.Seq2[ratelimit.Status, error] {
	return func(yield func(ratelimit.Status, error) bool) {
		if err := errors.Join(s.own().usable(ctx), decide.BadPage(limit, page)); err != nil {
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
		a := decide.Demand{Request: limit.For(key), Definition: bucket.Definition(limit.Definition())}
		statuses = append(statuses, decide.Shown(limit, key, s.own().of(&a, now), now))
	}
	return statuses
}

// Reset forgets the limit's state for key: full again, debt and pause gone.
func (s *Store) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.own().reset(ctx, limit, key)
}

// Credit gives the request's count back to its limit, capped at the capacity, and returns the
// status then.
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (ratelimit.Status, error) {
	return s.own().credit(ctx, r)
}

// Pause empties the limit for key; for the duration lasts nothing can be allowed and nothing is
// refilled. Debt stays, and so do a sliding window's slots. Tokens that are credited or
// cancelled meanwhile can be reserved, and allowed after the pause. The later of two pauses
// holds. It returns the instant at which the pause ends.
func (s *Store) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	return s.own().pause(ctx, lasts, ratelimit.Request{Limit: limit, Key: key})
}

// PauseEach is Pause for the limits and keys of several requests, all of them, or on an error
// none; their counts do not matter. It returns the last of the instants at which the pauses
// end.
func (s *Store) PauseEach(ctx context.Context, requests []ratelimit.Request, lasts time.Duration) (until time.Time, err error) {
	return s.own().pause(ctx, lasts, requests...)
}

// Resume ends a pause that is not over: the value stays, a token bucket refills
// from now on, and a fixed window has its own edges back. Without a pause it
// changes nothing.
func (s *Store) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	return s.own().resume(ctx, limit, key)
}

// Change has a limit's state for key as it is when the definition to replaces from, with what was
// used kept, and returns the status then. A key that has used nothing has none, and stays full.
// Another name or kind is [ratelimit.ErrInvalid].
func (s *Store) Change(ctx context.Context, from, to ratelimit.Limit, key string) (ratelimit.Status, error) {
	return s.own().change(ctx, from, to, key)
}

// Settle replaces the tokens that a call took by those really used: one count for each of its
// limits, in the order of the call. Unused tokens go back to their rows; tokens used besides
// are taken unconditionally, below MaxReserved too. The result has the statuses then, and is
// OK; while there is debt or a pause its RetryAt is the end of that. A receipt that was settled
// or cancelled before is [ratelimit.ErrSettled]; invalid counts, and an empty receipt, are
// [ratelimit.ErrInvalid].
func (s *Store) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (ratelimit.Result, error) {
	return s.own().settle(ctx, r, append([]float64{}, used...))
}

// Cancel gives back exactly the tokens that a call took. It reports false, and does nothing,
// when the receipt is nil or of a call that took nothing, or was settled or cancelled before.
func (s *Store) Cancel(ctx context.Context, r *ratelimit.Receipt) (cancelled bool, err error) {
	return s.own().cancel(ctx, r)
}

// Prune forgets the rows of the given limits that mean the same as no row: that
// are full, have been for a minute, and are not paused, by every definition of
// their name that is given or that the store has seen, and that no transaction has. It
// says how many.
func (s *Store) Prune(ctx context.Context, limits ...ratelimit.Limit) (int64, error) {
	return s.PruneOverridden(ctx, nil, limits...)
}

// PruneOverridden is Prune by overrides as well, each of which binds the rows of its request's
// key only.
func (s *Store) PruneOverridden(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (int64, error) {
	return s.prune(ctx, overrides, limits, func(row decide.Row) { delete(s.rows, row) })
}

// Prunable returns how many rows PruneOverridden would forget at this moment, and forgets none.
func (s *Store) Prunable(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (int64, error) {
	return s.prune(ctx, overrides, limits, func(decide.Row) {})
}

// prune calls each for every row that Prune forgets, and returns their number.
func (s *Store) prune(ctx context.Context, overrides []ratelimit.Request, limits []ratelimit.Limit, each func(decide.Row)) (rows int64, err error) {
	if err := s.own().usable(ctx); err != nil {
		return 0, err
	}
	names, err := s.seen.NoteAll(overrides, limits)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	for row, state := range s.rows {
		of, named := names[row.Name]
		if named && s.held[row.Key] == nil && s.seen.Idle(row.Key, of, state, now) {
			each(row)
			rows++
		}
	}
	return rows, nil
}
