// Command report attacks the library from outside, under faults, and asks one
// question: does what callers were told agree with what is in the database? It prints
// a report with what it counted, and fails if one figure is not what it must be, or if
// a fault that it was to live through did not really happen.
//
//	go run ./integration/report          # a quarter of an hour
//	go run ./integration/report --quick  # two minutes, in CI by halves
//	go run ./integration/report --write  # the report into docs/attacks.md as well
//
// It starts PostgreSQL servers of its own, with fsync on, and kills them. For all of it,
// this machine needs PgBouncer: without it, the report says what was not run, and a run that
// is not quick fails.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// sections are the attacks, in the order of the report.
var sections = []section{
	{"accounts", "Exact accounts", attackAccounts},
	{"arrivals", "The arrival curve", attackArrivals},
	{"memory", "Granted from memory", attackMemory},
	{"permits", "How many at once", attackPermits},
	{"table", "A table that stays small", attackTable},
	{"wire", "Faults on the wire", attackWire},
	{"pooler", "PgBouncer between", attackPooler},
	{"crash", "Killed servers, connections and clients", attackCrash},
	{"standby", "A standby promoted", attackPromotion},
	{"linear", "Linearizability", attackLinear},
	{"snapshot", "A snapshot that is held", attackSnapshot},
}

// section is an attack.
type section struct {
	name, title string
	run         func(context.Context, *site, *chapter) error
}

func main() {
	if lab.IsChild() {
		exit(runChild())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	exit(run(ctx))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "report: %v\n", err)
		os.Exit(1)
	}
	os.Exit(0)
}

var (
	// errAttacked is a report with a figure that must not be.
	errAttacked = errors.New("a figure is not what it must be")
	// errAbsent is a whole report that is not whole. A quick one just says so.
	errAbsent = errors.New("not all was run, for want of what this machine has not: the report says what")
)

// command returns the command line of this run, without the report's file.
func command() string {
	words := []string{"go run ./integration/report"}
	for _, word := range os.Args[1:] {
		if strings.TrimLeft(word, "-") != "write" {
			words = append(words, word)
		}
	}
	return strings.Join(words, " ")
}

func run(ctx context.Context) error {
	var o options
	flag.BoolVar(&o.quick, "quick", false, "less of everything")
	flag.BoolVar(&o.write, "write", false, "write the report into "+document+" as well")
	flag.StringVar(&o.only, "only", "", "the sections whose names match this regular expression")
	flag.StringVar(&o.skip, "skip", "^$", "all but the sections whose names match this regular expression")
	flag.Float64Var(&o.minutes, "minutes", 0, "how long snapshot takes for each verb, by default 1, with --quick 0.05")
	flag.Parse()
	only, err := regexp.Compile(o.only)
	if err != nil {
		return fmt.Errorf("--only: %w", err)
	}
	skip, err := regexp.Compile(o.skip)
	if err != nil {
		return fmt.Errorf("--skip: %w", err)
	}
	l, err := newSite(ctx, o)
	if err != nil {
		return err
	}
	r := report{begun: time.Now(), facts: l.facts(), command: command()}
	for _, s := range sections {
		if !only.MatchString(s.name) || skip.MatchString(s.name) {
			continue
		}
		fmt.Fprintf(os.Stderr, "%s …\n", s.title)
		c := &chapter{title: s.title}
		begun := time.Now()
		err := s.run(ctx, l, c)
		c.took = time.Since(begun)
		if err != nil {
			c.fail(fmt.Sprintf("could not be carried out: %v", err))
		}
		for _, reason := range c.reasons() {
			fmt.Fprintf(os.Stderr, "  FAILED: %s\n", reason)
		}
		r.chapters = append(r.chapters, c)
	}
	if err := l.close(); err != nil {
		return err
	}
	text := r.markdown()
	fmt.Print(text)
	if o.write {
		if err := os.WriteFile(document, []byte(text), 0o644); err != nil {
			return err
		}
	}
	switch {
	case !r.ok():
		return errAttacked
	case len(r.absent()) > 0 && !o.quick:
		return errAbsent
	}
	return ctx.Err()
}
