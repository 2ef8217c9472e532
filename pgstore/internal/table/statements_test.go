package table

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Each statement is sent by some code.
func TestStatementsAreUsed(t *testing.T) {
	used := make(map[string]bool)
	sources, err := filepath.Glob("*.go")
	noError(t, err)
	for _, source := range sources {
		text, err := os.ReadFile(source)
		noError(t, err)
		if !strings.HasSuffix(source, "_test.go") {
			for _, match := range regexp.MustCompile(`"(\w+)"`).FindAllSubmatch(text, -1) {
				used[string(match[1])] = true
			}
		}
	}
	found := 0
	if err := fs.WalkDir(files, "sql", func(file string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			if found++; !used[strings.TrimSuffix(strings.TrimSuffix(path.Base(file), ".sql"), "_tx")] {
				t.Errorf("nobody sends %s", file)
			}
		}
		return err
	}); err != nil || found < 50 {
		t.Errorf("found %d, %v", found, err)
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
	for name, text := range allStatements(true) {
		if !strings.Contains(text, "s.rate_limits") || strings.Contains(text, "%") || strings.Contains(text, "--") {
			t.Errorf("%s: no table, or more than SQL, in:\n%s", name, text)
		}
	}
}

// What passes over locked rows is left out of a statement that waits in turn, which counts from
// when it had its turn; and nothing else.
func TestInTurn(t *testing.T) {
	passing := regexp.MustCompile(`(?s)WHERE \(?(SELECT )?set_config\('lock_timeout', '1', true\).*pg_current_snapshot\(\)\)\)\s+AND `)
	for name, text := range allStatements(false) {
		free, inTurn := strings.CutSuffix(name, "_in_turn")
		if !inTurn {
			continue
		}
		want := strings.ReplaceAll(passing.ReplaceAllString(allStatements(false)[free], "WHERE "), "CURRENT_TIMESTAMP", "statement_timestamp()")
		if text != want || strings.Contains(text, "xmax") || !strings.Contains(text, "statement_timestamp()") {
			t.Errorf("%s:\n%s\nwant\n%s", name, text, want)
		}
	}
}

// On a distributed table an upsert returns its columns to a SELECT around it, which reads the clock,
// and is the same otherwise.
func TestDistributed(t *testing.T) {
	plain, found := allStatements(false), 0
	for name, text := range allStatements(true) {
		upsert, returned, computes := strings.Cut(plain[name], ",\n\tclock_timestamp(), ")
		if !computes {
			continue
		}
		found++
		_, columns, _ := strings.Cut(upsert, "\nRETURNING ")
		own := map[string]string{"xmin::text": "pg_current_xact_id()::text", "xmax = 0": "false"}[returned]
		if want := "WITH written AS (" + upsert + ")\nSELECT " + columns + ", clock_timestamp(), " + own + " FROM written"; text != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, text, want)
		}
		if bare := allStatements(true)[name+"_bare"]; name == "bucket.take" && bare != upsert {
			t.Errorf("%s_bare:\n%s\nwant\n%s", name, bare, upsert)
		}
	}
	if found != 7 {
		t.Errorf("found %d statements", found)
	}
}

// The tolerance of comparisons is that of package exact.
func TestTolerance(t *testing.T) {
	tolerance := regexp.MustCompile(`\d\.\d+e-\d+`)
	found := 0
	for name, text := range allStatements(false) {
		for _, factor := range tolerance.FindAllString(text, -1) {
			if v, err := strconv.ParseFloat(factor, 64); err != nil || v != bucket.Tolerance(1, 0, 0) {
				t.Errorf("%s: %s, want %v", name, factor, bucket.Tolerance(1, 0, 0))
			}
			found++
		}
	}
	if found < 3 {
		t.Errorf("found %d, so this tells little", found)
	}
}
