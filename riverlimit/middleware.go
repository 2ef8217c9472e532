package riverlimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/edge"
	"github.com/pgratelimit/ratelimit/internal/keyqueue"
	"github.com/pgratelimit/ratelimit/internal/watch"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const (
	defaultMaxWait    = 3 * time.Second
	defaultStartSlack = 50 * time.Millisecond

	// faultSnooze is how long a job is put off, on average, if the database does not answer.
	faultSnooze = 5 * time.Second
)

// MiddlewareConfig says how a [Middleware] limits jobs.
type MiddlewareConfig struct {
	// Limits returns the limits that an attempt at a job takes from, and the counts: all or nothing. A
	// job with none is not limited. Limits must return the same each time it is called for a job, and
	// must not change the job. Required, unless there is InFlight. See [ByKind] and [ByQueue].
	Limits func(job *rivertype.JobRow) []ratelimit.Request

	// InFlight returns the limits of how many at once that a job is under, with its key and weight in
	// each. A limit without a name means none. A job takes its permits before its tokens, and holds them
	// until it ends. If they are lost, its context ends with the cause [ratelimit.ErrLeaseLost]. A job
	// without permits is parked in the line of its key, whose table the set "river" of migrations
	// creates. See [PermitOf]. The default is none.
	InFlight func(job *rivertype.JobRow) ratelimit.PermitRequest

	// Catalog chooses the limit of a key, such as an override in a database, in place of those
	// of Limits and InFlight: a *catalog.Catalog. Nil leaves them as they are.
	Catalog ratelimit.Catalog

	// HardStart bounds starts and not only averages, for a third party that counts them. In any stretch
	// of a limit's Period, jobs start for at most Rate + Capacity − 1 tokens, if counts are whole. The
	// bound of a SlidingWindow is Rate, and that of a FixedWindow Rate plus its largest count − 1. For
	// 100 calls a minute take a SlidingWindow of Rate 100, or a TokenBucket of Rate 91 and Capacity 10.
	//
	// Slots must be longer than StartSlack, or the job is cancelled. They should be longer than River
	// is late. Other kinds make each job pass a gate as it starts: see [Middleware.Rows]. More:
	// https://github.com/pgratelimit/ratelimit/blob/main/docs/river.md#averages-and-starts.
	HardStart bool

	// StartSlack is how late a job may start, with HardStart, after the instant that the database has
	// granted; and how long before the end of a sliding window's slot it starts at the latest. A later
	// grant is lost, and the job asks again. So StartSlack must be well above the time in which the
	// database answers. It is added to a gate's Period. The default is 50 ms.
	StartSlack time.Duration

	// MaxWait is the longest that a job waits in the worker, where it occupies one of the queue's
	// MaxWorkers and can be on time to the millisecond. A job that must wait longer is snoozed
	// until half of MaxWait before its instant. So choose MaxWait above twice River's
	// FetchPollInterval (1 second), and RescueStuckJobsAfter (1 hour) above twice MaxWait and the
	// job's own time. The jobs of one key that wait in workers are as many as the tokens that its
	// limit refills within MaxWait. Set MaxWorkers higher than that, or these jobs keep others out.
	// The default is 3 seconds.
	MaxWait time.Duration

	// Jitter spreads jobs that must wait over this much after their instants. The default is none.
	Jitter time.Duration

	// Observe is called each time that River has fetched a limited job, with an event of [Door] and
	// VerbReserve, or VerbAcquire if it has a Permit. The outcome is OutcomeGranted as the job starts,
	// OutcomeRefused when it is put off, or that of the error that cancels it or puts it off. [JobOf]
	// returns the job from the context. It must not block, and must be safe for concurrent use. The
	// store's own Observe is called for the reservations, too.
	Observe ratelimit.Observe

	// Logger gets the faults of the database. The default is slog.Default().
	Logger *slog.Logger
}

// Door is the Door of the events of a [Middleware].
const Door = "riverlimit"

