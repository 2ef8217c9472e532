package riverlimit_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/pgstore"
	"github.com/pgratelimit/ratelimit/refusals"
)

// What is refused while a program stops, by a request and a job that are under way when it is told
// to, is written, in the order in which docs/operations.md stops it.
func TestStopLosesNoRefusal(t *testing.T) {
	b := newBench(t, pgtest.With(migrations.Catalog), pgtest.With(migrations.Refusals))
	ctx := t.Context()
	recorder, err := refusals.New(b.Pool, &refusals.Config{Schema: b.Schema, Logger: quiet})
	must(t, err)
	store, err := pgstore.New(b.Pool, &pgstore.Config{Schema: b.Schema, Observe: recorder.Observe, Escrow: time.Second})
	must(t, err)
	limits, err := catalog.New(b.Pool, &catalog.Config{Schema: b.Schema, Logger: quiet})
	must(t, err)
	limit := ratelimit.TokenBucket{Name: "stopped", Rate: 1, Period: time.Hour}
	refuse := func(key string) {
		t.Helper()
		if result, err := store.Allow(ctx, limit.For(key)); err != nil || result.OK {
			t.Errorf("%s: got %v, %v, want a refusal", key, result, err)
		}
	}
	begun, goOn := make(chan string, 2), make(chan struct{})
	slow := func(key string) {
		begun <- key
		<-goOn
		refuse(key)
	}
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { slow("request") }))
	defer server.Close()
	jobs := b.client(t, b.config(func(context.Context, *river.Job[callArgs]) error {
		slow("job")
		return nil
	}))
	background, stop := context.WithCancel(ctx)
	ended := make(chan struct{}, 2)
	go func() { recorder.Run(background); ended <- struct{}{} }()
	go func() { limits.Run(background); ended <- struct{}{} }()
	must(t, errors.Join(limits.Publish(ctx, limit), jobs.Start(ctx)))
	must(t, errOf(jobs.Insert(ctx, callArgs{}, nil)))
	for _, key := range []string{"before", "request", "job"} {
		if result, err := store.Allow(ctx, limit.For(key)); err != nil || !result.OK {
			t.Fatal(result, err)
		}
	}
	go server.Client().Get(server.URL)
	<-begun
	<-begun
	refuse("before")

	stop() // as a signal does
	<-ended
	<-ended
	server.Config.RegisterOnShutdown(func() { close(goOn) })
	ending, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = errors.Join(server.Config.Shutdown(ending), jobs.Stop(ending))
	store.Close()
	err = errors.Join(err, recorder.Close(ending))
	b.Pool.Close()
	must(t, err)

	after, err := pgxpool.New(ctx, b.URL)
	must(t, err)
	defer after.Close()
	keys, err := refusals.Top(ctx, after, b.Schema, refusals.Query{Since: time.Hour})
	must(t, err)
	times := map[string]int64{}
	for _, k := range keys {
		times[k.Key] = k.Times
	}
	if len(times) != 3 || times["before"] != 1 || times["request"] != 1 || times["job"] != 1 {
		t.Errorf("got %v, want one refusal of before, request and job", times)
	}
}
