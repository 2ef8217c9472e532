// Package conn holds the database of a Store: its pool, deadlines, errors, and waits for locks. It
// knows no limit.
package conn

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

// Conn is the database of a Store. Its exported fields do not change once it is in use.
type Conn struct {
	Pool        *pgxpool.Pool // nil for a Store whose callers bring their transactions
	Schema      string        // "" leaves it to the search_path
	Portable    bool          // the statements are for distributed tables
	Timeout     time.Duration // of decisions on their own without a deadline; NoTimeout for none
	RetryBudget time.Duration // of attempts without a deadline
	Now         func() time.Time

	Work    Work
	Retries atomic.Int64

	probes probes

	seats chan struct{} // has room for the connections that may wait for a locked row
	moves moves
	lock  tableLock
}

const (
	// DefaultTimeout is the default of Config.Timeout.
	DefaultTimeout = 5 * time.Second

	// NoTimeout lets a decision take as long as it does.
	NoTimeout time.Duration = -1

	// MostTogether is the most calls that one statement decides.
	MostTogether = 1024

	// RollbackTime bounds the work after a context is over, such as a ROLLBACK.
	RollbackTime = 5 * time.Second
)

// Open makes a Conn ready for use.
func (c *Conn) Open() {
	c.Work.over = make(chan struct{})
	c.Work.Opened, c.Work.shut = context.WithCancel(context.Background())
	if c.Pool != nil {
		c.seats = make(chan struct{}, min(c.Pool.Config().MaxConns/4, 4))
	}
}

// Silence returns for how long the server keeps the locks of a decision's own transaction while the
// client sends nothing.
func (c *Conn) Silence() time.Duration {
	if c.Timeout == NoTimeout {
		return DefaultTimeout
	}
	return c.Timeout
}

// Clock returns the injected instant that decides; nil if the database's clock decides.
func (c *Conn) Clock() *time.Time {
	if c.Now == nil {
		return nil
	}
	now := c.Now().UTC().Truncate(time.Microsecond)
	return &now
}

// Instant returns the instant of a decision that is made without the database.
func (c *Conn) Instant() time.Time {
	if now := c.Clock(); now != nil {
		return *now
	}
	return time.Now().UTC().Truncate(time.Microsecond)
}

// Enter begins a decision on its own. The caller must call end.
func (c *Conn) Enter(ctx context.Context) (end func(), err error) {
	if c.Pool == nil {
		return nil, ErrNoPool
	}
	return c.Work.End, c.Work.Begin(ctx)
}

// Bounded begins a decision on its own, like Enter. Its context has the Store's time-out if ctx has no
// deadline.
func (c *Conn) Bounded(ctx context.Context) (_ context.Context, end func(), err error) {
	leave, err := c.Enter(ctx)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := c.Timed(ctx)
	return ctx, func() { cancel(); leave() }, nil
}

// Standalone runs do on the pool, each statement a transaction of its own.
func (c *Conn) Standalone(ctx context.Context, doing string, do func(context.Context) error) error {
	ctx, end, err := c.Bounded(ctx)
	if err != nil {
		return err
	}
	defer end()
	if err := c.Retry(ctx, func() error { return do(ctx) }); err != nil {
		return c.Fault(doing, err)
	}
	return nil
}

// Timed returns a context with the Store's time-out, if ctx has no deadline.
func (c *Conn) Timed(ctx context.Context) (context.Context, context.CancelFunc) {
	return c.TimedFrom(ctx, time.Now())
}

// TimedFrom returns a context with the Store's time-out, counted from begun, if ctx has no deadline.
func (c *Conn) TimedFrom(ctx context.Context, begun time.Time) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok || c.Timeout == NoTimeout {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, begun.Add(c.Timeout))
}

// End rolls tx back, if it has not ended, even when ctx is over. Callers defer it, so that it runs when
// a caller's function panics or ends its goroutine. A transaction that cannot be rolled back has lost
// its connection, and with it all that it did: so the error is dropped.
func End(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), RollbackTime)
	defer cancel()
	_ = tx.Rollback(ctx)
}

// Session returns a value that identifies the connection of a transaction, and the data kept with it.
// Both are nil if the connection is not known. A transaction of package sqltx has none of pgx, and
// tells by a method of its own.
func Session(tx pgx.Tx) (id any, data map[string]any) {
	if c := tx.Conn(); c != nil {
		return c, c.PgConn().CustomData()
	}
	if other, ok := tx.(interface{ Session() (any, map[string]any) }); ok {
		return other.Session()
	}
	return nil, nil
}

