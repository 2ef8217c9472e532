package edge

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/keyqueue"
	"github.com/pgratelimit/ratelimit/internal/mask"
)

// The defaults of a [Waiter].
const (
	DefaultMaxWait  = 30 * time.Second
	DefaultMaxTries = 4
	DefaultMaxPause = time.Hour
)

const (
	pauseTimeout = 5 * time.Second // of pausing the limit after a refusal
	firstBackoff = time.Second     // after a refusal that does not say for how long
)

// WaitStore is the part of a store that a [Waiter] needs to share a quota with other processes.
type WaitStore interface {
	Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
	Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (time.Time, error)
}

// Waiter is the client's side: it holds requests back until their server wants to be asked
// again, and there are tokens of a limit of the client's own. It is safe for concurrent use.
type Waiter struct {
	Package  string // for errors and logs
	MaxWait  time.Duration
	MaxTries int
	MaxPause time.Duration
	Store    WaitStore // nil without a limit
	Logger   *slog.Logger

	// NotSent makes the error of a request that would have to wait for too long, until an
	// instant and because of err, which may be nil.
	NotSent func(until time.Time, err error) error

	holds holds
	turns keyqueue.Queue[string] // of callers that want tokens, by limit and key
}

// Init notes the faults of the waiter, and sets the defaults. limited is whether requests may
// be for a limit of the client's own.
func (w *Waiter) Init(f *Faults, limited bool) {
	f.Must(w.MaxWait >= 0, "MaxWait", w.MaxWait, "must not be negative")
	f.Must(w.MaxTries >= 0, "MaxTries", w.MaxTries, "must not be negative")
	f.Must(w.MaxPause >= 0 && w.MaxPause <= ratelimit.MaxSpan, "MaxPause", w.MaxPause, "must be at least 0 and at most ratelimit.MaxSpan")
	f.Must((w.Store != nil) == limited, "Store", w.Store, "must be given with Limit, and Limit with it")
	w.MaxWait = OrDefault(w.MaxWait, DefaultMaxWait)
	w.MaxTries = OrDefault(w.MaxTries, DefaultMaxTries)
	w.MaxPause = OrDefault(w.MaxPause, DefaultMaxPause)
	w.Logger = OrDefault(w.Logger, slog.Default())
}

// Answer is the limits stated by a server's answer.
type Answer struct {
	Refused   bool          // the request was refused, and may be asked again
	Exhausted bool          // it was not, but the next one would be
	Wait      time.Duration // for how long
	Told      bool          // Wait was said of a refusal, even if it is 0
	Pause     bool          // the client's own limit is to be paused for all its processes
}

// Turn waits until a request of the scope may be sent: until its server wants to be asked
// again, and there is a token of its limit, for which it may have waited so long that the server
// has refused another request. A request without a limit takes nothing.
func (w *Waiter) Turn(b *Budget, scope string, request ratelimit.Request) error {
	if err := w.holdBack(scope, b); err != nil || request.Limit == nil {
		return err
	}
	if err := w.take(request, b); err != nil {
		return err
	}
	return w.holdBack(scope, b)
}

// holdBack waits until no server holds requests of the scope back.
func (w *Waiter) holdBack(scope string, b *Budget) error {
	for {
		h := w.holds.of(scope)
		wait := time.Until(h.refused)
		if wait >= b.left() {
			return w.NotSent(h.refused, b.ctx.Err())
		}
		if hinted := time.Until(h.exhausted); hinted < b.left() {
			wait = max(wait, hinted)
		}
		if wait <= 0 {
			return b.ctx.Err()
		}
		// Those that were held back together do not go together.
		if err := b.sleep(wait + rand.N(max(1, min(wait/10, b.left()-wait)))); err != nil {
			return err
		}
	}
}

// askers is how many requests of a process ask for the same tokens at a time. The others
// wait in turn, and do not ask: when one is refused, so would they be.
const askers = 4

