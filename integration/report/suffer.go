package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"
)

// suffering is what work is under way, and then what came of it.
type suffering struct {
	*account
	schema   string
	children []*child
	verdict  verdict
}

// suffer has processes do the work of the accounts while something is done to them, from
// when all of them are at work, and compares. Each of killed processes takes what it was not told with it.
func (l *lab) suffer(ctx context.Context, c *chapter, tasks []task, lasts time.Duration, killed int, harm func(context.Context, *suffering) error) (*suffering, error) {
	s := &suffering{account: newAccount()}
	var err error
	if s.schema, err = l.schema(ctx); err != nil {
		return nil, err
	}
	if err := l.seed(ctx, s.schema); err != nil {
		return nil, err
	}
	for n, t := range tasks {
		t.Job, t.URL, t.Schema, t.Process, t.For, t.Seed = "work", l.server.URL, s.schema, n+1, lasts, rand.Uint64()
		child, err := start(ctx, t, s.read)
		if err != nil {
			return nil, err
		}
		s.children = append(s.children, child)
	}
	for _, child := range s.children {
		<-child.told
	}
	if harm != nil {
		err = harm(ctx, s)
	}
	gone := 0
	for _, child := range s.children {
		if <-child.done != nil {
			gone++
		}
	}
	if err != nil {
		return nil, err
	}
	if gone != killed {
		return nil, fmt.Errorf("%d processes failed, want %d", gone, killed)
	}
	slack := 0.0
	for _, t := range tasks[:killed] {
		slack += float64(t.Workers) * 9 // three requests for one key, three tokens each
	}
	return s, l.compare(ctx, c, s, slack)
}

// compare compares what is there with what was told, give or take what killed clients had
// under way.
func (l *lab) compare(ctx context.Context, c *chapter, s *suffering, slack float64) error {
	pool, err := l.pool(ctx, 2)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := l.quiet(ctx); err != nil {
		return err
	}
	if s.verdict, err = s.audit(ctx, pool, s.schema); err != nil {
		return err
	}
	c.tell("decisions on their own, transactions and runs", "%d, %d", s.own(), len(s.byID))
	s.verdict.lines(c, slack)
	c.tell("calls that were told an error, or that nobody knows", "%d", s.total("", "error")+s.total("", "unknown"))
	c.tell("of transactions that nobody knew of: there", "%d of %d", s.verdict.resolved, s.total("", "unknown"))
	return nil
}

// quiet waits until the server has ended what clients left behind: transactions of
// callers that it has not heard of for good, and what it is still doing.
func (l *lab) quiet(ctx context.Context) error {
	var busy int
	if err := l.ask(ctx, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'", &busy); err != nil {
		return err
	}
	return within(ctx, time.Minute, "nothing is under way any more", func() bool {
		err := l.ask(ctx, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND (state <> 'idle' OR backend_xid IS NOT NULL)", &busy)
		return err == nil && busy == 0
	})
}
