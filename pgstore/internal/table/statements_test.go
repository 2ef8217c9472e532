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
	for _, file := range []string{"table.sql", "maintenance.sql", "bucket.sql", "window.sql", "calendar.sql", "slots.sql"} {
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
		if texts, _ := load(file); len(texts) != len(names) || len(names) == 0 {
			t.Errorf("%s: %d statements, want %d", file, len(texts), len(names))
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

// What passes over locked rows is left out of a statement that waits in turn, which counts from
// when it had its turn; and nothing else.
func TestInTurn(t *testing.T) {
	for kind, s := range New("", false, time.Second).kinds {
		for _, free := range []string{"grant", "prefetch_many"} {
			text := s[free+"_in_turn"].sql
			if text == "" || strings.Contains(text, "lock_timeout") || strings.Contains(text, "xmax") {
				t.Errorf("%s.%s passes over:\n%s", kind, free, text)
			}
			if strings.Contains(text, "CURRENT_TIMESTAMP") {
				t.Errorf("%s.%s counts from before its turn:\n%s", kind, free, text)
			}
			text = strings.ReplaceAll(text, "statement_timestamp()", "CURRENT_TIMESTAMP")
			head, tail, _ := strings.Cut(text, "\nWHERE r.name = u.name")
			if !strings.HasPrefix(s[free].sql, head+"\nWHERE ") || !strings.HasSuffix(s[free].sql, "\n\tAND r.name = u.name"+tail) {
				t.Errorf("%s.%s is not the same otherwise:\n%s", kind, free, text)
			}
		}
	}
}

// The comment above each statement of a kind names its parameters, in order, and there is a
// value for each name.
func TestParameters(t *testing.T) {
	used := regexp.MustCompile(`\$(\d+)`)
	for kind, s := range New("", true, time.Second).kinds {
		own, parameters := load(kind + ".sql")
		own["prefetch_many"] = s["prefetch_many"].sql // or table.sql's
		_, shared := load("table.sql")
		for name := range own {
			names := parameters[name]
			if names == nil {
				names = shared[name]
			}
			last := 0
			for _, n := range used.FindAllStringSubmatch(s[name].sql, -1) {
				number, _ := strconv.Atoi(n[1])
				last = max(last, number)
			}
			if last == 0 || last != len(names) || last != len(s[name].takes) {
				t.Errorf("%s.%s has %d parameters, of which %d are named: %q", kind, name, last, len(names), names)
			}
			for i, of := range names {
				if parameterValues[of] == nil || s[name].takes[i] == nil {
					t.Errorf("%s.%s: there is no value for %s", kind, name, of)
				}
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
