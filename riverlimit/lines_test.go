package riverlimit_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

var (
	limitOne   = ratelimit.InFlight{Name: "one", Limit: 1, Lease: time.Hour}
	limitOther = ratelimit.InFlight{Name: "other", Limit: 1, Lease: time.Hour}
)

// oneOrOther asks for a permit of the limit that the tenant is called by, or of both.
func oneOrOther(job *rivertype.JobRow) ratelimit.PermitRequest {
	switch tenantOf(job) {
	case limitOne.Name:
		return limitOne.For("")
	case limitOther.Name:
		return limitOther.For("")
	}
	return limitOne.For("").And(limitOther.For(""))
}

const running = `SELECT count(*) FROM river_job WHERE state = 'running'`

// A parked job that comes by itself brings the others, though this process knows of none and the permits
// were of others: it does not hold one of two permits alone.
func TestParkedJobBringsOthers(t *testing.T) {
	b := newBench(t)
	two := func(*rivertype.JobRow) ratelimit.PermitRequest {
		return ratelimit.InFlight{Name: "two", Limit: 2, Lease: time.Hour}.For("")
	}
	in := b.inserter(t)
	in.InFlight = two
	inserted, err := b.insertTenants(t, in, "A", "A", "A", "A")
	must(t, err)
	r := newRuns()
	client := b.tenants(t, r, 10, middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: two}))
	for _, i := range inserted[:2] {
		must(t, errOf(client.JobDelete(t.Context(), i.Job.ID)))
	}
	must(t, errOf(client.JobRetry(t.Context(), inserted[2].Job.ID)))
	start(t, client)
	b.eventually(t, 2, running)
	b.eventually(t, 0, parkedRows)
	close(r.letGo)
	b.eventually(t, 2, completedOnce)
}

// withPausedQueue starts a client with two queues, of which "other" is paused.
func (b *bench) withPausedQueue(t *testing.T, r *runs, inFlight func(*rivertype.JobRow) ratelimit.PermitRequest) *river.Client[pgx.Tx] {
	t.Helper()
	config := b.config(nil, middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: inFlight}))
	config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 5}, "other": {MaxWorkers: 5}}
	config.Workers = river.NewWorkers()
	river.AddWorker(config.Workers, river.WorkFunc(r.work))
	client := b.client(t, config)
	start(t, client)
	b.eventually(t, 2, `SELECT count(*) FROM river_queue`)
	must(t, client.QueuePause(t.Context(), "other", nil))
	return client
}

// Jobs of a queue that is paused stay in line, and those of others come before them.
func TestParkedInPausedQueue(t *testing.T) {
	b := newBench(t)
	r := newRuns()
	client := b.withPausedQueue(t, r, oneOfTenant)
	in := b.inserter(t)
	in.InFlight = oneOfTenant
	b.inTx(t, func(tx pgx.Tx) error {
		args := tenantArgs{"A"}
		_, err := in.InsertManyTx(t.Context(), tx, []riverlimit.InsertManyParams{
			{Args: args}, {Args: args, InsertOpts: &river.InsertOpts{Queue: "other"}}, {Args: args},
		})
		return err
	})
	r.next(t)
	r.letGo <- struct{}{}
	if job := r.next(t); job.Queue != river.QueueDefault {
		t.Errorf("a job of the queue %q starts", job.Queue)
	}
	b.want(t, 1, parkedRows)
	must(t, client.QueueResume(t.Context(), "other", nil))
	close(r.letGo)
	b.eventually(t, 3, completedOnce)
	b.eventually(t, 0, parkedRows)
}

// Jobs that River skips as duplicates keep no others in line: nobody would wake them.
func TestInsertParkedBehindDuplicates(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	unique := &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
	insert := func(tenants ...string) {
		t.Helper()
		params := make([]riverlimit.InsertManyParams, len(tenants))
		for i, tenant := range tenants {
			params[i] = riverlimit.InsertManyParams{Args: tenantArgs{tenant}, InsertOpts: unique}
		}
		b.insert(t, in, params)
	}
	insert("A", "B")
	in.InFlight = func(*rivertype.JobRow) ratelimit.PermitRequest { return oneAtOnce.For("") }
	insert("A", "B", "C", "D")
	b.want(t, 3, `SELECT count(*) FROM river_job WHERE state = 'available'`)
	b.want(t, 1, parkedRows)
}

