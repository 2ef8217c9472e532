package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

// Processes that ask at the same time are children of this program. Each has called a first time
// when it writes into its journal, begins when its stdin ends, and then writes its sample.

// task is the task of a process.
type task struct {
	URL, Schema, Redis string
	Impl, Key          string
	Limit              ratelimit.TokenBucket
	Round              round
}

func runChild(ctx context.Context) error {
	var t task
	begin, journal, err := lab.Task(ctx, &t)
	if err != nil {
		return err
	}
	e := &env{postgres: &postgresServer{
		server: &throwaway.Server{URL: t.URL}, schema: t.Schema, counts: &counts{}, conns: min(t.Round.Goroutines+2, manyConns),
	}}
	if t.Redis != "" {
		e.redis = &redisServer{address: t.Redis, counts: &counts{}}
	}
	if err := e.postgres.openPools(); err != nil {
		return err
	}
	defer e.postgres.closePools()
	t.Round.keys = []string{t.Key}
	t.Round.contender, err = implementations[t.Impl](ctx, e, workload{limit: t.Limit, keys: t.Round.keys})
	if err != nil {
		return err
	}
	defer closeAll(t.Round.contender)
	// Connections are made, which takes longer than a call.
	if err := lab.Each(t.Round.Goroutines, func(int) error {
		_, err := t.Round.contender.decide(ctx, "first")
		return err
	}); err != nil {
		return err
	}
	journal.Write(nil)
	<-begin.Done()
	journal.Write(t.Round.run(ctx, e.counts(t.Impl)))
	return nil
}

// crowd is processes, and goroutines in each.
type crowd struct{ processes, goroutines int }

func (c crowd) String() string { return fmt.Sprintf("%d × %d", c.processes, c.goroutines) }

// runApart runs the n-th round of a job in processes, with a key of its own.
func (j job) runApart(ctx context.Context, e *env, n int, r round) (*sample, error) {
	t := task{URL: e.postgres.server.URL, Schema: e.postgres.schema, Impl: j.impl, Limit: j.workload().limit, Key: fmt.Sprint("round ", n), Round: r}
	t.Limit.Name += j.crowd.String()
	if e.redis != nil {
		t.Redis = e.redis.address
	}
	var mu sync.Mutex
	total := newSample()
	read := lab.Reading(&mu, func(s *sample) {
		if s != nil {
			total.add(s)
		}
	})
	var children []*lab.Child
	for i := range j.processes {
		t.Round.Seed = uint64(i)
		child, err := lab.Start(ctx, t, read)
		if err != nil {
			return nil, errors.Join(append(lab.End(children), err)...)
		}
		children = append(children, child)
	}
	lab.AtWork(children)
	return total, errors.Join(lab.End(children)...)
}
