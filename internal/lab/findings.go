package lab

import (
	"fmt"
	"io"
	"strings"
)

// Between returns a page with other text between the line begin and the line "<!-- end -->" after it.
func Between(page, begin, text string) (string, error) {
	const end = "<!-- end -->\n"
	head, rest, ok := strings.Cut(page, begin)
	_, tail, ended := strings.Cut(rest, end)
	if !ok || !ended {
		return "", fmt.Errorf("there are no lines %q and %q", begin, end)
	}
	return head + begin + text + end + tail, nil
}

// Finding is one figure of a run.
type Finding struct {
	Claim          string // that it supports, in words; "" for none
	What, Measured string
	Must           string // be; "" for anything
	OK, Missing    bool   // Missing if it was not measured
}

// Verdict returns the verdict in a word, or "" for a figure that may be anything.
func (f *Finding) Verdict() string {
	switch {
	case f.Missing:
		return "not measured"
	case !f.OK:
		return "**no**"
	case f.Must != "":
		return "ok"
	}
	return ""
}

// Findings are the figures of a run. Claim is the claim of those that are added.
type Findings struct {
	Claim string
	All   []Finding
}

// Add adds a figure and its verdict.
func (f *Findings) Add(what, measured, must string, ok bool) {
	f.All = append(f.All, Finding{Claim: f.Claim, What: what, Measured: measured, Must: must, OK: ok})
}

// Miss adds a figure that was not measured.
func (f *Findings) Miss(what, must string) {
	f.All = append(f.All, Finding{f.Claim, what, "-", must, true, true})
}

// Tell adds a figure that may be anything.
func (f *Findings) Tell(what, format string, args ...any) {
	f.Add(what, fmt.Sprintf(format, args...), "", true)
}

// Zero adds a count that must be 0.
func (f *Findings) Zero(what string, n int) { f.Add(what, fmt.Sprint(n), "0", n == 0) }

// AtMost adds a figure with an upper bound.
func (f *Findings) AtMost(what string, got, bound float64, unit string) {
	f.Add(what, figure(got, unit), "at most "+figure(bound, unit), got <= bound)
}

// AtLeast adds a figure with a lower bound.
func (f *Findings) AtLeast(what string, got, bound float64, unit string) {
	f.Add(what, figure(got, unit), "at least "+figure(bound, unit), got >= bound)
}

func figure(v float64, unit string) string {
	return strings.TrimSpace(fmt.Sprintf("%.6g %s", v, unit))
}

// Markdown writes the figures as a table, below their claims.
func (f *Findings) Markdown(w io.Writer) {
	if len(f.All) == 0 {
		return
	}
	fmt.Fprint(w, "| what | measured | must be | |\n|---|---|---|---|\n")
	claim := ""
	for _, one := range f.All {
		if one.Claim != claim {
			claim = one.Claim
			fmt.Fprintf(w, "| **%s** | | | |\n", claim)
		}
		fmt.Fprintf(w, "| %s | %s | %s | %s |\n", one.What, one.Measured, one.Must, one.Verdict())
	}
}
