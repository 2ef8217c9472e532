package riverlimit_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/riverlimit"
)

// statements counts those that a pool sends, without BEGIN, COMMIT and ROLLBACK.
type statements struct{ n atomic.Int64 }

func (s *statements) add(sql string) {
	switch strings.ToUpper(strings.Fields(sql)[0]) {
	case "BEGIN", "COMMIT", "ROLLBACK":
	default:
		s.n.Add(1)
	}
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.add(d.SQL)
	return ctx
}
func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	for _, q := range d.Batch.QueuedQueries {
		s.add(q.SQL)
	}
	return ctx
}
func (*statements) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*statements) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}

// tenantArgs is a job of a tenant.
type tenantArgs struct {
	Tenant string `json:"tenant"`
}

func (tenantArgs) Kind() string { return "tenant" }

func tenantOf(job *rivertype.JobRow) string {
	_, rest, _ := strings.Cut(string(job.EncodedArgs), `"tenant"`)
	return strings.Trim(rest, `:"} `)
}

// turnsRun is a run in which 10 workers work jobs of tenants A, B and so on.
type turnsRun struct {
	name     string
	config   riverlimit.MiddlewareConfig
	took     time.Duration
	jobs     []int                                           // of each tenant, inserted in this order
	inserted func(tenant string) []ratelimit.Request         // by an Inserter; nil for jobs inserted without
	parked   func(*rivertype.JobRow) ratelimit.PermitRequest // at insertion
}

var (
	oneAtOnce  = ratelimit.InFlight{Name: "one", Limit: 1}
	oneASecond = ratelimit.TokenBucket{Name: "second", Rate: 1, Period: time.Second, Capacity: 1}
	fewAhead   = ratelimit.TokenBucket{Name: "few", Rate: 1, Period: time.Second, Capacity: 1, MaxReserved: 5}
	oneAMinute = ratelimit.TokenBucket{Name: "minute", Rate: 1, Period: time.Minute, Capacity: 1}
	shared     = ratelimit.TokenBucket{Name: "shared", Rate: 100, Period: time.Minute, Capacity: 1}
)

func ofTenant(limits ...ratelimit.TokenBucket) func(*rivertype.JobRow) []ratelimit.Request {
	return func(job *rivertype.JobRow) (requests []ratelimit.Request) {
		for _, l := range limits {
			key := tenantOf(job)
			if l.Name == shared.Name {
				key = ""
			}
			requests = append(requests, l.For(key))
		}
		return requests
	}
}

func oneOfTenant(job *rivertype.JobRow) ratelimit.PermitRequest { return oneAtOnce.For(tenantOf(job)) }

// River with 10 workers, a flood of jobs of tenant A, and then 10 of tenant B. For each tenant it reports how many
// jobs start, and when the first and the tenth of them do; and statements and snoozes for each job that has started.
//
//	go test -bench Turns -benchtime 1x ./riverlimit
func BenchmarkTurns(b *testing.B) {
	benchmarkTurns(b, 45*time.Second, []turnsRun{
		{name: "InFlight 1", config: riverlimit.MiddlewareConfig{InFlight: oneOfTenant}, took: time.Second, jobs: []int{200, 10}},
		{name: "InFlight 1, 10,000 jobs inserted with it", config: riverlimit.MiddlewareConfig{InFlight: oneOfTenant}, took: time.Second, jobs: []int{10_000, 10}, parked: oneOfTenant},
		{name: "1 a second", config: riverlimit.MiddlewareConfig{Limits: ofTenant(oneASecond)}, jobs: []int{200, 10}},
		{name: "1 a second, MaxReserved 5", config: riverlimit.MiddlewareConfig{Limits: ofTenant(fewAhead)}, jobs: []int{200, 10}},
		{
			name: "1 a minute for the tenant, 100 for all", config: riverlimit.MiddlewareConfig{Limits: ofTenant(oneAMinute, shared)}, jobs: []int{6000, 10},
			inserted: func(tenant string) []ratelimit.Request { return []ratelimit.Request{oneAMinute.For(tenant)} },
		},
	})
}

