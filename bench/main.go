// Command bench compares limits in PostgreSQL with Redis and with limits written by hand, side
// by side in one run on one machine. See "bench -h".
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

const help = `Usage: go run ./bench [flags]

Compares limits in PostgreSQL with Redis and with what people write by hand, on
a throwaway PostgreSQL with its default durability (fsync on) and a throwaway
Redis that keeps nothing on disk, both over TCP on this machine. With
DATABASE_URL it uses that server, in a schema of its own. Without redis-server
the rest runs.

Every goroutine calls again as soon as it has its answer. All implementations
of a case take turns, in several short rounds after a warm-up each; a figure is
the median of its rounds. Only what was answered within a round counts as
throughput; the latency of the rest counts too. Nothing of a warm-up counts,
statements and round trips neither.

What is measured:

  granted-one-key, granted-10k-keys   decisions that are granted, each on its
                                      own; trips are round trips a decision,
                                      statements/s what PostgreSQL is sent, BEGIN
                                      and COMMIT too (of one key: for that key)
  refused-one-key, refused-10k-keys   decisions that are refused
  tx-one-key, tx-10k-keys             transactions with one INSERT and a limit;
                                      retries are those a transaction
  over-grant                          64 goroutines ask a limit of burst 10 and
                                      10 a second for 3 s: at most 40 are right
  churn-one-key, churn-10k-keys       a million decisions: does the table stay
                                      small, and are its updates HOT? It is
                                      vacuumed each minute; early is after two
  granted-one-key-1ms, tx-one-key-1ms as above, with 1 ms of network before the
                                      servers: see --network

"ours, combined" is Store.Allow over 4 connections, and "escrow" takes ahead for
100 ms; all else in PostgreSQL has 16. "single-row UPDATE" counts and limits
nothing: it is PostgreSQL's own bound for one statement a decision. "UPDATE of
many rows, combined" is its bound for calls that gather as ours do: over two
connections, and in our table, a statement that only writes their rows. With
"synchronous_commit off" a decision does not wait for the disk, as with the Redis
here; if the server fails, the last half second of decisions may be granted again.
"nothing" is a call that does nothing: what the program itself takes. While calls
take less than a microsecond it times one of sixteen, of every implementation.
The tables that are not ours have the fillfactor of ours. go-redis and rueidis
have their defaults.

With --network 1ms a proxy in this program passes all that goes to PostgreSQL and
to Redis, and all that comes back, on half a millisecond later, so that a round
trip takes 1 ms more, and no less goes through. What a ping takes with it and
without is measured and printed. The proxy needs the processor, too.

"bench windows" is another comparison, of kinds of limits: see "bench windows -h". "bench
escrow" is one of lengths of pgstore.Config.Escrow, "bench processes" of numbers of
processes, and "bench permits" of limits of how many at once.

Flags:
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if lab.IsChild() {
		err = runChild(ctx)
	} else {
		err = run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the jobs to run, and for how long.
type options struct {
	only     *regexp.Regexp
	list     bool
	plotFile string
	docs     string // the directory

	levels    []int         // how many goroutines
	rounds    int           // of each measurement
	round     time.Duration // of each round
	warmUp    time.Duration // before each round
	overGrant time.Duration
	churn     churnSize

	network time.Duration // before the servers, in cases that have none of their own

	redisServer string // the program
}

func defaults() options {
	return options{
		levels: []int{1, 16, 64, 256},
		rounds: 5, round: time.Second, warmUp: 200 * time.Millisecond,
		overGrant:   3 * time.Second,
		churn:       churnSize{decisions: 1_000_000, vacuum: time.Minute, atLeast: 3 * time.Minute},
		redisServer: "redis-server",
	}
}

// quicken makes all of it run in some three minutes.
func (o *options) quicken() {
	o.levels = []int{1, 64, 256}
	o.rounds, o.round, o.warmUp = 3, 150*time.Millisecond, escrow // until prefetching has found its measure
	o.overGrant = time.Second
	o.churn = churnSize{decisions: 20_000, vacuum: time.Second, atLeast: 4 * time.Second}
}

func parse(args []string, stderr io.Writer) (options, error) {
	o := defaults()
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, help)
		flags.PrintDefaults()
	}
	quick := flags.Bool("quick", false, "some three minutes for all: short rounds, 1, 64 and 256 goroutines")
	only := flags.String("only", "", "measure only what this `regexp` finds in its line of --list")
	flags.BoolVar(&o.list, "list", false, "list what can be measured, as case/goroutines/implementation, and exit")
	flags.StringVar(&o.plotFile, "plot", "", "draw the results into this `file`, as SVG")
	flags.StringVar(&o.docs, "docs", "", "write the results into docs/benchmark.md and its picture, in this `directory`")
	flags.DurationVar(&o.network, "network", 0, "how much `longer` a round trip to a server is to be, half of it each way")
	rounds := flags.Int("rounds", 0, "how often each measurement is made (default 5, or 3 with --quick)")
	round := flags.Duration("round", 0, "how long one takes (default 1s, or 150ms with --quick)")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("arguments that mean nothing: %q", flags.Args())
	}
	if o.network < 0 {
		return o, fmt.Errorf("--network %v: no round trip is shorter than without", o.network)
	}
	if *quick {
		o.quicken()
	}
	if *rounds > 0 {
		o.rounds = *rounds
	}
	if *round > 0 {
		o.round = *round
	}
	var err error
	if o.only, err = regexp.Compile(*only); err != nil {
		return o, fmt.Errorf("--only: %w", err)
	}
	return o, nil
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 {
		switch args[0] {
		case "windows":
			return runWindows(ctx, args[1:], stdout, stderr)
		case "escrow":
			return runTrade(ctx, args[1:], stdout, stderr)
		case "processes":
			return runProcesses(ctx, args[1:], stdout, stderr)
		case "permits":
			return runPermits(ctx, args[1:], stdout, stderr)
		}
	}
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	return runWith(ctx, o, stdout, stderr)
}

// cases returns all that there are, with network before the servers.
func (o options) cases() []testCase {
	cases := allCases(o.levels)
	for i := range cases {
		c := &cases[i]
		c.network = cmp.Or(c.network, o.network)
		if c.network > 0 {
			c.title += fmt.Sprintf(", %v of network", c.network)
		}
	}
	return cases
}

func runWith(ctx context.Context, o options, stdout, stderr io.Writer) error {
	jobs := selectJobs(o.cases(), o.only)
	if len(jobs) == 0 {
		return fmt.Errorf("nothing to measure matches --only %q; see --list", o.only)
	}
	if o.list {
		for _, j := range jobs {
			fmt.Fprintln(stdout, j)
		}
		return nil
	}
	results, facts, err := measureJobs(ctx, o, jobs, stderr)
	if err != nil {
		return err
	}
	return o.present(results, facts, stdout)
}

// measureJobs measures jobs, and returns the facts that the figures depend on as well.
func measureJobs(ctx context.Context, o options, jobs []job, stderr io.Writer) (results []result, facts []string, err error) {
	e, err := startServers(ctx, durable, o.redisServer, stderr)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	if results, err = measureAll(ctx, e, o, jobs, stderr); err != nil {
		return nil, nil, err
	}
	facts, err = e.facts(ctx)
	return results, facts, err
}

// present prints results, writes the documents that are wanted, and returns an error for those that no
// run may have.
func (o options) present(results []result, facts []string, stdout io.Writer) error {
	checks := check(results)
	var report bytes.Buffer
	if err := printReport(io.MultiWriter(stdout, &report), results, checks, facts); err != nil {
		return err
	}
	if o.docs != "" {
		if err := writeDocs(o.docs, report.String(), checks); err != nil {
			return err
		}
		o.plotFile = cmp.Or(o.plotFile, filepath.Join(o.docs, "docs", "benchmark.svg"))
	}
	if o.plotFile != "" {
		if err := drawPlot(o.plotFile, results); err != nil {
			return err
		}
	}
	return wrong(results)
}
