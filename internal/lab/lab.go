// Package lab is for the programs that measure and attack the library: processes of their own,
// what these tell, and what a run must show.
package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// NewPool returns a pool of at most so many connections to the server with a URL. Change, if it is
// not nil, changes its configuration.
func NewPool(url string, most int32, change func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("parsing the URL of the server: %w", err)
	}
	config.MaxConns = most
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		return nil, fmt.Errorf("making a pool: %w", err)
	}
	return pool, nil
}

// Each calls do with 0 to n-1, in a goroutine each. It returns when all have ended, with their
// errors.
func Each(n int, do func(i int) error) error {
	errs := make([]error, n)
	var group sync.WaitGroup
	for i := range errs {
		group.Go(func() { errs[i] = do(i) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// P99 returns the 99th percentile of values; the zero value of none.
func P99[T cmp.Ordered](values []T) (p99 T) {
	if sorted := slices.Sorted(slices.Values(values)); len(sorted) > 0 {
		p99 = sorted[len(sorted)*99/100]
	}
	return p99
}

// AskedToRetry reports whether PostgreSQL wants a transaction run again: serialization_failure or
// deadlock_detected.
func AskedToRetry(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// Within polls until so returns true. It returns an error that says what it waited for if that
// takes longer than most, or until ctx is over.
func Within(ctx context.Context, most time.Duration, what string, so func() bool) error {
	for deadline := time.Now().Add(most); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("waited %v for this: %s", most, what)
		}
	}
	return nil
}
