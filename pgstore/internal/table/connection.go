package table

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// unsentError marks an error that came before anything was changed.
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

// Release rolls back a transaction that a fault has left open, and gives the connection back to its
// pool.
func Release(ctx context.Context, pooled *pgxpool.Conn) {
	rollBack(ctx, pooled)
	pooled.Release()
}

func rollBack(ctx context.Context, pooled *pgxpool.Conn) {
	if status := pooled.Conn().PgConn().TxStatus(); status != 'I' && !pooled.Conn().IsClosed() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), conn.RollbackTime)
		defer cancel()
		_, _ = pooled.Exec(ctx, "ROLLBACK") // if it fails, it closes the connection
	}
}

const (
	keptUnused = time.Second           // how long a connection is kept unused
	keptInAll  = 10 * time.Second      // how long it is kept in all: the pool checks its age only when it gets it back
	keptLook   = 50 * time.Millisecond // how often to ask whether the pool has another idle one
)

// keeper keeps a connection from one grant that prefetches to the next. Its session has planned the
// statement, which takes ten times as long as running it. Other sessions of the pool would each
// plan it while callers wait for the tokens, and after a start of many processes all at the same
// time. A connection is kept only while the pool has another idle one, so hardly any caller waits
// for it.
type keeper struct {
	mu   sync.Mutex
	kept *session
	shut bool // nothing is kept any more
}

// session is a connection that was acquired from a pool.
type session struct {
	*pgxpool.Conn
	pool           *pgxpool.Pool
	acquired, used time.Time
}

// acquire returns the kept connection, otherwise one from the pool.
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

// release keeps a connection, or gives it back to its pool. If a fault has left a transaction open,
// it rolls that back and gives the connection back: its server may have become a standby.
func (k *keeper) release(ctx context.Context, s session) {
	faulty := s.Conn.Conn().PgConn().TxStatus() != 'I'
	rollBack(ctx, s.Conn)
	s.used = time.Now()
	k.mu.Lock()
	defer k.mu.Unlock()
	if faulty || k.shut || k.kept != nil || s.over() {
		s.Release()
		return
	}
	k.kept = &s
	k.look(&s)
}

// look gives a kept connection back once it must not be kept longer.
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

// over reports whether a connection must not be kept longer.
func (s *session) over() bool {
	return s.Conn.Conn().IsClosed() || s.pool.Stat().IdleConns() == 0 || time.Since(s.used) >= keptUnused || time.Since(s.acquired) >= keptInAll
}

// close gives the kept connection back, and keeps none from then on.
func (k *keeper) close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.shut = true; k.kept != nil {
		k.kept.Release()
		k.kept = nil
	}
}
