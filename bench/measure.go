package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// result is the measurement of a job.
type result struct {
	job
	opsPerSec   float64
	p50, p99    time.Duration
	perDecision float64 // round trips, retries or writes: see testCase.per
	statements  float64 // a second, that PostgreSQL was sent
	granted     int64
	bound       *int64 // of granted; nil where it is of no interest
	decisions   int64
	errors      int64
	firstErr    error
	rounds      []float64 // decisions a second, by round
	churn       *churnResult
	behind      *network // nil if there was none
}

// sample is the figures of one round, after its warm-up.
type sample struct {
	decided  int64 // within the round
	tally          // after it, too
	errors   int64 // in the warm-up, too
	firstErr error
	latency  *hdrhistogram.Histogram // nanoseconds
	elapsed  time.Duration           // until the last answer
	counts   snapshot
}

func (s *sample) add(other *sample) {
	s.decided += other.decided
	s.tally.add(other.tally)
	s.errors += other.errors
	s.firstErr = cmp.Or(s.firstErr, other.firstErr)
	s.latency.Merge(other.latency)
}

const (
	longest    = int64(time.Minute) // latency that is told from longer ones
	mostErrors = 100                // after which a goroutine gives up
)

func newSample() *sample {
	return &sample{latency: hdrhistogram.New(1, longest, 2)} // 1 % exact
}

// round is one stretch of time in which goroutines ask a contender.
type round struct {
	contender  contender
	keys       []string
	goroutines int
	warmUp     time.Duration
	duration   time.Duration
	enough     int64 // decisions of each goroutine without which it goes on
	seed       uint64
}

func (r *round) run(ctx context.Context, c *counts) *sample {
	runtime.GC() // garbage of the others is not collected at this one's expense
	samples := make([]*sample, r.goroutines)
	for i := range samples {
		samples[i] = newSample()
	}
	before := make(chan snapshot, 1)
	start := time.Now()
	if r.warmUp == 0 {
		before <- c.now()
	} else {
		time.AfterFunc(r.warmUp, func() { before <- c.now() })
	}
	var wg sync.WaitGroup
	for i, s := range samples {
		wg.Go(func() { r.ask(ctx, start, uint64(i), s) })
	}
	wg.Wait()
	total := newSample()
	total.elapsed = time.Since(start) - r.warmUp
	after := c.now()
	total.counts = after.minus(<-before)
	for _, s := range samples {
		total.add(s)
	}
	return total
}

// While calls take less than soon, one of oneOf is timed, and counts for all of them: to read
// the clock and note its time takes as long as a call that is served from memory.
const (
	soon  = time.Microsecond
	oneOf = 16
)

// ask asks again and again. The clock is read once a decision: it ends one and
// starts the next.
func (r *round) ask(ctx context.Context, start time.Time, i uint64, s *sample) {
	ctx, cancel := context.WithCancel(ctx) // as each request has a context of its own
	defer cancel()
	random := rand.New(rand.NewPCG(r.seed, i))
	end, stride := r.warmUp+r.duration, 1
	for now := time.Since(start); now < end || s.decisions < r.enough; {
		begun := now
		var t tally
		for n := range stride {
			if n > 0 && n == stride-1 {
				begun = time.Since(start)
			}
			key := r.keys[0]
			if len(r.keys) > 1 {
				key = r.keys[random.IntN(len(r.keys))]
			}
			granted, err := r.contender.decide(ctx, key)
			switch {
			case err == nil:
				t.count(granted)
			case ctx.Err() != nil:
				return
			default:
				if s.fail(err); s.errors == mostErrors {
					return
				}
			}
		}
		now = time.Since(start)
		if now > r.warmUp && t.decisions > 0 {
			s.tally.add(t)
			_ = s.latency.RecordValues(min(int64(now-begun), longest), t.decisions) // an error is out of range only
			if now <= end || r.enough > 0 {
				s.decided += t.decisions
			}
		}
		if stride = 1; now-begun < soon {
			stride = oneOf
		}
	}
}

// tally is the outcomes of some decisions.
type tally struct{ decisions, granted int64 }

func (t *tally) count(granted bool) {
	t.decisions++
	if granted {
		t.granted++
	}
}

func (t *tally) add(other tally) {
	t.decisions += other.decisions
	t.granted += other.granted
}

func (s *sample) fail(err error) {
	s.errors++
	s.firstErr = cmp.Or(s.firstErr, err)
}

