package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// result is the measurement of a job.
type result struct {
	job
	opsPerSec   float64
	p50, p99    time.Duration
	perDecision float64 // retries of transactions, or round trips
	statements  float64 // a second, that PostgreSQL was sent
	granted     int64
	bound       *int64 // of granted; nil where it is of no interest
	decisions   int64
	errors      int64
	firstErr    string
	rounds      []float64 // decisions a second, by round
	least, most float64   // of the processes, a second
}

// sample is the figures of one round, after its warm-up.
type sample struct {
	Decided            int64 // within the round
	Decisions, Granted int64 // after it, too
	Errors             int64 // in the warm-up, too
	FirstErr           string
	Latency            latencies
	Elapsed            time.Duration // until the last answer
	Counts             snapshot

	parts []int64 // what each process, or goroutine, has decided within the round
}

// latencies are in nanoseconds, 1 % exact.
type latencies struct{ *hdrhistogram.Histogram }

func (l latencies) MarshalJSON() ([]byte, error) { return json.Marshal(l.Export()) }

func (l *latencies) UnmarshalJSON(text []byte) error {
	var s hdrhistogram.Snapshot
	err := json.Unmarshal(text, &s)
	l.Histogram = hdrhistogram.Import(&s)
	return err
}

func newSample() *sample {
	return &sample{Latency: latencies{hdrhistogram.New(1, longest, 2)}}
}

// add adds what was measured at the same time.
func (s *sample) add(other *sample) {
	s.parts = append(s.parts, other.Decided)
	s.Decided += other.Decided
	s.Decisions += other.Decisions
	s.Granted += other.Granted
	s.Errors += other.Errors
	s.FirstErr = cmp.Or(s.FirstErr, other.FirstErr)
	s.Latency.Merge(other.Latency.Histogram)
	s.Elapsed = max(s.Elapsed, other.Elapsed)
	s.Counts.add(other.Counts)
}

const (
	longest    = int64(time.Minute) // latency that is told from longer ones
	mostErrors = 100                // after which a goroutine gives up
)

// round is one stretch of time in which goroutines ask a contender.
type round struct {
	contender        contender
	keys             []string
	Goroutines       int
	WarmUp, Duration time.Duration
	Seed             uint64
}

func (r *round) run(ctx context.Context, c *counts) *sample {
	runtime.GC() // garbage of the others is not collected at this one's expense
	samples := make([]*sample, r.Goroutines)
	for i := range samples {
		samples[i] = newSample()
	}
	before := make(chan snapshot, 1)
	start := time.Now()
	if r.WarmUp == 0 {
		before <- c.now()
	} else {
		time.AfterFunc(r.WarmUp, func() { before <- c.now() })
	}
	_ = lab.Each(r.Goroutines, func(i int) error {
		r.ask(ctx, start, uint64(i), samples[i])
		return nil
	})
	total := newSample()
	for _, s := range samples {
		total.add(s)
	}
	total.Elapsed = time.Since(start) - r.WarmUp
	total.Counts = c.now().minus(<-before)
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
	random := rand.New(rand.NewPCG(r.Seed, i))
	end, stride := r.WarmUp+r.Duration, 1
	for now := time.Since(start); now < end; {
		begun := now
		var decisions, grants int64
		for n := range stride {
			if n > 0 && n == stride-1 {
				begun = time.Since(start)
			}
			key := r.keys[0]
			if len(r.keys) > 1 {
				key = r.keys[random.IntN(len(r.keys))]
			}
			granted, err := r.contender.decide(ctx, key)
			if err != nil {
				s.Errors++
				s.FirstErr = cmp.Or(s.FirstErr, err.Error())
				if ctx.Err() != nil || s.Errors == mostErrors {
					return
				}
				continue
			}
			decisions++
			if granted {
				grants++
			}
		}
		now = time.Since(start)
		if now > r.WarmUp && decisions > 0 {
			s.Decisions += decisions
			s.Granted += grants
			_ = s.Latency.RecordValues(min(int64(now-begun), longest), decisions) // an error is out of range only
			if now <= end {
				s.Decided += decisions
			}
		}
		if stride = 1; now-begun < soon {
			stride = oneOf
		}
	}
}

