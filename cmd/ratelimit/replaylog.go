package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/chart"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/trial"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// logFlags are the flags of replay for logs.
type logFlags struct {
	limitSources
	keys              []string
	count, time, form string
	reserve           bool
	most              int
	picture           pictureFlags
	plotKey           string
}

func (f *logFlags) addTo(c *cobra.Command) {
	flags := c.Flags()
	flags.StringArrayVar(&f.texts, "limit", nil, "log: "+limitHelp)
	flags.StringVar(&f.definitions, "definitions", "", "log: a file of definitions, as catalog export prints")
	flags.StringSliceVar(&f.keys, "key", nil, "log: what the key is: of an access log remote (the default), user, method, path or agent, of CSV a column; several, with commas, make one key")
	flags.StringVar(&f.count, "count", "", "log: the column of CSV with the tokens that a call takes; 1 if left out")
	flags.StringVar(&f.time, "time", "", "log: the column of CSV with the time; one of the usual names if left out")
	flags.StringVar(&f.form, "time-format", "", "log: of times in CSV, as Go writes it: 2006-01-02 15:04:05")
	flags.BoolVar(&f.reserve, "reserve", false, "log: calls reserve, and wait until they are due")
	flags.IntVar(&f.most, "most", 5, "log: how many of the keys that were refused most often are listed")
	flags.StringVar(&f.plotKey, "plot-key", "", "log: the key of the picture; the one that was refused most often if left out")
	f.picture.addTo(c, "log: ")
}

// logNames are the names of flags that scenarios do not take.
var logNames = []string{"limit", "definitions", "key", "count", "time", "time-format", "reserve", "most", "plot-key", "plot", "theme"}

// isScenario looks whether a file is a scenario: whether what it begins with, after comments, is a
// JSON object.
func isScenario(head []byte) bool {
	for line := range bytes.Lines(head) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' {
			return line[0] == '{'
		}
	}
	return true
}

// sniff looks at how each file begins, and returns whether they are scenarios or logs.
func sniff(stdin *bufio.Reader, files []string) (scenarios bool, err error) {
	for i, file := range files {
		in, closeIn, err := open(stdin, file)
		if err != nil {
			return false, err
		}
		head, err := in.Peek(4096)
		closeIn()
		if err != nil && !errors.Is(err, io.EOF) {
			return false, badInput{fmt.Errorf("%s: %w", file, err)}
		}
		is := isScenario(head)
		if i > 0 && is != scenarios {
			return false, bad("%s and %s: one is a scenario, and the other a log", files[0], file)
		}
		scenarios = is
	}
	return scenarios, nil
}

// open opens a file; - is standard input.
func open(stdin *bufio.Reader, file string) (in *bufio.Reader, closeIn func(), err error) {
	if file == "-" {
		return stdin, func() {}, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, nil, badInput{err}
	}
	return bufio.NewReader(f), func() { f.Close() }, nil
}

// replayLogs tries limits out on the calls of logs.
func replayLogs(cmd *cobra.Command, p *printer, stdin *bufio.Reader, files []string, f *logFlags) error {
	if f.most < 0 {
		return bad("--most %d: must not be negative", f.most)
	}
	limits, err := f.limits(stdin)
	if err != nil {
		return err
	}
	if err := f.picture.check(); err != nil {
		return err
	}
	bar := newBar(cmd)
	defer bar.end()
	calls, err := f.readAll(stdin, files, bar)
	if err != nil {
		return err
	}
	trials := make([]*trial.Trial, len(limits))
	for i, limit := range limits {
		trials[i], err = trial.Replay(cmd.Context(), limit, calls, f.reserve, nil, func(done int) {
			bar.show("limit "+fmt.Sprint(i+1), float64(done)/float64(len(calls)))
		})
		if err != nil {
			return namePlace(err, files)
		}
	}
	bar.end()
	if f.picture.file != "" {
		if err := f.draw(cmd.Context(), limits, trials, calls); err != nil {
			return err
		}
	}
	return f.report(p, trials)
}

// namePlace says in which line of which file a call stands that a limit cannot make sense of.
func namePlace(err error, files []string) error {
	if e, ok := errors.AsType[*trial.CallError](err); ok {
		return bad("%s:%d: %w", files[e.Call.File], e.Call.Line, e.Err)
	}
	return asBad(err)
}

