package riverlimit_test

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/riverqueue/river"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/refusals"
)

// What is refused while a program stops, by a job that is under way when it is told to, is written, in the order
// in which docs/operations.md stops it.
func TestStopLosesNoRefusal(t *testing.T) {
	b := newBench(t, pgtest.With(migrations.Refusals))
	ctx := t.Context()
	recorder, err := refusals.New(b.Pool, &refusals.Config{Schema: b.Schema, Logger: quiet})
	must(t, err)
	store, err := pgstore.New(b.Pool, &pgstore.Config{Schema: b.Schema, Observe: recorder.Observe, Escrow: time.Second})
	must(t, err)
	limit := ratelimit.TokenBucket{Name: "stopped", Rate: 1, Period: time.Hour}
	allow := func(key string, want bool) {
		t.Helper()
		if result, err := store.Allow(ctx, limit.For(key)); err != nil || result.OK != want {
			t.Errorf("%s: got %v, %v, want %t", key, result, err, want)
		}
	}
	begun, goOn := make(chan struct{}), make(chan struct{})
	jobs := b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		close(begun)
		<-goOn
		allow("job", false)
		return nil
	}))
	background, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() { recorder.Run(background); close(ended) }()
	must(t, jobs.Start(ctx))
	must(t, errOf(jobs.Insert(ctx, callArgs{}, nil)))
	allow("before", true)
	allow("job", true)
	<-begun
	allow("before", false)

	stop() // as a signal does
	<-ended
	time.AfterFunc(100*time.Millisecond, func() { close(goOn) }) // while it stops
	ending, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	must(t, jobs.Stop(ending))
	store.Close()
	must(t, recorder.Close(ending))
	keys, err := refusals.Top(ctx, b.Pool, b.Schema, refusals.Query{Since: time.Hour})
	must(t, err)
	times := map[string]int64{}
	for _, k := range keys {
		times[k.Key] = k.Times
	}
	if !maps.Equal(times, map[string]int64{"before": 1, "job": 1}) {
		t.Errorf("got %v, want one refusal of before and of job", times)
	}
}
