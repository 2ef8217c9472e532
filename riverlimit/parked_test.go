package riverlimit_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/erase"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

const (
	parkedRows = `SELECT count(*) FROM rate_limit_parked`
	completed  = `SELECT count(*) FROM river_job WHERE state = 'completed'`
	putOff     = `SELECT count(*) FROM river_job WHERE state = 'scheduled'`
)

// runs records jobs of tenants as they start, by their IDs; a job runs until it is let go.
type runs struct {
	started chan *river.Job[tenantArgs]
	letGo   chan struct{}

	mu    sync.Mutex
	times map[int64]int
	now   map[string]int
	most  int // of a tenant at a time
}

func newRuns() *runs {
	return &runs{started: make(chan *river.Job[tenantArgs], 1000), letGo: make(chan struct{}), times: map[int64]int{}, now: map[string]int{}}
}

func (r *runs) work(ctx context.Context, job *river.Job[tenantArgs]) error {
	r.mu.Lock()
	r.times[job.ID]++
	r.now[job.Args.Tenant]++
	r.most = max(r.most, r.now[job.Args.Tenant])
	r.mu.Unlock()
	r.started <- job
	select {
	case <-r.letGo:
	case <-ctx.Done():
	}
	r.mu.Lock()
	r.now[job.Args.Tenant]--
	r.mu.Unlock()
	return ctx.Err()
}

// next returns the next job to start.
func (r *runs) next(t *testing.T) *river.Job[tenantArgs] {
	t.Helper()
	select {
	case job := <-r.started:
		return job
	case <-time.After(patience):
		t.Fatal("no job has started")
		return nil
	}
}

// tenants is a client with so many workers for jobs of tenants.
func (b *bench) tenants(t *testing.T, r *runs, workers int, m ...rivertype.Middleware) *river.Client[pgx.Tx] {
	t.Helper()
	config := b.config(nil, m...)
	config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}}
	config.Workers = river.NewWorkers()
	river.AddWorker(config.Workers, river.WorkFunc(r.work))
	return b.client(t, config)
}

// works starts a client with so many workers for jobs of tenants.
func (b *bench) works(t *testing.T, workers int, config riverlimit.MiddlewareConfig) *runs {
	t.Helper()
	r := newRuns()
	start(t, b.tenants(t, r, workers, middleware(t, b.store, config)))
	return r
}

// insertTenants inserts a job for each tenant.
func (b *bench) insertTenants(t *testing.T, in riverlimit.Inserter, tenants ...string) (inserted []*riverlimit.Inserted, err error) {
	t.Helper()
	params := make([]riverlimit.InsertManyParams, len(tenants))
	for i, tenant := range tenants {
		params[i].Args = tenantArgs{tenant}
	}
	err = pgx.BeginFunc(t.Context(), b.Pool, func(tx pgx.Tx) (err error) {
		inserted, err = in.InsertManyTx(t.Context(), tx, params)
		return err
	})
	return inserted, err
}

func (b *bench) mustInsertTenants(t *testing.T, tenants ...string) []*riverlimit.Inserted {
	t.Helper()
	inserted, err := b.insertTenants(t, b.inserter(t), tenants...)
	must(t, err)
	return inserted
}

// Jobs that wait for a permit hold no worker: with three workers and a job of tenant A that does not end,
// five more of A do not keep B's from starting. All of them run in the end.
func TestParkedJobsHoldNoWorker(t *testing.T) {
	b := newBench(t)
	b.mustInsertTenants(t, append(slices.Repeat([]string{"A"}, 6), "B")...)
	r := b.works(t, 3, riverlimit.MiddlewareConfig{InFlight: oneOfTenant, MaxWait: time.Hour})
	first, second := r.next(t), r.next(t)
	if first.Args.Tenant != "A" || second.Args.Tenant != "B" {
		t.Errorf("a job of %s starts after one of %s", second.Args.Tenant, first.Args.Tenant)
	}
	b.eventually(t, 5, putOff)
	close(r.letGo)
	b.eventually(t, 7, completedOnce)
	b.eventually(t, 0, parkedRows)
	if n := b.count(t, `SELECT max(coalesce((metadata->>'snoozes')::int, 0)) FROM river_job`); n > 5 || r.most != 1 { // a look may wake one more while the next has not asked yet
		t.Errorf("%d snoozes of a job, %d at a time", n, r.most)
	}
}

