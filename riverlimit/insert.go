package riverlimit

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
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

	// Catalog chooses the limit of a key, such as an override in a database: a
	// *catalog.Catalog. Nil takes requests as they are.
	Catalog ratelimit.Catalog

	// InFlight is that of the Middleware, and is called with jobs that have no ID yet. A job is
	// parked at once if jobs of its key wait in line, or if earlier jobs of the call need all
	// permits. So no worker fetches it in vain. Jobs scheduled for later are not parked. The
	// default, nil, parks jobs when they are fetched.
	InFlight func(job *rivertype.JobRow) ratelimit.PermitRequest

	// MaxParked is how many jobs may wait in a line. A call that would make one longer is refused:
	// it is a [LineFullError], and inserts nothing. Jobs that are parked when they are fetched are
	// never refused. The default is any number.
	MaxParked int

	// Jitter spreads jobs that must wait: each is scheduled up to this much after the instant at which
	// its capacity is there. The default is none.
	Jitter time.Duration
}

// Inserted is a job with its reservation.
type Inserted struct {
	// JobInsertResult is River's.
	*rivertype.JobInsertResult

	// Reservation is the result of the reservation. It was given back already if River skipped
	// the job as a duplicate. Its receipt is in the job's metadata, too: see [SettleTx] and
	// [CancelTx].
	Reservation ratelimit.Result
}

// shown holds what logs and JSON show of an Inserted.
type shown struct {
	JobID       int64            `json:"job_id"`
	ScheduledAt time.Time        `json:"scheduled_at"`
	Reservation ratelimit.Result `json:"reservation"`
}

func (i Inserted) shown() shown {
	if i.JobInsertResult == nil || i.Job == nil {
		return shown{Reservation: i.Reservation}
	}
	return shown{i.Job.ID, i.Job.ScheduledAt, i.Reservation}
}

// String returns the job and its reservation in a line, without the keys.
func (i Inserted) String() string {
	s := i.shown()
	return fmt.Sprintf("job %d, scheduled at %s: %v", s.JobID, s.ScheduledAt.Format(time.RFC3339Nano), s.Reservation)
}

// LogValue returns the job and its reservation as a group, without the keys.
func (i Inserted) LogValue() slog.Value {
	s := i.shown()
	return slog.GroupValue(slog.Int64("job_id", s.JobID), slog.Time("scheduled_at", s.ScheduledAt), slog.Any("reservation", s.Reservation))
}

// MarshalJSON returns the job and its reservation as a JSON object, without the keys: the
// job's metadata, which has the receipts, is not in it.
func (i Inserted) MarshalJSON() ([]byte, error) { return json.Marshal(i.shown()) }

// InsertManyParams is a job for [Inserter.InsertManyTx].
type InsertManyParams struct {
	Args       river.JobArgs
	InsertOpts *river.InsertOpts
	Requests   []ratelimit.Request // none for a job that is not limited
}

// InsertTx reserves the count of each request from its limit and inserts the job, scheduled for
// the instant at which the reservation is due, all inside tx. A later ScheduledAt of opts or args
// stays; the capacity is taken as from now all the same. A job that River skips as a duplicate
// costs nothing.
//
// A refusal, which only limits with a MaxReserved make, is a *[ratelimit.RefusedError]. After any
// error nothing is inserted or reserved. After an error of PostgreSQL's, such as 40001 and 40P01,
// tx has failed; after others it remains usable.
//
// The limits' rows stay locked until tx ends: insert late, or commit soon. River promotes
// scheduled jobs every 5 seconds, so a job may start that much late, but never early.
//
// The reservation of a job that is cancelled or deleted before it runs stays until it is given
// back: see "Jobs that never run" in the package's documentation.
func (in Inserter) InsertTx(ctx context.Context, tx pgx.Tx, args river.JobArgs, opts *river.InsertOpts, requests ...ratelimit.Request) (*Inserted, error) {
	inserted, err := in.InsertManyTx(ctx, tx, []InsertManyParams{{args, opts, requests}})
	if err != nil {
		return nil, err
	}
	return inserted[0], nil
}

// InsertManyTx is [Inserter.InsertTx] for many jobs, each as if it had a reservation of its own:
// all of them or, on an error, none. Of jobs with the same limits, the first are due first. Jobs
// that take from the same limits and keys share reservations, if each takes from one limit or they
// are next to each other, so 500 of them cost no more round trips than one. A shared reservation
// of a sliding window is due when a slot begins that has room for all its jobs.
//
// Two such calls never deadlock (40P01), whatever the order of their jobs. Several calls in one
// transaction can, if another transaction makes them in another order: put all jobs into one.
func (in Inserter) InsertManyTx(ctx context.Context, tx pgx.Tx, params []InsertManyParams) ([]*Inserted, error) {
	if err := in.usable(); err != nil {
		return nil, err
	}
	params = slices.Clone(params)
	for i := range params {
		params[i].Requests = decide.Resolved(in.Catalog, params[i].Requests)
	}
	order, err := in.inOrder(ctx, tx, params)
	if err != nil {
		return nil, err
	}
	all := reservations{in: in, params: params, jobs: make([]ratelimit.Result, len(params))}
	if err = all.reserve(ctx, tx, order); err != nil {
		in.giveBack(ctx, tx, all.wholes)
		return nil, err
	}
	inserted, err := all.insert(ctx, tx)
	for i, job := range inserted {
		if job.UniqueSkippedAsDuplicate {
			if _, err := in.Store.CancelTx(ctx, tx, all.jobs[i].Receipt); err != nil {
				return nil, err
			}
		}
	}
	return inserted, err
}