// ByKind limits jobs by their kind: one token of the kind's limit for each. Jobs of other kinds are
// not limited. A limit that is nil is an error that cancels the job.
func ByKind(limits map[string]ratelimit.Limit) func(*rivertype.JobRow) []ratelimit.Request {
	return func(job *rivertype.JobRow) []ratelimit.Request { return oneOf(limits, job.Kind) }
}

// ByQueue limits jobs by their queue: one token of the queue's limit for each. Jobs of other queues
// are not limited. A limit that is nil is an error that cancels the job.
func ByQueue(limits map[string]ratelimit.Limit) func(*rivertype.JobRow) []ratelimit.Request {
	return func(job *rivertype.JobRow) []ratelimit.Request { return oneOf(limits, job.Queue) }
}

func oneOf(limits map[string]ratelimit.Limit, of string) []ratelimit.Request {
	limit, ok := limits[of]
	if !ok {
		return nil
	}
	return []ratelimit.Request{{Limit: limit, Count: 1}}
}

// Middleware is a River worker middleware that limits how often jobs are worked. It goes into
// river.Config.Middleware, as the last one if it has HardStart: middleware between it and the
// worker delays the start.
//
// Before an attempt at a job it reserves, once, and holds the job back until the reservation is
// due, and until the end of a pause that began since: see [Middleware.Pause]. An attempt that
// fails, or that the worker itself snoozes, has used its reservation up; the next pays again.
//
// Holding back uses up no attempt, nor does a refusal (of a limit with a MaxReserved), a
// shut-down, or a database that does not answer: River fetches the job again later. A job whose
// requests can never be granted, or are invalid, is cancelled, with the reason among its errors.
//
// A limit in [ratelimit.ModeRefuse] snoozes its jobs until the mode ends, or for a minute; they
// keep their reservations. One in [ratelimit.ModeShadow] holds no job back and has no gate.
//
// Waits follow the database's clock. A worker's clock may differ by up to an hour.
type Middleware struct {
	river.MiddlewareDefaults

	store   *pgstore.Store
	config  MiddlewareConfig
	turns   keyqueue.Queue[string] // of the jobs that ask at gates
	passing counts                 // jobs that queue, ask, or wait for their start
	lines   *lines                 // of parked jobs; nil without InFlight
}

var _ rivertype.WorkerMiddleware = (*Middleware)(nil)

// NewMiddleware makes a Middleware. The store needs a pool. An error is [ratelimit.ErrInvalid], and
// names every invalid field: it is a *[ratelimit.FieldError], or several joined.
func NewMiddleware(store *pgstore.Store, config *MiddlewareConfig) (*Middleware, error) {
	m := &Middleware{store: store}
	if config != nil {
		m.config = *config
	}
	f := edge.Faults{Package: "riverlimit"}
	f.Must(store != nil, "Store", nil, "must not be nil")
	f.Must(m.config.Limits != nil || m.config.InFlight != nil, "Limits", nil, "must not be nil")
	for _, d := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"StartSlack", &m.config.StartSlack, defaultStartSlack},
		{"MaxWait", &m.config.MaxWait, defaultMaxWait},
		{"Jitter", &m.config.Jitter, 0},
	} {
		f.Must(*d.value >= 0, d.name, *d.value, "must not be negative")
		*d.value = cmp.Or(*d.value, d.def)
	}
	if err := f.Err(); err != nil {
		return nil, err
	}
	m.config.Logger = cmp.Or(m.config.Logger, slog.Default())
	if m.config.InFlight != nil {
		m.lines = newLines(store, m.config.Catalog, m.config.Logger)
	}
	return m, nil
}

// invalid returns an error for a field with an invalid value.
func invalid(field string, value any, reason string) error {
	return edge.Invalid("riverlimit", field, value, reason)
}

// String is for logs: without it they would show the keys that jobs wait for.
func (m *Middleware) String() string { return "riverlimit.Middleware" }

// Work implements River's rivertype.WorkerMiddleware.
func (m *Middleware) Work(ctx context.Context, job *rivertype.JobRow, doInner func(context.Context) error) error {
	if m.config.InFlight == nil {
		return m.work(ctx, job, doInner)
	}
	return m.inFlight(ctx, job, func(ctx context.Context) error { return m.work(ctx, job, doInner) })
}