// Parked jobs that somebody cancels or deletes do not run, those that are retried run once, and nothing
// is left of any in the table.
func TestParkedJobsByHand(t *testing.T) {
	b := newBench(t)
	const each = 10
	inserted := b.mustInsertTenants(t, slices.Repeat([]string{"A"}, 1+3*each)...)
	r := newRuns()
	client := b.tenants(t, r, 20, middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: oneOfTenant}))
	start(t, client)
	first := r.next(t)
	b.eventually(t, 3*each, putOff)
	for i, job := range slices.DeleteFunc(inserted, func(i *riverlimit.Inserted) bool { return i.Job.ID == first.ID }) {
		var err error
		switch i % 3 {
		case 0:
			_, err = client.JobCancel(t.Context(), job.Job.ID)
		case 1:
			_, err = client.JobDelete(t.Context(), job.Job.ID)
		case 2:
			_, err = client.JobRetry(t.Context(), job.Job.ID)
		}
		must(t, err)
	}
	close(r.letGo)
	b.eventually(t, 1+each, completedOnce)
	b.eventually(t, 0, parkedRows)
	b.want(t, each, `SELECT count(*) FROM river_job WHERE state = 'cancelled' AND attempt = 0`)
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, times := range r.times {
		if times != 1 {
			t.Errorf("job %d has run %d times", id, times)
		}
	}
	if len(r.times) != 1+each || r.most != 1 {
		t.Errorf("%d jobs have run, %d at a time", len(r.times), r.most)
	}
}

// Jobs that are parked for a key that is erased start, though nothing is left that would wake them.
func TestParkedJobsOfAnErasedKey(t *testing.T) {
	b := newBench(t)
	longer := oneAtOnce
	longer.Lease = time.Hour
	b.hold(t, longer.For("A"))
	r := newRuns()
	close(r.letGo)
	b.mustInsertTenants(t, "A", "A", "B")
	start(t, b.tenants(t, r, 5, middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: oneOfTenant})))
	b.eventually(t, 1, completedOnce)
	b.eventually(t, 2, putOff)
	var erased erase.Counts
	b.inTx(t, func(tx pgx.Tx) (err error) {
		erased, err = erase.Keys(t.Context(), tx, b.Schema, "A")
		return err
	})
	if erased.Rows != 1 || erased.Parked != 2 {
		t.Errorf("erased %v", erased)
	}
	b.eventually(t, 3, completedOnce)
	b.eventually(t, 0, parkedRows)
}

// A job of weight 3 is not woken before it fits, and is not passed over.
func TestParkedByWeight(t *testing.T) {
	b := newBench(t)
	limit := ratelimit.InFlight{Name: "weighed", Limit: 3}
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: func(job *rivertype.JobRow) ratelimit.PermitRequest {
		return limit.ForN("", len(tenantOf(job)))
	}})
	r := newRuns()
	client := b.tenants(t, r, 10, m)
	b.mustInsertTenants(t, "1", "1", "1")
	start(t, client)
	for range 3 {
		r.next(t)
	}
	b.mustInsertTenants(t, "333")
	b.eventually(t, 1, putOff)
	b.mustInsertTenants(t, "1")
	b.eventually(t, 2, putOff)
	r.letGo <- struct{}{}
	r.letGo <- struct{}{}
	b.eventually(t, 2, completed)
	b.want(t, 2, putOff)
	close(r.letGo)
	if job := r.next(t); job.Args.Tenant != "333" {
		t.Errorf("a job of weight %d is first", len(job.Args.Tenant))
	}
	b.eventually(t, 5, completedOnce)
	b.eventually(t, 0, parkedRows)
}

// Inserter parks what cannot start, in its own transaction, and no more than is wanted.
func TestInsertParked(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	in.InFlight, in.MaxParked = oneOfTenant, 3
	inserted, err := b.insertTenants(t, in, "A", "A", "B", "A")
	must(t, err)
	if n := b.count(t, parkedRows); n != 2 || b.count(t, putOff) != 2 {
		t.Errorf("%d jobs are parked, want 2", n)
	}
	for i, want := range []time.Duration{0, oneAtOnce.LeaseOrDefault(), 0, 24 * time.Hour} { // the first of the line comes by itself
		wantWait(t, inserted[i].Job, want, patience/3)
	}
	lines, err := riverlimit.Lines(t.Context(), b.store, "", 10)
	if err != nil || len(lines) != 1 || lines[0].Limit != "one" || lines[0].Key != "A" || lines[0].Jobs != 2 || time.Since(lines[0].Since) > patience {
		t.Errorf("got the lines %+v, %v", lines, err)
	}
	_, err = b.insertTenants(t, in, "B", "A", "A")
	if full, ok := errors.AsType[*riverlimit.LineFullError](err); !ok || full.Limit != "one" || full.Most != 3 || !errors.Is(err, ratelimit.ErrRefused) {
		t.Errorf("got %v, want the error of a full line", err)
	}
	b.want(t, 4, `SELECT count(*) FROM river_job`)
	if inserted, err = b.insertTenants(t, in, "C", "A"); err != nil || inserted[0].Job.State != rivertype.JobStateAvailable {
		t.Fatal(inserted, err)
	}
	r := b.works(t, 10, riverlimit.MiddlewareConfig{InFlight: oneOfTenant})
	close(r.letGo)
	b.eventually(t, 6, completedOnce)
	b.eventually(t, 0, parkedRows)
	if r.most != 1 {
		t.Errorf("%d at a time", r.most)
	}
}

