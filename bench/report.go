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
		if i == 0 || r.name != results[i-1].name {
			p.head(r)
		}
		if r.kind == kindThroughput && (i == 0 || r.name != results[i-1].name || r.goroutines != results[i-1].goroutines) {
			p.linef("  %s", plural(r.goroutines, "goroutine"))
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
	if n := r.behind; n != nil {
		p.linef("  PostgreSQL answers a ping after %s, and without the network after %s\n", latency(n.far), latency(n.near))
	}
	switch r.kind {
	case kindThroughput:
		p.linef("  %-50s %12s %9s %9s %9s %12s", "", "a second", "p50", "p99", r.per, "statements/s")
	case kindOverGrant:
		p.linef("  %-50s %12s %9s %9s %9s %12s", "", "a second", "granted", "bound", "too many", "statements/s")
	case kindChurn:
		p.linef("  %-50s %12s %9s %9s %9s %9s %9s %12s", "", "a second", "decisions", "writes", "HOT", "early", "at end", "statements/s")
	}
}

func (p *printer) row(r result) {
	statements := "-" // Redis has none
	if !needsRedis[r.impl] {
		statements = thousands(r.statements)
	}
	switch r.kind {
	case kindThroughput:
		p.linef("    %-48s %12s %9s %9s %9s %12s", r.impl, thousands(r.opsPerSec), latency(r.p50), latency(r.p99), few(r.perDecision), statements)
	case kindOverGrant:
		p.linef("    %-48s %12s %9d %9d %9d %12s", r.impl, thousands(r.opsPerSec), r.granted, *r.bound, max(0, r.granted-*r.bound), statements)
	case kindChurn:
		p.linef("    %-48s %12s %9s %9s %8.2f%% %9s %9s %12s", r.impl, thousands(r.opsPerSec), thousands(float64(r.decisions)),
			few(r.perDecision), r.churn.hotPercent, kib(r.churn.firstBytes), kib(r.churn.endBytes), statements)
	}
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

func kib(bytes int64) string { return fmt.Sprintf("%d KiB", bytes/1024) }

// wrong returns an error for results that no run on any machine may have.
func wrong(results []result) error {
	var errs []error
	for _, r := range results {
		if !oursAll[r.impl] {
			continue
		}
		if r.errors > 0 {
			errs = append(errs, fmt.Errorf("%s: %d errors, the first: %w", r.job, r.errors, r.firstErr))
		}
		if r.bound != nil && r.granted > *r.bound {
			errs = append(errs, fmt.Errorf("%s: granted %d of at most %d", r.job, r.granted, *r.bound))
		}
	}
	return errors.Join(errs...)
}