// work does the work of a job that has its permits.
func (m *Middleware) work(ctx context.Context, job *rivertype.JobRow, doInner func(context.Context) error) error {
	requests := m.requests(job)
	if len(requests) == 0 {
		if permit, ok := PermitOf(ctx); ok {
			m.observe(ctx, job, ratelimit.Event{Outcome: ratelimit.OutcomeGranted, Permit: &permit})
		}
		return doInner(ctx)
	}
	n, err := m.hold(ctx, job, requests)
	if err != nil {
		return m.putOff(ctx, job, ratelimit.Event{Requests: requests}, errors.Join(err, n.save(ctx)))
	}
	inner := context.WithValue(ctx, noteKey{job.ID}, n)
	n.Started = true
	if err := n.save(ctx); err != nil {
		return err
	}
	m.observe(ctx, job, ratelimit.Event{Outcome: ratelimit.OutcomeGranted, Requests: requests})
	return doInner(inner)
}

// requests returns the job's requests, by what the catalog says now.
func (m *Middleware) requests(job *rivertype.JobRow) []ratelimit.Request {
	if m.config.Limits == nil {
		return nil
	}
	return decide.Resolved(m.config.Catalog, m.config.Limits(job))
}

// hold returns the job's reservation when the job may start. An error says that it may not start in
// this round. Limits in ModeShadow are asked, and do not hold it back.
func (m *Middleware) hold(ctx context.Context, job *rivertype.JobRow, requests []ratelimit.Request) (note, error) {
	holding := slices.DeleteFunc(slices.Clone(requests), func(r ratelimit.Request) bool { return r.Mode == ratelimit.ModeShadow })
	err := m.refused(ctx, requests)
	if err == nil && m.config.HardStart {
		err = m.tooNarrow(holding)
	}
	if err != nil {
		return noteOf(ctx, job), err
	}
	n, now, err := m.reserveAll(ctx, job, requests, holding)
	if err == nil && m.config.HardStart {
		var passed *ratelimit.Receipt
		passed, err = m.pass(ctx, m.gates(holding, n, now))
		n = n.keep(passed)
	}
	if err == nil { // it may have been switched off while the job waited
		err = m.refused(ctx, m.requests(job))
	}
	return n, err
}

// refused returns the snooze of a job if one of its limits is in ModeRefuse: until the mode ends,
// or for RefusedFor. The store answers from its clock, without the database.
func (m *Middleware) refused(ctx context.Context, requests []ratelimit.Request) error {
	if !slices.ContainsFunc(requests, func(r ratelimit.Request) bool { return r.Mode == ratelimit.ModeRefuse }) {
		return nil
	}
	asked := time.Now()
	result, err := m.store.CheckReserve(ctx, requests...)
	if err != nil || result.OK {
		return err
	}
	return decided(result, asked).snooze(ratelimit.Jitter(result.RetryAt, m.config.Jitter))
}

// slides reports whether a request is for a sliding window, which is its own gate.
func slides(r ratelimit.Request) bool {
	return ratelimit.NameOf(r.Limit) != "" && r.Limit.Definition().Kind == ratelimit.KindSlidingWindow
}

// reserveAll returns the job's reservation once it is due. It reserves several limits together if
// all are granted now. Otherwise it reserves the one with the longest wait, and the others when
// that is due. So what it takes from a shared limit is for work that starts now.
func (m *Middleware) reserveAll(ctx context.Context, job *rivertype.JobRow, requests, holding []ratelimit.Request) (n note, now *instant, err error) {
	n = noteOf(ctx, job)
	earlier := len(n.Paid) > 0 // and maybe paused since
	for {
		if n, now, err = m.reserve(ctx, n, requests); err != nil {
			return n, now, err
		}
		rest := len(n.unpaid(requests)) > 0
		if earlier && !rest {
			now = nil
		}
		if n, now, err = m.await(ctx, job, n, now, holding); err != nil || !rest {
			return n, now, err
		}
	}
}

