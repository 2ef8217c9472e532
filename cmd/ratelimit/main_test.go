package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"runtime"
	"strings"
	"testing"

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
	for _, args := range [][]string{{"help"}, {"-h"}, {"--help"}} {
		o := execute(t, "", args...)
		o.wantStatus(t, exitOK)
		for _, c := range commands {
			if !strings.Contains(o.stdout, c.name) {
				t.Errorf("%q does not name %s", args, c.name)
			}
		}
	}
}

// Which version it is, the test of package internal/release shows.
func TestVersion(t *testing.T) {
	t.Parallel()
	for _, arg := range []string{"version", "-version", "--version"} {
		o := execute(t, "", arg)
		o.wantStatus(t, exitOK)
		if fields := strings.Fields(o.stdout); len(fields) != 4 || fields[0] != "ratelimit" || fields[2] != runtime.Version() {
			t.Errorf("%s printed %q", arg, o.stdout)
		}
	}
}

func TestHelpOfCommands(t *testing.T) {
	t.Parallel()
	for _, c := range commands {
		for _, args := range [][]string{{"help", c.name}, {c.name, "-h"}, {c.name, "--help"}} {
			o := execute(t, "", args...)
			o.wantStatus(t, exitOK)
			if o.stdout != c.help {
				t.Errorf("%q printed:\n%s", args, o.stdout)
			}
		}
		for _, part := range []string{"usage: ratelimit " + c.name, "\nExample: ratelimit " + c.name} {
			if !strings.Contains(c.help, part) {
				t.Errorf("the help of %s lacks %q", c.name, part)
			}
		}
	}
}

func TestBadArguments(t *testing.T) {
	t.Setenv("DATABASE_URL", "") // a test that gets that far must not find a database
	tests := []struct {
		args []string
		want string
	}{
		{nil, "usage: ratelimit COMMAND"},
		{[]string{"rewind"}, `unknown command "rewind"`},
		{[]string{"help", "rewind"}, `unknown command "rewind"`},
		{[]string{"replay"}, "no file to replay"},
		{[]string{"replay", "--fast", "-"}, "-fast"},
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

func TestFlagsAmongOperands(t *testing.T) {
	t.Parallel()
	flags := flag.NewFlagSet("test", flag.ContinueOnError)
	x := flags.Bool("x", false, "")
	y := flags.String("y", "", "")
	operands, err := parse(flags, []string{"a", "-x", "-", "--y", "1", "b"})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(operands, " "); got != "a - b" || !*x || *y != "1" {
		t.Errorf("got operands %q, x %t, y %q", got, *x, *y)
	}
}

// What stops a command is its context: it must arrive where the work is done.
func TestRunPassesItsContextOn(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var stdout, stderr bytes.Buffer
	stdin := strings.NewReader(bucket + `{"at": "0s", "do": "allow", "limit": "l"}`)
	if status := run(ctx, []string{"replay", "-"}, stdin, &stdout, &stderr); status != exitFailed {
		t.Errorf("exit status: got %d, want %d", status, exitFailed)
	}
}
