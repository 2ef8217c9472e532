package conn

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

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