// A job that is inserted behind a line is found, though all before it has gone before that is committed.
func TestInsertParkedWhileTheLineEnds(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	in.InFlight = oneOfTenant
	must(t, errOf(b.insertTenants(t, in, "A", "A")))
	r := b.works(t, 5, riverlimit.MiddlewareConfig{InFlight: oneOfTenant})
	r.next(t)
	tx := b.begin(t)
	inserted, err := in.InsertTx(t.Context(), tx, tenantArgs{"A"}, nil)
	if err != nil || time.Until(inserted.Job.ScheduledAt) < time.Hour {
		t.Fatal(inserted, err)
	}
	r.letGo <- struct{}{}
	r.next(t)
	b.want(t, 1, parkedRows)
	close(r.letGo)
	b.eventually(t, 2, completedOnce)
	must(t, tx.Commit(t.Context()))
	b.eventually(t, 3, completedOnce)
	b.eventually(t, 0, parkedRows)
}

// A job that is inserted behind one that another limit refuses meanwhile is found, though that stands in
// the other's line when it is committed.
func TestInsertParkedBehindOneThatMoves(t *testing.T) {
	b := newBench(t)
	b.hold(t, limitOther.For(""))
	in := b.inserter(t)
	in.InFlight = oneOrOther
	must(t, errOf(b.insertTenants(t, in, "one", "both")))
	tx := b.begin(t)
	must(t, errOf(in.InsertTx(t.Context(), tx, tenantArgs{"one"}, nil)))
	r := newRuns()
	close(r.letGo)
	refused := make(chan struct{}, 1000)
	start(t, b.tenants(t, r, 5, middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: oneOrOther, Observe: func(_ context.Context, e ratelimit.Event) {
		if e.Outcome == ratelimit.OutcomeRefused && e.Permit.InFlight.Name == limitOther.Name {
			refused <- struct{}{}
		}
	}})))
	<-refused
	b.eventually(t, 1, putOff)
	must(t, tx.Commit(t.Context()))
	b.eventually(t, 2, completedOnce)
	b.eventually(t, 1, `SELECT count(*) FROM rate_limit_parked WHERE name = 'other'`)
}

// In the line of a limit that tenants share, jobs go by arrival, and not by their age.
func TestParkedByArrival(t *testing.T) {
	b := newBench(t)
	shared := ratelimit.InFlight{Name: "shared", Limit: 1, Lease: time.Hour}
	inFlight := func(job *rivertype.JobRow) ratelimit.PermitRequest { return oneOfTenant(job).And(shared.For("")) }
	r := newRuns()
	client := b.withPausedQueue(t, r, inFlight)
	insert := func(tenant string, opts *river.InsertOpts) {
		t.Helper()
		must(t, errOf(client.Insert(t.Context(), tenantArgs{tenant}, opts)))
	}
	insert("A", nil)
	r.next(t)
	insert("older", &river.InsertOpts{Queue: "other"})
	insert("first", nil)
	b.eventually(t, 1, putOff)
	must(t, client.QueueResume(t.Context(), "other", nil))
	b.eventually(t, 2, putOff)
	r.letGo <- struct{}{}
	if job := r.next(t); job.Args.Tenant != "first" {
		t.Errorf("a job of tenant %q starts, want of the one that came first", job.Args.Tenant)
	}
	close(r.letGo)
	b.eventually(t, 3, completedOnce)
}

