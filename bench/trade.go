package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/chart"
	"github.com/pgratelimit/ratelimit/internal/curve"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

const tradeHelp = `Usage: go run ./bench escrow [flags]

Measures what pgstore.Config.Escrow gives and what it costs, for several lengths of it:

  a second     decisions of 64 goroutines for one key, all granted
  statements   a second, that these took
  at once      the most that a flood gets at once from a full token bucket of 10,000
               that is refilled with 10,000 a second: what is above the line of its
               rate, over all stretches of the flood

All of it on a throwaway PostgreSQL.

Flags:
`

// trade is the gain and the cost of a length of Config.Escrow.
type trade struct {
	escrow     time.Duration
	pace       float64 // decisions a second
	statements float64 // a second
	atOnce     float64 // tokens
}

func (t trade) String() string {
	if t.escrow == 0 {
		return "none"
	}
	return t.escrow.String()
}

// escrows are the lengths that are compared.
var escrows = []time.Duration{0, 10 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond}

const (
	burstCapacity = 10_000
	burstFor      = 300 * time.Millisecond // of a flood: until a full bucket is empty, and then some
)

// measure fills in t for one round; the best of all is kept.
func (t *trade) measure(ctx context.Context, p *postgresServer, n int, duration time.Duration) error {
	store, err := pgstore.New(p.few, &pgstore.Config{Escrow: t.escrow})
	if err != nil {
		return err
	}
	defer store.Close()
	plenty := ratelimit.TokenBucket{Name: "plenty", Rate: 1e9, Period: time.Second}
	s, pace, err := compared(ctx, p, contender{decide: allow(store, plenty)}, []string{""}, n, duration)
	if err != nil {
		return err
	}
	if pace > t.pace {
		t.pace, t.statements = pace, float64(s.counts.statements)/s.elapsed.Seconds()
	}
	atOnce, err := burst(ctx, store, fmt.Sprint(t, n))
	t.atOnce = max(t.atOnce, atOnce)
	return err
}

// burst returns the most that a flood of a key that was never used gets at once.
func burst(ctx context.Context, store *pgstore.Store, key string) (float64, error) {
	limit := ratelimit.TokenBucket{Name: "burst", Rate: burstCapacity, Period: time.Second}
	var (
		mu     sync.Mutex
		events []curve.Event
	)
	end := time.Now().Add(burstFor)
	err := lab.Each(busy, func(int) error {
		for time.Now().Before(end) {
			result, err := store.Allow(ctx, limit.For(key))
			if err != nil {
				return err
			}
			if result.OK {
				mu.Lock()
				events = append(events, curve.Event{At: result.At, Count: 1})
				mu.Unlock()
			}
		}
		return nil
	})
	return curve.Burst(events, limit.Definition()), err
}

func runTrade(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	o, err := parseComparison("escrow", tradeHelp, 2*time.Second, args, stderr)
	if err != nil {
		return err
	}
	p, err := startPostgres(ctx, durable)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	all := make([]trade, len(escrows))
	for n := range o.rounds {
		for i := range all {
			all[i].escrow = escrows[i]
			if err := all[i].measure(ctx, p, n, o.round); err != nil {
				return fmt.Errorf("escrow of %s: %w", all[i], err)
			}
		}
	}
	if err := printTrade(stdout, all); err != nil {
		return err
	}
	if o.file != "" {
		if err := drawTrade(o.file, all); err != nil {
			return err
		}
	}
	for _, t := range all {
		if t.atOnce > burstCapacity*(1+1e-9) {
			return fmt.Errorf("escrow of %s: %g at once from a bucket of %d", t, t.atOnce, burstCapacity)
		}
	}
	return nil
}

func printTrade(w io.Writer, all []trade) error {
	p := printer{w: w}
	p.linef("%-8s %12s %12s %10s", "Escrow", "a second", "statements", "at once")
	for _, t := range all {
		p.linef("%-8s %12s %12s %10s", t, thousands(t.pace), thousands(t.statements), thousands(t.atOnce))
	}
	return p.err
}

// drawTrade draws a panel of bars for each figure.
func drawTrade(file string, all []trade) error {
	panel := func(label string, limit float64, value func(trade) float64) chart.FiguresPanel {
		return panelOf(label, limit, all, func(t trade) (string, float64, bool) { return "Escrow " + t.String(), value(t), t.escrow > 0 })
	}
	return drawFigures(
		file, "What Config.Escrow gives, and what it costs",
		panel("decisions a second, one key, 64 goroutines", 0, func(t trade) float64 { return t.pace }),
		panel("statements a second that these take", 0, func(t trade) float64 { return t.statements }),
		panel("most at once, from a full bucket of 10,000", burstCapacity, func(t trade) float64 { return t.atOnce }),
	)
}