// take takes from the client's own limit, waiting if need be. It asks again rather than
// reserve: reservations made before a pause would all be due at its end.
func (w *Waiter) take(request ratelimit.Request, b *Budget) error {
	ctx, cancel := context.WithDeadline(b.ctx, b.end)
	defer cancel()
	turn := Identity(ratelimit.NameOf(request.Limit), request.Key)
	place, err := w.turns.Enter(ctx, turn, askers, nil)
	if err != nil {
		return w.over(b, err)
	}
	defer w.turns.Leave(turn, place)
	for {
		result, err := w.Store.Allow(ctx, request)
		switch {
		case err != nil:
			return w.over(b, fmt.Errorf("%s: not sent: its limit could not be asked: %w", w.Package, err))
		case result.OK:
			return nil
		case result.RetryAfter >= b.left():
			return w.NotSent(time.Now().Add(result.RetryAfter), result.Err())
		}
		if err := b.sleep(result.RetryAfter); err != nil {
			return err
		}
	}
}

// over returns err, or if the budget is used up, the error that this is to the caller.
func (w *Waiter) over(b *Budget, err error) error {
	switch {
	case b.ctx.Err() != nil:
		return b.ctx.Err()
	case b.left() <= 0:
		return w.NotSent(time.Now(), err)
	}
	return err
}

// Heed notes the limits in the answer to the n-th try of a request, and returns how long to
// wait before the next one.
func (w *Waiter) Heed(ctx context.Context, scope string, request ratelimit.Request, a Answer, n int) (wait time.Duration) {
	if wait = a.Wait; wait == 0 && a.Refused && !a.Told {
		wait = backoff(n)
	}
	wait = min(wait, w.MaxPause)
	switch until := time.Now().Add(wait); {
	case a.Refused:
		w.holds.set(scope, hold{refused: until})
	case a.Exhausted:
		w.holds.set(scope, hold{exhausted: until})
	}
	if a.Pause && request.Limit != nil && wait > 0 {
		w.pause(ctx, request, wait)
	}
	return wait
}

// Again reports whether there is to be another try after the n-th, which was refused.
func (w *Waiter) Again(b *Budget, wait time.Duration, n int) bool {
	return n < w.MaxTries && wait < b.left()
}

// backoff returns 1, 2, 4 … seconds, less up to a half.
func backoff(n int) time.Duration {
	most := firstBackoff << min(n-1, 10)
	return most/2 + rand.N(most/2)
}

// pause pauses the client's own limit, for all processes that share it: the request's context
// does not keep it from that.
func (w *Waiter) pause(ctx context.Context, request ratelimit.Request, lasts time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pauseTimeout)
	defer cancel()
	if _, err := w.Store.Pause(ctx, request.Limit, request.Key, lasts.Truncate(time.Microsecond)); err != nil {
		w.Logger.ErrorContext(ctx, w.Package+": the limit could not be paused after a refusal",
			slog.String("limit", ratelimit.NameOf(request.Limit)), slog.String("error", mask.Error(err, []ratelimit.Request{request})))
	}
}

// Budget is how long a request may still wait.
type Budget struct {
	ctx context.Context
	end time.Time
}

// Budget returns that of a request that begins now.
func (w *Waiter) Budget(ctx context.Context) *Budget {
	end := time.Now().Add(w.MaxWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	return &Budget{ctx, end}
}

func (b *Budget) left() time.Duration { return time.Until(b.end) }

// sleep waits for d, or until the request's context ends.
func (b *Budget) sleep(d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return b.ctx.Err()
	case <-b.ctx.Done():
		return b.ctx.Err()
	}
}

// hold is until when requests are held back: because the server has refused one, or
// because it has said that the next would be refused.
type hold struct{ refused, exhausted time.Time }

// over reports whether nothing is held back at now.
func (h hold) over(now time.Time) bool { return !h.refused.After(now) && !h.exhausted.After(now) }

// holds is the holds that are not over, by scope. The zero value is ready for use.
type holds struct {
	mu      sync.Mutex
	byScope map[string]hold
	sweep   int // how many there may be before those that are over are looked for
}

func (hs *holds) of(scope string) hold {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return hs.byScope[scope]
}

// set merges h into the hold of a scope: for each of the two, the later end holds.
func (hs *holds) set(scope string, h hold) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.byScope == nil {
		hs.byScope, hs.sweep = map[string]hold{}, minSweep
	}
	was := hs.byScope[scope]
	hs.byScope[scope] = hold{latest(was.refused, h.refused), latest(was.exhausted, h.exhausted)}
	if len(hs.byScope) > hs.sweep {
		now := time.Now()
		maps.DeleteFunc(hs.byScope, func(_ string, h hold) bool { return h.over(now) })
		hs.sweep = max(minSweep, 2*len(hs.byScope))
	}
}

const minSweep = 64

func latest(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}
