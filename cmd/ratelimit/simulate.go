package main

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/chart"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/trial"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// mostDrawn is how many limits a picture has.
const mostDrawn = 4

// pictureFlags are the flags of verbs that draw.
type pictureFlags struct{ file, theme string }

func (f *pictureFlags) addTo(c *cobra.Command, prefix string) {
	c.Flags().StringVar(&f.file, "plot", "", prefix+"a file for a picture (SVG) of a key's tokens over time, with the calls that are granted and refused")
	c.Flags().StringVar(&f.theme, "theme", "auto", prefix+"of the picture: auto, light or dark")
}

func (f *pictureFlags) check() error {
	if !slices.Contains([]chart.Theme{chart.Auto, chart.Light, chart.Dark}, chart.Theme(f.theme)) {
		return bad("--theme %q: want auto, light or dark", f.theme)
	}
	return nil
}

func (f *pictureFlags) write(c *chart.Chart) error {
	c.Theme = chart.Theme(f.theme)
	return os.WriteFile(f.file, []byte(c.SVG()), 0o644) // names the file in its error
}

// simulateFlags are the flags of simulate.
type simulateFlags struct {
	limitSources
	load       trial.Load
	capacities []float64
	reserve    bool
	picture    pictureFlags
}

func simulateCommand(o *options) *cobra.Command {
	var f simulateFlags
	c := &cobra.Command{
		Use:   "simulate",
		Short: "Have callers that are made up meet limits, and say what becomes of them",
		Long: `Have callers that are made up meet limits in memory, and say how many are refused, how long
they wait until they are served, and how much a key gets within a period at most: at a
window's edge that can be twice the rate. Callers come at random at a rate, in bursts, or as a
herd; those that are refused come again as --retry says:

  never     they give up
  promised  at the instant that the refusal told, all of them
  jitter    after it, by up to --spread later
  fixed     after --spread, whatever the refusal told

Everything begins at midnight UTC, and is the same for the same --seed.`,
		Example: `  ratelimit simulate --limit '10 per 1m, capacity 20' --rate 0.3 --for 10m
  ratelimit simulate --limit '60 per 1m' --capacities 1,5,10,30,60 --rate 1 --retry jitter
  ratelimit simulate --limit 'fixed window, 100 per 1m' --limit 'sliding window, 100 per 1m' --burst 100 --every 59s --plot edge.svg`,
		GroupID: trying,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(); err != nil {
				return err
			}
			return f.run(cmd, o.printer(cmd))
		},
	}
	flags := c.Flags()
	flags.StringArrayVar(&f.texts, "limit", nil, limitHelp)
	flags.StringVar(&f.definitions, "definitions", "", "a file of definitions, as catalog export prints")
	flags.Float64SliceVar(&f.capacities, "capacities", nil, "try each limit with each of these capacities: what capacity buys")
	flags.DurationVar(&f.load.For, "for", 10*time.Minute, "how long callers come")
	flags.Float64Var(&f.load.Rate, "rate", 0, "callers a second, at random instants")
	flags.IntVar(&f.load.Burst, "burst", 0, "callers that come at once, at the beginning and each --every")
	flags.DurationVar(&f.load.Every, "every", 0, "the time between bursts; one burst if left out")
	flags.IntVar(&f.load.Herd, "herd", 0, "callers that come at once, such as after an outage, at --herd-at")
	flags.DurationVar(&f.load.HerdAt, "herd-at", time.Minute, "when the herd comes")
	flags.IntVar(&f.load.Keys, "keys", 1, "keys among which callers are spread")
	flags.Float64Var(&f.load.Count, "count", 1, "tokens that a call takes")
	flags.StringVar((*string)(&f.load.Retry), "retry", "never", "what callers do that are refused: never, promised, jitter or fixed")
	flags.DurationVar(&f.load.Spread, "spread", 10*time.Second, "of jitter and fixed")
	flags.IntVar(&f.load.Attempts, "attempts", 10, "calls of a caller at most, the first included")
	flags.BoolVar(&f.reserve, "reserve", false, "callers reserve, and wait until they are due")
	flags.DurationVar(&f.load.Pause, "pause", 0, "pause all keys for so long, at --pause-at")
	flags.DurationVar(&f.load.PauseAt, "pause-at", time.Minute, "when they are paused")
	flags.Uint64Var(&f.load.Seed, "seed", 1, "other numbers have other callers come")
	f.picture.addTo(c, "")
	return o.listing(c)
}