// measureAll measures the jobs, case by case.
func measureAll(ctx context.Context, e *env, o options, jobs []job, stderr io.Writer) ([]result, error) {
	if e.redis == nil {
		jobs = slices.DeleteFunc(slices.Clone(jobs), func(j job) bool { return needsRedis[j.impl] })
	}
	var results []result
	for len(jobs) > 0 {
		n := slices.IndexFunc(jobs, func(j job) bool { return j.name != jobs[0].name })
		if n < 0 {
			n = len(jobs)
		}
		begun := time.Now()
		found, err := measureCase(ctx, e, o, jobs[:n])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", jobs[0].name, err)
		}
		results = append(results, found...)
		fmt.Fprintf(stderr, "bench: %s took %v\n", jobs[0].name, time.Since(begun).Round(100*time.Millisecond))
		jobs = jobs[n:]
	}
	return results, nil
}

// measureCase measures jobs of one case.
func measureCase(ctx context.Context, e *env, o options, jobs []job) ([]result, error) {
	if wanted := jobs[0].network; wanted > 0 {
		far, err := e.behind(ctx, wanted)
		if err != nil {
			return nil, fmt.Errorf("putting network before the servers: %w", err)
		}
		defer far.network.close()
		e = far
	}
	results, err := measureOn(ctx, e, o, jobs)
	for i := range results {
		results[i].behind = e.network
	}
	return results, err
}

// measureOn measures jobs of one case on these servers.
func measureOn(ctx context.Context, e *env, o options, jobs []job) ([]result, error) {
	if jobs[0].kind == kindChurn {
		return measureChurn(ctx, e, o, jobs)
	}
	contenders, err := open(ctx, e, jobs)
	defer closeAll(contenders)
	if err != nil {
		return nil, err
	}
	if err := e.postgres.analyze(ctx); err != nil {
		return nil, err
	}
	if jobs[0].kind == kindOverGrant {
		o.rounds, o.round, o.warmUp = 1, o.overGrant, 0
	}
	samples := make([][]*sample, len(jobs))
	for n := range o.rounds {
		for _, i := range order(n, len(jobs)) {
			j := jobs[i]
			r := &round{
				contender: contenders[j.impl], keys: j.workload(j.impl).keys, goroutines: j.goroutines,
				warmUp: o.warmUp, duration: o.round, seed: uint64(n),
			}
			s := r.run(ctx, e.counts(j.impl))
			if ctx.Err() != nil {
				return nil, fmt.Errorf("interrupted: %w", ctx.Err())
			}
			samples[i] = append(samples[i], s)
		}
	}
	results := make([]result, len(jobs))
	for i, j := range jobs {
		results[i] = summarize(j, samples[i], o.round)
	}
	return results, nil
}

// order returns the indices below n, forwards in even rounds and backwards in odd ones, so that
// changes over time favour no job.
func order(round, n int) []int {
	indexes := make([]int, n)
	for i := range indexes {
		indexes[i] = i
	}
	if round%2 == 1 {
		slices.Reverse(indexes)
	}
	return indexes
}

// open opens each implementation once, for all numbers of goroutines.
func open(ctx context.Context, e *env, jobs []job) (map[string]contender, error) {
	contenders := make(map[string]contender)
	for _, j := range jobs {
		if _, ok := contenders[j.impl]; ok {
			continue
		}
		c, err := implementations[j.impl](ctx, e, j.workload(j.impl))
		if err != nil {
			return contenders, fmt.Errorf("%s: %w", j.impl, err)
		}
		contenders[j.impl] = c
	}
	return contenders, nil
}

func closeAll(contenders map[string]contender) {
	for _, c := range contenders {
		if c.close != nil {
			c.close()
		}
	}
}

// summarize makes the medians of a job's rounds.
func summarize(j job, samples []*sample, duration time.Duration) result {
	r := result{job: j}
	var p50s, p99s []time.Duration
	var counted snapshot
	var elapsed time.Duration
	for _, s := range samples {
		r.rounds = append(r.rounds, float64(s.decided)/duration.Seconds())
		p50s = append(p50s, time.Duration(s.latency.ValueAtQuantile(50)))
		p99s = append(p99s, time.Duration(s.latency.ValueAtQuantile(99)))
		r.granted += s.granted
		r.decisions += s.decisions
		r.errors += s.errors
		r.firstErr = cmp.Or(r.firstErr, s.firstErr)
		counted.add(s.counts)
		elapsed += s.elapsed
	}
	r.opsPerSec, r.p50, r.p99 = median(r.rounds), median(p50s), median(p99s)
	r.statements = float64(counted.statements) / max(elapsed.Seconds(), 1e-9)
	if j.per == "retries" {
		r.perDecision = float64(counted.retries) / float64(max(r.decisions, 1))
	} else {
		r.perDecision = float64(counted.trips) / float64(max(r.decisions, 1))
	}
	if j.kind == kindOverGrant {
		d := j.limit.Definition()
		bound := int64(d.Capacity + d.Rate*float64(samples[0].elapsed)/float64(d.Period))
		r.bound = &bound
	}
	return r
}

// median returns the upper one of two.
func median[T cmp.Ordered](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
