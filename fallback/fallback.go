package fallback

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/receipt"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// Store is a store that answers at once while its database is silent. It is safe for concurrent
// use.
type Store struct {
	*detector
	store   ratelimit.Store
	watches *watch.Observer
	memory  *memory // nil without Config.Processes

	granted, refused, failed atomic.Int64
}

var _ ratelimit.Store = (*Store)(nil)

// New returns a Store around another. A nil config is the zero one. Errors are
// [ratelimit.ErrInvalid].
func New(store ratelimit.Store, config *Config) (*Store, error) {
	if store == nil {
		return nil, &ratelimit.FieldError{Package: "fallback", Field: "Store", Value: nil, Reason: "must not be nil"}
	}
	var c Config
	if config != nil {
		c = *config
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	c.setDefaults()
	s := &Store{detector: newDetector(store, c), store: store, watches: watch.New(c.Observe, nil)}
	if c.Processes > 0 {
		s.memory = newMemory(c.Processes, c.Keys)
	}
	return s, nil
}

// Close ends the probe, and the silence without a word. After it every call is the store's, which it
// does not close.
func (s *Store) Close() {
	if s.usable() == nil {
		s.stop()
	}
}

// usable returns an error if the Store was not made by New.
func (s *Store) usable() error {
	if s == nil || s.detector == nil {
		return &ratelimit.FieldError{Package: "fallback", Field: "Store", Value: nil, Reason: "must be made by New"}
	}
	return nil
}

// String is for logs: without it they would show the keys.
func (s *Store) String() string { return "fallback.Store" }

// Stats returns counters since New, and what holds now.
func (s *Store) Stats() Stats {
	if s.usable() != nil {
		return Stats{}
	}
	stats := Stats{
		Silences: s.silences.Load(), Granted: s.granted.Load(), Refused: s.refused.Load(),
		Failed: s.failed.Load(), Busy: s.busy.Load(), Keys: s.memory.size(),
	}
	if quiet := s.quiet.Load(); quiet != nil {
		stats.Silent, stats.Since = true, quiet.since
	}
	return stats
}

// Allow returns the store's Allow, and during a silence memory's or a [SilentError].
func (s *Store) Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.All, requests, ratelimit.Store.Allow)
}

// AllowAtMost returns the store's AllowAtMost, and during a silence memory's or a [SilentError].
func (s *Store) AllowAtMost(ctx context.Context, r ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.AtMost, []ratelimit.Request{r}, func(store ratelimit.Store, ctx context.Context, _ ...ratelimit.Request) (ratelimit.Result, error) {
		return store.AllowAtMost(ctx, r)
	})
}

// AllowFirst returns the store's AllowFirst, and during a silence memory's or a [SilentError].
func (s *Store) AllowFirst(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.First, requests, ratelimit.Store.AllowFirst)
}

// Take is Allow that returns a refusal as a *[ratelimit.RefusedError].
func (s *Store) Take(ctx context.Context, requests ...ratelimit.Request) error {
	_, err := ratelimit.Granted(s.Allow(ctx, requests...))
	return err
}

// Check returns the store's Check, and during a silence memory's or a [SilentError].
func (s *Store) Check(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.decide(ctx, decide.Look, requests, ratelimit.Store.Check)
}

// Reserve returns the store's Reserve, and during a silence a [SilentError].
func (s *Store) Reserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.noted(ask(ctx, s, ratelimit.VerbReserve, requests, func() (ratelimit.Result, error) { return s.store.Reserve(ctx, requests...) }))
}

// Wait returns the store's Wait, and during a silence a [SilentError].
func (s *Store) Wait(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	result, err := ask(ctx, s, ratelimit.VerbReserve, requests, func() (ratelimit.Result, error) { return s.store.Wait(ctx, requests...) })
	if err == nil {
		s.memory.note(&result, result.RetryAfter) // which it has slept
	}
	return result, err
}

// CheckReserve returns the store's CheckReserve, and during a silence a [SilentError].
func (s *Store) CheckReserve(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error) {
	return s.noted(ask(ctx, s, ratelimit.VerbCheck, requests, func() (ratelimit.Result, error) { return s.store.CheckReserve(ctx, requests...) }))
}

// Settle settles what memory granted in memory. Otherwise it is the store's Settle, and during a
// silence a [SilentError].
func (s *Store) Settle(ctx context.Context, r *ratelimit.Receipt, used ...float64) (ratelimit.Result, error) {
	if s.usable() == nil && s.memory.granted(r) {
		return s.memory.settle(ctx, r, append([]float64{}, used...))
	}
	return s.noted(ask(ctx, s, ratelimit.VerbSettle, nil, func() (ratelimit.Result, error) { return s.store.Settle(ctx, r, used...) }))
}

// Cancel cancels what memory granted in memory. Otherwise it is the store's Cancel, and during a
// silence a [SilentError].
func (s *Store) Cancel(ctx context.Context, r *ratelimit.Receipt) (cancelled bool, err error) {
	if err := s.usable(); err != nil {
		return false, err
	}
	switch {
	case !receipt.Pays(r): // which asks nobody
		return s.store.Cancel(ctx, r)
	case s.memory.granted(r):
		_, err := s.memory.settle(ctx, r, nil)
		if errors.Is(err, ratelimit.ErrSettled) {
			return false, nil
		}
		return err == nil, err
	}
	return ask(ctx, s, ratelimit.VerbCancel, nil, func() (bool, error) { return s.store.Cancel(ctx, r) })
}

