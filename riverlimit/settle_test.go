package riverlimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// slowTokens is a limit whose tokens do not come back while a test runs.
var slowTokens = ratelimit.TokenBucket{Name: "tokens", Rate: 1000, Period: 1000 * time.Hour, Capacity: 1000}

// finishing is a worker that uses so many tokens, and settles and completes its job in
// one transaction.
func (b *bench) finishing(used func(n int) float64) func(context.Context, *river.Job[callArgs]) error {
	return func(ctx context.Context, job *river.Job[callArgs]) error {
		return pgx.BeginFunc(ctx, b.Pool, func(tx pgx.Tx) error {
			if err := riverlimit.SettleTx(ctx, tx, b.store, job.JobRow, slowTokens.ForN("org", used(job.Args.N))); err != nil {
				return err
			}
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
	}
}

func wantValue(t *testing.T, b *bench, name string, want float64) {
	t.Helper()
	if got := b.value(t, name); math.Abs(got-want) > 0.5 { // some is refilled
		t.Errorf("%s has %v tokens, want %v", name, got, want)
	}
}

// What was reserved when the jobs were inserted is settled where they are worked, less and
// more, with the receipt that travels in their metadata.
func TestSettleInsertTime(t *testing.T) {
	b := newBench(t)
	requests := ratelimit.TokenBucket{Name: "requests", Rate: 1, Period: 1000 * time.Hour, Capacity: 100}
	in := b.inserter(t)
	b.inTx(t, func(tx pgx.Tx) error {
		params := numbered(4, slowTokens.ForN("org", 100), requests.For("org"))
		_, err := in.InsertManyTx(t.Context(), tx, params)
		return err
	})
	wantValue(t, b, "tokens", 600)
	used := []float64{30, 0, 100, 470}
	start(t, b.client(t, b.config(b.finishing(func(n int) float64 { return used[n] }))))
	b.eventually(t, 4, completed)
	wantValue(t, b, "tokens", 1000-600)
	wantValue(t, b, "requests", 96)
}

// What the middleware has reserved is settled too, at the gate as well.
func TestSettleHardStart(t *testing.T) {
	b := newBench(t)
	limits := func(*rivertype.JobRow) []ratelimit.Request { return []ratelimit.Request{slowTokens.ForN("org", 100)} }
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: limits, HardStart: true, StartSlack: time.Minute}) // no start is too late
	client := b.client(t, b.config(b.finishing(func(n int) float64 { return float64(40 + 110*n) }), m))
	for n := range 2 {
		must(t, errOf(client.Insert(t.Context(), callArgs{n}, nil)))
	}
	start(t, client)
	b.eventually(t, 2, completed)
	wantValue(t, b, "tokens", 1000-40-150)
	wantValue(t, b, "tokens:start", 1000-40-150)
}

// A worker whose transaction fails has settled nothing, and its next attempt, which
// reserves anew, settles that.
func TestSettleAfterFailure(t *testing.T) {
	pgtest.Long(t)
	b := newBench(t)
	limits := func(*rivertype.JobRow) []ratelimit.Request { return []ratelimit.Request{slowTokens.ForN("org", 100)} }
	work := func(ctx context.Context, job *river.Job[callArgs]) error {
		return pgx.BeginFunc(ctx, b.Pool, func(tx pgx.Tx) error {
			settle := func(r ratelimit.Request) error { return riverlimit.SettleTx(ctx, tx, b.store, job.JobRow, r) }
			if err := settle(slowTokens.ForN("another", 1)); !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("error %v for a key for which nothing was reserved, want ErrInvalid", err)
			}
			if err := settle(slowTokens.ForN("org", 60)); err != nil {
				return err
			}
			if err := settle(slowTokens.ForN("org", 60)); !errors.Is(err, ratelimit.ErrSettled) {
				t.Errorf("error %v the second time, want ErrSettled", err)
			}
			if job.Attempt == 1 {
				return errors.New("the answer is not to be stored")
			}
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
	}
	client := b.client(t, b.config(work, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: limits})))
	must(t, errOf(client.Insert(t.Context(), callArgs{}, nil)))
	start(t, client)
	b.eventually(t, 1, `SELECT count(*) FROM river_job WHERE state = 'completed' AND attempt = 2`)
	wantValue(t, b, "tokens", 1000-100-60)
}