// readAll reads the calls of all files, in the order of their instants.
func (f *logFlags) readAll(stdin *bufio.Reader, files []string, bar *bar) ([]trial.Call, error) {
	r := &callReader{keys: f.keys, count: f.count, time: f.time, format: f.form, texts: map[string]string{}}
	var calls []trial.Call
	for _, file := range files {
		in, closeIn, err := open(stdin, file)
		if err != nil {
			return nil, err
		}
		var size int64
		if info, err := os.Stat(file); err == nil && file != "-" {
			size = info.Size()
		}
		r.said = func(read int64) {
			if size > 0 {
				bar.show("reading "+file, float64(read)/float64(size))
			}
		}
		some, err := r.read(file, in)
		closeIn()
		if err != nil {
			return nil, err
		}
		calls = append(calls, some...)
	}
	if len(calls) == 0 {
		return nil, bad("there is no call in %s", plural(len(files), "file"))
	}
	slices.SortStableFunc(calls, func(a, b trial.Call) int { return a.At.Compare(b.At) })
	return calls, nil
}

// draw draws one key's calls against all limits.
func (f *logFlags) draw(ctx context.Context, limits []ratelimit.Limit, trials []*trial.Trial, calls []trial.Call) error {
	key, err := keyOf(f.plotKey)
	if err != nil {
		return err
	}
	if f.plotKey == "" {
		key = trials[0].Most(1)[0].Key
	}
	from, to := calls[0].At, calls[len(calls)-1].At
	calls = slices.DeleteFunc(slices.Clone(calls), func(c trial.Call) bool { return c.Key != key })
	if len(calls) == 0 {
		return bad("--plot-key %s: there is no call of it", visible.Text(key))
	}
	watch := trial.NewWatch(key, from, to)
	c := chart.Chart{Title: "Calls of " + visible.Short(key, 60), X: chart.Time(watch.From, watch.To.Sub(watch.From), true)}
	for _, limit := range limits[:min(len(limits), mostDrawn)] {
		watch := trial.NewWatch(key, from, to)
		t, err := trial.Replay(ctx, limit, calls, f.reserve, watch, nil)
		if err != nil {
			return err
		}
		c.Panels = append(c.Panels, watch.Panels(&t.Tally)...)
	}
	return f.picture.write(&c)
}

// trialJSON is the outcomes of calls against a limit.
type trialJSON struct {
	*trial.Tally
	RefusedShare float64          `json:"refusedShare"`
	LongestWait  string           `json:"longestWait"`
	Most         []trial.KeyTally `json:"most,omitempty"`
}

func trialJSONOf(t *trial.Trial, most int) trialJSON {
	return trialJSON{&t.Tally, t.RefusedShare(), t.LongestWait.String(), t.Most(most)}
}

// report prints the outcomes of the calls, and the keys refused most.
func (f *logFlags) report(p *printer, trials []*trial.Trial) error {
	table := p.table("CALLS", "KEYS", "GRANTED", "REFUSED", "", "LONGEST WAIT", "MOST IN A PERIOD", "LIMIT")
	for _, t := range trials {
		err := table.row(trialJSONOf(t, f.most), fmt.Sprint(t.Calls), fmt.Sprint(t.Keys), fmt.Sprint(t.Granted), fmt.Sprint(t.Refused),
			percent(t.RefusedShare()), inspect.Span(t.LongestWait), visible.Amount(t.Peak), visible.Lines(t.Limit.String()))
		if err != nil {
			return err
		}
	}
	if err := table.end(); err != nil || p.json || p.csv {
		return err
	}
	for _, t := range trials {
		if t.Refused == 0 || f.most == 0 {
			continue
		}
		p.say("\nrefused most by %s", visible.Lines(t.Limit.String()))
		table := p.table("CALLS", "REFUSED", "", "KEY")
		for _, k := range t.Most(f.most) {
			if err := table.row(nil, fmt.Sprint(k.Calls), fmt.Sprint(k.Refused), percent(float64(k.Refused)/float64(k.Calls)), p.key(k.Key)); err != nil {
				return err
			}
		}
		if err := table.end(); err != nil {
			return err
		}
	}
	return nil
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// A bar shows progress, on a terminal.
type bar struct {
	out   io.Writer // nil for none
	shown time.Time
}

func newBar(cmd *cobra.Command) *bar {
	if out := cmd.ErrOrStderr(); isTerminal(out) {
		return &bar{out: out}
	}
	return &bar{}
}

// barWidth is how many characters a whole bar has.
const barWidth = 30

// show shows how much is done of what is being done, a few times a second.
func (b *bar) show(what string, share float64) {
	if b.out == nil || time.Since(b.shown) < 100*time.Millisecond {
		return
	}
	b.shown = time.Now()
	full := int(min(share, 1) * barWidth)
	fmt.Fprintf(b.out, "\r\x1b[K%s%s %3.0f %% %s", bytes.Repeat([]byte("█"), full), bytes.Repeat([]byte("░"), barWidth-full), 100*share, visible.Lines(what))
}

func (b *bar) end() {
	if b.out != nil && !b.shown.IsZero() {
		fmt.Fprint(b.out, "\r\x1b[K")
		b.shown = time.Time{}
	}
}