// Credit returns the store's Credit, and during a silence a [SilentError].
func (s *Store) Credit(ctx context.Context, r ratelimit.Request) (ratelimit.Status, error) {
	return ask(ctx, s, ratelimit.VerbCredit, []ratelimit.Request{r}, func() (ratelimit.Status, error) { return s.store.Credit(ctx, r) })
}

// Pause returns the store's Pause, and during a silence a [SilentError].
func (s *Store) Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (until time.Time, err error) {
	until, err = ask(ctx, s, ratelimit.VerbPause, of(limit, key), func() (time.Time, error) { return s.store.Pause(ctx, limit, key, lasts) })
	if err == nil {
		s.memory.pause(limit, key, lasts)
	}
	return until, err
}

// Resume returns the store's Resume, and during a silence a [SilentError].
func (s *Store) Resume(ctx context.Context, limit ratelimit.Limit, key string) error {
	_, err := ask(ctx, s, ratelimit.VerbResume, of(limit, key), func() (none struct{}, _ error) { return none, s.store.Resume(ctx, limit, key) })
	if err == nil {
		s.memory.resume(limit, key)
	}
	return err
}

// Reset returns the store's Reset, and during a silence a [SilentError].
func (s *Store) Reset(ctx context.Context, limit ratelimit.Limit, key string) error {
	_, err := ask(ctx, s, ratelimit.VerbReset, of(limit, key), func() (none struct{}, _ error) { return none, s.store.Reset(ctx, limit, key) })
	return err
}

// Change is the store's Change, and during a silence a [SilentError].
func (s *Store) Change(ctx context.Context, from, to ratelimit.Limit, key string) (ratelimit.Status, error) {
	return ask(ctx, s, ratelimit.VerbChange, of(to, key), func() (ratelimit.Status, error) { return s.store.Change(ctx, from, to, key) })
}

func of(limit ratelimit.Limit, key string) []ratelimit.Request {
	return []ratelimit.Request{{Limit: limit, Key: key}}
}

// noted returns what ask has, and memory heeds it.
func (s *Store) noted(result ratelimit.Result, err error) (ratelimit.Result, error) {
	if err == nil {
		s.memory.note(&result, 0)
	}
	return result, err
}

// ask asks the store, unless the database is silent.
func ask[T any](ctx context.Context, s *Store, verb ratelimit.Verb, requests []ratelimit.Request, do func() (T, error)) (answer T, err error) {
	if err := s.usable(); err != nil {
		return answer, err
	}
	if quiet := s.quiet.Load(); quiet != nil {
		w := s.watches.Begin(ctx, verb, ratelimit.FormMemory, requests)
		defer w.ReportError(&err)
		return answer, s.fail(quiet, "")
	}
	answer, err = do()
	if result, ok := any(answer).(ratelimit.Result); ok && err == nil && !asked(&result) {
		return answer, nil
	}
	return answer, s.hear(ctx, err)
}

// decide asks the store, and answers from memory if the database is silent, or became so while it
// was asked.
func (s *Store) decide(ctx context.Context, verb decide.Verb, requests []ratelimit.Request, ask func(ratelimit.Store, context.Context, ...ratelimit.Request) (ratelimit.Result, error)) (result ratelimit.Result, err error) {
	if err := s.usable(); err != nil {
		return result, err
	}
	quiet, gaveUp := s.quiet.Load(), ctx.Err()
	if quiet == nil {
		gaveUp = nil // what ends the call is the store's to say
		result, err = ask(s.store, ctx, requests...)
		if err == nil {
			if asked(&result) {
				s.answered()
				s.memory.note(&result, 0)
			}
			return result, nil
		}
		err = s.hear(ctx, err)
		if quiet = s.quiet.Load(); quiet == nil || kindOf(ctx, err) != sign {
			return result, err
		}
	}
	w := s.watches.Begin(ctx, verb.Observed(false), ratelimit.FormMemory, requests)
	if err = gaveUp; err == nil {
		result, err = s.decideHere(verb, requests, quiet)
	}
	w.Report(&result, err)
	return result, err
}

// asked reports whether a result has a status of the database: a refusal by ModeRefuse has none.
func asked(result *ratelimit.Result) bool {
	return isAsked(&result.Status) || slices.ContainsFunc(result.Several, func(s ratelimit.Status) bool { return isAsked(&s) })
}

// decideHere decides a call without the database.
func (s *Store) decideHere(verb decide.Verb, requests []ratelimit.Request, quiet *silence) (result ratelimit.Result, err error) {
	decideEnforced := func(requests []ratelimit.Request) (ratelimit.Result, error) {
		switch _, err := verb.Call(nil, nil, false, requests); {
		case err != nil:
			return ratelimit.Result{}, err
		case s.memory == nil:
			return ratelimit.Result{}, s.fail(quiet, "")
		case !s.reached.Load():
			return ratelimit.Result{}, s.fail(quiet, "this process has not reached it yet")
		}
		result, reason := s.memory.decide(verb, requests)
		if reason != "" {
			return ratelimit.Result{}, s.fail(quiet, reason)
		}
		return result, nil
	}
	if decide.Moded(requests) {
		result, err = decide.ByMode(verb, time.Now().UTC().Truncate(time.Microsecond), requests, decideEnforced)
	} else {
		result, err = decideEnforced(requests)
	}
	switch {
	case err != nil:
	case result.OK:
		s.granted.Add(1)
	default:
		s.refused.Add(1)
	}
	return result, err
}

func (s *Store) fail(quiet *silence, reason string) error {
	s.failed.Add(1)
	return &SilentError{Since: quiet.since, Err: quiet.err, Reason: reason}
}
