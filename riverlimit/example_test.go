package riverlimit_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// Emails is a limit for each customer, with reservations up to an hour ahead.
var Emails = ratelimit.TokenBucket{Name: "emails", Rate: 100, Period: time.Minute, MaxReserved: 6_000}

// The order, its e-mail and the capacity for that commit together.
func ExampleInserter_InsertTx() {
	placeOrder := func(ctx context.Context, pool *pgxpool.Pool, jobs riverlimit.Inserter, customer string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO orders (customer) VALUES ($1)", customer); err != nil {
				return err
			}
			_, err := jobs.InsertTx(ctx, tx, callArgs{}, nil, Emails.For(customer))
			var refused *ratelimit.RefusedError
			if errors.As(err, &refused) {
				return fmt.Errorf("too many orders, retry after %v: %w", refused.Result.RetryAfter, err)
			}
			return err
		})
	}
	_ = placeOrder
}

// A job that is cancelled before it has run gives back what was reserved when it
// was inserted.
func ExampleInserter_cancelled() {
	cancelOrder := func(ctx context.Context, pool *pgxpool.Pool, jobs riverlimit.Inserter, jobID int64) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			job, err := jobs.Client.JobCancelTx(ctx, tx, jobID)
			if err != nil {
				return err
			}
			_, err = riverlimit.CancelTx(ctx, tx, jobs.Store, job) // unless it has begun
			return err
		})
	}
	_ = cancelOrder
}

// What a job has really used replaces what was reserved for it, in the transaction that
// stores its result and completes it.
func ExampleSettleTx() {
	llmTokens := ratelimit.TokenBucket{Name: "llm_tokens", Rate: 40_000, Period: time.Minute}

	finish := func(ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, job *river.Job[callArgs], answer string, used float64) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO answers (job, answer) VALUES ($1, $2)", job.ID, answer); err != nil {
				return err
			}
			if err := riverlimit.SettleTx(ctx, tx, store, job.JobRow, llmTokens.ForN("acme", used)); err != nil {
				return err
			}
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
	}
	_ = finish
}

// The geocoder bans callers that call more than 100 times in any minute.
func ExampleNewMiddleware() {
	geocoder := ratelimit.TokenBucket{Name: "geocoder", Rate: 100, Period: time.Minute, Capacity: 1}

	newClient := func(pool *pgxpool.Pool, workers *river.Workers) (*river.Client[pgx.Tx], error) {
		store, err := pgstore.New(pool, nil)
		if err != nil {
			return nil, err
		}
		limit, err := riverlimit.NewMiddleware(store, &riverlimit.MiddlewareConfig{
			Limits:    riverlimit.ByKind(map[string]ratelimit.Limit{"geocode": geocoder}),
			HardStart: true,
		})
		if err != nil {
			return nil, err
		}
		return river.NewClient(riverpgxv5.New(pool), &river.Config{
			Middleware: []rivertype.Middleware{limit},
			Queues:     map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 50}},
			Workers:    workers,
		})
	}
	_ = newClient
}
