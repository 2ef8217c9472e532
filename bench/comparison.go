package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"
)

// comparison is how one is made that is none of the cases: "bench windows", "bench
// escrow", "bench processes".
type comparison struct {
	file   string // for a picture; "" for none
	rounds int
	round  time.Duration
}

// parseComparison parses the arguments of a comparison, which may have more flags.
func parseComparison(name, help string, round time.Duration, args []string, stderr io.Writer, more ...func(*flag.FlagSet)) (c comparison, err error) {
	flags := flag.NewFlagSet("bench "+name, flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.Usage = func() {
		fmt.Fprint(stderr, help)
		flags.PrintDefaults()
	}
	flags.StringVar(&c.file, "plot", "", "draw the results into this `file`, as SVG")
	flags.IntVar(&c.rounds, "rounds", 5, "how often each measurement is made")
	flags.DurationVar(&c.round, "round", round, "how long one takes")
	for _, add := range more {
		add(flags)
	}
	if err := flags.Parse(args); err != nil {
		return c, err
	}
	if flags.NArg() > 0 {
		return c, fmt.Errorf("arguments that mean nothing: %q", flags.Args())
	}
	return c, nil
}

// warmedUp is how long a round of compared takes, of that which counts.
const warmedUp = 1.25

// compared returns the n-th round of a contender, after a quarter of it to warm up, and its
// decisions a second.
func compared(ctx context.Context, p *postgresServer, c contender, keys []string, n int, duration time.Duration) (s *sample, perSecond float64, err error) {
	r := round{contender: c, keys: keys, goroutines: busy, warmUp: duration / 4, duration: duration, seed: uint64(n)}
	s = r.run(ctx, p.counts)
	return s, float64(s.decided) / duration.Seconds(), errors.Join(ctx.Err(), s.firstErr)
}