// measureAll measures the jobs, case by case.
func measureAll(ctx context.Context, e *env, o options, jobs []job, stderr io.Writer) ([]result, error) {
	if e.durable == nil {
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
func measureCase(ctx context.Context, e *env, o options, jobs []job) (results []result, err error) {
	if late := jobs[0].late; late > 0 {
		if e, err = e.behind(late); err != nil {
			return nil, err
		}
		defer e.postgres.closePools()
	}
	contenders, err := open(ctx, e, jobs)
	for _, c := range contenders {
		defer closeAll(c)
	}
	if err != nil {
		return nil, err
	}
	if err := e.postgres.analyze(ctx); err != nil {
		return nil, err
	}
	if jobs[0].bounded {
		o.rounds, o.round, o.warmUp = 1, o.overGrant, 0
	}
	samples := make([][]*sample, len(jobs))
	for n := range o.rounds {
		for _, i := range order(n, len(jobs)) {
			j := jobs[i]
			r := round{
				contender: contenders[j.impl], keys: j.workload().keys, Goroutines: j.goroutines,
				WarmUp: o.warmUp, Duration: o.round, Seed: uint64(n),
			}
			var s *sample
			if j.apart {
				s, err = j.runApart(ctx, e, n, r)
			} else {
				s = r.run(ctx, e.counts(j.impl))
			}
			if err := errors.Join(err, ctx.Err()); err != nil {
				return nil, fmt.Errorf("%s: %w", j, err)
			}
			samples[i] = append(samples[i], s)
		}
	}
	for i, j := range jobs {
		results = append(results, summarize(j, samples[i], o.round))
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

// open opens each implementation once, for all numbers of goroutines; processes open theirs.
func open(ctx context.Context, e *env, jobs []job) (map[string]contender, error) {
	contenders := make(map[string]contender)
	for _, j := range jobs {
		if _, ok := contenders[j.impl]; ok || j.apart {
			continue
		}
		c, err := implementations[j.impl](ctx, e, j.workload())
		if err != nil {
			return contenders, fmt.Errorf("%s: %w", j.impl, err)
		}
		contenders[j.impl] = c
	}
	return contenders, nil
}

func closeAll(c contender) {
	if c.close != nil {
		c.close()
	}
}

// summarize makes the medians of a job's rounds.
func summarize(j job, samples []*sample, duration time.Duration) result {
	r := result{job: j}
	var p50s, p99s []time.Duration
	var least, most []float64
	var counted snapshot
	var elapsed time.Duration
	aSecond := func(n int64) float64 { return float64(n) / duration.Seconds() }
	for _, s := range samples {
		r.rounds = append(r.rounds, aSecond(s.Decided))
		p50s = append(p50s, time.Duration(s.Latency.ValueAtQuantile(50)))
		p99s = append(p99s, time.Duration(s.Latency.ValueAtQuantile(99)))
		least, most = append(least, aSecond(slices.Min(s.parts))), append(most, aSecond(slices.Max(s.parts)))
		r.granted += s.Granted
		r.decisions += s.Decisions
		r.errors += s.Errors
		r.firstErr = cmp.Or(r.firstErr, s.FirstErr)
		counted.add(s.Counts)
		elapsed += s.Elapsed
	}
	r.opsPerSec, r.p50, r.p99, r.least, r.most = median(r.rounds), median(p50s), median(p99s), median(least), median(most)
	r.statements = float64(counted.Statements) / max(elapsed.Seconds(), 1e-9)
	per := counted.Trips
	if j.transactions {
		per = counted.Retries
	}
	r.perDecision = float64(per) / float64(max(r.decisions, 1))
	if j.bounded {
		d := j.limit.Definition()
		bound := int64(d.Capacity + d.Rate*float64(samples[0].Elapsed)/float64(d.Period))
		r.bound = &bound
	}
	return r
}

// median returns the upper one of two.
func median[T cmp.Ordered](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
