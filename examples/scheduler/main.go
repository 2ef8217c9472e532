// Scheduler is a job scheduler with rate limits, to be read in five minutes and
// to be copied:
//
//	go run ./examples/scheduler
//
// It sends e-mails for customers, each of whom may send 20 a second, through a mail
// server that takes 30 a second of all of them. All of it is in four places:
//
//   - schema, a jobs table;
//   - enqueue, which reserves capacity and inserts the job in the caller's
//     transaction: no job without capacity, no capacity without a job;
//   - claim, with which any number of workers in any number of processes take
//     jobs that are due, without waiting for each other (SKIP LOCKED): as many of
//     a batch as the mail server takes now;
//   - finish and fail, which end an attempt.
//
// An attempt that failed, or whose worker died, has called the mail server and
// is spent: the next one reserves anew, before it is due. So the limit counts
// calls, whatever happens, and every job runs at least once.
//
// Then it checks that this is so: it rolls a transaction back, has attempts
// fail, and kills workers in the middle of a job.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/examples/internal/demo"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Emails is a limit for each customer, up to 5 at once; MailServer is for all together.
var (
	Emails     = ratelimit.TokenBucket{Name: "emails", Rate: 20, Period: time.Second, Capacity: 5}
	MailServer = ratelimit.TokenBucket{Name: "mail_server", Rate: 30, Period: time.Second, Capacity: 6}
)

// schema is the jobs table. run_at is when the job may be claimed; paid is
// whether capacity is reserved for that instant.
const schema = `
	CREATE TABLE jobs (
		id         uuid PRIMARY KEY,
		customer   text NOT NULL,
		run_at     timestamptz NOT NULL,
		paid       boolean NOT NULL,
		attempt    integer NOT NULL DEFAULT 0,
		created_at timestamptz NOT NULL DEFAULT now(),
		done_at    timestamptz
	);
	CREATE INDEX ON jobs (run_at) WHERE done_at IS NULL;
	CREATE TABLE calls (job uuid, attempt integer, at timestamptz) -- for the checks`

const (
	lease = 2 * time.Second      // after which a worker that was not heard of is dead
	idle  = 5 * time.Millisecond // between looks for jobs that are due; LISTEN would do as well
	batch = 4                    // jobs that a worker claims at most
)

// Job is a job that was claimed.
type Job struct {
	ID       uuid.UUID
	Customer string
	Attempt  int
}

// Scheduler has no state of its own.
type Scheduler struct {
	pool  *pgxpool.Pool
	store *pgstore.Store
}

// enqueue inserts a job that is due when the limit allows, inside tx. If tx
// rolls back there is neither job nor debt.
func (s Scheduler) enqueue(ctx context.Context, tx pgx.Tx, customer string) (ratelimit.Result, error) {
	reserved, err := s.store.ReserveTx(ctx, tx, Emails.For(customer))
	if err == nil {
		err = reserved.Err() // a refusal, if Emails had a MaxReserved
	}
	if err != nil {
		return reserved, err
	}
	id, err := uuid.NewV7() // in the order of time, which is kind to the index
	if err != nil {
		return reserved, err
	}
	_, err = tx.Exec(ctx, `INSERT INTO jobs (id, customer, run_at, paid) VALUES ($1, $2, $3, true)`,
		id, customer, reserved.RetryAt) // the database's clock, as in claim
	return reserved, err
}

