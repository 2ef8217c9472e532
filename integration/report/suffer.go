package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// attack is the faults that processes doing the work of the accounts have to suffer.
type attack struct {
	tasks  []task
	lasts  time.Duration // at least
	killed int           // so many of the processes, the first ones
	harm   func(context.Context, *suffering) error
	must   func(*suffering) []count
}

// patient is how much longer than planned a section goes on until what has to happen has:
// how soon that is depends on what else the machine does.
const patient = time.Minute

// suffering is what work is under way, and then what came of it.
type suffering struct {
	*account
	schema   string
	children []*lab.Child
	verdict  verdict
}

// suffer has processes do the work of the accounts while harm is done to them, and
// compares. The harm begins when all of them are at work, and they work on until it is
// over, and until what must happen has.
func (l *site) suffer(ctx context.Context, c *chapter, a attack) (*suffering, error) {
	s := &suffering{account: newAccount()}
	var err error
	if s.schema, err = l.schema(ctx); err != nil {
		return nil, err
	}
	if err := l.seed(ctx, s.schema); err != nil {
		return nil, err
	}
	tasks := slices.Clone(a.tasks)
	for n := range tasks {
		tasks[n].Job, tasks[n].Schema = "work", s.schema
	}
	if s.children, err = l.launch(ctx, tasks, lab.Reading(&s.mu, s.note)); err != nil {
		return nil, err
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
	lab.AtWork(s.children)
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
		_ = lab.Within(ctx, patient, "what must happen", func() bool { return happened(a.must(s)...) })
	}
	return nil
}

// end has all processes come to their end, and says how many failed.
func (s *suffering) end() (failed int) {
	for _, err := range lab.End(s.children) {
		if err != nil {
			failed++
		}
	}
	return failed
}

// goOn waits until the processes are told OK a hundred times, again or still.
func (s *suffering) goOn(ctx context.Context) error {
	before := s.granted()
	return lab.Within(ctx, patient, "calls that are told OK", func() bool { return s.granted() > before+100 })
}

// compare compares what is there with what was told, give or take what killed clients had
// under way.
func (l *site) compare(ctx context.Context, c *chapter, s *suffering, slack float64) error {
	p, err := l.at(s.schema, 2)
	if err != nil {
		return err
	}
	defer p.close()
	if err := l.quiet(ctx); err != nil {
		return err
	}
	if s.verdict, err = s.audit(ctx, p); err != nil {
		return err
	}
	c.Tell("decisions on their own, transactions and runs", "%d, %d", s.own(), len(s.byID))
	s.verdict.lines(c, slack)
	c.Zero("calls of which Config.Observe was not told once, and as their callers were", len(s.unlike))
	if len(s.unlike) > 0 {
		c.fail(s.unlike[0])
	}
	c.Tell("calls that were told an error, or that nobody knows", "%d", s.total("", "error")+s.total("", "unknown"))
	c.Tell("of transactions that nobody knew of: there", "%d of %d", s.verdict.resolved, s.total("", "unknown"))
	return nil
}

// quiet waits until the server has ended what clients left behind: transactions of
// callers that it has not heard of for good, and what it is still doing.
func (l *site) quiet(ctx context.Context) error {
	var busy int
	if err := l.ask(ctx, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'", &busy); err != nil {
		return err
	}
	return lab.Within(ctx, time.Minute, "nothing is under way any more", func() bool {
		err := l.ask(ctx, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND (state <> 'idle' OR backend_xid IS NOT NULL)", &busy)
		return err == nil && busy == 0
	})
}
