package riverlimit_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// A limit of how many at once over all jobs, which is not reached: of none is the jobs a second
// with it as a share of those without, the median of five rounds. Both take turns.
//
//	go test -bench JobsInFlight ./riverlimit
func BenchmarkJobsInFlight(b *testing.B) {
	jobs, rounds := 4000, 5
	if testing.Short() {
		jobs, rounds = 400, 1
	}
	for b.Loop() {
		bench := newBench(b)
		m := middleware(b, bench.store, riverlimit.MiddlewareConfig{InFlight: func(*rivertype.JobRow) ratelimit.PermitRequest {
			return ratelimit.InFlight{Name: "all", Limit: 1000}.For("")
		}})
		var with, without, shares []float64
		for range rounds {
			w, o := bench.jobsPerSecond(b, jobs, m), bench.jobsPerSecond(b, jobs)
			with, without, shares = append(with, w), append(without, o), append(shares, w/o)
		}
		b.ReportMetric(middle(with), "jobs/s")
		b.ReportMetric(middle(without), "without/s")
		b.ReportMetric(middle(shares), "of-none")
	}
}

func middle(v []float64) float64 {
	slices.Sort(v)
	return v[len(v)/2]
}

// jobsPerSecond is how fast jobs that do nothing are worked, once they are there.
func (b *bench) jobsPerSecond(tb testing.TB, jobs int, m ...rivertype.Middleware) float64 {
	tb.Helper()
	must(tb, errOf(b.Pool.Exec(tb.Context(), fmt.Sprintf("TRUNCATE %s.river_job", b.Schema))))
	b.insertPlain(tb, jobs)
	client := b.client(tb, b.config(func(context.Context, *river.Job[callArgs]) error { return nil }, m...))
	begun := time.Now()
	must(tb, client.Start(context.WithoutCancel(tb.Context())))
	b.eventually(tb, jobs, completed)
	took := time.Since(begun)
	must(tb, client.Stop(context.WithoutCancel(tb.Context())))
	return float64(jobs) / took.Seconds()
}
