package riverlimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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

	// ideal is how long jobs take at the limit's rate, the first one at once.
	ideal = (jobs - 1) * time.Second / perSecond
)

// insertPlain inserts n jobs that are due and not limited.
func (b *bench) insertPlain(t testing.TB, n int) {
	t.Helper()
	params := make([]riverlimit.InsertManyParams, n)
	for i := range params {
		params[i].Args = callArgs{i}
	}
	in := b.inserter(t)
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := in.InsertManyTx(t.Context(), tx, params)
		return err
	})
}

const completedOnce = `SELECT count(*) FROM river_job WHERE state = 'completed' AND attempt = 1 AND errors IS NULL`

// Jobs that are all there at once start at the rate, and each reserves once.
func TestMiddlewareHardStart(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	b := newBench(t)
	b.insertPlain(t, jobs)
	var started starts
	limit := ratelimit.TokenBucket{Name: "calls", Rate: perSecond, Period: time.Second, Capacity: 1}
	both := func(*rivertype.JobRow) []ratelimit.Request {
		return []ratelimit.Request{limit.For(""), slowTokens.For("")}
	}
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: both, HardStart: true})

	stalled := measureStalls()
	begun := time.Now()
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		started.add()
		return nil
	}, m)))
	b.eventually(t, jobs, `SELECT count(*) FROM river_job WHERE state = 'completed'`)
	total, stall := time.Since(begun), stalled()

	sorted := started.sorted()
	most := mostIn(sorted, time.Second-stall)
	t.Logf("%d jobs at %d/s: most starts in any second %d (bound %d); first to last start %.2f s, in all %.2f s, ideal %.2f s (+%.1f %%), the machine stood still for %v at most; snoozes %d; attempts burned %d",
		len(sorted), perSecond, most, perSecond, sorted[len(sorted)-1].Seconds(), total.Seconds(), ideal.Seconds(),
		100*(total.Seconds()/ideal.Seconds()-1), stall.Round(time.Millisecond),
		b.count(t, `SELECT coalesce(sum((metadata->>'snoozes')::int), 0)::int FROM river_job`),
		b.count(t, `SELECT sum(attempt - 1)::int FROM river_job`))
	if len(sorted) != jobs {
		t.Errorf("%d starts, want %d", len(sorted), jobs)
	}
	if most > perSecond {
		t.Errorf("%d starts in a second, want at most %d", most, perSecond)
	}
	wantValue(t, b, slowTokens.Name, slowTokens.Capacity-jobs)
	if got := b.count(t, completedOnce); got != jobs {
		t.Errorf("%d jobs completed at their first attempt and without errors, want %d", got, jobs)
	}
}

// A second limit that has enough for all jobs, but is refilled slowly, does not put off
// those that have to wait for their turn at the first.
func TestHardStartBesideSlowLimit(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	b := newBench(t)
	const n = 14
	b.insertPlain(t, n)
	limit := ratelimit.TokenBucket{Name: "calls", Rate: perSecond, Period: time.Second, Capacity: 1}
	both := func(*rivertype.JobRow) []ratelimit.Request {
		return []ratelimit.Request{limit.For(""), slowTokens.For("")}
	}
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: both, HardStart: true, MaxWait: 100 * time.Millisecond})
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error { return nil }, m)))
	b.eventually(t, n, `SELECT count(*) FROM river_job WHERE state = 'completed' OR scheduled_at > now() + interval '1 min'`)
	if got := b.count(t, completedOnce); got != n {
		t.Errorf("%d jobs completed, want %d: the others are put off for more than a minute", got, n)
	}
}

