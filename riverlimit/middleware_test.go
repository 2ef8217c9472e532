package riverlimit_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertest"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/memstore"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// one is River's own test worker in a transaction that rolls back.
type one struct {
	*bench
	t      *testing.T
	tx     pgx.Tx
	worker *rivertest.Worker[callArgs, pgx.Tx]
	runs   int
	result error // what the next run returns
}

func newOne(t *testing.T, b *bench, middleware ...rivertype.Middleware) *one {
	t.Helper()
	tx, err := b.Pool.Begin(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	o := &one{bench: b, t: t, tx: tx}
	work := func(context.Context, *river.Job[callArgs]) error {
		o.runs++
		return o.result
	}
	config := &river.Config{Logger: quiet, Middleware: middleware, Schema: b.Schema}
	o.worker = rivertest.NewWorker(t, riverpgxv5.New(nil), config, river.WorkFunc(work))
	return o
}

// limited makes a worker whose jobs a middleware limits, on a bench of its own.
func limited(t *testing.T, config riverlimit.MiddlewareConfig) *one {
	t.Helper()
	b := newBench(t)
	return newOne(t, b, middleware(t, b.store, config))
}

// work works a new job, or job again, and wants the event and the number of
// runs so far. A snooze uses up no attempt.
func (o *one) work(job *rivertype.JobRow, event river.EventKind, runs int) *rivertype.JobRow {
	o.t.Helper()
	var result *rivertest.WorkResult
	var err error
	var before rivertype.JobRow
	if job == nil {
		result, err = o.worker.Work(o.t.Context(), o.t, o.tx, callArgs{}, nil)
	} else {
		before = *job
		result, err = o.worker.WorkJob(o.t.Context(), o.t, o.tx, job)
	}
	if err != nil && (o.result == nil || !errors.Is(err, o.result)) {
		o.t.Fatal(err)
	}
	if result.EventKind != event || o.runs != runs {
		o.t.Fatalf("got %s after %d runs, want %s after %d; errors %v", result.EventKind, o.runs, event, runs, result.Job.Errors)
	}
	if event == river.EventKindJobSnoozed && o.result == nil && (result.Job.Attempt > before.Attempt || len(result.Job.Errors) > len(before.Errors)) {
		o.t.Errorf("after a snooze attempt %d, errors %v, want attempt %d", result.Job.Attempt, result.Job.Errors, before.Attempt)
	}
	return result.Job
}

// due has the job's reservation come due. A transaction's time stands still,
// but River's test worker brings its own.
func (o *one) due(job *rivertype.JobRow) *rivertype.JobRow { return o.longAgo(job, "at") }

// longAgo has an instant of the job's note lie in the past.
func (o *one) longAgo(job *rivertype.JobRow, instant string) *rivertype.JobRow {
	o.t.Helper()
	sql := fmt.Sprintf(`UPDATE %s.river_job SET metadata = jsonb_set(metadata, '{ratelimit,%s}', '"2000-01-01T00:00:00Z"') WHERE id = $1 RETURNING metadata`, o.Schema, instant)
	if err := o.tx.QueryRow(o.t.Context(), sql, job.ID).Scan(&job.Metadata); err != nil {
		o.t.Fatal(err)
	}
	return job
}

// wantValue wants so many tokens of hourly in the database, less what comes in.
func (o *one) wantValue(want float64) {
	o.t.Helper()
	if got := o.value(o.t, "hourly"); got < want || got > want+0.05 {
		o.t.Errorf("%v tokens, want %v", got, want)
	}
}

// The life of jobs at a limit of 2 and one an hour.
func TestMiddlewareLife(t *testing.T) {
	o := limited(t, riverlimit.MiddlewareConfig{Limits: each(hourly)})

	o.work(nil, river.EventKindJobCompleted, 1) // the first of two tokens
	o.wantValue(1)

	o.result = errors.New("the call failed")
	failed := o.work(nil, river.EventKindJobFailed, 2) // the second
	o.wantValue(0)

	o.result = nil
	failed = o.work(failed, river.EventKindJobSnoozed, 2) // pays again
	o.wantValue(-1)
	wantWait(t, failed, time.Hour, 5*time.Minute)

	failed = o.work(failed, river.EventKindJobSnoozed, 2) // not due, and paid
	o.wantValue(-1)

	o.work(o.due(failed), river.EventKindJobCompleted, 3)
	o.wantValue(-1)
}

// A worker that is killed leaves the note as it was, and River's rescue counts
// the attempt. Nobody knows whether it had begun, so the next one pays.
func TestMiddlewareRescued(t *testing.T) {
	b := newBench(t)
	must(t, errOf(b.store.Reserve(t.Context(), hourly.ForN("", 2))))
	o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(hourly)}))
	job := o.due(o.work(nil, river.EventKindJobSnoozed, 0))
	o.wantValue(-1)
	job.Attempt++ // fetched when it was due, and rescued
	o.work(job, river.EventKindJobSnoozed, 0)
	o.wantValue(-2)
}