// The same of three tenants with 400 jobs each, and a limit for all that is below what they may start together.
//
//	go test -bench Shares -benchtime 1x ./riverlimit
func BenchmarkShares(b *testing.B) {
	tenSecond := ratelimit.TokenBucket{Name: "ten", Rate: 10, Period: time.Second, Capacity: 1}
	twentyForAll := ratelimit.TokenBucket{Name: shared.Name, Rate: 20, Period: time.Second, Capacity: 1}
	rates := ofTenant(tenSecond, twentyForAll)
	two, fourForAll := ratelimit.InFlight{Name: "two", Limit: 2}, ratelimit.InFlight{Name: "four", Limit: 4}
	twoOfTenant := func(job *rivertype.JobRow) ratelimit.PermitRequest { return two.For(tenantOf(job)) }
	permits := riverlimit.MiddlewareConfig{InFlight: func(job *rivertype.JobRow) ratelimit.PermitRequest {
		return twoOfTenant(job).And(fourForAll.For(""))
	}}
	jobs := []int{400, 400, 400}
	benchmarkTurns(b, 55*time.Second, []turnsRun{
		{name: "rates", config: riverlimit.MiddlewareConfig{Limits: rates}, jobs: jobs},
		{name: "rates, MaxWait 300 ms", config: riverlimit.MiddlewareConfig{Limits: rates, MaxWait: 300 * time.Millisecond}, jobs: jobs},
		{
			name: "rates, by Inserter", config: riverlimit.MiddlewareConfig{Limits: rates}, jobs: jobs,
			inserted: func(tenant string) []ratelimit.Request { return []ratelimit.Request{tenSecond.For(tenant)} },
		},
		{name: "permits, jobs of a second", took: time.Second, parked: twoOfTenant, config: permits, jobs: jobs},
		{name: "permits, jobs of 200 ms", took: 200 * time.Millisecond, parked: twoOfTenant, config: permits, jobs: jobs},
	})
}

func benchmarkTurns(b *testing.B, lasts time.Duration, runs []turnsRun) {
	if testing.Short() {
		lasts = 3 * time.Second
	}
	for _, run := range runs {
		b.Run(strings.ReplaceAll(run.name, " ", "_"), func(b *testing.B) {
			for b.Loop() {
				run.run(b, lasts)
			}
		})
	}
}

// run has 10 workers work what is inserted.
func (r *turnsRun) run(b *testing.B, lasts time.Duration) {
	b.Helper()
	sent := &statements{}
	bench := newBench(b, pgtest.WithConfig(func(c *pgxpool.Config) { c.ConnConfig.Tracer = sent }))
	var mu sync.Mutex
	began := map[string][]time.Duration{} // in order
	var begin time.Time
	config := bench.config(nil, middleware(b, bench.store, r.config))
	config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}}
	config.Workers = river.NewWorkers()
	river.AddWorker(config.Workers, river.WorkFunc(func(_ context.Context, job *river.Job[tenantArgs]) error {
		mu.Lock()
		began[job.Args.Tenant] = append(began[job.Args.Tenant], time.Since(begin))
		mu.Unlock()
		time.Sleep(r.took)
		return nil
	}))
	client := bench.client(b, config)
	for i, n := range r.jobs {
		r.insert(b, bench, client, string(rune('A'+i)), n)
	}
	begin = time.Now()
	sent.n.Store(0)
	start(b, client)
	time.Sleep(lasts)
	all := sent.n.Load()
	mu.Lock()
	defer mu.Unlock()
	total := 0
	for tenant, at := range began {
		total += len(at)
		b.ReportMetric(float64(len(at)), tenant)
		b.ReportMetric(at[0].Seconds(), tenant+"-first-s")
		if len(at) >= 10 {
			b.ReportMetric(at[9].Seconds(), tenant+"-tenth-s")
		}
	}
	b.ReportMetric(float64(all)/float64(max(total, 1)), "statements/job")
	b.ReportMetric(float64(bench.count(b, `SELECT coalesce(sum((metadata->>'snoozes')::int), 0)::int FROM river_job`)), "snoozes")
	b.ReportMetric(float64(bench.count(b, `SELECT coalesce(max((metadata->>'snoozes')::int), 0)::int FROM river_job`)), "most-snoozes")
}

// insert inserts jobs of a tenant.
func (r *turnsRun) insert(b *testing.B, bench *bench, client *river.Client[pgx.Tx], tenant string, n int) {
	b.Helper()
	in := riverlimit.Inserter{Client: client, Store: bench.store, InFlight: r.parked}
	params := make([]riverlimit.InsertManyParams, n)
	for i := range params {
		params[i].Args = tenantArgs{tenant}
		if r.inserted != nil {
			params[i].Requests = r.inserted(tenant)
		}
	}
	bench.inTx(b, func(tx pgx.Tx) error {
		for some := range slices.Chunk(params, 2000) {
			if _, err := in.InsertManyTx(b.Context(), tx, some); err != nil {
				return fmt.Errorf("insert: %w", err)
			}
		}
		return nil
	})
}
