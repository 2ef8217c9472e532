package main

import (
	"fmt"
	"strings"
	"time"
)

// document is where the report is kept, from the root of the repository.
const document = "docs/attacks.md"

// report is the findings of all sections.
type report struct {
	begun    time.Time
	command  string
	facts    []string
	chapters []*chapter
}

// chapter is the findings of a section.
type chapter struct {
	title  string
	took   time.Duration
	about  []string
	lines  []line
	failed []string
	absent []string // attacks that could not be tried on this machine
}

// line is one figure.
type line struct {
	what, measured, must string
	ok                   bool
}

// say adds a sentence about how the section attacks.
func (c *chapter) say(format string, args ...any) {
	c.about = append(c.about, fmt.Sprintf(format, args...))
}

// fail adds a reason for which the section as a whole is not passed.
func (c *chapter) fail(reason string) { c.failed = append(c.failed, reason) }

// notRun adds an attack for which this machine lacks a prerequisite.
func (c *chapter) notRun(what, why string) { c.absent = append(c.absent, what+" ("+why+")") }

// tell adds a figure that can be any.
func (c *chapter) tell(what, format string, args ...any) {
	c.lines = append(c.lines, line{what, fmt.Sprintf(format, args...), "", true})
}

// zero adds a count that must be 0.
func (c *chapter) zero(what string, n int) {
	c.lines = append(c.lines, line{what, fmt.Sprint(n), "0", n == 0})
}

// happened adds counts of events that must really have happened.
func (c *chapter) happened(counts ...count) {
	for _, n := range counts {
		c.lines = append(c.lines, line{n.what, fmt.Sprint(n.n), "at least 1", happened(n)})
	}
}

// atMost adds a figure that has an upper bound.
func (c *chapter) atMost(what string, got, bound float64, unit string) {
	c.lines = append(c.lines, line{what, figure(got, unit), "at most " + figure(bound, unit), got <= bound})
}

// atLeast adds a figure that has a lower bound.
func (c *chapter) atLeast(what string, got, bound float64, unit string) {
	c.lines = append(c.lines, line{what, figure(got, unit), "at least " + figure(bound, unit), got >= bound})
}

func figure(v float64, unit string) string {
	return strings.TrimSpace(fmt.Sprintf("%.6g %s", v, unit))
}

// reasons are why the section is not passed.
func (c *chapter) reasons() []string {
	reasons := c.failed
	for _, l := range c.lines {
		if !l.ok {
			reasons = append(reasons, fmt.Sprintf("%s: %s, must be %s", l.what, l.measured, l.must))
		}
	}
	return reasons
}

func (r *report) ok() bool {
	for _, c := range r.chapters {
		if len(c.reasons()) > 0 {
			return false
		}
	}
	return len(r.chapters) > 0
}

// absent returns the attacks that could not be tried.
func (r *report) absent() (absent []string) {
	for _, c := range r.chapters {
		absent = append(absent, c.absent...)
	}
	return absent
}

// markdown is the report as it is printed and kept.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# What was attacked, and what it found\n\nMade by `%s` on %s:\n\n", r.command, r.begun.UTC().Format("2006-01-02"))
	for _, fact := range r.facts {
		fmt.Fprintf(&b, "- %s\n", fact)
	}
	b.WriteString("\nEvery figure is counted in that run, the zeros too. A line whose fault did not happen\nfails, and so does the command. [INVARIANTS.md](../INVARIANTS.md) says what is promised;\n`go run ./integration/mutants` plants known faults again and shows which test finds each.\n")
	if absent := r.absent(); len(absent) > 0 {
		fmt.Fprintf(&b, "\n**Not run, for want of what this machine has not: %s. As a whole this run is not valid.**\n", strings.Join(absent, "; "))
	}
	for _, c := range r.chapters {
		c.write(&b)
	}
	return b.String()
}

func (c *chapter) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n## %s\n\n", c.title)
	if len(c.about) > 0 {
		fmt.Fprintf(b, "%s ", strings.Join(c.about, " "))
	}
	fmt.Fprintf(b, "It took %d s.\n\n", int(c.took.Seconds()+0.5))
	for _, reason := range c.failed {
		fmt.Fprintf(b, "**FAILED: %s**\n\n", reason)
	}
	for _, what := range c.absent {
		fmt.Fprintf(b, "**Not run: %s**\n\n", what)
	}
	if len(c.lines) == 0 {
		return
	}
	b.WriteString("| what | measured | must be | |\n|---|---|---|---|\n")
	for _, l := range c.lines {
		verdict := ""
		switch {
		case !l.ok:
			verdict = "**FAILED**"
		case l.must != "":
			verdict = "ok"
		}
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", l.what, l.measured, l.must, verdict)
	}
}
