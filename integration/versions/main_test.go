package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A run replaces what the page says of an earlier one, and nothing else.
func TestPageKeepsTable(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("../..", kept))
	if err != nil {
		t.Fatal(err)
	}
	other, err := withTable(string(page), "2099-01-01", "a table\n")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(other, "2099-01-01") || !strings.Contains(other, "a table\n<!-- end -->") {
		t.Error("the page has not what the run found")
	}
	_, rest, _ := strings.Cut(string(page), begin)
	old, _, _ := strings.Cut(rest, "<!-- end -->\n")
	about, table, _ := strings.Cut(old, "\n\n")
	day := strings.Fields(about)[2]
	if again, err := withTable(other, strings.TrimSuffix(day, ","), table); err != nil || again != string(page) {
		t.Errorf("got %v, want the page as it was", err)
	}
	if _, err := withTable("no such lines", "", ""); err == nil {
		t.Error("got no error for a page without the lines")
	}
}