func (f *simulateFlags) check() error {
	l := &f.load
	for _, flag := range []struct {
		name     string
		v, least float64
	}{
		{"rate", l.Rate, 0},
		{"burst", float64(l.Burst), 0},
		{"herd", float64(l.Herd), 0},
		{"keys", float64(l.Keys), 1},
		{"attempts", float64(l.Attempts), 1},
		{"count", l.Count, 0},
		{"every", l.Every.Seconds(), 0},
		{"spread", l.Spread.Seconds(), 0},
		{"herd-at", l.HerdAt.Seconds(), 0},
		{"pause", l.Pause.Seconds(), 0},
		{"pause-at", l.PauseAt.Seconds(), 0},
		{"for", l.For.Seconds(), 0.001},
	} {
		if flag.v < flag.least || math.IsNaN(flag.v) || math.IsInf(flag.v, 0) {
			return bad("--%s %g: must be at least %g", flag.name, flag.v, flag.least)
		}
	}
	switch {
	case !slices.Contains([]trial.Retry{trial.Never, trial.Promised, trial.Jittered, trial.Fixed}, l.Retry):
		return bad("--retry %q: want never, promised, jitter or fixed", l.Retry)
	case l.Retry == trial.Fixed && l.Spread < time.Millisecond:
		return bad("--spread %s: must be at least 1ms for --retry fixed", l.Spread)
	case l.Rate == 0 && l.Burst == 0 && l.Herd == 0:
		return bad("nobody comes: give --rate, --burst or --herd")
	}
	return f.picture.check()
}

// outcomeJSON is the outcomes of callers.
type outcomeJSON struct {
	trialJSON
	Callers int    `json:"callers"`
	Served  int    `json:"served"`
	GaveUp  int    `json:"gaveUp"`
	Wait50  string `json:"wait50"` // until they were served
	Wait99  string `json:"wait99"`
	WaitMax string `json:"waitMax"`
	Busiest int    `json:"busiest"` // calls within a millisecond
}

func (f *simulateFlags) run(cmd *cobra.Command, p *printer) error {
	limits, err := f.limits(bufio.NewReader(cmd.InOrStdin()))
	if err == nil {
		limits, err = withCapacities(limits, f.capacities)
	}
	if err != nil {
		return err
	}
	picture := chart.Chart{Title: "Calls of a key that are granted and refused", X: chart.Time(trial.Origin(), f.load.For, false)}
	table := p.table("CALLERS", "CALLS", "REFUSED", "SERVED", "WAIT 50 %", "99 %", "LONGEST", "AT ONCE", "MOST IN A PERIOD", "LIMIT")
	for i, limit := range limits {
		watch := f.load.WatchOf()
		out, err := trial.Simulate(cmd.Context(), limit, f.load, f.reserve, watch)
		if err != nil {
			return asBad(err)
		}
		if i < mostDrawn {
			picture.Panels = append(picture.Panels, watch.Panels(&out.Tally)...)
		}
		waits := [3]time.Duration{out.Wait(0.5), out.Wait(0.99), out.Wait(1)}
		v := outcomeJSON{trialJSONOf(out.Trial, 0), out.Callers, out.Served, out.GaveUp, waits[0].String(), waits[1].String(), waits[2].String(), out.Busiest}
		err = table.row(v, fmt.Sprint(out.Callers), fmt.Sprint(out.Calls), percent(out.RefusedShare()),
			percent(float64(out.Served)/float64(max(out.Callers, 1))), inspect.Span(waits[0]), inspect.Span(waits[1]), inspect.Span(waits[2]),
			fmt.Sprint(out.Busiest), visible.Amount(out.Peak), visible.Lines(out.Limit.String()))
		if err != nil {
			return err
		}
	}
	if f.picture.file != "" {
		if err := f.picture.write(&picture); err != nil {
			return err
		}
	}
	return table.end()
}
