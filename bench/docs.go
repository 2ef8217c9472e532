package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/lab"
)

// writeDocs writes the claims of a run, and its whole output, between the marked lines of
// docs/benchmark.md.
func writeDocs(dir, report string, checks *lab.Findings) error {
	file := filepath.Join(dir, "docs", "benchmark.md")
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("reading what to write into: %w", err)
	}
	page := string(text)
	var table strings.Builder
	checks.Markdown(&table)
	for _, section := range []struct{ name, text string }{
		{"claims", table.String()},
		{"run", "```\n" + strings.Trim(report, "\n") + "\n```\n"},
	} {
		if page, err = replaceSection(page, section.name, section.text); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
		return fmt.Errorf("writing the results: %w", err)
	}
	return nil
}

// replaceSection returns a page with other text between the lines
// "<!-- bench: name -->" and "<!-- end -->".
func replaceSection(page, name, text string) (string, error) {
	head, rest, ok := strings.Cut(page, "<!-- bench: "+name+" -->\n")
	_, tail, ended := strings.Cut(rest, "<!-- end -->\n")
	if !ok || !ended {
		return "", fmt.Errorf("there are no lines <!-- bench: %s --> and <!-- end -->", name)
	}
	return head + "<!-- bench: " + name + " -->\n" + text + "<!-- end -->\n" + tail, nil
}
