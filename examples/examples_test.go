// Package examples_test runs the examples as their readers do.
package examples_test

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/gotool"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// examples are the programs, but for those that have more to test: quickstart and metrics.
var examples = []struct {
	name   string
	claims int // that it checks: one that is no longer checked fails nothing by itself
	prints []string
}{
	{"login", 4, []string{
		"3 of 5 left",
		"5 of 5 left",
		"5 passwords were looked at, 95 guesses refused",
		"the right password is refused too",
	}},
	{"river", 5, []string{
		"40 of 40 jobs completed",
		"10 are granted",
		"1 answer of 429, and 0 calls while it was in force",
		"0 jobs lost an attempt to a limit",
	}},
	{"scheduler", 5, []string{
		"no job, no debt: 0 jobs, 5 of 5 tokens",
		"nothing is lost: 60 jobs, 60 done",
		"never over: 0 calls beyond 5 + 20 a second",
		"nor for the mail server: 0 calls beyond 6 + 30 a second",
	}},
}

// Each example keeps its promises, and says so. They run at the same time, and while others are
// built: they wait more than they compute.
func TestExamples(t *testing.T) {
	pgtest.Long(t)
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	dir := t.TempDir()
	started := make([]*exec.Cmd, len(examples))
	outputs := make([]bytes.Buffer, len(examples))
	for i, e := range examples {
		gotool.Build(t, ".", dir, "./"+e.name)
		cmd := exec.CommandContext(t.Context(), filepath.Join(dir, e.name))
		cmd.Stdout, cmd.Stderr = &outputs[i], &outputs[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		started[i] = cmd
	}
	for i, e := range examples {
		t.Run(e.name, func(t *testing.T) {
			err, text := started[i].Wait(), outputs[i].String()
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			for _, want := range e.prints {
				if !strings.Contains(text, want) {
					t.Errorf("the output lacks %q", want)
				}
			}
			if got := strings.Count(text, "   ok: "); got != e.claims {
				t.Errorf("%d promises checked, want %d", got, e.claims)
			}
		})
	}
}
