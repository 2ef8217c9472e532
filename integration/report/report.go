package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
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
	lab.Findings
	title  string
	took   time.Duration
	about  []string
	failed []string
	absent []string // attacks that could not be tried on this machine
}

// say adds a sentence about how the section attacks.
func (c *chapter) say(format string, args ...any) {
	c.about = append(c.about, fmt.Sprintf(format, args...))
}

// fail adds a reason for which the section as a whole is not passed.
func (c *chapter) fail(reason string) { c.failed = append(c.failed, reason) }

// notRun adds an attack for which this machine lacks a prerequisite.
func (c *chapter) notRun(what, why string) { c.absent = append(c.absent, what+" ("+why+")") }

// count is how often something happened that has to, a fault for example.
type count struct {
	what string
	n    int
}

// happened reports whether everything has.
func happened(counts ...count) bool {
	return !slices.ContainsFunc(counts, func(c count) bool { return c.n < 1 })
}

// happened adds counts of events that must have happened, or nothing was attacked.
func (c *chapter) happened(counts ...count) {
	for _, n := range counts {
		c.Add(n.what, fmt.Sprint(n.n), "at least 1", happened(n))
	}
}

// reasons returns why the section is not passed.
func (c *chapter) reasons() []string {
	reasons := c.failed
	for _, f := range c.All {
		if !f.OK {
			reasons = append(reasons, fmt.Sprintf("%s: %s, must be %s", f.What, f.Measured, f.Must))
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

// markdown returns the report as it is printed and kept.
func (r *report) markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# What was attacked, and what it found\n\nMade by `%s` on %s:\n\n", r.command, r.begun.UTC().Format("2006-01-02"))
	for _, fact := range r.facts {
		fmt.Fprintf(&b, "- %s\n", fact)
	}
	b.WriteString("\nEvery figure was counted in that run, the zeros too. If a fault did not happen, its line fails,\nand so does the command. [INVARIANTS.md](../INVARIANTS.md) lists the promises.\n`go run ./integration/mutants` plants known faults again, and shows which test finds each.\n")
	if absent := r.absent(); len(absent) > 0 {
		fmt.Fprintf(&b, "\n**Not run, because this machine lacks what they need: %s. This run is not valid.**\n", strings.Join(absent, "; "))
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
	c.Markdown(b)
}