func TestSettleInvalid(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	b.inTx(t, func(tx pgx.Tx) error {
		free, err := in.InsertTx(t.Context(), tx, callArgs{}, nil)
		if err != nil {
			return err
		}
		together, err := in.InsertBatchTx(t.Context(), tx, []river.InsertManyParams{{Args: callArgs{}}}, slowTokens.ForN("org", 100))
		if err != nil {
			return err
		}
		for name, err := range map[string]error{
			"no store":        riverlimit.SettleTx(t.Context(), tx, nil, free.Job),
			"no job":          riverlimit.SettleTx(t.Context(), tx, b.store, nil),
			"not limited":     riverlimit.SettleTx(t.Context(), tx, b.store, free.Job),
			"of all together": riverlimit.SettleTx(t.Context(), tx, b.store, together[0].Job),
		} {
			if !errors.Is(err, ratelimit.ErrInvalid) {
				t.Errorf("%s: %v, want ErrInvalid", name, err)
			}
		}
		if ok, err := riverlimit.CancelTx(t.Context(), tx, b.store, free.Job); ok || err != nil {
			t.Errorf("CancelTx() of a job that is not limited: %v, %v", ok, err)
		}
		return nil
	})
}

// A job that is cancelled before it begins gives its reservation back, from what is in
// its metadata; one that has begun does not.
func TestCancelTx(t *testing.T) {
	b := newBench(t)
	in := b.inserter(t)
	for _, test := range []struct {
		name    string
		attempt int
		want    bool
	}{{"not begun", 0, true}, {"begun", 1, false}} {
		t.Run(test.name, func(t *testing.T) {
			job := b.insert(t, in, numbered(1, slowTokens.ForN(test.name, 100)))[0]
			b.inTx(t, func(tx pgx.Tx) error {
				row, err := in.Client.JobCancelTx(t.Context(), tx, job.Job.ID)
				if err != nil {
					return err
				}
				row.Attempt = test.attempt
				ok, err := riverlimit.CancelTx(t.Context(), tx, b.store, row)
				if ok != test.want {
					t.Errorf("CancelTx() = %v, want %v", ok, test.want)
				}
				return err
			})
			left, err := b.store.Check(t.Context(), slowTokens.ForN(test.name, 0))
			want := 900.0
			if test.want {
				want = 1000
			}
			if err != nil || math.Abs(left.Value-want) > 0.5 {
				t.Errorf("%v tokens left, %v, want %v", left.Value, err, want)
			}
		})
	}
}

// 500 jobs are one reservation, with exact gaps, over shards as well, and each can be
// given back by itself.
func TestInsertManyIsOneReservation(t *testing.T) {
	pgtest.Long(t)
	const jobs, limited = 500, 20
	for _, shards := range []int{1, 8} {
		t.Run(fmt.Sprint(shards), func(t *testing.T) {
			b := newBench(t)
			in := b.inserter(t)
			l := ratelimit.TokenBucket{Name: "calls", Rate: limited, Period: time.Second, Capacity: limited, Shards: shards}
			params := numbered(jobs, l.For(""))
			must(t, b.store.Take(t.Context(), l.ForN("", limited)))
			inserted := b.insert(t, in, params)
			for i := 1; i < jobs; i++ {
				gap := inserted[i].Reservation.RetryAt.Sub(inserted[i-1].Reservation.RetryAt)
				if off := gap - time.Second/limited; off.Abs() > 2*time.Microsecond {
					t.Fatalf("job %d is due %v after the one before it, want %v", i, gap, time.Second/limited)
				}
				if !inserted[i].Job.ScheduledAt.Equal(inserted[i].Reservation.RetryAt) {
					t.Fatalf("job %d is scheduled for %v, want %v", i, inserted[i].Job.ScheduledAt, inserted[i].Reservation.RetryAt)
				}
			}
			before, err := b.store.Check(t.Context(), l.ForN("", 0))
			must(t, err)
			for _, i := range []int{0, 7, 499} {
				if ok, err := b.store.Cancel(t.Context(), inserted[i].Reservation.Receipt); !ok || err != nil {
					t.Errorf("Cancel() of job %d: %v, %v", i, ok, err)
				}
			}
			after, err := b.store.Check(t.Context(), l.ForN("", 0))
			if gained := after.Value - before.Value - limited*after.At.Sub(before.At).Seconds(); err != nil || math.Abs(gained-3) > 1e-3 {
				t.Errorf("3 jobs gave %v tokens back, %v", gained, err)
			}
		})
	}
}
