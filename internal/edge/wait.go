package edge

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/keyqueue"
	"github.com/pgratelimit/ratelimit/internal/mask"
)

// The defaults of a [Waiter].
const (
	DefaultMaxWait  = 30 * time.Second
	DefaultMaxTries = 4
	DefaultMaxPause = 5 * time.Minute
)

const pauseTimeout = 5 * time.Second // bounds the pause of a limit after a refusal

// WaitStore is the part of a store that a [Waiter] needs to share a quota with other processes.
type WaitStore interface {
	Allow(ctx context.Context, requests ...ratelimit.Request) (ratelimit.Result, error)
	Pause(ctx context.Context, limit ratelimit.Limit, key string, lasts time.Duration) (time.Time, error)
}

// Waiter holds requests back until their server accepts them again and the client's own limit has
// tokens. It is safe for concurrent use.
type Waiter struct {
	Package  string // for errors and logs
	MaxWait  time.Duration
	MaxTries int
	MaxPause time.Duration // bounds each hold and pause, whatever a server says
	Store    WaitStore     // nil without a limit
	Logger   *slog.Logger

	// NotSent makes the error of a request that would wait too long. until is the end of the wait;
	// err is the cause, or nil.
	NotSent func(until time.Time, err error) error

	holds holds
	turns keyqueue.Queue[string] // requests that want tokens, by limit and key
}

// Init notes faults and sets defaults. limited says whether requests may have a limit of the
// client's own.
func (w *Waiter) Init(f *Faults, limited bool) {
	f.Must(w.MaxWait >= 0, "MaxWait", w.MaxWait, "must not be negative")
	f.Must(w.MaxTries >= 0, "MaxTries", w.MaxTries, "must not be negative")
	f.Must(w.MaxPause >= 0 && w.MaxPause <= ratelimit.MaxSpan, "MaxPause", w.MaxPause, "must be at least 0 and at most ratelimit.MaxSpan")
	f.Must((w.Store != nil) == limited, "Store", w.Store, "must be given with Limit, and Limit with it")
	w.MaxWait = cmp.Or(w.MaxWait, DefaultMaxWait)
	w.MaxTries = cmp.Or(w.MaxTries, DefaultMaxTries)
	w.MaxPause = cmp.Or(w.MaxPause, DefaultMaxPause)
	w.Logger = cmp.Or(w.Logger, slog.Default())
}

// Answer is what a server's answer says of its limits.
type Answer struct {
	Refused   bool          // the request was refused, and may be asked again
	Exhausted bool          // the next request would be refused
	Wait      time.Duration // as the server says; 0 if it does not
	Pause     bool          // pause the client's own limit in all processes
}

// Turn waits until a request of the scope may be sent, and returns its round for [Waiter.Heed]. The
// server must accept requests again, and the request's limit must have a token. Turn asks the
// server's hold again after a wait for the token, since the server may have refused another request
// meanwhile. A request without a limit takes nothing.
func (w *Waiter) Turn(b *Budget, scope string, request ratelimit.Request) (round Round, err error) {
	if request.Limit != nil {
		if err := w.holdBack(scope, b); err != nil {
			return Round{}, err
		}
		if err := w.take(request, b); err != nil {
			return Round{}, err
		}
	}
	for {
		if err := w.holdBack(scope, b); err != nil {
			return Round{}, err
		}
		round, again, sooner := w.holds.enter(scope, time.Now())
		if sooner == nil {
			return round, nil
		}
		if b.left() <= 0 {
			return Round{}, w.NotSent(again, b.ctx.Err())
		}
		if err := b.sleep(min(time.Until(again), b.left()), sooner); err != nil {
			return Round{}, err
		}
	}
}

// NotSent returns the text of an error of a request that was not sent.
func NotSent(pkg string, until time.Time, err error) string {
	text := pkg + ": not sent: it would have to wait until " + until.UTC().Format(time.RFC3339)
	if err != nil {
		text += ": " + err.Error()
	}
	return text
}

// holdBack waits until no hold of the scope is left.
func (w *Waiter) holdBack(scope string, b *Budget) error {
	for {
		refused, exhausted := w.holds.until(scope)
		wait := time.Until(refused)
		if wait >= b.left() {
			return w.NotSent(refused, b.ctx.Err())
		}
		if hinted := time.Until(exhausted); hinted < b.left() {
			wait = max(wait, hinted)
		}
		if wait <= 0 {
			return b.ctx.Err()
		}
		// Spread the requests that waited for the same instant.
		if err := b.sleep(wait+rand.N(max(1, min(wait/10, b.left()-wait))), nil); err != nil {
			return err
		}
	}
}

// askers is how many requests of a process ask for one key's tokens at a time. The others wait
// behind them: if one is refused, so are they.
const askers = 4

// take takes from the client's own limit, and waits for tokens. It asks again instead of reserving:
// reservations made before a pause would all be due at its end.
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
		if err := b.sleep(result.RetryAfter, nil); err != nil {
			return err
		}
	}
}

// over returns err, unless the context ended or the budget is used up: then it returns the error
// for that.
func (w *Waiter) over(b *Budget, err error) error {
	switch {
	case b.ctx.Err() != nil:
		return b.ctx.Err()
	case b.left() <= 0:
		return w.NotSent(time.Now(), err)
	}
	return err
}

// Heed notes the answer to a request that was sent in a round. After a refusal it returns how long
// the scope is held back.
func (w *Waiter) Heed(b *Budget, scope string, round Round, request ratelimit.Request, a Answer) (wait time.Duration) {
	now := time.Now()
	if !a.Refused {
		w.holds.grant(scope, round, now)
		if a.Exhausted && a.Wait > 0 {
			w.holds.exhaust(scope, now.Add(min(a.Wait, w.MaxPause)), now)
		}
		return 0
	}
	wait = w.holds.refuse(scope, round, a.Wait, w.MaxPause, now).Sub(now)
	if a.Pause && request.Limit != nil && wait > 0 {
		w.pause(b, request, wait)
	}
	return wait
}

// Again reports whether to try again after try n was refused.
func (w *Waiter) Again(b *Budget, wait time.Duration, n int) bool {
	return n < w.MaxTries && wait < b.left()
}

// pause pauses the client's own limit in all processes that share it. The request waits for that
// within its budget. If the request ends first, the pause is made all the same.
func (w *Waiter) pause(b *Budget, request ratelimit.Request, lasts time.Duration) {
	lasts = (lasts + time.Microsecond - 1).Truncate(time.Microsecond)
	done := make(chan struct{})
	go func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(b.ctx), pauseTimeout)
		defer cancel()
		if _, err := w.Store.Pause(ctx, request.Limit, request.Key, lasts); err != nil {
			w.Logger.ErrorContext(ctx, w.Package+": the limit could not be paused after a refusal",
				slog.String("limit", ratelimit.NameOf(request.Limit)), slog.String("error", mask.Error(err, []ratelimit.Request{request})))
		}
	}()
	_ = b.sleep(b.left(), done)
}

// Budget bounds how long a request may still wait.
type Budget struct {
	ctx context.Context
	end time.Time
}

// Budget returns the budget of a request that begins now.
func (w *Waiter) Budget(ctx context.Context) *Budget {
	end := time.Now().Add(w.MaxWait)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	return &Budget{ctx, end}
}

func (b *Budget) left() time.Duration { return time.Until(b.end) }

// sleep waits for d, but no longer than until sooner is closed or the request's context ends.
func (b *Budget) sleep(d time.Duration, sooner <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-sooner:
	case <-b.ctx.Done():
	}
	return b.ctx.Err()
}