// reserve returns n with a reservation for what is not paid, or for a part of it, and the
// reservation's instant; nil if none had to be made.
func (m *Middleware) reserve(ctx context.Context, n note, requests []ratelimit.Request) (note, *instant, error) {
	unpaid := n.unpaid(requests)
	for begun := time.Now(); len(unpaid) > 0; {
		paying, asked, result, err := m.askFirst(ctx, unpaid)
		if err != nil {
			return n, nil, err
		}
		now := decided(result, asked)
		if result.OK {
			return n.with(paying, result, m.config.Jitter).keep(result.Receipt), now, nil
		}
		at := ratelimit.Jitter(result.RetryAt, m.config.Jitter)
		if !m.waits(ctx, result, begun, now.until(at)) {
			n, at = m.putBehind(ctx, n, result, at)
			return n, nil, now.snooze(at)
		}
	}
	return n, nil, nil
}

// askFirst reserves for requests: all of them if all are granted now, otherwise the one that waits longest. It
// returns those that it has asked.
func (m *Middleware) askFirst(ctx context.Context, requests []ratelimit.Request) (paying []ratelimit.Request, asked time.Time, result ratelimit.Result, err error) {
	asked = time.Now()
	if len(requests) > 1 {
		now := make([]ratelimit.Request, len(requests))
		for i, r := range requests {
			now[i] = atOnce(m.scheduled(r))
		}
		result, err = m.store.Reserve(ctx, now...)
		longest := result.Request
		var exceeds *ratelimit.ExceedsCapacityError
		switch {
		case errors.As(err, &exceeds): // never at once, but perhaps with debt
			longest = exceeds.Request
		case err != nil || result.OK:
			return requests, asked, result, err
		}
		if i := slices.IndexFunc(requests, func(r ratelimit.Request) bool { return compareRows(r, longest) == 0 }); i >= 0 {
			requests = requests[i : i+1]
		}
		asked = time.Now()
	}
	scheduled := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		scheduled[i] = m.scheduled(r)
	}
	result, err = m.store.Reserve(ctx, scheduled...)
	return requests, asked, result, err
}

// await holds the job back until its reservation is due, and until the end of a pause that began after
// it was made. now is nil for an earlier reservation. requests are those that hold the job back.
func (m *Middleware) await(ctx context.Context, job *rivertype.JobRow, n note, now *instant, requests []ratelimit.Request) (note, *instant, error) {
	if len(requests) == 0 {
		return n, now, ctx.Err()
	}
	// The gate knows of pauses. AttemptedAt is when River's fetch found the job, on the database's
	// clock. A sliding window in time has no gate.
	gated := m.config.HardStart && !slices.ContainsFunc(requests, slides)
	if gated && now == nil && job.AttemptedAt != nil && !job.AttemptedAt.Before(n.At) {
		return n, nil, nil
	}
	for {
		if now == nil {
			var err error
			if n, now, err = m.again(ctx, n, requests); err != nil {
				return n, nil, err
			}
		}
		wait := now.until(n.At)
		if wait <= 0 {
			return n, now, ctx.Err()
		}
		if wait > m.config.MaxWait {
			return n, nil, now.snooze(n.At.Add(-m.config.MaxWait / 2))
		}
		if !sleep(ctx, wait) {
			return n, nil, now.snooze(n.At)
		}
		if gated {
			return n, nil, nil
		}
		now = nil
	}
}

// again reads the time, and whether the limits are paused; then it returns n, put off until the
// pause is over.
func (m *Middleware) again(ctx context.Context, n note, requests []ratelimit.Request) (note, *instant, error) {
	questions := make([]ratelimit.Request, len(requests))
	for i, r := range requests {
		questions[i] = m.scheduled(r)
		questions[i].Count = 0
	}
	asked := time.Now()
	result, err := m.store.Check(ctx, questions...)
	if err != nil {
		return n, nil, err
	}
	for _, status := range result.Each() {
		if status.PausedUntil.After(n.At) {
			n = n.notBefore(ratelimit.Jitter(status.PausedUntil, m.config.Jitter))
		}
	}
	return n, decided(result, asked), nil
}

type jobKey struct{}

