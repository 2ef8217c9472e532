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
		if page, err = lab.Between(page, "<!-- bench: "+section.name+" -->\n", section.text); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
		return fmt.Errorf("writing the results: %w", err)
	}
	return nil
}
