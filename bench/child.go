package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// Processes that ask at the same time are children of this program. Each reports that it is ready,
// begins when its stdin ends, and reports what it measured.

// childTask is the task of a process.
type childTask struct {
	URL, Schema, Redis string
	Impl               string
	Limit              ratelimit.TokenBucket
	Key                string
	Callers            int
	WarmUp, Round      time.Duration
	Seed               uint64
}

// childReport is what a process reports: first that it is ready, and at its end the rest.
type childReport struct {
	Ready                       bool
	Decided, Decisions, Granted int64
	Errors                      int64
	FirstErr                    string
	Trips, Statements, Retries  int64
	Elapsed                     time.Duration
	Latency                     []byte // a histogram, encoded
}

// runChild is such a process.
func runChild(ctx context.Context) error {
	var task childTask
	begin, journal, err := lab.Task(ctx, &task)
	if err != nil {
		return err
	}
	e, err := task.attach()
	if err != nil {
		return err
	}
	defer e.postgres.closePools()
	c, err := implementations[task.Impl](ctx, e, workload{limit: task.Limit, keys: []string{task.Key}})
	if err != nil {
		return err
	}
	defer closeAll(map[string]contender{task.Impl: c})
	if err := task.connect(ctx, e); err != nil {
		return err
	}
	journal.Write(childReport{Ready: true})
	<-begin.Done()
	r := round{contender: c, keys: []string{task.Key}, goroutines: task.Callers, warmUp: task.WarmUp, duration: task.Round, seed: task.Seed}
	report, err := newChildReport(r.run(ctx, e.counts(task.Impl)))
	journal.Write(report)
	return err
}

// attach returns the servers, of which this process starts none.
func (task *childTask) attach() (*env, error) {
	p := &postgresServer{server: &throwaway.Server{URL: task.URL}, counts: &counts{}, schema: task.Schema}
	p.conns = min(task.Callers+2, manyConns)
	e := &env{postgres: p}
	if task.Redis != "" {
		e.redis = &redisServer{address: task.Redis, counts: &counts{}}
	}
	return e, p.openPools()
}

// connect makes the connections that will be used, which takes longer than a call.
func (task *childTask) connect(ctx context.Context, e *env) error {
	pool := e.postgres.many
	switch {
	case needsRedis[task.Impl]:
		return nil
	case task.Impl == oursCombined || task.Impl == oursEscrow:
		pool = e.postgres.few
	}
	conns := make([]*pgxpool.Conn, pool.Config().MaxConns)
	for i := range conns {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return fmt.Errorf("connecting: %w", err)
		}
		defer conn.Release()
		conns[i] = conn
	}
	return nil
}

func newChildReport(s *sample) (r childReport, err error) {
	r = childReport{
		Decided: s.decided, Decisions: s.decisions, Granted: s.granted, Errors: s.errors,
		Trips: s.counts.trips, Statements: s.counts.statements, Retries: s.counts.retries, Elapsed: s.elapsed,
	}
	if s.firstErr != nil {
		r.FirstErr = s.firstErr.Error()
	}
	r.Latency, err = s.latency.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
	return r, err
}

// sample returns the reported sample.
func (r *childReport) sample() (*sample, error) {
	s := newSample()
	s.decided, s.decisions, s.granted, s.errors = r.Decided, r.Decisions, r.Granted, r.Errors
	s.counts, s.elapsed = snapshot{r.Trips, r.Statements, r.Retries}, r.Elapsed
	if r.FirstErr != "" {
		s.firstErr = errors.New(r.FirstErr)
	}
	latency, err := hdrhistogram.Decode(r.Latency)
	if err == nil {
		s.latency.Merge(latency)
	}
	return s, err
}

// crowd is processes, and goroutines in each.
type crowd struct{ processes, callers int }

func (c crowd) String() string { return fmt.Sprintf("%d × %d", c.processes, c.callers) }

// run runs a task in the processes of a crowd at the same time, on some processors.
func (c crowd) run(ctx context.Context, on *processors, task childTask) (reports []childReport, err error) {
	ctx, cancel := context.WithCancel(ctx) // it ends the others when one fails
	defer cancel()
	task.Callers = c.callers
	var (
		mu       sync.Mutex
		ready    int
		children []*lab.Child
	)
	read := lab.Reading(&mu, func(r childReport) {
		if r.Ready {
			ready++
		} else {
			reports = append(reports, r)
		}
	})
	err = on.run(func() error {
		for i := range c.processes {
			task.Seed = uint64(i)
			child, err := lab.Start(ctx, task, read)
			if err != nil {
				return err
			}
			children = append(children, child)
		}
		return nil
	})
	lab.AtWork(children)
	mu.Lock()
	if ready < c.processes {
		cancel()
		err = errors.Join(err, fmt.Errorf("%d of %d processes were ready", ready, c.processes))
	}
	mu.Unlock()
	err = errors.Join(append(lab.End(children), err)...)
	return reports, err
}
