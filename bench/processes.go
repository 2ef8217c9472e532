package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/chart"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

const processesHelp = `Usage: go run ./bench processes [flags]

Measures what becomes of one key when several processes ask for it: the same 64 goroutines
in 1, 2, 4 and 8 processes, and 80 in 40. All implementations take turns, in several
rounds, each with new processes and a new key; what is measured begins 200 ms after the
first call, which is twice what "escrow" prefetches for. A figure is the median of its rounds.
They are long because the sessions of new processes are new, too, and the server parses and
plans their first statements.

  a second       decisions, or transactions with one INSERT, of all processes
  p99            of all
  retries        those a transaction that PostgreSQL asks to run again
  statements/s   that PostgreSQL is sent
  least, most    of the processes, a second

A process has two connections more than goroutines, but 16 at most, and 4 for Store.Allow.
Whether several processes are granted too much in any stretch of time is for
go run ./integration/report --only 'arrivals|memory' to say.

All of it on a throwaway PostgreSQL and Redis. On Linux they have one half of the processors,
and the processes the other, as where the database has a machine of its own. With --together
all share all of them, and processes may wait longer for one than for the row.

Flags:
`

// The cases of processes.
const (
	processesTx  = "tx"
	processesOwn = "decisions"
)

// crowds are the processes that are compared.
var crowds = []crowd{{1, 64}, {2, 32}, {4, 16}, {8, 8}, {40, 2}}

// processCases are the cases of the processes.
var processCases = []struct {
	name, title string
	impls       []string
}{
	{processesTx, "Transactions with one INSERT, one key", []string{noLimit, oursTxEscrow, oursTxLong, oursTx, oursTx32}},
	{processesOwn, "Decisions on their own, one key", []string{plainUpdate, oursCombined, oursEscrow, goRedisLua}},
}

// processesJob is one implementation in one crowd.
type processesJob struct {
	name, title string // of the case
	impl        string
	crowd
}

func (j processesJob) String() string { return fmt.Sprintf("%s/%s/%s", j.name, j.crowd, j.impl) }

// spread is the measurement of a job: figures for each round.
type spread struct {
	processesJob
	pace, statements, retries []float64 // a second; a second; a transaction
	least, most               []float64 // a second
	p99                       []time.Duration
}

type processesOptions struct {
	comparison
	only     *regexp.Regexp
	together bool // servers and processes share all processors
}

func parseProcesses(args []string, stderr io.Writer) (o processesOptions, err error) {
	only := ""
	o.comparison, err = parseComparison("processes", processesHelp, 15*time.Second, args, stderr, func(flags *flag.FlagSet) {
		flags.StringVar(&only, "only", "", "measure only what this `regexp` finds in case/processes × goroutines/implementation")
		flags.BoolVar(&o.together, "together", false, "have servers and processes share all processors")
	})
	if err != nil {
		return o, err
	}
	if o.only, err = regexp.Compile(only); err != nil {
		return o, fmt.Errorf("--only: %w", err)
	}
	return o, nil
}

// jobs returns those that are wanted.
func (o *processesOptions) jobs() (jobs []processesJob) {
	for _, c := range processCases {
		for _, crowd := range crowds {
			for _, impl := range c.impls {
				if j := (processesJob{c.name, c.title, impl, crowd}); o.only.MatchString(j.String()) {
					jobs = append(jobs, j)
				}
			}
		}
	}
	return jobs
}

