package table

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/exact"
)

var (
	sectionRE = regexp.MustCompile(`(?m)^-- name: (\w+)$`)
	usedRE    = regexp.MustCompile(`"(\w+)"`)
)

// Each statement in a file is sent by some code, and none has the name of another of its file.
func TestStatementsAreUsed(t *testing.T) {
	used := make(map[string]bool)
	sources, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(source, "_test.go") {
			for _, match := range usedRE.FindAllSubmatch(text, -1) {
				used[string(match[1])] = true
			}
		}
	}
	for _, file := range []string{"table.sql", "keep.sql", "bucket.sql", "window.sql", "calendar.sql", "slots.sql"} {
		text, err := files.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, match := range sectionRE.FindAllSubmatch(text, -1) {
			name := string(match[1])
			if !used[name] {
				t.Errorf("%s: nobody sends %s", file, name)
			}
			if slices.Contains(names, name) {
				t.Errorf("%s: two statements are %s", file, name)
			}
			names = append(names, name)
		}
		if len(load(file)) != len(names) || len(names) == 0 {
			t.Errorf("%s: %d statements, want %d", file, len(load(file)), len(names))
		}
	}
}

// A statement is sent with the name of its table, and nothing else is changed.
func TestStatementsAreAsWritten(t *testing.T) {
	for schema, name := range map[string]string{"": `"rate_limits"`, `a "b"`: `"a ""b"""."rate_limits"`} {
		got := New(schema, false, time.Second).common["remove"]
		if want := "DELETE FROM " + name + " WHERE name = $1::text AND key = $2::text AND shard = $3::int4"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	for name, text := range allStatements(New("", false, time.Second)) {
		if strings.Contains(text, "--") || text == "" || text != strings.TrimSpace(text) {
			t.Errorf("%s: a comment, or nothing, in:\n%s", name, text)
		}
	}
}

// What passes over locked rows is left out of a statement that waits in turn, and nothing else.
func TestInTurn(t *testing.T) {
	table := New("", false, time.Second)
	for _, s := range []statements{table.buckets, table.windows, table.slots} {
		for name, text := range s {
			free, ok := strings.CutSuffix(name, "_in_turn")
			if !ok {
				continue
			}
			if strings.Contains(text, "lock_timeout") || strings.Contains(text, "xmax") {
				t.Errorf("%s passes over:\n%s", name, text)
			}
			head, tail, _ := strings.Cut(text, "\nWHERE r.name = u.name")
			if !strings.HasPrefix(s[free], head+"\nWHERE ") || !strings.HasSuffix(s[free], "\n\tAND r.name = u.name"+tail) {
				t.Errorf("%s is not %s otherwise:\n%s", name, free, text)
			}
		}
	}
}

// The tolerance of comparisons is that of package exact.
func TestTolerance(t *testing.T) {
	tolerance := regexp.MustCompile(`\d\.\d+e-\d+`)
	found := 0
	for name, text := range allStatements(New("", false, time.Second)) {
		for _, factor := range tolerance.FindAllString(text, -1) {
			if v, err := strconv.ParseFloat(factor, 64); err != nil || v != exact.Tolerance(1, 0, 0) {
				t.Errorf("%s: %s, want %v", name, factor, exact.Tolerance(1, 0, 0))
			}
			found++
		}
	}
	if found < 3 {
		t.Errorf("found %d, so this tells little", found)
	}
}