// An attempt that the worker itself puts off has called, and pays again.
func TestMiddlewareWorkerSnoozes(t *testing.T) {
	o := limited(t, riverlimit.MiddlewareConfig{Limits: each(hourly)})
	o.result = river.JobSnooze(0)
	job := o.work(nil, river.EventKindJobSnoozed, 1)
	o.result = nil
	o.work(job, river.EventKindJobCompleted, 2)
	o.wantValue(0)
}

// A reservation that was made when inserting is not made again.
func TestMiddlewareInserted(t *testing.T) {
	t.Parallel()
	for _, hard := range []bool{false, true} {
		t.Run(fmt.Sprintf("HardStart=%t", hard), func(t *testing.T) {
			o := limited(t, riverlimit.MiddlewareConfig{Limits: each(hourly), HardStart: hard, StartSlack: time.Minute})
			in := o.inserter(t)
			var now, later *riverlimit.Inserted
			o.inTx(t, func(tx pgx.Tx) (err error) {
				if now, err = in.InsertTx(t.Context(), tx, callArgs{}, nil, hourly.ForN("", 2)); err != nil {
					return err
				}
				later, err = in.InsertTx(t.Context(), tx, callArgs{}, nil, hourly.For(""))
				return err
			})
			o.work(now.Job, river.EventKindJobCompleted, 1)
			job := o.work(later.Job, river.EventKindJobSnoozed, 1)
			o.work(o.due(job), river.EventKindJobCompleted, 2)
			o.wantValue(-1)
		})
	}
}

// Of what a job asks for, what is not noted is paid.
func TestMiddlewareAddsToInserted(t *testing.T) {
	b := newBench(t)
	other := hourly
	other.Name = "other"
	both := func(*rivertype.JobRow) []ratelimit.Request {
		return []ratelimit.Request{hourly.For(""), other.For("")}
	}
	o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: both}))
	in := b.inserter(t)
	inserted := b.insert(t, in, numbered(1, hourly.For("")))[0]
	o.work(inserted.Job, river.EventKindJobCompleted, 1)
	o.wantValue(1)
	if got := b.value(t, "other"); got < 1 || got > 1.05 {
		t.Errorf("%v tokens of the other, want 1", got)
	}
}

// Two middlewares, one limit each: what the outer one has taken is still noted
// when the inner one puts the job off.
func TestMiddlewareStacked(t *testing.T) {
	b := newBench(t)
	empty := ratelimit.TokenBucket{Name: "empty", Rate: 1, Period: time.Hour, Capacity: ratelimit.None}
	o := newOne(t, b,
		middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(hourly)}),
		middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(empty)}))
	job := o.work(nil, river.EventKindJobSnoozed, 0)
	if n := noted(t, job); len(n.Paid) != 2 || n.Started {
		t.Errorf("note %+v, want both limits, not started", n)
	}
	o.work(o.due(job), river.EventKindJobCompleted, 1)
	o.wantValue(1)
	if got := b.value(t, "empty"); got < -1 || got > -0.95 {
		t.Errorf("%v tokens of the inner limit, want -1", got)
	}
}

// A job whose limit can never grant what it asks for is cancelled, and so is
// one that asks nonsense. Its errors say why.
func TestMiddlewareNever(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name    string
		request ratelimit.Request
		want    string
	}{
		{"never", bounded.ForN("", 4), `"bounded": 4 tokens can never be reserved at once, at most 3 can`},
		{"negative", bounded.ForN("", -1), "Count -1: must not be negative"},
		{"no limit", ratelimit.Request{}, "Limit <nil>: must not be nil"},
		{"nil window", ratelimit.Request{Limit: (*ratelimit.SlidingWindow)(nil)}, "Limit <nil>: must not be nil"},
		{"embeds nil", ratelimit.Request{Limit: struct{ *ratelimit.TokenBucket }{}}, "Limit <nil>: must not be nil"},
		{"name too long for the gate", ratelimit.TokenBucket{Name: strings.Repeat("n", ratelimit.MaxNameLength), Rate: 1, Period: time.Hour}.For(""), "Name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t)
			o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{
				HardStart: true,
				Limits:    func(*rivertype.JobRow) []ratelimit.Request { return []ratelimit.Request{test.request} },
			}))
			job := o.work(nil, river.EventKindJobCancelled, 0)
			if len(job.Errors) != 1 || !strings.Contains(job.Errors[0].Error, test.want) || !strings.Contains(job.Errors[0].Error, "can never run") {
				t.Errorf("errors %v, want one with %q", job.Errors, test.want)
			}
		})
	}
}