func runProcesses(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	o, err := parseProcesses(args, stderr)
	if err != nil {
		return err
	}
	jobs := o.jobs()
	if len(jobs) == 0 {
		return fmt.Errorf("nothing to measure matches --only %q", o.only)
	}
	e, err := o.startServers(ctx, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	if e.redis == nil {
		jobs = slices.DeleteFunc(jobs, func(j processesJob) bool { return needsRedis[j.impl] })
	}
	spreads := make([]spread, len(jobs))
	for n := range o.rounds {
		for _, i := range order(n, len(jobs)) {
			fmt.Fprintf(stderr, "round %d of %d: %v\n", n+1, o.rounds, jobs[i])
			spreads[i].processesJob = jobs[i]
			if err := spreads[i].measure(ctx, e, n, o.round); err != nil {
				return fmt.Errorf("%v: %w", jobs[i], err)
			}
		}
	}
	facts, err := e.facts(ctx)
	if err != nil {
		return err
	}
	if err := printProcesses(stdout, spreads, checkProcesses(spreads), slices.Insert(facts, 1, e.sides())); err != nil {
		return err
	}
	if o.file != "" {
		return drawProcesses(o.file, spreads)
	}
	return nil
}

// startServers starts the servers on their half of the processors; the other is for the processes.
func (o *processesOptions) startServers(ctx context.Context, stderr io.Writer) (e *env, err error) {
	var servers, clients *processors
	if !o.together {
		if servers, clients, err = halves(); err != nil {
			return nil, err
		}
	}
	postgres := throwaway.Options{Fsync: true, Settings: map[string]string{"max_connections": "400"}}
	err = servers.run(func() (err error) {
		e, err = startServers(ctx, postgres, defaults().redisServer, stderr)
		return err
	})
	if err == nil && e.postgres.server.Here { // or others started it, as a container engine
		e.servers, e.clients = servers, clients
	}
	return e, err
}

// sides says in words on which processors all of it runs.
func (e *env) sides() string {
	if e.servers == nil {
		return "servers and processes share all processors"
	}
	return fmt.Sprintf("servers on processor %v, processes on %v", e.servers, e.clients)
}

// task returns the task of the processes of a job in a round.
func (e *env) task(j processesJob, limit ratelimit.TokenBucket, key string) childTask {
	limit.Name = "processes/" + j.String()
	task := childTask{URL: e.postgres.server.URL, Schema: e.postgres.schema, Impl: j.impl, Limit: limit, Key: key, WarmUp: 2 * escrow}
	if e.redis != nil {
		task.Redis = e.redis.address
	}
	return task
}

// measure adds a round.
func (s *spread) measure(ctx context.Context, e *env, n int, duration time.Duration) error {
	task := e.task(s.processesJob, plenty, fmt.Sprint("round ", n))
	task.Round = duration
	reports, err := s.run(ctx, e.clients, task)
	if err != nil {
		return err
	}
	total := newSample()
	elapsed := time.Duration(0)
	var least, most float64
	for i := range reports {
		one, err := reports[i].sample()
		if err != nil {
			return err
		}
		total.add(one)
		total.counts.add(one.counts)
		elapsed = max(elapsed, one.elapsed)
		pace := float64(one.decided) / duration.Seconds()
		if i == 0 || pace < least {
			least = pace
		}
		most = max(most, pace)
	}
	if total.firstErr != nil {
		return total.firstErr
	}
	s.pace = append(s.pace, float64(total.decided)/duration.Seconds())
	s.p99 = append(s.p99, time.Duration(total.latency.ValueAtQuantile(99)))
	s.statements = append(s.statements, float64(total.counts.statements)/elapsed.Seconds())
	s.retries = append(s.retries, float64(total.counts.retries)/float64(max(total.decisions, 1)))
	s.least, s.most = append(s.least, least), append(s.most, most)
	return nil
}

func printProcesses(w io.Writer, spreads []spread, checks *lab.Findings, facts []string) error {
	p := &printer{w: w}
	for i := range spreads {
		s := &spreads[i]
		if i == 0 || s.name != spreads[i-1].name {
			p.linef("\n%s\n", s.title)
			p.linef("  %-42s %12s %9s %9s %12s %10s %10s", "", "a second", "p99", "retries", "statements/s", "least", "most")
		}
		if i == 0 || s.crowd != spreads[i-1].crowd || s.name != spreads[i-1].name {
			p.linef("  %s, %s in each", plural(s.processes, "process"), plural(s.callers, "goroutine"))
		}
		statements := "-" // Redis has none
		if !needsRedis[s.impl] {
			statements = thousands(median(s.statements))
		}
		p.linef("    %-40s %12s %9s %9s %12s %10s %10s", s.impl, thousands(median(s.pace)), latency(median(s.p99)), few(median(s.retries)),
			statements, thousands(median(s.least)), thousands(median(s.most)))
	}
	p.criteria(checks)
	p.linef("\nOn")
	for _, fact := range facts {
		p.linef("  %s", fact)
	}
	return p.err
}

// processesChecker judges the measurements.
type processesChecker struct {
	checker
	spreads []spread
}

func (c *processesChecker) of(name string, processes int, impl string) *spread {
	for i := range c.spreads {
		if s := &c.spreads[i]; s.name == name && s.processes == processes && s.impl == impl {
			return s
		}
	}
	return nil
}

// compare judges one implementation by another, or by itself in another crowd, if both were measured.
func (c *processesChecker) compare(name string, a int, impl string, b int, other string, judge func(a, b *spread)) {
	if x, y := c.of(name, a, impl), c.of(name, b, other); x != nil && y != nil {
		judge(x, y)
	}
}

func checkProcesses(spreads []spread) *lab.Findings {
	c := &processesChecker{spreads: spreads}
	c.Claim = "Transactions with tokens from memory, from 200 ms after the first call on"
	c.compare(processesTx, 8, oursTxEscrow, 8, noLimit, func(ours, free *spread) {
		c.atLeast("8 processes, as a share of no limit", ratio(ours.pace, free.pace), 0.9)
		c.atMost("p99, as a multiple of that without a limit", ratio(ours.p99, free.p99), 1.2)
		c.atMost("retries a transaction", median(ours.retries), 0)
	})
	c.compare(processesTx, 40, oursTxLong, 40, noLimit, func(ours, free *spread) {
		c.atLeast("40 processes, and tokens for 1 s, as a share of no limit", ratio(ours.pace, free.pace), 0.8)
	})
	c.compare(processesTx, 40, oursTxEscrow, 40, noLimit, func(ours, free *spread) {
		c.atLeast("40 processes, as a share of no limit", ratio(ours.pace, free.pace), 0.8)
	})
	c.Claim = "Transactions that take from the row"
	c.compare(processesTx, 8, oursTx, 1, oursTx, func(many, one *spread) {
		c.atLeast("8 processes, as a share of one", ratio(many.pace, one.pace), 0.8)
		c.atMost("p99, as a multiple of that of one", ratio(many.p99, one.p99), 2)
		c.atMost("retries a transaction", median(many.retries), 0.05)
		c.atLeast("least of the processes, as a share of most", ratio(many.least, many.most), 0.8)
	})
	c.Claim = "Decisions on their own"
	c.compare(processesOwn, 8, oursCombined, 8, plainUpdate, func(ours, updates *spread) {
		bound, share := make([]float64, len(updates.pace)), make([]time.Duration, len(updates.pace))
		for i, pace := range updates.pace {
			bound[i] = pace * float64(updates.callers)
			share[i] = time.Duration(float64(updates.processes*updates.callers) / bound[i] * float64(time.Second))
		}
		c.atLeast("8 processes, as a share of UPDATEs a second × goroutines in a process", ratio(ours.pace, bound), 0.9)
		c.atMost("p99, as a multiple of 64 goroutines' share of that", ratio(ours.p99, share), 1.5)
		c.atLeast("least of the processes, as a share of most", ratio(ours.least, ours.most), 0.9)
	})
	c.compare(processesOwn, 8, oursEscrow, 1, oursEscrow, func(many, one *spread) {
		c.atLeast("with escrow, 8 processes, as a share of one", ratio(many.pace, one.pace), 0.8)
		c.atLeast("with escrow, least of the processes, as a share of most", ratio(many.least, many.most), 0.8)
	})
	return &c.Findings
}

// drawProcesses draws two panels of bars for the transactions, in groups by the number of processes.
func drawProcesses(file string, spreads []spread) error {
	styles := map[string]chart.Style{noLimit: chart.Grey, oursTxEscrow: chart.Teal, oursTxLong: chart.Teal, oursTx: chart.Blue, oursTx32: chart.Violet}
	pace := chart.FiguresPanel{Label: "transactions a second"}
	slow := chart.FiguresPanel{Label: "p99, ms"}
	for _, processes := range []int{1, 8, 40} {
		var paces, slows chart.Group
		for i := range spreads {
			if s := &spreads[i]; s.name == processesTx && s.processes == processes {
				paces.Name = s.crowd.String() + " (processes × goroutines)"
				paces.Bars = append(paces.Bars, chart.Bar{Name: s.impl, Style: styles[s.impl], Value: math.Round(median(s.pace))})
				slows.Bars = append(slows.Bars, chart.Bar{Name: s.impl, Style: styles[s.impl], Value: math.Round(median(s.p99).Seconds()*1e4) / 10})
			}
		}
		if slows.Name = paces.Name; paces.Bars != nil {
			pace.Groups, slow.Groups = append(pace.Groups, paces), append(slow.Groups, slows)
		}
	}
	if pace.Groups == nil {
		return errors.New("nothing to draw: --plot shows transactions in 1, 8 and 40 processes")
	}
	return drawFigures(file, "Transactions with one INSERT, all on one key", pace, slow)
}