// UsableIn returns an error if tx is nil.
func UsableIn(tx pgx.Tx) error {
	if v := reflect.ValueOf(tx); tx == nil || v.Kind() == reflect.Pointer && v.IsNil() {
		return &ratelimit.FieldError{Field: "Tx", Value: nil, Reason: "must not be nil"}
	}
	return nil
}

// Work counts the calls under way, for which Close waits. Each call writes one number twice; a lock and
// a sync.WaitGroup would write shared memory four times.
type Work struct {
	underWay       atomic.Int64 // the calls under way; less by closing once Close was called
	closing, ended sync.Once
	over           chan struct{} // closed when nothing is under way after Close

	Opened context.Context // ends when Close is called
	shut   context.CancelFunc
}

const closing = math.MinInt64 / 2

// Begin counts a call until End. After Close it returns ErrClosed, and the caller must not call End.
func (w *Work) Begin(ctx context.Context) error {
	if w.underWay.Add(1) > 0 || ctx.Value(w) != nil {
		return nil
	}
	w.End()
	return ErrClosed
}

// BeginSpan begins work of several calls, such as a wait. Its context ends when the Store is closed. The
// calls that use the context begin even then.
func (w *Work) BeginSpan(ctx context.Context) (_ context.Context, end func(), err error) {
	if err := w.Begin(ctx); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(w.Part(ctx))
	stop := context.AfterFunc(w.Opened, cancel)
	return ctx, func() { stop(); cancel(); w.End() }, nil
}

// Part returns a context whose calls begin even when the Store is closed.
func (w *Work) Part(ctx context.Context) context.Context { return context.WithValue(ctx, w, true) }

// End ends a call that has begun.
func (w *Work) End() {
	if w.underWay.Add(-1) == closing {
		w.ended.Do(func() { close(w.over) })
	}
}

// Spawn starts a goroutine that counts as a call. The caller has begun one.
func (w *Work) Spawn(f func()) {
	w.underWay.Add(1)
	go func() {
		defer w.End()
		f()
	}()
}

// UnderWay returns the number of calls under way.
func (w *Work) UnderWay() int64 {
	n := w.underWay.Load()
	if n < 0 {
		n -= closing
	}
	return n
}

// Close lets no more calls begin, and returns when none is under way.
func (w *Work) Close() {
	w.closing.Do(func() {
		w.shut()
		w.underWay.Add(closing + 1)
		w.End()
	})
	<-w.over
}

const (
	firstPause   = 2 * time.Millisecond
	longestPause = 250 * time.Millisecond

	mostForgotten = 24 // prepared statements that a decision finds gone, at most
)

// Retry repeats attempt while PostgreSQL asks for another one, until ctx is over. Without a deadline it
// ends after the retry budget. The pauses have full jitter (Brooker, "Exponential Backoff And Jitter",
// 2015). If ctx is over, the error wraps the last error of PostgreSQL too. An attempt that may have
// been committed is not repeated. On a connection that has lost its prepared statements, each attempt
// prepares one more of them.
func (c *Conn) Retry(ctx context.Context, attempt func() error) error {
	return c.RetryCounted(ctx, func() {}, attempt)
}

// RetryCounted does what Retry does, and calls again before each further attempt that PostgreSQL asked
// for.
func (c *Conn) RetryCounted(ctx context.Context, again func(), attempt func() error) error {
	end, hasDeadline := ctx.Deadline()
	if !hasDeadline {
		end = time.Now().Add(c.RetryBudget)
	}
	var last error // that asked for another attempt
	longest := firstPause
	for n, forgotten := 1, 0; ; n++ {
		err := attempt()
		if err == nil {
			return nil
		}
		c.LeaveReadOnly(err)
		if Forgotten(err) && forgotten < mostForgotten && ctx.Err() == nil {
			forgotten++
			continue
		}
		if !Retriable(err) || Done(err) {
			if last != nil && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)) {
				return fmt.Errorf("pgstore: gave up after %d attempts: %w: %w", n, err, last)
			}
			return err
		}
		last = err
		pause := time.Duration(rand.Int64N(int64(longest)))
		if time.Until(end) <= pause {
			if hasDeadline {
				err = fmt.Errorf("%w: %w", context.DeadlineExceeded, err)
			}
			return fmt.Errorf("pgstore: gave up after %d attempts: %w", n, err)
		}
		longest = min(2*longest, longestPause)
		if ctxErr := Sleep(ctx, pause); ctxErr != nil {
			return fmt.Errorf("pgstore: gave up after %d attempts: %w: %w", n, ctxErr, err)
		}
		c.Retries.Add(1)
		again()
	}
}

// Sleep returns after a pause, or with ctx's error when that is over first.
func Sleep(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
