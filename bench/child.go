package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// Processes that ask at the same time are this program, which starts itself: each reads its
// task from its standard input, writes to its standard output that it is ready, and begins on a
// second line of input.

// childVariable is set in the environment of such a process.
const childVariable = "RATELIMIT_BENCH_CHILD"

// childTask is the task of a process.
type childTask struct {
	URL, Schema, Redis string
	Impl               string
	Limit              ratelimit.TokenBucket
	Key                string
	Callers            int
	WarmUp, Round      time.Duration
	Seed               uint64
	Record             bool // the intervals of grants
}

// childReport is the report of a process at its end.
type childReport struct {
	Decided, Decisions, Granted int64
	Errors                      int64
	FirstErr                    string
	Trips, Statements, Retries  int64
	Elapsed                     time.Duration
	Latency                     []byte // a histogram, encoded
	Served                      []curve.Served
}

const ready = "ready\n"

// runChild is such a process.
func runChild(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	in := json.NewDecoder(stdin)
	var task childTask
	if err := in.Decode(&task); err != nil {
		return fmt.Errorf("reading the task: %w", err)
	}
	e, err := task.attach()
	if err != nil {
		return err
	}
	defer e.postgres.closePools()
	c, err := implementations[task.Impl](ctx, e, task.workload())
	if err != nil {
		return err
	}
	defer closeAll(map[string]contender{task.Impl: c})
	if err := task.connect(ctx, e); err != nil {
		return err
	}
	if _, err := io.WriteString(stdout, ready); err != nil {
		return err
	}
	var begin bool
	if err := in.Decode(&begin); err != nil {
		return fmt.Errorf("waiting for the others: %w", err)
	}
	var served recorder
	if task.Record {
		c.decide = served.of(c.decide)
	}
	r := round{contender: c, keys: []string{task.Key}, goroutines: task.Callers, warmUp: task.WarmUp, duration: task.Round, seed: task.Seed}
	report, err := newChildReport(r.run(ctx, e.counts(task.Impl)))
	report.Served = served.served
	return errors.Join(err, json.NewEncoder(stdout).Encode(report))
}

func (task *childTask) workload() workload {
	return workload{limit: task.Limit, keys: []string{task.Key}}
}

// attach is the servers, of which this process starts none.
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

// recorder notes grants, each with the instants between which it was made.
type recorder struct {
	mu     sync.Mutex
	served []curve.Served
}

func (r *recorder) of(decide func(context.Context, string) (bool, error)) func(context.Context, string) (bool, error) {
	return func(ctx context.Context, key string) (bool, error) {
		from := time.Now()
		granted, err := decide(ctx, key)
		if granted && err == nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.served = append(r.served, curve.Served{From: from, To: time.Now(), Count: 1})
		}
		return granted, err
	}
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

// child is a process that was started.
type child struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	tell   *json.Encoder
	stdout io.ReadCloser
}

func startChild(ctx context.Context, task *childTask) (c *child, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c = &child{cmd: exec.CommandContext(ctx, self)}
	c.cmd.Env = append(os.Environ(), childVariable+"=1")
	c.cmd.Stderr = os.Stderr
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if c.stdout, err = c.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting another process: %w", err)
	}
	c.tell = json.NewEncoder(c.stdin)
	return c, c.tell.Encode(task)
}

// waitUntilReady returns when the process is, or has ended before.
func (c *child) waitUntilReady() error {
	got := make([]byte, len(ready))
	if _, err := io.ReadFull(c.stdout, got); err != nil || string(got) != ready {
		return fmt.Errorf("a process was not ready: %q, %w", got, errors.Join(err, c.end()))
	}
	return nil
}

// report has the process end, and returns its report.
func (c *child) report() (r childReport, err error) {
	err = json.NewDecoder(c.stdout).Decode(&r)
	return r, errors.Join(err, c.end())
}

func (c *child) end() error {
	return errors.Join(c.stdin.Close(), c.cmd.Wait())
}

// crowd is processes, and goroutines in each.
type crowd struct{ processes, callers int }

func (c crowd) String() string { return fmt.Sprintf("%d × %d", c.processes, c.callers) }

// run has the processes of a crowd do a task at the same time, on some processors.
func (c crowd) run(ctx context.Context, on *processors, task childTask) ([]childReport, error) {
	ctx, cancel := context.WithCancel(ctx) // which ends those that are left when one fails
	defer cancel()
	task.Callers = c.callers
	children := make([]*child, c.processes)
	err := on.run(func() (err error) {
		for i := range children {
			task.Seed = uint64(i)
			if children[i], err = startChild(ctx, &task); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, child := range children {
		if err := child.waitUntilReady(); err != nil {
			return nil, err
		}
	}
	for _, child := range children {
		if err := child.tell.Encode(true); err != nil {
			return nil, err
		}
	}
	reports := make([]childReport, len(children))
	faults := make([]error, len(children))
	var wg sync.WaitGroup
	for i, child := range children {
		wg.Go(func() { reports[i], faults[i] = child.report() })
	}
	wg.Wait()
	return reports, errors.Join(faults...)
}
