// River shows limits for calls to a language model, made by jobs of the queue
// River (https://riverqueue.com):
//
//	go run ./examples/river
//
// The provider counts requests and tokens, and answers 429 to callers that exceed
// either. The cost of a call is known only after it. So:
//
//   - A job reserves one request and the most tokens that it may use, from both
//     limits or from none, before it runs. River's worker does not see any of
//     that: a middleware does it, and waits, without using up attempts.
//   - HardStart has the jobs pass a gate when they start, because the provider
//     counts calls as they arrive, and River starts jobs in bunches.
//   - The use of a call is settled in the transaction that stores its answer and
//     completes the job: all three or none. The receipt of the reservation
//     travels with the job.
//   - On a 429 all jobs of the organization pause, for as long as the provider
//     asks, and the job runs again without losing an attempt.
//
// The provider is a fake inside this program. It is strict: it counts calls
// itself, and the program fails if it had any reason to complain.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// The limits of the provider, for each organization. Capacity 1 spaces the requests:
// then no window of a second sees more than 10 of them.
var (
	Requests = ratelimit.TokenBucket{Name: "llm_requests", Rate: 10, Period: time.Second, Capacity: 1}
	Tokens   = ratelimit.TokenBucket{Name: "llm_tokens", Rate: 6_000, Period: time.Second, Capacity: 2_000}
)

const (
	organization = "acme"
	prompts      = 40
	pause        = time.Second // of the one 429
)

// PromptArgs is a job.
type PromptArgs struct {
	Prompt    string `json:"prompt"`
	MaxTokens int    `json:"max_tokens"` // the estimate: what the call may use at most
}

func (PromptArgs) Kind() string { return "prompt" }

// limits returns those of a job.
func limits(job *rivertype.JobRow) []ratelimit.Request {
	var args PromptArgs
	if job.Kind != args.Kind() || json.Unmarshal(job.EncodedArgs, &args) != nil {
		return nil // not limited; the worker will complain about the arguments
	}
	return []ratelimit.Request{Requests.For(organization), Tokens.ForN(organization, float64(args.MaxTokens))}
}

// Worker calls the provider.
type Worker struct {
	river.WorkerDefaults[PromptArgs]
	pool       *pgxpool.Pool
	store      *pgstore.Store
	middleware *riverlimit.Middleware
	provider   *provider
}

func (w *Worker) Work(ctx context.Context, job *river.Job[PromptArgs]) error {
	used, err := w.provider.complete(job.Args)
	var tooMany *tooManyRequests
	if errors.As(err, &tooMany) {
		if err := w.middleware.Pause(ctx, tooMany.retryAfter, Requests.For(organization), Tokens.For(organization)); err != nil {
			return err
		}
		w.provider.pauseIsKnown()
		return river.JobSnooze(tooMany.retryAfter) // the attempt does not count, but its request did
	}
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO answers VALUES ($1, $2, $3)`, job.ID, used, job.Args.MaxTokens-used); err != nil {
			return err
		}
		if err := riverlimit.SettleTx(ctx, tx, w.store, job.JobRow, Tokens.ForN(organization, float64(used))); err != nil {
			return err
		}
		_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
		return err
	})
}

func main() { demo.Main("river", run) }

func run(ctx context.Context, out io.Writer) (err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	d := &demonstration{pool: db.Pool, provider: &provider{}, out: out}
	if err := d.setUp(ctx); err != nil {
		return err
	}
	if err := d.insert(ctx); err != nil {
		return err
	}
	if err := d.client.Start(ctx); err != nil {
		return err
	}
	err = d.untilDone(ctx)
	stopping, cancelStop := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancelStop()
	if err := errors.Join(err, d.client.Stop(stopping)); err != nil {
		return err
	}
	return d.check(ctx)
}

type demonstration struct {
	pool     *pgxpool.Pool
	client   *river.Client[pgx.Tx]
	provider *provider
	out      io.Writer
	begun    time.Time // on the database's clock
}

// setUp makes River's tables, and a client with the middleware.
func (d *demonstration) setUp(ctx context.Context) error {
	logger := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	driver := riverpgxv5.New(d.pool)
	migrator, err := rivermigrate.New(driver, &rivermigrate.Config{Logger: logger})
	if err != nil {
		return err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return err
	}
	if _, err := d.pool.Exec(ctx, `CREATE TABLE answers (job bigint PRIMARY KEY, used integer, unused integer)`); err != nil {
		return err
	}
	store, err := pgstore.New(d.pool, nil)
	if err != nil {
		return err
	}
	middleware, err := riverlimit.NewMiddleware(store, &riverlimit.MiddlewareConfig{
		Limits: limits, HardStart: true, StartSlack: startSlack, Logger: logger,
	})
	if err != nil {
		return err
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, &Worker{pool: d.pool, store: store, middleware: middleware, provider: d.provider})
	d.client, err = river.NewClient(driver, &river.Config{
		Logger:     logger,
		Middleware: []rivertype.Middleware{middleware},
		Queues:     map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2 * prompts}},
		Workers:    workers,
	})
	return err
}

// startSlack is roomy, for a machine that has other things to do.
const startSlack = 100 * time.Millisecond

func (d *demonstration) insert(ctx context.Context) error {
	fmt.Fprintf(d.out, "1. %d prompts for a provider that grants %g requests and %g tokens a second\n", prompts, Requests.Rate, Tokens.Rate)
	if err := d.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&d.begun); err != nil {
		return err
	}
	params := make([]river.InsertManyParams, prompts)
	for i := range params {
		params[i].Args = PromptArgs{Prompt: fmt.Sprintf("Why %d?", i), MaxTokens: 500}
	}
	_, err := d.client.InsertMany(ctx, params)
	return err
}

func (d *demonstration) untilDone(ctx context.Context) error {
	for {
		var done int
		if err := d.pool.QueryRow(ctx, `SELECT count(*) FROM answers`).Scan(&done); err != nil || done == prompts {
			return err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%d of %d prompts answered: %w", done, prompts, ctx.Err())
		}
	}
}

// check holds the outcome against the promises.
func (d *demonstration) check(ctx context.Context) error {
	var seconds float64
	var used, unused, completed, failed int
	err := d.pool.QueryRow(ctx, `
		SELECT extract(epoch FROM clock_timestamp() - $1)::float8, (SELECT sum(used) FROM answers), (SELECT sum(unused) FROM answers),
			count(*) FILTER (WHERE state = 'completed'), count(*) FILTER (WHERE attempt > 1 OR errors IS NOT NULL)
		FROM river_job`, d.begun).Scan(&seconds, &used, &unused, &completed, &failed)
	if err != nil {
		return err
	}
	p := d.provider
	fmt.Fprintf(d.out, "2. After %.1f s: %d calls, %d tokens used, %d more reserved and given back\n", seconds, len(p.calls), used, unused)
	most := Tokens.Capacity + Tokens.Rate*seconds
	return errors.Join(
		demo.Claim(d.out, completed == prompts, "%d of %d jobs completed", completed, prompts),
		demo.Claim(d.out, p.most <= int(Requests.Rate), "at most %d requests arrived within any second, %g are granted", p.most, Requests.Rate),
		demo.Claim(d.out, float64(used) <= most, "%d tokens used, %.0f were granted in this time", used, most),
		demo.Claim(d.out, p.refused == 1 && p.disregarded == 0, "%d answer of 429, and %d calls while it was in force", p.refused, p.disregarded),
		demo.Claim(d.out, failed == 0, "%d jobs lost an attempt to a limit", failed))
}
