package riverlimit_test

import (
	"context"
	"encoding/json"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// tenth has slots of 100 ms, and lets perSecond jobs start in any second.
var tenth = ratelimit.SlidingWindow{Name: "tenth", Rate: perSecond, Period: time.Second, Slots: 10}

// wantWindowKept inserts jobs and works them, and wants at most perSecond starts in any second,
// perSecond in one of them, and no second limit. A machine with other work may start fewer, and
// then as many jobs are inserted again, three times at most.
func wantWindowKept(t *testing.T, b *bench, jobs int, insert func(t testing.TB, n int)) {
	t.Helper()
	var started starts
	stalled := measureStalls()
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(tenth), HardStart: true})
	insert(t, jobs)
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		started.add()
		return nil
	}, m)))
	inserted, sorted := jobs, []time.Duration(nil)
	for more := 3; ; more-- {
		b.eventually(t, inserted, completed)
		sorted = started.sorted()
		if more == 0 || mostIn(sorted, time.Second) >= perSecond {
			break
		}
		insert(t, jobs)
		inserted += jobs
	}
	stall := stalled()
	most := mostIn(sorted, time.Second-stall)
	t.Logf("%d jobs at most %d in any second: most starts %d, first to last start %v, the machine stood still for %v at most",
		inserted, perSecond, most, sorted[len(sorted)-1].Round(time.Millisecond), stall)
	if most > perSecond {
		t.Errorf("%d starts in a second, want at most %d", most, perSecond)
	}
	if most := mostIn(sorted, time.Second+stall); most < perSecond {
		t.Errorf("%d starts in a second at most, want %d", most, perSecond)
	}
	b.want(t, 0, `SELECT count(*) FROM rate_limits WHERE name <> 'tenth'`)
	b.want(t, inserted, completedOnce)
}

// A job that starts in the slot that it has reserved needs no gate. Those that River brings in bunches, seconds after
// the slots that were reserved when they were inserted, ask for others.
func TestHardStartSlidingWindow(t *testing.T) {
	pgtest.Long(t)
	for name, requests := range map[string][]ratelimit.Request{"plain": nil, "inserted": {tenth.For("")}} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			wantWindowKept(t, b, 80, func(t testing.TB, n int) { b.insert(t, b.inserter(t), numbered(n, requests...)) })
		})
	}
}

// A slot that is over before a job can start would be missed each time.
func TestHardStartSlotsTooNarrow(t *testing.T) {
	b := newBench(t)
	narrow := tenth
	narrow.Slots = 20 // of 50 ms
	o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(narrow), HardStart: true}))
	job := o.work(nil, river.EventKindJobCancelled, 0)
	if len(job.Errors) != 1 {
		t.Errorf("errors %v, want one", job.Errors)
	}
}

// Jobs that are inserted together reserve for as many of them as fit a window: as fast as
// the limit allows, and no faster.
func TestInsertManySlidingWindow(t *testing.T) {
	const jobs, rate = 205, 20
	b := newBench(t)
	l := ratelimit.SlidingWindow{Name: "window", Rate: rate, Period: time.Minute, Slots: 6}
	params := numbered(jobs, l.For(""))
	inserted := b.insert(t, b.inserter(t), params)
	var events []curve.Event
	for i, job := range inserted {
		events = append(events, curve.Event{At: job.Reservation.RetryAt, Count: 1})
		if after := job.Reservation.RetryAfter; i%rate != 0 && !job.Reservation.RetryAt.Equal(inserted[i-1].Reservation.RetryAt) ||
			after > time.Duration(i/rate)*70*time.Second {
			t.Errorf("job %d is due after %v", i, after)
		}
	}
	if worst := curve.Judge(events, curve.Of(l.Definition())); worst.Share != 1 {
		t.Errorf("at worst %v", worst)
	}
	if ok, err := b.store.Cancel(t.Context(), inserted[jobs-1].Reservation.Receipt); !ok || err != nil {
		t.Errorf("cancelling the last job: %v, %v", ok, err)
	}
}

// A job that has missed its slot and was given another has used what it has used once:
// the slot that it missed has all of it back.
func TestSettleMissedSlot(t *testing.T) {
	b := newBench(t)
	slots := ratelimit.SlidingWindow{Name: "slots", Rate: 1000, Period: 20 * time.Second, Slots: 100}
	// Most of a slot is too late to start in; what is granted there is given back. Slots begin at
	// another instant for each key, so that hardly ever all jobs are in time.
	const jobs, slack = 5, 150 * time.Millisecond
	key := func(job *rivertype.JobRow) string {
		var args callArgs
		if err := json.Unmarshal(job.EncodedArgs, &args); err != nil {
			t.Error(err)
		}
		return strconv.Itoa(args.N)
	}
	b.inTx(t, func(tx pgx.Tx) error {
		for i := range jobs {
			if _, err := b.inserter(t).InsertTx(t.Context(), tx, callArgs{i}, nil, slots.ForN(strconv.Itoa(i), 100)); err != nil {
				return err
			}
		}
		return nil
	})
	b.eventually(t, jobs, `SELECT count(*) FROM river_job WHERE created_at < now() - interval '400 ms'`) // two slots
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{
		Limits:     func(job *rivertype.JobRow) []ratelimit.Request { return []ratelimit.Request{slots.ForN(key(job), 100)} },
		HardStart:  true,
		StartSlack: slack,
	})
	start(t, b.client(t, b.config(func(ctx context.Context, job *river.Job[callArgs]) error {
		return pgx.BeginFunc(ctx, b.Pool, func(tx pgx.Tx) error {
			if err := riverlimit.SettleTx(ctx, tx, b.store, job.JobRow, slots.ForN(key(job.JobRow), 30)); err != nil {
				return err
			}
			_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
			return err
		})
	}, m)))
	b.eventually(t, jobs, completed)
	for i := range jobs {
		if left, err := b.store.Check(t.Context(), slots.ForN(strconv.Itoa(i), 0)); err != nil || left.Value != 970 {
			t.Errorf("job %d: %v, %v, want 970 left", i, left, err)
		}
	}
}
