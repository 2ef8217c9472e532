// Httpload measures an HTTP service with and without limits:
//
//	go run ./bench/httpload
//
// The service and a throwaway PostgreSQL run here; the load comes over loopback from a
// second process, which is vegeta, as fast as a number of connections allow. It prints
// requests a second, and the 50th and 99th percentile of how long they took, and
// checks that no limit granted more than it had, and that there is an order in the
// database for each token.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "httpload:", err)
		os.Exit(1)
	}
}

// options are the options of both processes.
type options struct {
	duration    time.Duration
	rounds      int
	connections int
	attack      string // the URL, in the second process
	keys        int
}

func run(ctx context.Context, args []string, out io.Writer) error {
	var o options
	flags := flag.NewFlagSet("httpload", flag.ContinueOnError)
	flags.DurationVar(&o.duration, "duration", 3*time.Second, "how long each case runs in each round")
	flags.IntVar(&o.rounds, "rounds", 3, "how often all cases run; the median is told")
	flags.IntVar(&o.connections, "connections", 64, "how many requests are under way at a time")
	flags.StringVar(&o.attack, "attack", "", "used by the program itself: send requests to this URL")
	flags.IntVar(&o.keys, "keys", 1, "used by the program itself: how many users there are")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if o.duration <= 0 || o.rounds < 1 || o.connections < 1 || o.keys < 1 || flags.NArg() > 0 {
		return errors.New("all numbers must be positive, and there are no arguments")
	}
	if o.attack != "" {
		return json.NewEncoder(out).Encode(attack(o))
	}
	return measure(ctx, o, out)
}

// secondProcess has another process send the requests, and returns its measurement.
func secondProcess(ctx context.Context, o options) (m load, err error) {
	program, err := os.Executable()
	if err != nil {
		return m, err
	}
	cmd := exec.CommandContext(ctx, program, "-attack", o.attack, "-duration", o.duration.String(),
		"-connections", fmt.Sprint(o.connections), "-keys", fmt.Sprint(o.keys))
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		return m, fmt.Errorf("the process that sends requests: %w", err)
	}
	return m, json.Unmarshal(text, &m)
}

// measure runs all cases in turn, several rounds of them, and prints a table.
func measure(ctx context.Context, o options, out io.Writer) error {
	s, err := start(ctx)
	if err != nil {
		return err
	}
	defer s.close()
	facts, err := s.facts(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s, %d cores, %d connections, %d rounds of %v\n\n", facts, runtime.NumCPU(), o.connections, o.rounds, o.duration)
	cases := s.cases()
	loads := make([][]load, len(cases))
	for range o.rounds {
		for i, c := range cases {
			l, err := s.round(ctx, o, c)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			loads[i] = append(loads[i], l)
		}
	}
	fmt.Fprintf(out, "| | requests a second | p50 ms | p99 ms | refused |\n|---|---|---|---|---|\n")
	for i, c := range cases {
		m := median(loads[i])
		fmt.Fprintf(out, "| %s | %.0f | %.2f | %.2f | %.0f %% |\n", c.name, m.Rate, ms(m.P50), ms(m.P99), 100*m.refused())
	}
	fmt.Fprintf(out, "\n%d checks hold: no limit granted more than it had, and there is an order for each token.\n", s.checks)
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
