// Package examples_test runs the examples as their readers do, all at a time: they wait more
// than they compute.
package examples_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(len(examples))
	pgtest.Main(m)
}

// examples are the programs, but for those that have more to test: quickstart and metrics.
var examples = []struct {
	name   string
	long   bool // takes more than ten seconds, most of which it waits
	claims int  // that it checks: one that is no longer checked fails nothing by itself
	prints []string
}{
	{"api", false, 7, []string{
		"she gets [200 200 200 429], and Retry-After: ",
		"somebody with a key that he made up gets [401]",
		" s later she gets [200]",
		"he gets [200 429 422 400]",
		"five orders, five tokens",
		"only failures count",
	}},
	{"catalog", true, 3, []string{
		"INSERT INTO rate_limit_definitions",
		"holds within 5 seconds",
		"ends by itself",
		"initech has what it had",
	}},
	{"inflight", false, 4, []string{"120 of 120 prompts answered, 0 twice, although"}},
	{"llm", false, 4, []string{"60 of 60 prompts answered", "1 answer of 429, and 0 calls while the pause was known"}},
	{"login", false, 4, []string{
		"3 of 5 left",
		"5 of 5 left",
		"5 passwords were looked at, 95 guesses refused",
		"the right password is refused too",
	}},
	{"priority", true, 5, []string{"no critical call is refused", "batch work has the rest"}},
	{"river", false, 5, []string{
		"40 of 40 jobs completed",
		"10 are granted",
		"1 answer of 429, and 0 calls while it was in force",
		"0 jobs lost an attempt to a limit",
	}},
	{"scheduler", false, 5, []string{
		"no job, no debt: 0 jobs, 5 of 5 tokens",
		"nothing is lost: 60 jobs, 60 done",
		"never over: 0 calls beyond 5 + 20 a second",
		"nor for the mail server: 0 calls beyond 6 + 30 a second",
	}},
	{"signup", false, 4, []string{
		"60 accounts made",
		"2 of 3 left",
		"61 accounts, 61 of the service's sign-ups spent",
	}},
}

// Each example keeps its promises, and says so.
func TestExamples(t *testing.T) {
	pgtest.Long(t)
	t.Setenv("DATABASE_URL", pgtest.URL(t))
	bin := t.TempDir()
	build := func(long bool) func() error {
		args := []string{"build", "-ldflags=-s -w", "-o", bin}
		for _, e := range examples {
			if e.long == long {
				args = append(args, "./"+e.name)
			}
		}
		return sync.OnceValue(func() error {
			_, err := output(t, "go", args...)
			return err
		})
	}
	buildLong, buildOthers := build(true), build(false)
	for _, e := range examples {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			err := buildLong() // they run while the others are built
			if err == nil && !e.long {
				err = buildOthers()
			}
			if err != nil {
				t.Fatal(err)
			}
			text, err := output(t, filepath.Join(bin, e.name))
			if err != nil {
				t.Fatal(err)
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

// output returns the output of a command.
func output(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return string(out), nil
}