// A kind or queue with a limit that is nil is not one without a limit.
func TestMiddlewareNil(t *testing.T) {
	t.Parallel()
	for _, nothing := range []ratelimit.Limit{nil, (*ratelimit.TokenBucket)(nil), struct{ *ratelimit.FixedWindow }{}} {
		limits := map[string]ratelimit.Limit{"of": nothing}
		job := &rivertype.JobRow{Kind: "of", Queue: "of"}
		for _, requests := range [][]ratelimit.Request{riverlimit.ByKind(limits)(job), riverlimit.ByQueue(limits)(job)} {
			if len(requests) != 1 || requests[0].Validate() == nil {
				t.Errorf("%T: requests %v, want one that is invalid", nothing, requests)
			}
			m := middleware(t, newStore(t, nil, ""), riverlimit.MiddlewareConfig{HardStart: true, Limits: riverlimit.ByKind(limits)})
			if rows := m.Rows(requests[0]); len(rows) != 1 {
				t.Errorf("%T: rows %v, want the request", nothing, rows)
			}
		}
	}
}

// Refused: a limit whose debt is bounded has no more instants to give. The job comes again when the one
// that it is given then is due, after an hour and the hour of debt, and has paid nothing.
func TestMiddlewareRefused(t *testing.T) {
	o := limited(t, riverlimit.MiddlewareConfig{Limits: each(bounded)})
	must(t, errOf(o.store.Reserve(t.Context(), bounded.ForN("", 3))))
	job := o.work(nil, river.EventKindJobSnoozed, 0)
	wantWait(t, job, 2*time.Hour, time.Minute)
	if n := noted(t, job); len(n.Paid) != 0 {
		t.Errorf("note %+v of nothing", n)
	}
}

// A refusal that is over soon is waited for.
func TestMiddlewareRefusedShortly(t *testing.T) {
	b := newBench(t)
	fast := ratelimit.TokenBucket{Name: "fast", Rate: 10, Period: time.Second, Capacity: 1, MaxReserved: ratelimit.None}
	must(t, errOf(b.store.Allow(t.Context(), fast.For(""))))
	o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(fast), MaxWait: time.Minute}))
	o.work(nil, river.EventKindJobCompleted, 1)
}

// A job that waits in the worker when its client is stopped is put back, and
// keeps its reservation.
func TestMiddlewareStopped(t *testing.T) {
	b := newBench(t)
	b.insertPlain(t, 3)
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(hourly), MaxWait: 2 * time.Hour})
	ran := make(chan struct{}, 3)
	client := b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		ran <- struct{}{}
		return nil
	}, m))
	must(t, client.Start(context.Background()))
	<-ran
	<-ran
	b.eventually(t, 1, `SELECT count(*) FROM rate_limits WHERE value < -0.9`)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	must(t, client.StopAndCancel(ctx))
	got := b.count(t, `SELECT count(*) FROM river_job WHERE state = 'scheduled' AND attempt = 0 AND errors IS NULL
		AND jsonb_array_length(metadata->'ratelimit'->'paid') = 1 AND scheduled_at > now() + interval '50 min'`)
	if got != 1 {
		t.Errorf("%d jobs put back with their reservations, want 1", got)
	}
}