// A job that was woken for a permit of one limit, and is refused by another, leaves the permit to the next.
func TestParkedPassesOn(t *testing.T) {
	b := newBench(t)
	r := b.works(t, 10, riverlimit.MiddlewareConfig{InFlight: oneOrOther})
	b.mustInsertTenants(t, "one")
	r.next(t)
	b.mustInsertTenants(t, "both")
	b.eventually(t, 1, putOff)
	b.mustInsertTenants(t, "one")
	b.eventually(t, 2, putOff)
	b.hold(t, limitOther.For(""))
	r.letGo <- struct{}{}
	if job := r.next(t); job.Args.Tenant != "one" {
		t.Errorf("a job of %s starts", job.Args.Tenant)
	}
	b.eventually(t, 1, parkedRows)
	close(r.letGo)
	b.eventually(t, 2, completedOnce)
}

// A job that ends wakes the jobs of all its limits, though this process knows the line of one only.
func TestParkedForEachLimit(t *testing.T) {
	b := newBench(t)
	r := b.works(t, 10, riverlimit.MiddlewareConfig{InFlight: oneOrOther})
	b.mustInsertTenants(t, "both")
	r.next(t)
	b.mustInsertTenants(t, "other")
	b.eventually(t, 1, putOff)
	b.inTx(t, func(tx pgx.Tx) error { // as another process parks one
		job, err := b.inserter(t).Client.InsertTx(t.Context(), tx, tenantArgs{"one"}, &river.InsertOpts{ScheduledAt: time.Now().Add(24 * time.Hour)})
		if err != nil {
			return err
		}
		_, err = tx.Exec(t.Context(), fmt.Sprintf("INSERT INTO %s.rate_limit_parked VALUES ($1, 'one', '', 1, $2, 1)", b.Schema), b.Schema, job.Job.ID)
		return err
	})
	close(r.letGo)
	b.eventually(t, 3, completedOnce)
	b.eventually(t, 0, parkedRows)
}

// A job that wants more permits than there are is cancelled, and does not stand in a line for ever.
func TestParkedTooHeavy(t *testing.T) {
	b := newBench(t)
	r := b.works(t, 10, riverlimit.MiddlewareConfig{InFlight: func(job *rivertype.JobRow) ratelimit.PermitRequest {
		return oneAtOnce.ForN("", len(tenantOf(job)))
	}})
	b.mustInsertTenants(t, "1")
	r.next(t)
	b.mustInsertTenants(t, "1")
	b.eventually(t, 1, putOff)
	b.mustInsertTenants(t, "22")
	b.eventually(t, 1, `SELECT count(*) FROM river_job WHERE state = 'cancelled'`)
	close(r.letGo)
	b.eventually(t, 2, completedOnce)
}

// The first in line comes when the lease ends on the database's clock, whatever the worker's says.
func TestParkedClocksDiffer(t *testing.T) {
	b := newBench(t)
	const ahead = 40 * time.Minute
	store, err := pgstore.New(b.Pool, &pgstore.Config{Schema: b.Schema, Clock: func() time.Time { return time.Now().Add(ahead) }})
	must(t, err)
	permit, err := store.Permits().Acquire(t.Context(), threeAtOnce.ForN("", 3))
	if err != nil || !permit.OK {
		t.Fatal(permit, err)
	}
	o := newOne(t, b, middleware(t, store, riverlimit.MiddlewareConfig{InFlight: inFlight}))
	if job := o.work(nil, river.EventKindJobSnoozed, 0); job.ScheduledAt.Sub(permit.Until).Abs() > 5*time.Second {
		t.Errorf("comes at %v, want %v", job.ScheduledAt, permit.Until)
	}
}

// Jobs are parked at READ COMMITTED, so that those of other processes do not abort it.
func TestParkedWhereSerializableIsTheDefault(t *testing.T) {
	b := newBench(t, pgtest.WithConfig(func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	}))
	b.exec(t, fmt.Sprintf(`CREATE FUNCTION %[1]s.level() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	ASSERT current_setting('transaction_isolation') = 'read committed';
	RETURN new;
END $$;
CREATE TRIGGER level BEFORE INSERT ON %[1]s.rate_limit_parked FOR EACH ROW EXECUTE FUNCTION %[1]s.level()`, b.Schema))
	b.hold(t, threeAtOnce.ForN("", 3))
	newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: inFlight})).work(nil, river.EventKindJobSnoozed, 0)
	b.want(t, 1, parkedRows)
}