// Jobs in line start when a limit that was switched off is on again.
func TestParkedWhileRefused(t *testing.T) {
	b := newBench(t)
	limits := newCatalog(t)
	must(t, limits.PublishInFlight(t.Context(), oneAtOnce))
	b.mustInsertTenants(t, "A", "A", "A")
	r := newRuns()
	client := b.tenants(t, r, 10, middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: oneOfTenant, Catalog: limits, MaxWait: time.Millisecond}))
	start(t, client)
	r.next(t)
	b.eventually(t, 2, putOff)
	set := func(mode ratelimit.Mode) {
		t.Helper()
		must(t, errOf(limits.Set(t.Context(), oneAtOnce.Name, catalog.AllKeys, catalog.Override{Mode: mode})))
	}
	set(ratelimit.ModeRefuse)
	close(r.letGo)
	// The next is woken, and refused by the mode, which puts it off for a minute.
	const refused = `state = 'scheduled' AND scheduled_at < now() + interval '62 s' AND id NOT IN (SELECT job FROM rate_limit_parked)`
	b.eventually(t, 1, `SELECT least(count(*), 1) FROM river_job WHERE `+refused)
	set(ratelimit.ModeEnforce)
	b.exec(t, `UPDATE river_job SET state = 'available', scheduled_at = now() WHERE `+refused)
	b.eventually(t, 3, completedOnce)
}

// Without the table a job that gets no permit is put off, and says why.
func TestParkedNotMigrated(t *testing.T) {
	b := newBench(t)
	b.exec(t, "DROP TABLE rate_limit_parked")
	b.hold(t, oneAtOnce.For(""))
	var told error
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{
		InFlight: func(*rivertype.JobRow) ratelimit.PermitRequest { return oneAtOnce.For("") },
		Observe:  func(_ context.Context, e ratelimit.Event) { told = e.Err },
	})
	newOne(t, b, m).work(nil, river.EventKindJobSnoozed, 0)
	if !errors.Is(told, riverlimit.ErrNotMigrated) || !strings.Contains(told.Error(), "--set river") {
		t.Errorf("got %v", told)
	}
}

// Jobs that a limit refuses have places behind each other, at its rate, also when they are asked for by
// different processes; a job that is refused again at its turn keeps it, and long after it gets another.
func TestRefusedJobsStandBehindEachOther(t *testing.T) {
	b := newBench(t)
	limit := ratelimit.TokenBucket{Name: "few", Rate: 1, Period: time.Hour, Capacity: 1, MaxReserved: ratelimit.None}
	must(t, errOf(b.store.Allow(t.Context(), limit.For(""))))
	for i := range 4 {
		o := newOne(t, b, middleware(t, newStore(t, b.Pool, b.Schema), riverlimit.MiddlewareConfig{Limits: each(limit)}))
		job := o.work(nil, river.EventKindJobSnoozed, 0)
		wantWait(t, job, time.Duration(2*i+1)*time.Hour, 6*time.Minute)
		last := o.work(job, river.EventKindJobSnoozed, 0)
		if time.Until(last.ScheduledAt) > 61*time.Minute {
			t.Errorf("job %d was refused again, and is put off for %v", i, time.Until(last.ScheduledAt))
		}
		last = o.work(o.longAgo(last, "turn"), river.EventKindJobSnoozed, 0)
		wantWait(t, last, time.Duration(2*i+2)*time.Hour, 6*time.Minute) // it comes long after its turn
	}
}

// A limit that others share is reserved for work that starts now: while a job waits for the narrow one
// nothing is taken from it.
func TestSharedLimitIsReservedLast(t *testing.T) {
	b := newBench(t)
	narrow := ratelimit.TokenBucket{Name: "narrow", Rate: 1, Period: time.Hour, Capacity: 1}
	for name, requests := range map[string][]ratelimit.Request{
		"narrow first": {narrow.For("first"), hourly.For("first")},
		"shared first": {hourly.For("last"), narrow.For("last")},
	} {
		t.Run(name, func(t *testing.T) {
			key := requests[0].Key
			o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: func(*rivertype.JobRow) []ratelimit.Request { return requests }}))
			left := func(want float64) {
				t.Helper()
				if status, err := b.store.Check(t.Context(), hourly.ForN(key, 0)); err != nil || math.Abs(status.Value-want) > 0.05 {
					t.Errorf("%v tokens of the shared limit, %v, want %v", status.Value, err, want)
				}
			}
			o.work(nil, river.EventKindJobCompleted, 1)
			left(1)
			job := o.work(nil, river.EventKindJobSnoozed, 1)
			left(1)
			if n := noted(t, job); len(n.Paid) != 1 || n.Paid[0].Name != "narrow" {
				t.Errorf("note %+v, want the narrow limit", n)
			}
			o.work(o.due(job), river.EventKindJobCompleted, 2)
			left(0)
		})
	}
}