// Snoozes are for instants on the database's clock, whatever the worker's says.
func TestMiddlewareClocksDiffer(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for _, ahead := range []time.Duration{-40 * time.Minute, -time.Second, time.Second, 40 * time.Minute} {
		t.Run(fmt.Sprintf("database %v ahead", ahead), func(t *testing.T) {
			b := newBench(t)
			store, err := pgstore.New(b.Pool, &pgstore.Config{Schema: b.Schema, Clock: func() time.Time { return time.Now().Add(ahead) }})
			must(t, err)
			o := newOne(t, b, middleware(t, store, riverlimit.MiddlewareConfig{Limits: each(hourly), MaxWait: 2 * time.Second}))
			o.work(nil, river.EventKindJobCompleted, 1)
			o.work(nil, river.EventKindJobCompleted, 2)
			job := o.work(nil, river.EventKindJobSnoozed, 2)
			wake := noted(t, job).At.Add(-time.Second)
			if off := job.ScheduledAt.Sub(wake); off < 0 || off > 5*time.Second {
				t.Errorf("scheduled %v after when it should be", off)
			}
		})
	}
}

// A wait on a clock that the worker's is past never becomes a negative snooze,
// at which River panics.
func TestMiddlewareWorkerFarAhead(t *testing.T) {
	b := newBench(t)
	store, err := pgstore.New(b.Pool, &pgstore.Config{Schema: b.Schema, Clock: func() time.Time { return time.Now().Add(-50 * time.Minute) }})
	must(t, err)
	minutely := ratelimit.TokenBucket{Name: "minutely", Rate: 1, Period: time.Minute, Capacity: ratelimit.None}
	o := newOne(t, b, middleware(t, store, riverlimit.MiddlewareConfig{Limits: each(minutely)}))
	o.work(nil, river.EventKindJobSnoozed, 0)
}

// A grant that took longer than the slack allows is not used, and not given back
// either.
func TestHardStartStale(t *testing.T) {
	b := newBench(t)
	o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{
		Limits: each(hourly), HardStart: true, StartSlack: time.Nanosecond, MaxWait: 10 * time.Second,
	}))
	job := o.work(nil, river.EventKindJobSnoozed, 0)
	if n := noted(t, job); len(n.Paid) != 1 || n.Started {
		t.Errorf("note %+v, want a reservation that was not used", n)
	}
	if got := b.value(t, "hourly:start"); got > 0.05 {
		t.Errorf("%v tokens at the gate, want none", got)
	}
}

// During a pause nothing starts, not even what was reserved before.
func TestHardStartPause(t *testing.T) {
	b := newBench(t)
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(hourly), HardStart: true, StartSlack: time.Minute})
	o := newOne(t, b, m)
	in := b.inserter(t)
	inserted := b.insert(t, in, numbered(1, hourly.For("")))[0]
	const pause = 30 * time.Hour
	must(t, m.Pause(t.Context(), pause, hourly.For("")))
	job := o.work(inserted.Job, river.EventKindJobSnoozed, 0)
	// One more hour until there is a token.
	wantWait(t, job, pause+time.Hour, 5*time.Minute)
	for _, row := range m.Rows(hourly.For("")) {
		must(t, b.store.Reset(t.Context(), row.Limit, row.Key))
	}
	o.work(job, river.EventKindJobCompleted, 1)
}

// Without HardStart, too, a job asks before it starts whether there is a pause that
// began after it was reserved for.
func TestPauseAfterReservation(t *testing.T) {
	b := newBench(t)
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(hourly)})
	o := newOne(t, b, m)
	in := b.inserter(t)
	inserted := b.insert(t, in, numbered(1, hourly.For("")))[0]
	const pause = 30 * time.Hour
	must(t, m.Pause(t.Context(), pause, hourly.For("")))
	job := o.work(inserted.Job, river.EventKindJobSnoozed, 0)
	wantWait(t, job, pause, 5*time.Minute)
	if n := noted(t, job); len(n.Paid) != 1 || n.Started || !n.At.After(inserted.Reservation.RetryAt.Add(pause-time.Minute)) {
		t.Errorf("note %+v, want the reservation, put off by the pause", n)
	}
	must(t, b.store.Resume(t.Context(), hourly, ""))
	o.work(o.due(job), river.EventKindJobCompleted, 1)
	o.wantValue(0) // the pause has emptied it, and the job had paid before
}

// A job that waits in the worker asks again when its instant has come.
func TestPauseWhileWaiting(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	const wait = time.Second
	slow := ratelimit.TokenBucket{Name: "slow", Rate: 1, Period: wait, Capacity: ratelimit.None}
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(slow), MaxWait: 10 * wait})
	o := newOne(t, b, m)
	paused := make(chan error, 1)
	go func() {
		for { // until it is reserved
			result, err := b.store.Check(t.Context(), slow.ForN("", 0))
			if err != nil || !result.OK {
				break
			}
		}
		paused <- m.Pause(t.Context(), time.Hour, slow.For(""))
	}()
	job := o.work(nil, river.EventKindJobSnoozed, 0)
	must(t, <-paused)
	wantWait(t, job, time.Hour, 5*time.Minute)
}

