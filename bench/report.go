package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// printer prints until the first error.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) linef(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintln(p.w, strings.TrimRight(fmt.Sprintf(format, args...), " "))
	}
}

func printReport(w io.Writer, results []result, checks *lab.Findings, facts []string) error {
	p := &printer{w: w}
	for i, r := range results {
		fresh := i == 0 || r.name != results[i-1].name
		if fresh {
			p.head(r)
		}
		if !r.bounded && (fresh || r.crowd != results[i-1].crowd) {
			if r.apart {
				p.linef("  %s, %s in each", plural(r.processes, "process"), plural(r.goroutines, "goroutine"))
			} else {
				p.linef("  %s", plural(r.goroutines, "goroutine"))
			}
		}
		p.row(r)
	}
	p.criteria(checks)
	p.linef("\nOn")
	for _, fact := range facts {
		p.linef("  %s", fact)
	}
	return p.err
}

// criteria prints the criteria of a run.
func (p *printer) criteria(checks *lab.Findings) {
	p.linef("\nWhat it must show: ratios in this run, and bounds\n")
	p.linef("  %-85s %12s %18s", "", "got", "wanted")
	claim := ""
	for _, f := range checks.All {
		if f.Claim != claim {
			claim = f.Claim
			p.linef("  %s:", claim)
		}
		p.linef("    %-83s %12s %18s  %s", f.What, f.Measured, f.Must, strings.Trim(f.Verdict(), "*"))
	}
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	if strings.HasSuffix(what, "s") {
		what += "e"
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// head is above the rows of a case.
func (p *printer) head(r result) {
	p.linef("\n%s (%s)\n", r.title, r.name)
	columns := []string{"p50", "p99", "trips"}
	switch {
	case r.bounded:
		columns = []string{"granted", "bound", "too many"}
	case r.transactions:
		columns[2] = "retries"
	}
	line := fmt.Sprintf("  %-50s %12s %9s %9s %9s %12s", "", "a second", columns[0], columns[1], columns[2], "statements/s")
	if r.apart {
		line += fmt.Sprintf(" %10s %10s", "least", "most")
	}
	p.linef("%s", line)
}

func (p *printer) row(r result) {
	statements := "-" // Redis has none
	if !needsRedis[r.impl] {
		statements = thousands(r.statements)
	}
	columns := []string{latency(r.p50), latency(r.p99), few(r.perDecision)}
	if r.bounded {
		columns = []string{fmt.Sprint(r.granted), fmt.Sprint(*r.bound), fmt.Sprint(max(0, r.granted-*r.bound))}
	}
	line := fmt.Sprintf("    %-48s %12s %9s %9s %9s %12s", r.impl, thousands(r.opsPerSec), columns[0], columns[1], columns[2], statements)
	if r.apart {
		line += fmt.Sprintf(" %10s %10s", thousands(r.least), thousands(r.most))
	}
	p.linef("%s", line)
	if r.errors > 0 {
		p.linef("      errors: %d, the first: %v", r.errors, r.firstErr)
	}
}

// thousands returns a whole number that can be read.
func thousands(v float64) string {
	digits := strconv.FormatFloat(v, 'f', 0, 64)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

func latency(d time.Duration) string {
	switch us := micros(d); {
	case us < 10:
		return fmt.Sprintf("%.2f µs", us)
	case us < 1000:
		return fmt.Sprintf("%.0f µs", us)
	case us < 10_000:
		return fmt.Sprintf("%.2f ms", us/1000)
	default:
		return fmt.Sprintf("%.0f ms", us/1000)
	}
}

// few returns a small number; one that is not zero does not look like it.
func few(v float64) string {
	if v > 0 && v < 0.005 {
		return fmt.Sprintf("%.1g", v)
	}
	return fmt.Sprintf("%.2f", v)
}

// wrong returns an error for results that no run on any machine may have.
func wrong(results []result) error {
	var errs []error
	for _, r := range results {
		if !strings.HasPrefix(r.impl, "ours") {
			continue
		}
		if r.errors > 0 {
			errs = append(errs, fmt.Errorf("%s: %d errors, the first: %s", r.job, r.errors, r.firstErr))
		}
		if r.bound != nil && r.granted > *r.bound {
			errs = append(errs, fmt.Errorf("%s: granted %d of at most %d", r.job, r.granted, *r.bound))
		}
	}
	return errors.Join(errs...)
}
