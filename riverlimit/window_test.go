package riverlimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// tenth has slots of 100 ms, and lets perSecond jobs start in any second.
var tenth = ratelimit.SlidingWindow{Name: "tenth", Rate: perSecond, Period: time.Second, Slots: 10}

// wantWindowKept works all jobs and wants no more starts than that in any second, as
// many in one of them, and no second limit.
func wantWindowKept(t *testing.T, b *bench, jobs int) {
	t.Helper()
	var started starts
	stalled := measureStalls()
	m := middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(tenth), HardStart: true})
	start(t, b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		started.add()
		return nil
	}, m)))
	b.eventually(t, jobs, `SELECT count(*) FROM river_job WHERE state = 'completed'`)
	sorted := started.sorted()
	most, stall := mostIn(sorted, time.Second), stalled()
	t.Logf("%d jobs at most %d in any second: most starts %d, first to last start %v, the machine stood still for %v",
		jobs, perSecond, most, sorted[len(sorted)-1].Round(time.Millisecond), stall)
	if most > perSecond && stall < 50*time.Millisecond {
		t.Errorf("%d starts in a second, want at most %d", most, perSecond)
	}
	if most < perSecond {
		t.Errorf("%d starts in a second at most, want %d", most, perSecond)
	}
	if got := b.count(t, `SELECT count(*) FROM rate_limits WHERE name <> 'tenth'`); got != 0 {
		t.Errorf("%d rows of other limits, want none", got)
	}
	if got := b.count(t, completedOnce); got != jobs {
		t.Errorf("%d jobs completed at their first attempt and without errors, want %d", got, jobs)
	}
}

// TestHardStartSlidingWindow: a job that starts in the slot that it has reserved needs
// no gate.
func TestHardStartSlidingWindow(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.insertPlain(t, 100)
	wantWindowKept(t, b, 100)
}

// TestHardStartSlidingWindowBunched: those that River brings in bunches, seconds after
// the slots that were reserved when they were inserted, ask for others.
func TestHardStartSlidingWindowBunched(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	const n = 60
	params := make([]riverlimit.InsertManyParams, n)
	for i := range params {
		params[i] = riverlimit.InsertManyParams{Args: callArgs{i}, Requests: []ratelimit.Request{tenth.For("")}}
	}
	b.inTx(t, func(tx pgx.Tx) error {
		_, err := b.inserter(t).InsertManyTx(t.Context(), tx, params)
		return err
	})
	wantWindowKept(t, b, n)
}

// A slot that is over before a job can start would be missed each time.
func TestHardStartSlotsTooNarrow(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	narrow := tenth
	narrow.Slots = 20 // of 50 ms
	o := newOne(t, b, middleware(t, b.store, riverlimit.MiddlewareConfig{Limits: each(narrow), HardStart: true}))
	job := o.work(nil, river.EventKindJobCancelled, 0)
	if len(job.Errors) != 1 {
		t.Errorf("errors %v, want one", job.Errors)
	}
}