// claim takes some jobs that are due, for as long as the lease: of a batch, as many as the
// mail server takes now. The others stay for later.
func (s Scheduler) claim(ctx context.Context) (claimed []*Job, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		due, err := s.due(ctx, tx)
		if err != nil || len(due) == 0 {
			return err
		}
		may, err := s.store.AllowAtMostTx(ctx, tx, MailServer.ForN("", float64(len(due))))
		if err != nil {
			return err
		}
		claimed = due[:int(may.Taken)] // none when it is refused
		for _, job := range claimed {
			job.Attempt++
			// Spent as of now: a worker that finds it after the lease must pay.
			_, err := tx.Exec(ctx, `UPDATE jobs SET paid = false, attempt = $2, run_at = clock_timestamp() + $3 WHERE id = $1`,
				job.ID, job.Attempt, lease)
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return claimed, nil
}

// due returns a batch of jobs that are due and paid, locked until tx ends. Those that are
// not paid, it pays for.
func (s Scheduler) due(ctx context.Context, tx pgx.Tx) (due []*Job, err error) {
	rows, err := tx.Query(ctx, `
		SELECT id, customer, attempt, paid FROM jobs
		WHERE done_at IS NULL AND run_at <= clock_timestamp()
		ORDER BY run_at LIMIT $1 FOR UPDATE SKIP LOCKED`, batch)
	if err != nil {
		return nil, err
	}
	var job Job
	var paid bool
	var unpaid []Job
	_, err = pgx.ForEachRow(rows, []any{&job.ID, &job.Customer, &job.Attempt, &paid}, func() error {
		if found := job; paid {
			due = append(due, &found)
		} else {
			unpaid = append(unpaid, found)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(unpaid, func(a, b Job) int { return strings.Compare(a.Customer, b.Customer) }) // one order of locking
	for _, job := range unpaid {
		if err := s.pay(ctx, tx, job); err != nil {
			return nil, err
		}
	}
	return due, nil
}

// pay reserves for another attempt, which is claimed when that is due.
func (s Scheduler) pay(ctx context.Context, tx pgx.Tx, job Job) error {
	reserved, err := s.store.ReserveTx(ctx, tx, Emails.For(job.Customer))
	if err != nil {
		return err
	}
	// Refused, RetryAt is when to ask again.
	_, err = tx.Exec(ctx, `UPDATE jobs SET paid = $2, run_at = $3 WHERE id = $1`, job.ID, reserved.OK, reserved.RetryAt)
	return err
}

// finish ends a job. Give it the transaction in which the job's results are
// written, and they are there if and only if the job is done. The attempt makes
// sure that a worker that overslept its lease does not end another's.
func (s Scheduler) finish(ctx context.Context, tx pgx.Tx, job *Job) error {
	tag, err := tx.Exec(ctx, `UPDATE jobs SET done_at = clock_timestamp() WHERE id = $1 AND attempt = $2`, job.ID, job.Attempt)
	if err == nil && tag.RowsAffected() == 0 {
		err = errors.New("the lease is over")
	}
	return err
}

// fail puts the job off for a while. It is not paid, and will be then.
func (s Scheduler) fail(ctx context.Context, job *Job, backoff time.Duration) error {
	_, err := s.pool.Exec(ctx, `UPDATE jobs SET run_at = clock_timestamp() + $3 WHERE id = $1 AND attempt = $2 AND NOT paid`,
		job.ID, job.Attempt, backoff)
	return err
}

var errCrash = errors.New("the worker's process is gone")

// work claims jobs and sends their e-mails until ctx is over.
func (s Scheduler) work(ctx context.Context, send func(context.Context, *Job) error) error {
	for ctx.Err() == nil {
		jobs, err := s.claim(ctx)
		if err != nil {
			return err
		}
		for _, job := range jobs {
			if err := s.run(ctx, job, send); err != nil {
				return err
			}
		}
		if len(jobs) == 0 {
			select {
			case <-time.After(idle):
			case <-ctx.Done():
			}
		}
	}
	return ctx.Err()
}

func (s Scheduler) run(ctx context.Context, job *Job, send func(context.Context, *Job) error) error {
	err := send(ctx, job)
	switch {
	case errors.Is(err, errCrash): // only here; a true one would not even return
		return err
	case err != nil:
		return s.fail(ctx, job, 100*time.Millisecond)
	}
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error { return s.finish(ctx, tx, job) })
}

// That was the scheduler. The rest uses it, and checks it.

const (
	emails  = 40
	workers = 6
	crashes = 2
)

func main() { demo.Main("scheduler", run) }

func run(ctx context.Context, out io.Writer) (err error) {
	db, err := demo.Database(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.Pool.Exec(ctx, schema); err != nil {
		return err
	}
	store, err := pgstore.New(db.Pool, nil)
	if err != nil {
		return err
	}
	d := demonstration{Scheduler{db.Pool, store}, out, new(atomic.Int64)}
	for _, step := range []func(context.Context) error{d.enqueueAll, d.rollBack, d.workAll, d.check} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

type demonstration struct {
	Scheduler
	out   io.Writer
	calls *atomic.Int64 // of the mail server
}

func (d demonstration) enqueueAll(ctx context.Context) error {
	fmt.Fprintf(d.out, "1. %d e-mails for acme and %d for globex, in one transaction; the limit is %g a second each\n", emails, emails/2, Emails.Rate)
	var last ratelimit.Result
	err := pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) (err error) {
		for i := range emails {
			if i%2 == 0 {
				if _, err = d.enqueue(ctx, tx, "globex"); err != nil {
					return err
				}
			}
			if last, err = d.enqueue(ctx, tx, "acme"); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "   acme's last one is due in %v\n", last.RetryAfter.Round(time.Millisecond))
	return nil
}

func (d demonstration) rollBack(ctx context.Context) error {
	fmt.Fprintln(d.out, "\n2. 10 e-mails for initech, and the transaction rolls back")
	errRollBack := errors.New("roll back")
	err := pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		for range 10 {
			if _, err := d.enqueue(ctx, tx, "initech"); err != nil {
				return err
			}
		}
		return errRollBack
	})
	if !errors.Is(err, errRollBack) {
		return err
	}
	var jobs int
	if err := d.pool.QueryRow(ctx, `SELECT count(*) FROM jobs WHERE customer = 'initech'`).Scan(&jobs); err != nil {
		return err
	}
	left, err := d.store.Check(ctx, Emails.For("initech"))
	if err != nil {
		return err
	}
	return demo.Claim(d.out, jobs == 0 && left.Value == left.Capacity, "no job, no debt: %d jobs, %g of %g tokens", jobs, left.Value, left.Capacity)
}

// workAll runs workers until all is done. Some e-mails fail, some workers die.
func (d demonstration) workAll(ctx context.Context) error {
	fmt.Fprintf(d.out, "\n3. %d workers; some calls fail, and %d workers die in the middle of a job\n", workers, crashes)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	working, stop := context.WithCancel(ctx)
	defer stop()
	group, working := errgroup.WithContext(working)
	for range workers {
		group.Go(func() error {
			if err := d.work(working, d.send); !errors.Is(err, errCrash) && working.Err() == nil {
				return err
			}
			return nil
		})
	}
	for left := 1; left > 0 && working.Err() == nil; time.Sleep(20 * time.Millisecond) {
		if err := d.pool.QueryRow(ctx, `SELECT count(*) FROM jobs WHERE done_at IS NULL`).Scan(&left); err != nil {
			stop()
			return errors.Join(err, group.Wait())
		}
	}
	stop()
	return errors.Join(group.Wait(), ctx.Err())
}

// send has the mail server note the call. It is not too reliable.
func (d demonstration) send(ctx context.Context, job *Job) error {
	if _, err := d.pool.Exec(ctx, `INSERT INTO calls VALUES ($1, $2, clock_timestamp())`, job.ID, job.Attempt); err != nil {
		return err
	}
	switch n := d.calls.Add(1); {
	case n%10 == 0 && n/10 <= crashes:
		return errCrash
	case n%7 == 0:
		return errors.New("451 try again later")
	}
	return nil
}

func (d demonstration) check(ctx context.Context) error {
	var jobs, done, calls, again, over, overAll int
	err := d.pool.QueryRow(ctx, `
		WITH counted AS (
			-- The n-th call for a customer, t seconds after the first reservations were made.
			SELECT c.attempt,
				row_number() OVER (PARTITION BY j.customer ORDER BY c.at) AS n,
				row_number() OVER (ORDER BY c.at) AS of_all,
				extract(epoch FROM c.at - j.created_at)::float8 AS t
			FROM calls c JOIN jobs j ON j.id = c.job
		)
		SELECT (SELECT count(*) FROM jobs), (SELECT count(*) FROM jobs WHERE done_at IS NOT NULL AND id IN (SELECT job FROM calls)),
			count(*), count(*) FILTER (WHERE attempt > 1),
			count(*) FILTER (WHERE n > $1::float8 + $2::float8 * t),
			count(*) FILTER (WHERE of_all > $3::float8 + $4::float8 * t)
		FROM counted`, Emails.Capacity, Emails.Rate, MailServer.Capacity, MailServer.Rate).Scan(&jobs, &done, &calls, &again, &over, &overAll)
	if err != nil {
		return err
	}
	return errors.Join(
		demo.Claim(d.out, jobs == done, "nothing is lost: %d jobs, %d done", jobs, done),
		demo.Claim(d.out, again >= crashes, "%d calls, %d of them repeated attempts", calls, again),
		demo.Claim(d.out, over == 0, "never over: %d calls beyond %g + %g a second", over, Emails.Capacity, Emails.Rate),
		demo.Claim(d.out, overAll == 0, "nor for the mail server: %d calls beyond %g + %g a second", overAll, MailServer.Capacity, MailServer.Rate))
}