// JobOf returns the job of an event, from the context that MiddlewareConfig.Observe is called with.
// It returns nil if the event is not a Middleware's, such as a store's.
func JobOf(ctx context.Context) *rivertype.JobRow {
	job, _ := ctx.Value(jobKey{}).(*rivertype.JobRow)
	return job
}

// observe reports a job's event, whose outcome, error, and requests or permit are set.
func (m *Middleware) observe(ctx context.Context, job *rivertype.JobRow, e ratelimit.Event) {
	if m.config.Observe == nil {
		return
	}
	e.Verb, e.Door, e.Passed = ratelimit.VerbReserve, Door, e.Outcome == ratelimit.OutcomeGranted
	if e.Permit != nil {
		e.Verb = ratelimit.VerbAcquire
	}
	e.ErrorClass = (*watch.Observer)(nil).Class(e.Err)
	m.config.Observe(context.WithValue(ctx, jobKey{}, job), e)
}

// putOff returns the error for River of a job that does not start because of err, and reports e.
func (m *Middleware) putOff(ctx context.Context, job *rivertype.JobRow, e ratelimit.Event, err error) error {
	var snooze *river.JobSnoozeError
	if errors.As(err, &snooze) {
		e.Outcome = ratelimit.OutcomeRefused
		m.observe(ctx, job, e)
		return snooze
	}
	e.Outcome, e.Err = (*watch.Observer)(nil).Outcome(nil, err), err
	m.observe(ctx, job, e)
	switch {
	case errors.Is(err, ratelimit.ErrExceedsCapacity), errors.Is(err, ratelimit.ErrInvalid):
		return river.JobCancel(fmt.Errorf("riverlimit: this job can never run: %w", err))
	case ctx.Err() != nil: // the client stops, or the job was cancelled
		return river.JobSnooze(0)
	}
	// The job is not to blame, and may have only one attempt.
	m.config.Logger.ErrorContext(ctx, "riverlimit: the limit could not be asked; snoozing the job",
		slog.Int64("job_id", job.ID), slog.String("kind", job.Kind), slog.String("error", e.ErrorText()))
	return river.JobSnooze(faultSnooze/2 + rand.N(faultSnooze))
}

// Pause lets no job start that takes from the limits and keys of requests, for as long as a third
// party asks for with a 429 and Retry-After. It is one decision on its own: after an error nothing is
// paused. The requests' counts do not matter.
//
// Jobs that have reserved before are held back, too. When the pause is over they all start, spread
// over Jitter, or with HardStart at the limit's rate. Jobs that have asked already may still start:
// with HardStart, for up to 5 times StartSlack.
func (m *Middleware) Pause(ctx context.Context, pause time.Duration, requests ...ratelimit.Request) error {
	var rows []ratelimit.Request
	for _, r := range requests {
		if err := r.Validate(); err != nil {
			return err
		}
		rows = append(rows, m.Rows(r)...)
	}
	_, err := m.store.PauseEach(ctx, rows, pause)
	return err
}

// instant is an instant on the database's clock and on the worker's. The worker's is that of the
// answer, so waits that are counted from it are never too short.
type instant struct {
	database, worker time.Time
	asked            time.Time // when the database was asked, on the worker's
}

func decided(r ratelimit.Result, asked time.Time) *instant { return &instant{r.At, time.Now(), asked} }

// latest returns the latest time that it can be now on the database's clock.
func (i instant) latest() time.Time { return i.database.Add(time.Since(i.asked)) }

// until returns how long it is, now, to an instant on the database's clock.
func (i instant) until(at time.Time) time.Duration {
	return at.Sub(i.database) - time.Since(i.worker)
}

// maxSkew is how far the clocks may differ; beyond, one of them is a test's.
const maxSkew = time.Hour

// snooze returns the error that makes River fetch the job again at an instant on the database's
// clock. River adds the duration to the worker's clock, so the difference of the clocks is taken
// off.
func (i instant) snooze(at time.Time) error {
	wait := i.until(at)
	if skew := i.worker.Sub(i.database); skew.Abs() <= maxSkew {
		wait -= skew
	}
	return river.JobSnooze(max(0, wait))
}

// sleep waits for d. It reports false if ctx was over before.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