// The same with reservations made when inserting, and no middleware.
func TestInsertTimeReservations(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	b := newBench(t)
	limit := ratelimit.TokenBucket{Name: "calls", Rate: perSecond, Period: time.Second, Capacity: 1}
	params := make([]riverlimit.InsertManyParams, jobs)
	for i := range params {
		params[i] = riverlimit.InsertManyParams{Args: callArgs{i}, Requests: []ratelimit.Request{limit.For("")}}
	}
	in := b.inserter(t)
	var inserted []*riverlimit.Inserted
	b.inTx(t, func(tx pgx.Tx) (err error) {
		inserted, err = in.InsertManyTx(t.Context(), tx, params)
		return err
	})

	// Exact: each that must wait is due one twentieth of a second after the one
	// before. (The first is due at once, which is when it was answered.)
	for i := 2; i < jobs; i++ {
		got := inserted[i].Reservation.RetryAt.Sub(inserted[1].Reservation.RetryAt)
		want := time.Duration(i-1) * time.Second / perSecond
		if off := (got - want).Abs(); off > time.Microsecond {
			t.Errorf("job %d is due %v after the second, want %v", i, got, want)
		}
	}

	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error { return nil })))
	b.eventually(t, jobs, `SELECT count(*) FROM river_job WHERE state = 'completed'`)

	// attempted_at is the database's clock, read when River fetched the job.
	early := b.count(t, `SELECT count(*) FROM river_job WHERE attempted_at < (metadata->'ratelimit'->>'at')::timestamptz`)
	if early != 0 {
		t.Errorf("%d jobs started early", early)
	}
	// The long run: of n jobs, those that started by any instant are at most
	// those whose capacity had come in, one and twenty a second.
	over := b.count(t, `
		WITH j AS (
			SELECT attempted_at, (metadata->'ratelimit'->>'at')::timestamptz AS due FROM river_job
		), s AS (
			SELECT row_number() OVER (ORDER BY attempted_at) AS n,
				0.05 + extract(epoch FROM attempted_at - (SELECT due FROM j ORDER BY due OFFSET 1 LIMIT 1)) AS t
			FROM j
		) SELECT count(*) FROM s WHERE n > 1 + 20 * t + 0.0001`)
	if over != 0 {
		t.Errorf("%d jobs were ahead of the rate", over)
	}
	if got := b.count(t, completedOnce); got != jobs {
		t.Errorf("%d jobs completed at their first attempt and without errors, want %d", got, jobs)
	}
	var span, worst float64
	b.query(t, `SELECT extract(epoch FROM max(attempted_at) - min(attempted_at))::float8,
		max(extract(epoch FROM attempted_at - (metadata->'ratelimit'->>'at')::timestamptz))::float8 FROM river_job`, &span, &worst)
	t.Logf("%d jobs at %d/s: early %d, ahead of the rate %d; first to last start %.2f s (ideal %.2f s), the latest %.2f s after its instant",
		jobs, perSecond, early, over, span, ideal.Seconds(), worst)
}

// Reserved when inserted, and spaced by the middleware: what is paid is not
// paid again, and what River brings in bunches starts one by one.
func TestInsertTimeReservationsHardStart(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	b := newBench(t)
	const n = 40
	limit := ratelimit.TokenBucket{Name: "calls", Rate: perSecond, Period: time.Second, Capacity: 1}
	params := make([]riverlimit.InsertManyParams, n)
	for i := range params {
		params[i] = riverlimit.InsertManyParams{Args: callArgs{i}, Requests: []ratelimit.Request{limit.For("")}}
	}
	in := b.inserter(t)
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := in.InsertManyTx(t.Context(), tx, params)
		return err
	})
	var ts time.Time
	b.query(t, `SELECT ts FROM rate_limits WHERE name = 'calls'`, &ts)

	var started starts
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(limit), HardStart: true})
	stalled := measureStalls()
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		started.add()
		return nil
	}, m)))
	b.eventually(t, n, `SELECT count(*) FROM river_job WHERE state = 'completed'`)
	sorted := started.sorted()
	most := mostIn(sorted, time.Second-stalled())
	t.Logf("%d jobs, inserted with reservations at %d/s: most starts in any second %d, first to last start %v",
		n, perSecond, most, sorted[len(sorted)-1].Round(time.Millisecond))
	if most > perSecond {
		t.Errorf("%d starts in a second, want at most %d", most, perSecond)
	}
	var after time.Time
	b.query(t, `SELECT ts FROM rate_limits WHERE name = 'calls'`, &after)
	if !after.Equal(ts) {
		t.Error("the middleware reserved again")
	}
}

// Without HardStart the reservations' instants are kept all the same: a job
// never starts early, and none is asked twice.
func TestMiddlewareAverages(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	b := newBench(t)
	const n, burst = 60, 10
	b.insertPlain(t, n)
	var started starts
	limit := ratelimit.TokenBucket{Name: "calls", Rate: perSecond, Period: time.Second, Capacity: burst}
	// A MaxWait that is below River's poll sends nearly all through a snooze.
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(limit), MaxWait: 200 * time.Millisecond})
	start(t, b.client(t, b.config(func(_ context.Context, job *river.Job[callArgs]) error {
		started.add()
		return nil
	}, m)))
	b.eventually(t, n, `SELECT count(*) FROM river_job WHERE state = 'completed'`)
	sorted := started.sorted()
	snoozes := b.count(t, `SELECT coalesce(sum((metadata->>'snoozes')::int), 0)::int FROM river_job`)
	t.Logf("%d jobs at %d/s, burst %d: first to last start %v, %d snoozes", n, perSecond, burst, sorted[n-1].Round(time.Millisecond), snoozes)
	if got := b.count(t, completedOnce); got != n {
		t.Errorf("%d jobs completed at their first attempt and without errors, want %d", got, n)
	}
	// finalized_at is the worker's clock, which is the database's here.
	early := b.count(t, `SELECT count(*) FROM river_job WHERE finalized_at < (metadata->'ratelimit'->>'at')::timestamptz`)
	if early != 0 {
		t.Errorf("%d jobs were done before their instants", early)
	}
	if snoozes > 3*n {
		t.Errorf("%d snoozes of %d jobs: they ask again and again", snoozes, n)
	}
}
