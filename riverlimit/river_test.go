package riverlimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(6) // they wait for instants, and for River to look for jobs
	pgtest.Main(m)
}

const (
	jobs      = 60
	perSecond = 20
)

// insertPlain inserts n jobs that are due and not limited.
func (b *bench) insertPlain(t testing.TB, n int) {
	t.Helper()
	b.insert(t, b.inserter(t), numbered(n))
}

const completedOnce = `SELECT count(*) FROM river_job WHERE state = 'completed' AND attempt = 1 AND errors IS NULL`

// calls is a limit of perSecond starts.
var calls = ratelimit.TokenBucket{Name: "calls", Rate: perSecond, Period: time.Second, Capacity: 1}

// callsAndTokens is calls, and a limit that has enough for all jobs, but is refilled slowly.
func callsAndTokens(*rivertype.JobRow) []ratelimit.Request {
	return []ratelimit.Request{calls.For(""), slowTokens.For("")}
}

// Jobs that are all there at once start at the rate, and each reserves once. So do those that were reserved
// for when they were inserted, and that River brings in bunches; what is paid is not paid again.
func TestMiddlewareHardStart(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	for name, requests := range map[string][]ratelimit.Request{"plain": nil, "inserted": callsAndTokens(nil)} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.insert(t, b.inserter(t), numbered(jobs, requests...))
			begun := time.Now()
			sorted, stall := b.startsOf(t, jobs, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: callsAndTokens, HardStart: true}))
			most := mostIn(sorted, time.Second-stall)
			t.Logf("%d jobs at %d/s in %v: most starts in any second %d; the machine stood still for %v at most", jobs, perSecond, time.Since(begun), most, stall)
			if len(sorted) != jobs || most > perSecond {
				t.Errorf("%d starts, %d in a second, want %d, and at most %d", len(sorted), most, jobs, perSecond)
			}
			wantValue(t, b, slowTokens.Name, slowTokens.Capacity-jobs)
			b.want(t, jobs, completedOnce)
		})
	}
}

// A second limit that has enough for all jobs, but is refilled slowly, does not put off
// those that have to wait for their turn at the first.
func TestHardStartBesideSlowLimit(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	const n = 14
	b.insertPlain(t, n)
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: callsAndTokens, HardStart: true, MaxWait: 100 * time.Millisecond})
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error { return nil }, m)))
	b.eventually(t, n, `SELECT count(*) FROM river_job WHERE state = 'completed' OR scheduled_at > now() + interval '1 min'`)
	b.want(t, n, completedOnce)
}

// Without HardStart the reservations' instants are kept all the same, those of the middleware and, without one,
// those of insertion: a job never starts early, and none is asked twice.
func TestReservationsAreKept(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	burst := calls
	burst.Capacity = 10
	for name, requests := range map[string][]ratelimit.Request{"at execution": nil, "at insertion": {calls.For("")}} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.insert(t, b.inserter(t), numbered(jobs, requests...))
			var m []rivertype.Middleware
			if requests == nil { // a MaxWait that is below River's poll sends nearly all through a snooze
				m = append(m, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(burst), MaxWait: 200 * time.Millisecond}))
			}
			b.startsOf(t, jobs, m...)
			// finalized_at is the worker's clock, which is the database's here.
			early := b.count(t, `SELECT count(*) FROM river_job WHERE finalized_at < (metadata->'ratelimit'->>'at')::timestamptz`)
			snoozes := b.count(t, `SELECT coalesce(sum((metadata->>'snoozes')::int), 0)::int FROM river_job`)
			if once := b.count(t, completedOnce); early != 0 || snoozes > 3*jobs || once != jobs {
				t.Errorf("%d of %d jobs started early, %d snoozes, %d completed at their first attempt", early, jobs, snoozes, once)
			}
		})
	}
}
