// Command bench compares limits in PostgreSQL with Redis and with limits written by hand, side
// by side in one run on one machine. See "bench -h".
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
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
  permits-one-key, permits-10k-keys   how many at once: a permit is taken, and
                                      released
  over-grant                          64 goroutines ask a limit of burst 10 and
                                      10 a second for 3 s: at most 40 are right
  granted-one-key-1ms, tx-one-key-1ms as above, and every answer of a server
                                      comes 1 ms late, as over a network
  processes-decisions, processes-tx   the same 64 goroutines in 1, 2, 4 and 8
                                      processes, and 80 in 40, with new ones and
                                      a new key in each round; least and most
                                      are those of a process

"ours, combined" is Store.Allow over 4 connections, and "escrow" takes ahead for
100 ms, if it names no other time; all else in PostgreSQL has 16. "single-row
UPDATE" counts and limits nothing: it is PostgreSQL's own bound for one statement
a decision. With "synchronous_commit off" a decision does not wait for the disk,
as with the Redis here; if the server fails, the last half second of decisions
may be granted again. While calls take less than a microsecond one of sixteen is
timed, of every implementation. The tables that are not ours have the fillfactor
of ours. go-redis and rueidis have their defaults. Permits in Redis are the usual
semaphore, a sorted set of holders; with "fsync" Redis waits for the disk as
PostgreSQL does.

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
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the jobs to run, and for how long.
type options struct {
	only *regexp.Regexp
	list bool
	docs string // the directory

	levels    []int         // how many goroutines
	rounds    int           // of each measurement
	round     time.Duration // of each round
	warmUp    time.Duration // before each round
	overGrant time.Duration
}

func parse(args []string, stderr io.Writer) (options, error) {
	o := options{
		levels: []int{1, 16, 64, 256},
		rounds: 5, round: time.Second, warmUp: 2 * escrow,
		overGrant: 3 * time.Second,
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, help)
		flags.PrintDefaults()
	}
	quick := flags.Bool("quick", false, "some three minutes for all: short rounds, 1, 64 and 256 goroutines")
	only := flags.String("only", "", "measure only what this `regexp` finds in its line of --list")
	flags.BoolVar(&o.list, "list", false, "list what can be measured, as case/goroutines/implementation, and exit")
	flags.StringVar(&o.docs, "docs", "", "write the results into docs/benchmark.md and its picture, in this `directory`")
	rounds := flags.Int("rounds", 0, "how often each measurement is made (default 5, or 3 with --quick)")
	round := flags.Duration("round", 0, "how long one takes (default 1s, or 150ms with --quick)")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("arguments that mean nothing: %q", flags.Args())
	}
	if *quick {
		o.levels = []int{1, 64, 256}
		o.rounds, o.round, o.warmUp = 3, 150*time.Millisecond, escrow // until prefetching has found its measure
		o.overGrant = time.Second
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
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	jobs := o.jobs()
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
	e, err := startServers(ctx, stderr)
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
		dir := filepath.Join(o.docs, "docs")
		if err := errors.Join(writePage(dir, report.String(), checks), drawPlot(dir, results)); err != nil {
			return err
		}
	}
	return wrong(results)
}

// writePage writes the claims of a run, and its whole output, between the marked lines of benchmark.md.
func writePage(dir, report string, checks *lab.Findings) error {
	file := filepath.Join(dir, "benchmark.md")
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("reading what to write into: %w", err)
	}
	var claims strings.Builder
	checks.Markdown(&claims)
	page, err := lab.Between(string(text), "<!-- bench: claims -->\n", claims.String())
	if err == nil {
		page, err = lab.Between(page, "<!-- bench: run -->\n", "```\n"+strings.Trim(report, "\n")+"\n```\n")
	}
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, []byte(page), 0o644)
}
