package main

import (
	"bytes"
	"cmp"
	"iter"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// asProgram in the environment makes the test binary the program itself, for
// tests that need a process to send signals to.
const asProgram = "RATELIMIT_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	pgtest.Main(m)
}

// outcome is what a run of the program left behind.
type outcome struct {
	status         int
	stdout, stderr string
}

// execute runs the program in this process.
func execute(t *testing.T, stdin string, args ...string) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	status := run(t.Context(), args, strings.NewReader(stdin), &stdout, &stderr)
	return outcome{status, stdout.String(), stderr.String()}
}

// wantStatus fails the test if the program ended otherwise, or if standard
// error lacks one of the messages.
func (o outcome) wantStatus(t *testing.T, status int, messages ...string) {
	t.Helper()
	if o.status != status {
		t.Errorf("exit status: got %d, want %d", o.status, status)
	}
	for _, m := range messages {
		if !strings.Contains(o.stderr, m) {
			t.Errorf("standard error lacks %q", m)
		}
	}
	if t.Failed() {
		t.Fatalf("standard error:\n%s", o.stderr)
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	root, _ := newRoot()
	for _, args := range [][]string{{"help"}, {"-h"}, {"--help"}} {
		o := execute(t, "", args...)
		o.wantStatus(t, exitOK)
		for _, c := range root.Commands() {
			if !strings.Contains(o.stdout, c.Short) {
				t.Errorf("%q does not name %s", args, c.Name())
			}
		}
	}
}

// Which version it is, the test of package internal/release shows.
func TestVersion(t *testing.T) {
	t.Parallel()
	for _, arg := range []string{"version", "-v", "--version"} {
		o := execute(t, "", arg)
		o.wantStatus(t, exitOK)
		if fields := strings.Fields(o.stdout); len(fields) != 4 || fields[0] != "ratelimit" || fields[2] != runtime.Version() {
			t.Errorf("%s printed %q", arg, o.stdout)
		}
	}
}

// Each command says what it is for, how to use it, and shows it in an example that it takes.
func TestHelpOfCommands(t *testing.T) {
	t.Parallel()
	root, _ := newRoot()
	for c := range leaves(root) {
		path := strings.Fields(c.CommandPath())[1:]
		for _, args := range [][]string{append([]string{"help"}, path...), append(path, "-h"), append(path, "--help")} {
			o := execute(t, "", args...)
			o.wantStatus(t, exitOK)
			if !strings.Contains(o.stdout, cmp.Or(c.Long, c.Short)) || !strings.Contains(o.stdout, "ratelimit "+strings.Join(path, " ")) {
				t.Errorf("%q printed:\n%s", args, o.stdout)
			}
		}
		if c.GroupID == "" && c.Parent() == root {
			continue // version, and those that cobra adds
		}
		for line := range strings.Lines(c.Example) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), " >")
			found, rest, err := root.Find(words(line)[1:])
			if err == nil {
				err = found.ParseFlags(rest)
			}
			if err == nil {
				err = found.ValidateArgs(found.Flags().Args())
			}
			if err != nil || found != c {
				t.Errorf("the example %q of %s: %v", line, c.CommandPath(), err)
			}
		}
		if c.Example == "" {
			t.Errorf("%s has no example", c.CommandPath())
		}
	}
}

// leaves are the commands below c that do something.
func leaves(c *cobra.Command) iter.Seq[*cobra.Command] {
	return func(yield func(*cobra.Command) bool) {
		for _, child := range c.Commands() {
			if child.HasSubCommands() {
				for leaf := range leaves(child) {
					if !yield(leaf) {
						return
					}
				}
			} else if !yield(child) {
				return
			}
		}
	}
}

// words splits a line as a shell does, as far as single quotes go.
func words(line string) (words []string) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			words = append(words, part)
		} else {
			words = append(words, strings.Fields(part)...)
		}
	}
	return words
}

func TestBadArguments(t *testing.T) {
	t.Setenv("DATABASE_URL", "") // a test that gets that far must not find a database
	tests := []struct {
		args []string
		want string
	}{
		{nil, "no command"},
		{[]string{"rewind"}, `unknown command "rewind"`},
		{[]string{"replay"}, "no file to replay"},
		{[]string{"replay", "--fast", "-"}, "--fast"},
		{[]string{"replay", "--store", "redis", "-"}, `store "redis"`},
		{[]string{"replay", "--portable", "-"}, "--portable is for --store postgres"},
		{[]string{"replay", "-", "-"}, "once only"},
		{[]string{"replay", "no-such-file.jsonl"}, "no-such-file.jsonl"},
		{[]string{"migrate"}, "up, down, status and print"},
		{[]string{"migrate", "sideways"}, "up, down, status and print"},
		{[]string{"migrate", "up", "down"}, "up, down, status and print"},
		{[]string{"migrate", "up", "--down"}, "--down is for print"},
		{[]string{"migrate", "print", "--schema", "s"}, "print takes neither"},
		{[]string{"migrate", "up"}, "set DATABASE_URL"},
		{[]string{"migrate", "print", "--json"}, "takes no --json"},
		{[]string{"ls"}, "set DATABASE_URL"},
		{[]string{"ls", "a", "b"}, "at most 1 arg"},
		{[]string{"ls", "a", "--csv", "--json"}, "and not both"},
		{[]string{"ls", "a", "--most", "-1"}, "--most -1"},
		{[]string{"ls", "a", "--prefix", `"eu`}, "begins with a quote"},
		{[]string{"show", "a"}, "between 2 and 3 arg"},
		{[]string{"show", "a", "k", "some"}, `count "some"`},
		{[]string{"show", "a", "k", "NaN"}, `count "NaN"`},
		{[]string{"show", "a", "k", "--definitions", "no-such-file"}, "no-such-file"},
		{[]string{"credit", "a", "k"}, "at least 3 arg"},
		{[]string{"reset", "a", "-", "--yes"}, "standard input has no key"},
		{[]string{"reset", "a", "-", "--definitions", "-"}, "cannot be the keys and the definitions"},
		{[]string{"pause", "a", "k", "soon"}, `invalid duration "soon"`},
		{[]string{"prune", "--history-age", "-1h"}, "--history-age -1h"},
		{[]string{"change", "a", "k"}, "by --to, or the old one by --from"},
		{[]string{"change", "a", "--to", "shards=2"}, "name keys, or say --all-keys"},
		{[]string{"change", "a", "k", "--to", "shards"}, "shards must be formatted as key=value"},
		{[]string{"forget", "a", "--catalog", "--definitions", "f"}, "--catalog is for the catalog in the database"},
	}
	for _, test := range tests {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			o := execute(t, "", test.args...)
			o.wantStatus(t, exitBad, test.want)
			if o.stdout != "" {
				t.Errorf("standard output: %q", o.stdout)
			}
		})
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