func TestNewMiddlewareInvalid(t *testing.T) {
	t.Parallel()
	store, err := pgstore.New(nil, nil)
	must(t, err)
	limits := each(hourly)
	for _, test := range []struct {
		field  string
		store  *pgstore.Store
		config *riverlimit.MiddlewareConfig
	}{
		{"Store", nil, &riverlimit.MiddlewareConfig{Limits: limits}},
		{"Limits", store, nil},
		{"Limits", store, &riverlimit.MiddlewareConfig{}},
		{"StartSlack", store, &riverlimit.MiddlewareConfig{Limits: limits, StartSlack: -1}},
		{"MaxWait", store, &riverlimit.MiddlewareConfig{Limits: limits, MaxWait: -1}},
		{"Jitter", store, &riverlimit.MiddlewareConfig{Limits: limits, Jitter: -1}},
	} {
		_, err := riverlimit.NewMiddleware(test.store, test.config)
		var field *ratelimit.FieldError
		if !errors.As(err, &field) || field.Field != test.field || !errors.Is(err, ratelimit.ErrInvalid) {
			t.Errorf("got %v, want an error about %s", err, test.field)
		}
		if err != nil && !strings.HasPrefix(err.Error(), "riverlimit: "+test.field) {
			t.Errorf("got %q, want it to begin with the package and the field", err)
		}
	}
}

// The promise of HardStart, for many limits and on a clock of our own: jobs
// come whenever they like, start up to the slack after they were let in, and no
// window of the limit's period sees more than Rate + Capacity − 1.
func TestGateBound(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	const slack = 50 * time.Millisecond
	store, err := pgstore.New(nil, nil)
	must(t, err)
	m := middleware(t, store, riverlimit.MiddlewareConfig{Limits: each(hourly), HardStart: true, StartSlack: slack})
	for _, limit := range []ratelimit.Limit{
		ratelimit.TokenBucket{Name: "spaced", Rate: 20, Period: time.Second, Capacity: 1},
		ratelimit.TokenBucket{Name: "no burst", Rate: 20, Period: time.Second, Capacity: ratelimit.None},
		ratelimit.TokenBucket{Name: "bursts", Rate: 11, Period: time.Second, Capacity: 10},
		ratelimit.TokenBucket{Name: "default", Rate: 20, Period: time.Second},
		ratelimit.TokenBucket{Name: "one", Rate: 1, Period: time.Second, Capacity: 1},
		ratelimit.FixedWindow{Name: "windows", Rate: 20, Period: time.Second},
	} {
		d := limit.Definition()
		bound := int(d.Rate + max(1, d.Capacity) - 1)
		if d.Kind == ratelimit.KindFixedWindow {
			bound = int(d.Rate)
		}
		full := 0
		for seed := range uint64(20) {
			most, refused := mostStarts(t, m.Rows(limit.For(""))[1], d.Period, slack, rand.New(rand.NewPCG(seed, 1)))
			if most > bound {
				t.Errorf("%s, seed %d: %d starts in a window, want at most %d", d.Name, seed, most, bound)
			}
			if most == bound && refused > 0 {
				full++
			}
		}
		if full == 0 {
			t.Errorf("%s: no run came up to the bound of %d, so this tests nothing", d.Name, bound)
		}
	}
}

// mostStarts lets in jobs that come at random, at times far too many.
func mostStarts(t *testing.T, gate ratelimit.Request, window, slack time.Duration, r *rand.Rand) (most, refused int) {
	t.Helper()
	first := time.Date(2025, 3, 14, 12, 0, 0, 0, time.UTC)
	now := first
	store := memstore.New(func() time.Time { return now })
	var starts []time.Duration
	for range 2000 {
		if r.IntN(100) == 0 {
			now = now.Add(time.Duration(r.Int64N(int64(2 * time.Second))).Truncate(time.Microsecond)) // nobody comes
		}
		result, err := store.Reserve(t.Context(), gate)
		must(t, err)
		if !result.OK {
			refused++
			now = result.RetryAt // somebody is always there just in time
			continue
		}
		late := time.Duration(r.Int64N(int64(slack)))
		starts = append(starts, result.RetryAt.Add(late).Sub(first))
	}
	slices.Sort(starts)
	return mostIn(starts, window), refused
}
