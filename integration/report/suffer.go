package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// attack is the faults that processes doing the work of the accounts have to suffer.
type attack struct {
	tasks  []task
	lasts  time.Duration // at least
	killed int           // so many of the processes, the first ones
	harm   func(context.Context, *suffering) error
	must   func(*suffering) []count
}

// count is how often something happened that really has to, a fault for example, or
// nothing was attacked.
type count struct {
	what string
	n    int
}

// patient is how much longer than planned a section goes on until what has to happen has:
// how soon that is depends on what else the machine does.
const patient = time.Minute

// happened says whether everything has.
func happened(counts ...count) bool {
	return !slices.ContainsFunc(counts, func(c count) bool { return c.n < 1 })
}

// suffering is what work is under way, and then what came of it.
type suffering struct {
	*account
	schema   string
	children []*child
	verdict  verdict
}

// suffer has processes do the work of the accounts while harm is done to them, and
// compares. The harm begins when all of them are at work, and they work on until it is
// over, and until what must happen has.
func (l *lab) suffer(ctx context.Context, c *chapter, a attack) (*suffering, error) {
	s := &suffering{account: newAccount()}
	var err error
	if s.schema, err = l.schema(ctx); err != nil {
		return nil, err
	}
	if err := l.seed(ctx, s.schema); err != nil {
		return nil, err
	}
	for n, t := range a.tasks {
		t.Job, t.URL, t.Schema, t.Process, t.Seed = "work", l.server.URL, s.schema, n+1, rand.Uint64()
		child, err := start(ctx, t, s.read)
		if err != nil {
			return nil, err
		}
		s.children = append(s.children, child)
	}
	err = a.carryOut(ctx, s)
	if gone := s.end(); err == nil && gone != a.killed {
		err = fmt.Errorf("%d processes failed, want %d", gone, a.killed)
	}
	if err != nil {
		return nil, err
	}
	slack := 0.0
	for _, t := range a.tasks[:a.killed] {
		slack += float64(t.Workers) * 9 // three requests for one key, three tokens each
	}
	if err := l.compare(ctx, c, s, slack); err != nil {
		return nil, err
	}
	if a.must != nil {
		c.happened(a.must(s)...)
	}
	return s, nil
}

// carryOut attacks processes that have begun.
func (a *attack) carryOut(ctx context.Context, s *suffering) error {
	atWork(s.children)
	over := time.After(a.lasts)
	if a.harm != nil {
		if err := a.harm(ctx, s); err != nil {
			return err
		}
	}
	select {
	case <-over:
	case <-ctx.Done():
	}
	if a.must != nil {
		// If it does not, the report has a line that says so.
		_ = within(ctx, patient, "what must happen", func() bool { return happened(a.must(s)...) })
	}
	return nil
}

// end has all processes come to their end, and says how many failed.
func (s *suffering) end() (failed int) {
	for _, err := range end(s.children) {
		if err != nil {
			failed++
		}
	}
	return failed
}

// goOn waits until the processes are told OK, again or still.
func (s *suffering) goOn(ctx context.Context) error {
	return again(ctx, "calls that are told OK", s.granted)
}

// suffers waits until the processes are told an SQLSTATE, again or still.
func (s *suffering) suffers(ctx context.Context, code string) error {
	return again(ctx, "calls that are told "+code, func() int { return s.coded(code) })
}

// again waits until something has happened a hundred times from now on.
func again(ctx context.Context, what string, times func() int) error {
	before := times()
	return within(ctx, patient, what, func() bool { return times() > before+100 })
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
