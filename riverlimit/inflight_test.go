package riverlimit_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

var threeAtOnce = ratelimit.InFlight{Name: "at_once", Limit: 3, Lease: 30 * time.Second}

func inFlight(*rivertype.JobRow) ratelimit.PermitRequest { return threeAtOnce.For("") }

// Jobs of two clients, which know nothing of each other, are never more than the limit at a
// time, use up no attempt while they wait, and take from their rates once.
func TestJobsInFlight(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	const n = 40
	b.insertPlain(t, n)
	rate := ratelimit.TokenBucket{Name: "rate", Rate: 1000, Period: 24 * time.Hour}
	var at, most atomic.Int32
	work := func(ctx context.Context, _ *river.Job[callArgs]) error {
		now := at.Add(1)
		defer at.Add(-1)
		for was := most.Load(); now > was && !most.CompareAndSwap(was, now); was = most.Load() {
		}
		if permit, ok := riverlimit.PermitOf(ctx); !ok || !permit.OK {
			t.Errorf("the permit of the job is %v, %v", permit, ok)
		}
		time.Sleep(30 * time.Millisecond)
		return ctx.Err()
	}
	for range 2 {
		m := middleware(t, newStore(t, b.Pool, b.Schema), riverlimit.MiddlewareConfig{InFlight: inFlight, Limits: each(rate), MaxWait: 200 * time.Millisecond})
		start(t, b.client(t, b.config(work, m)))
	}
	b.eventually(t, n, completed)
	if got := most.Load(); got != int32(threeAtOnce.Limit) {
		t.Errorf("%d jobs were worked at a time, want %d", got, threeAtOnce.Limit)
	}
	b.want(t, n, completedOnce)
	result, err := b.store.Check(t.Context(), rate.ForN("", 0))
	if err != nil || result.Remaining != 1000-n {
		t.Errorf("%d of the rate are left, and %v, want %d", result.Remaining, err, 1000-n)
	}
	if permits, err := b.store.Permits().Held(t.Context(), threeAtOnce, ""); err != nil || len(permits) > 0 {
		t.Errorf("afterwards %v are held, and %v", permits, err)
	}
}

// A job that fails, and one that panics, give their permits back; and one can release its permit in
// the transaction that completes its work.
func TestJobsGiveTheirPermitsBack(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	const n = 6
	b.insertPlain(t, n)
	var calls atomic.Int32
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: func(*rivertype.JobRow) ratelimit.PermitRequest {
		return ratelimit.InFlight{Name: "one", Limit: 1, Lease: time.Hour}.For("")
	}})
	start(t, b.client(t, b.config(func(ctx context.Context, job *river.Job[callArgs]) error {
		calls.Add(1)
		switch job.Args.N % 3 {
		case 0:
			return river.JobCancel(errors.New("on purpose"))
		case 1:
			if job.Attempt == 1 {
				panic("on purpose")
			}
		}
		permit, _ := riverlimit.PermitOf(ctx)
		return pgx.BeginFunc(ctx, b.Pool, func(tx pgx.Tx) error { return b.store.Permits().ReleaseTx(ctx, tx, permit) })
	}, m)))
	b.eventually(t, n, `SELECT count(*) FROM river_job WHERE state IN ('completed', 'cancelled')`)
	if got := calls.Load(); got != n+n/3 {
		t.Errorf("%d attempts, want %d", got, n+n/3)
	}
}

// Jobs hold as many permits as they weigh, and those of other limits besides.
func TestJobsInFlightByWeight(t *testing.T) {
	b := newBench(t)
	const n = 4
	b.insertPlain(t, n)
	var at atomic.Int32
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: func(*rivertype.JobRow) ratelimit.PermitRequest {
		return threeAtOnce.ForN("", 2).And(ratelimit.InFlight{Name: "all", Limit: 9}.For(""))
	}})
	start(t, b.client(t, b.config(func(ctx context.Context, _ *river.Job[callArgs]) error {
		if now := at.Add(1); now > 1 {
			t.Errorf("%d jobs of weight 2 have permits of 3", now)
		}
		defer at.Add(-1)
		if permit, ok := riverlimit.PermitOf(ctx); !ok || len(permit.More) != 1 || len(permit.With) != 1 {
			t.Errorf("the permit of the job is %v, %v", permit, ok)
		}
		return ctx.Err()
	}, m)))
	b.eventually(t, n, completed)
}

// Jobs of a limit that is switched off wait until it is on again, and burn no attempt.
func TestJobsInFlightRefusedByMode(t *testing.T) {
	b := newBench(t)
	mode := ratelimit.ModeRefuse
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: func(*rivertype.JobRow) ratelimit.PermitRequest {
		return threeAtOnce.In(mode).For("")
	}})
	o := newOne(t, b, m)
	job := o.work(nil, river.EventKindJobSnoozed, 0)
	wantWait(t, job, ratelimit.RefusedFor, ratelimit.RefusedFor/2)
	mode = ratelimit.ModeEnforce
	o.work(job, river.EventKindJobCompleted, 1)
}

// A job that asks for nonsense is cancelled, and one whose limit has no name is not limited.
func TestJobsInFlightOfBadLimits(t *testing.T) {
	b := newBench(t)
	b.insertPlain(t, 2)
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{InFlight: func(job *rivertype.JobRow) (r ratelimit.PermitRequest) {
		if job.ID%2 == 0 {
			r.Limit.Name = "without permits"
		}
		return r
	}})
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error { return nil }, m)))
	b.eventually(t, 1, completed)
	b.eventually(t, 1, `SELECT count(*) FROM river_job WHERE state = 'cancelled'`)
}