// reservations holds the reservations for many jobs.
type reservations struct {
	in     Inserter
	params []InsertManyParams
	jobs   []ratelimit.Result // of each job
	wholes []ratelimit.Result // which are split among the jobs
	one    bool               // all jobs share one reservation, and none has its receipt
}

// reserve reserves for the jobs in an order.
func (r *reservations) reserve(ctx context.Context, tx pgx.Tx, order []int) error {
	for rest := order; len(rest) > 0; {
		n := r.alike(rest)
		if err := r.together(ctx, tx, rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
	}
	return nil
}

// insert inserts the jobs; on an error it gives the reservations back.
func (r *reservations) insert(ctx context.Context, tx pgx.Tx) (inserted []*Inserted, err error) {
	jobs := make([]river.InsertManyParams, len(r.params))
	for i, p := range r.params {
		receipt := r.jobs[i].Receipt
		if r.one {
			receipt = nil
		}
		if jobs[i], err = r.in.job(p, r.jobs[i], receipt); err != nil {
			break
		}
	}
	var results []*rivertype.JobInsertResult
	if err == nil {
		results, err = r.in.insert(ctx, tx, jobs)
	}
	if err != nil {
		r.in.giveBack(ctx, tx, r.wholes)
		return nil, err
	}
	for i, result := range results {
		inserted = append(inserted, &Inserted{result, r.jobs[i]})
	}
	return inserted, nil
}

// alike returns how many jobs, from the first on, take from the same limits and keys in the same
// modes.
func (r *reservations) alike(order []int) int {
	first, n := r.params[order[0]].Requests, 1
	same := func(a, b ratelimit.Request) bool {
		return a.Key == b.Key && sameMode(a, b) && a.Limit.Definition() == b.Limit.Definition()
	}
	for n < len(order) && slices.EqualFunc(first, r.params[order[n]].Requests, same) {
		n++
	}
	return n
}

// sameMode reports whether requests are in one mode: the zero Mode is ModeEnforce.
func sameMode(a, b ratelimit.Request) bool {
	return max(a.Mode, ratelimit.ModeEnforce) == max(b.Mode, ratelimit.ModeEnforce)
}

// together makes one reservation for jobs that are alike. Their sum may be more than the limit can
// ever grant. Then fewer jobs share a reservation, so that only a job that is too large by itself
// is an error.
func (r *reservations) together(ctx context.Context, tx pgx.Tx, jobs []int) error {
	sum, counts := r.sum(jobs)
	whole, err := r.in.reserve(ctx, tx, sum)
	if len(jobs) > 1 && (errors.Is(err, ratelimit.ErrExceedsCapacity) || errors.Is(err, ratelimit.ErrInvalid)) {
		for some := range slices.Chunk(jobs, fitting(len(jobs), err)) {
			if err := r.together(ctx, tx, some); err != nil {
				return err
			}
		}
		return nil
	}
	if err != nil || len(sum) == 0 {
		return err
	}
	r.wholes = append(r.wholes, whole)
	parts, err := whole.Split(counts...)
	for i := range parts {
		r.jobs[jobs[i]] = parts[i]
	}
	return err
}

// fitting returns for how many of so many equal jobs to try one reservation, after one for all of
// them failed.
func fitting(jobs int, err error) int {
	var exceeds *ratelimit.ExceedsCapacityError
	if !errors.As(err, &exceeds) {
		return 1
	}
	share := exceeds.Most / exceeds.Request.Count
	return min(max(int(float64(jobs)*share+1e-9), 1), jobs-1)
}

// sum returns the requests of alike jobs together, and the counts of each job. As in a result's
// Each, requests for the same limit and key are one.
func (r *reservations) sum(jobs []int) (sum []ratelimit.Request, counts [][]float64) {
	var place []int
	for i, a := range r.params[jobs[0]].Requests {
		k := slices.IndexFunc(sum, func(b ratelimit.Request) bool { return compareRows(a, b) == 0 && sameMode(a, b) })
		if k < 0 {
			k = len(sum)
			sum = append(sum, r.params[jobs[0]].Requests[i])
			sum[k].Count = 0
		}
		place = append(place, k)
	}
	counts = make([][]float64, len(jobs))
	for i, job := range jobs {
		counts[i] = make([]float64, len(sum))
		for j, request := range r.params[job].Requests {
			counts[i][place[j]] += request.Count
			sum[place[j]].Count += request.Count
		}
	}
	return sum, counts
}

// inOrder returns the order in which to reserve for jobs: that in which a call for several limits locks
// their rows. If there are jobs with several limits, it locks all rows and returns the jobs' own order.
func (in Inserter) inOrder(ctx context.Context, tx pgx.Tx, params []InsertManyParams) (order []int, err error) {
	var rows []ratelimit.Request
	several := false
	for i := range params {
		order = append(order, i)
		several = several || len(params[i].Requests) > 1
		for _, r := range params[i].Requests {
			if err := r.Validate(); err != nil {
				return nil, err
			}
			r.Count, r.Mode = 0, ratelimit.ModeEnforce // so that the row is locked in every mode
			rows = append(rows, r)
		}
	}
	if !several {
		slices.SortStableFunc(order, func(i, j int) int {
			a, b := params[i].Requests, params[j].Requests
			if len(a) == 0 || len(b) == 0 {
				return cmp.Compare(len(a), len(b))
			}
			return compareRows(a[0], b[0])
		})
		return order, nil
	}
	slices.SortStableFunc(rows, compareRows)
	rows = slices.CompactFunc(rows, func(a, b ratelimit.Request) bool { return compareRows(a, b) == 0 })
	for some := range slices.Chunk(rows, ratelimit.MaxRequests) {
		if _, err := in.Store.ReserveTx(ctx, tx, some...); err != nil {
			return nil, err
		}
	}
	return order, nil
}

// compareRows compares requests by the order in which a call locks their rows.
func compareRows(a, b ratelimit.Request) int {
	sharded := func(r ratelimit.Request) int { return min(r.Limit.Definition().Shards, 2) }
	return cmp.Or(cmp.Compare(sharded(a), sharded(b)),
		cmp.Compare(ratelimit.NameOf(a.Limit), ratelimit.NameOf(b.Limit)), cmp.Compare(a.Key, b.Key))
}

// InsertBatchTx is [Inserter.InsertTx] for jobs that are one unit of work, with one reservation for
// all of them. It is given back if River skips all of them as duplicates. No job has the receipt:
// settle that of the Reservation.
func (in Inserter) InsertBatchTx(ctx context.Context, tx pgx.Tx, params []river.InsertManyParams, requests ...ratelimit.Request) ([]*Inserted, error) {
	if err := in.usable(); err != nil {
		return nil, err
	}
	requests = decide.Resolved(in.Catalog, requests)
	reserved, err := in.reserve(ctx, tx, requests)
	if err != nil {
		return nil, err
	}
	all := reservations{in: in, wholes: []ratelimit.Result{reserved}, jobs: slices.Repeat([]ratelimit.Result{reserved}, len(params)), one: true}
	for _, p := range params {
		all.params = append(all.params, InsertManyParams{p.Args, p.InsertOpts, requests})
	}
	inserted, err := all.insert(ctx, tx)
	if err == nil && !slices.ContainsFunc(inserted, func(i *Inserted) bool { return !i.UniqueSkippedAsDuplicate }) {
		_, err = in.Store.CancelTx(ctx, tx, reserved.Receipt)
	}
	return inserted, err
}

// usable returns an error if Client or Store is missing.
func (in Inserter) usable() error {
	switch {
	case in.Client == nil:
		return invalid("Client", nil, "must not be nil")
	case in.Store == nil:
		return invalid("Store", nil, "must not be nil")
	}
	return nil
}

// reserve returns a reservation for jobs. A refusal is an error.
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
func (in Inserter) giveBack(ctx context.Context, tx pgx.Tx, reservations []ratelimit.Result) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveBackTimeout)
	defer cancel()
	for _, r := range reservations {
		if _, err := in.Store.CancelTx(ctx, tx, r.Receipt); err != nil {
			return
		}
	}
}

// job returns the job for River to insert. The receipt, nil for none, is for the job's worker
// to settle.
func (in Inserter) job(p InsertManyParams, reserved ratelimit.Result, receipt *ratelimit.Receipt) (river.InsertManyParams, error) {
	if reserved.At.IsZero() { // not limited
		return river.InsertManyParams{Args: p.Args, InsertOpts: p.InsertOpts}, nil
	}
	n := note{Attempt: 1}.with(p.Requests, reserved, in.Jitter).keep(receipt)
	scheduled := optsOf(p.InsertOpts)
	scheduled.ScheduledAt = cmp.Or(scheduled.ScheduledAt, ownOpts(p.Args).ScheduledAt)
	// A job that is due is not scheduled: that would have it wait for River's
	// next promotion.
	if n.At.After(reserved.At) && n.At.After(scheduled.ScheduledAt) {
		scheduled.ScheduledAt = n.At
	}
	var err error
	scheduled.Metadata, err = n.addTo(scheduled.Metadata)
	return river.InsertManyParams{Args: p.Args, InsertOpts: &scheduled}, err
}
