package riverlimit_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
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

// A hundred jobs of one customer are one reservation, and each is scheduled for the instant
// at which its part is there.
func ExampleInserter_InsertManyTx() {
	ctx := context.Background()
	pool, jobs, done := exampleRiver()
	defer done()

	emails := ratelimit.TokenBucket{Name: "emails", Rate: 60, Period: time.Hour, Capacity: 98}
	params := make([]riverlimit.InsertManyParams, 100)
	for i := range params {
		params[i] = riverlimit.InsertManyParams{Args: callArgs{N: i}, Requests: []ratelimit.Request{emails.For("acme")}}
	}
	var inserted []*riverlimit.Inserted
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		inserted, err = jobs.InsertManyTx(ctx, tx, params)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, i := range []int{0, 97, 98, 99} {
		fmt.Println(i, inserted[i].Job.State, inserted[i].Reservation.RetryAfter.Round(time.Minute))
	}
	// Output:
	// 0 available 0s
	// 97 available 0s
	// 98 scheduled 1m0s
	// 99 scheduled 2m0s
}

// A third party that says 429 is left alone by all jobs that call it, for as long as it
// asks for, those with a reservation included.
func ExampleMiddleware_Pause() {
	ctx := context.Background()
	pool, jobs, done := exampleRiver()
	defer done()

	partner := ratelimit.SlidingWindow{Name: "partner", Rate: 100, Period: time.Minute}
	limit, err := riverlimit.NewMiddleware(jobs.Store, &riverlimit.MiddlewareConfig{
		Limits: riverlimit.ByKind(map[string]ratelimit.Limit{"call": partner}),
	})
	if err != nil {
		log.Fatal(err)
	}
	// In the worker, of the partner's answer:
	resp := &http.Response{StatusCode: http.StatusTooManyRequests, Header: http.Header{"Retry-After": {"120"}}}
	if resp.StatusCode == http.StatusTooManyRequests {
		seconds, err := strconv.Atoi(resp.Header.Get("Retry-After"))
		if err != nil {
			seconds = 60
		}
		if err := limit.Pause(ctx, time.Duration(seconds)*time.Second, partner.For("")); err != nil {
			log.Fatal(err)
		}
	}

	var inserted *riverlimit.Inserted
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		inserted, err = jobs.InsertTx(ctx, tx, callArgs{}, nil, partner.For(""))
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(inserted.Job.State, inserted.Reservation.RetryAfter.Round(time.Minute))
	// Output: scheduled 2m0s
}

// exampleRiver is a database with River's tables and the limits', and an Inserter.
func exampleRiver() (pool *pgxpool.Pool, jobs riverlimit.Inserter, done func()) {
	pool, done = pgtest.Example("")
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: quiet})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := migrator.Migrate(context.Background(), rivermigrate.DirectionUp, nil); err != nil {
		log.Fatal(err)
	}
	if jobs.Client, err = river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: quiet}); err != nil {
		log.Fatal(err)
	}
	if jobs.Store, err = pgstore.New(pool, nil); err != nil {
		log.Fatal(err)
	}
	return pool, jobs, done
}

// The geocoder bans callers that call more than 100 times in any minute, wherever that
// begins: a sliding window, whose slots are longer than River is late (a second, for jobs
// that wait in the worker).
func ExampleNewMiddleware() {
	geocoder := ratelimit.SlidingWindow{Name: "geocoder", Rate: 100, Period: time.Minute, Slots: 60}

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
