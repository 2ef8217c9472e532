// Package conn holds the database of a Store: its pool, deadlines, errors, and waits for locks. It
// knows no limit.
package conn

import (
	"context"
	"reflect"
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
	c.Work.open()
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
