package riverlimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// Inserter inserts jobs together with reservations. It is a plain value:
//
//	jobs := riverlimit.Inserter{Client: client, Store: store}
//	_, err := jobs.InsertTx(ctx, tx, SendArgs{…}, nil, Emails.For(customer))
//
// In a worker, the client is river.ClientFromContext[pgx.Tx](ctx).
type Inserter struct {
	// Client inserts the jobs. Required; it need not be started.
	Client *river.Client[pgx.Tx]

	// Store makes the reservations, in the database of Client. Required.
	Store *pgstore.Store

	// Jitter spreads jobs that must wait: each is scheduled for a random
	// instant, up to this much after the one at which its capacity is there. A
	// job that need not wait is not delayed. The default is none.
	Jitter time.Duration
}

// Inserted is a job with its reservation.
type Inserted struct {
	// JobInsertResult is River's.
	*rivertype.JobInsertResult

	// Reservation is what was reserved. It was given back already if River
	// skipped the job as a duplicate.
	Reservation ratelimit.Result
}

// InsertManyParams is a job for [Inserter.InsertManyTx].
type InsertManyParams struct {
	Args       river.JobArgs
	InsertOpts *river.InsertOpts
	Requests   []ratelimit.Request // none for a job that is not limited
}

// InsertTx reserves what is asked from all the limits and inserts the job,
// scheduled for the instant at which the reservation is due, all inside tx: if
// tx rolls back there is neither job nor debt. A later ScheduledAt of opts or
// args stays; the capacity is taken as from now all the same.
//
// A refusal, which only limits with a MaxReserved know, is an error:
// [ratelimit.ErrRefused], as a *[ratelimit.RefusedError] with the result. Then,
// and on every other error, nothing was inserted and nothing is reserved. After
// errors that are PostgreSQL's, among them 40001 and 40P01, tx has failed, as
// always; after others it remains usable. A job that River skips as a duplicate
// costs nothing.
//
// The limits' rows stay locked until tx ends: insert late, or commit soon. River
// promotes what is scheduled every 5 seconds, so a job may start that much late,
// but never early.
func (in Inserter) InsertTx(ctx context.Context, tx pgx.Tx, args river.JobArgs, opts *river.InsertOpts, requests ...ratelimit.Request) (*Inserted, error) {
	inserted, err := in.InsertManyTx(ctx, tx, []InsertManyParams{{args, opts, requests}})
	if err != nil {
		return nil, err
	}
	return inserted[0], nil
}

// InsertManyTx is [Inserter.InsertTx] for many jobs, with a reservation for
// each, in the order given: all of them or, on an error, none. Each reservation
// is a round trip; the jobs are inserted in one.
func (in Inserter) InsertManyTx(ctx context.Context, tx pgx.Tx, params []InsertManyParams) ([]*Inserted, error) {
	reservations := make([]ratelimit.Result, 0, len(params))
	jobs := make([]river.InsertManyParams, len(params))
	for i, p := range params {
		reserved, err := in.reserve(ctx, tx, p.Requests)
		if err == nil {
			jobs[i], err = in.job(p.Args, p.InsertOpts, p.Requests, reserved)
			reservations = append(reservations, reserved)
		}
		if err != nil {
			in.giveBack(ctx, tx, reservations...)
			return nil, err
		}
	}
	results, err := in.Client.InsertManyTx(ctx, tx, jobs)
	if err != nil {
		in.giveBack(ctx, tx, reservations...)
		return nil, err
	}
	inserted := make([]*Inserted, len(results))
	for i, r := range results {
		inserted[i] = &Inserted{r, reservations[i]}
		if r.UniqueSkippedAsDuplicate {
			if _, err := in.Store.CancelTx(ctx, tx, reservations[i]); err != nil {
				return nil, err
			}
		}
	}
	return inserted, nil
}

// InsertBatchTx is [Inserter.InsertTx] for many jobs with one reservation for
// all of them: for jobs that are one unit of work, and due together. The
// reservation is given back if River skips all of them as duplicates.
func (in Inserter) InsertBatchTx(ctx context.Context, tx pgx.Tx, params []river.InsertManyParams, requests ...ratelimit.Request) ([]*Inserted, error) {
	reserved, err := in.reserve(ctx, tx, requests)
	if err != nil {
		return nil, err
	}
	jobs := make([]river.InsertManyParams, len(params))
	for i, p := range params {
		if jobs[i], err = in.job(p.Args, p.InsertOpts, requests, reserved); err != nil {
			in.giveBack(ctx, tx, reserved)
			return nil, err
		}
	}
	results, err := in.Client.InsertManyTx(ctx, tx, jobs)
	if err != nil {
		in.giveBack(ctx, tx, reserved)
		return nil, err
	}
	inserted, skipped := make([]*Inserted, len(results)), 0
	for i, r := range results {
		inserted[i] = &Inserted{r, reserved}
		if r.UniqueSkippedAsDuplicate {
			skipped++
		}
	}
	if skipped == len(results) {
		_, err = in.Store.CancelTx(ctx, tx, reserved)
	}
	return inserted, err
}

// reserve reserves and jitters. Its only error that is not the store's is the
// refusal.
func (in Inserter) reserve(ctx context.Context, tx pgx.Tx, requests []ratelimit.Request) (ratelimit.Result, error) {
	if len(requests) == 0 {
		return ratelimit.Result{}, nil
	}
	result, err := in.Store.ReserveTx(ctx, tx, requests...)
	if err != nil {
		return ratelimit.Result{}, err
	}
	return result, result.Err()
}

// giveBackTimeout bounds giving back when the caller's context is over.
const giveBackTimeout = 5 * time.Second

// giveBack undoes reservations for jobs that were not inserted. It fails when
// tx has failed, and then there is nothing to undo.
func (in Inserter) giveBack(ctx context.Context, tx pgx.Tx, reservations ...ratelimit.Result) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	for _, r := range reservations {
		if _, err := in.Store.CancelTx(ctx, tx, r); err != nil {
			return
		}
	}
}

// job is what River gets to insert.
func (in Inserter) job(args river.JobArgs, opts *river.InsertOpts, requests []ratelimit.Request, reserved ratelimit.Result) (river.InsertManyParams, error) {
	if reserved.At.IsZero() { // not limited
		return river.InsertManyParams{Args: args, InsertOpts: opts}, nil
	}
	at := reserved.RetryAt
	if reserved.RetryAfter > 0 {
		at = jitter(at, in.Jitter)
	}
	var scheduled river.InsertOpts
	if opts != nil {
		scheduled = *opts
	}
	if argsOpts, ok := args.(river.JobArgsWithInsertOpts); ok && scheduled.ScheduledAt.IsZero() {
		scheduled.ScheduledAt = argsOpts.InsertOpts().ScheduledAt
	}
	// A job that is due is not scheduled: that would have it wait for River's
	// next promotion.
	if at.After(reserved.At) && at.After(scheduled.ScheduledAt) {
		scheduled.ScheduledAt = at
	}
	var err error
	scheduled.Metadata, err = note{Attempt: 1}.with(requests, at).addTo(scheduled.Metadata)
	return river.InsertManyParams{Args: args, InsertOpts: &scheduled}, err
}
