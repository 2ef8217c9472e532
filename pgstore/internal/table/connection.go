package table

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// unsentError is an error before anything was changed.
type unsentError struct{ error }

func (e unsentError) Unwrap() error { return e.error }

// Unsent reports whether an error of a grant that prefetches, or of a return, came before anything
// was written, so that nothing was taken, returned or reported.
func Unsent(err error) bool {
	var unsent unsentError
	return errors.As(err, &unsent)
}

// acquire returns a connection of a pool, or an error that is Unsent.
func acquire(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Conn, error) {
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return nil, unsentError{err}
	}
	return pooled, nil
}

// Release gives a connection back to its pool, after rolling back a transaction that a fault
// has left open.
func Release(ctx context.Context, pooled *pgxpool.Conn) {
	rollBack(ctx, pooled)
	pooled.Release()
}

func rollBack(ctx context.Context, pooled *pgxpool.Conn) {
	if status := pooled.Conn().PgConn().TxStatus(); status != 'I' && !pooled.Conn().IsClosed() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.RollbackTime)
		defer cancel()
		_, _ = pooled.Exec(ctx, "ROLLBACK") // a connection on which it fails is closed
	}
}

const (
	keptUnused = time.Second           // for how long a connection is kept without being used
	keptInAll  = 10 * time.Second      // and from its acquisition on: the pool closes one that is too old when it has it back
	keptLook   = 50 * time.Millisecond // how often the pool is asked whether it has another one left
)

// keeper keeps a connection from one grant that prefetches to the next. Its session has planned the
// statement, which takes ten times as long as to run it. The pool's other sessions would plan it,
// one after the other, while callers wait for the tokens; and when many processes have just been
// started, the server would do so for all of them at a time. A connection is kept only while the
// pool has another one that is idle, so that hardly anybody waits for it.
type keeper struct {
	mu   sync.Mutex
	kept *session
	shut bool // nothing is kept any more
}

// session is a connection of a pool.
type session struct {
	*pgxpool.Conn
	pool           *pgxpool.Pool
	acquired, used time.Time
}

// acquire returns the kept connection of a pool, or else another one.
func (k *keeper) acquire(ctx context.Context, pool *pgxpool.Pool) (session, error) {
	if s := k.take(); s != nil {
		return *s, nil
	}
	pooled, err := acquire(ctx, pool)
	return session{Conn: pooled, pool: pool, acquired: time.Now()}, err
}

func (k *keeper) take() (s *session) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s, k.kept = k.kept, nil
	return s
}

// release keeps a connection, or gives it back to its pool, after rolling back a transaction that a
// fault has left open.
func (k *keeper) release(ctx context.Context, s session) {
	rollBack(ctx, s.Conn)
	s.used = time.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.shut || k.kept != nil || s.over() {
		s.Release()
		return
	}
	k.kept = &s
	k.look(&s)
}

// look gives a kept connection back when it is not to be kept any more.
func (k *keeper) look(s *session) {
	time.AfterFunc(keptLook, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		switch {
		case k.kept != s: // it was used
		case s.over():
			k.kept = nil
			s.Release()
		default:
			k.look(s)
		}
	})
}

// over reports whether a connection is not to be kept.
func (s *session) over() bool {
	return s.Conn.Conn().IsClosed() || s.pool.Stat().IdleConns() == 0 || time.Since(s.used) >= keptUnused || time.Since(s.acquired) >= keptInAll
}

// close gives back what is kept, and keeps nothing any more.
func (k *keeper) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.shut = true; k.kept != nil {
		k.kept.Release()
		k.kept = nil
	}
}
