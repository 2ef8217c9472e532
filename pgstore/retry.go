package pgstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	firstPause   = 2 * time.Millisecond
	longestPause = 250 * time.Millisecond
)

// retry runs attempt until PostgreSQL does not ask for another, with full
// jitter in between (Brooker, "Exponential Backoff And Jitter", 2015), until ctx
// is over, or for the retry budget if it has no deadline. An error because ctx is
// over has what PostgreSQL said last within reach too. A connection on which
// somebody has thrown prepared statements away gets one more attempt: pgx prepares
// them again.
func (s *Store) retry(ctx context.Context, attempt func() error) error {
	end, hasDeadline := ctx.Deadline()
	if !hasDeadline {
		end = time.Now().Add(s.config.RetryBudget)
	}
	var last error // that asked for another attempt
	longest := firstPause
	for n := 1; ; n++ {
		err := attempt()
		if !retriable(err) && (n > 1 || code(err) != "26000") { // invalid_sql_statement_name
			if last != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
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
		if ctxErr := sleep(ctx, pause); ctxErr != nil {
			return fmt.Errorf("pgstore: gave up after %d attempts: %w: %w", n, ctxErr, err)
		}
	}
}

// sleep returns after a pause, or with ctx's error when that is over first.
func sleep(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// bounded is a context for a decision on its own: with the Store's time-out if ctx
// has no deadline. The decision is counted until end is called.
func (s *Store) bounded(ctx context.Context) (_ context.Context, end func(), err error) {
	if err := s.usable(); err != nil {
		return nil, nil, err
	}
	if s.pool == nil {
		return nil, nil, ErrNoPool
	}
	if err := s.work.begin(); err != nil {
		return nil, nil, err
	}
	if _, ok := ctx.Deadline(); ok || s.config.Timeout == NoTimeout {
		return ctx, s.work.end, nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeout)
	return ctx, func() { cancel(); s.work.end() }, nil
}

// ownTx runs do in a transaction of its own. READ COMMITTED is enough: a take is
// right at every isolation level, and here nobody asks it again.
func (s *Store) ownTx(ctx context.Context, do func(context.Context, pgx.Tx) error) error {
	ctx, done, err := s.bounded(ctx)
	if err != nil {
		return err
	}
	defer done()
	return s.retry(ctx, func() error {
		tx, err := s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
		if err != nil {
			return s.fault("begin", err)
		}
		defer end(ctx, tx)
		if err := do(ctx, tx); err != nil {
			return err
		}
		if err := tx.Commit(ctx); err != nil {
			return s.fault("commit", err)
		}
		return nil
	})
}
