package main

import (
	"bufio"
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Without DATABASE_URL, replay starts a server for itself.
func TestReplayOnAServerOfItsOwn(t *testing.T) {
	t.Setenv("DATABASE_URL", "")
	o := execute(t, bucket+`{"at": "0s", "do": "allow", "limit": "l", "want": {"value": 9}}`,
		"replay", "--verify", "--store", "postgres", "-")
	o.wantStatus(t, exitOK, "1 call in 1 file agreed, on postgres (")
}

// observer sees the schemas that replays make.
type observer struct {
	pool   *pgxpool.Pool
	before []string
}

func observe(t *testing.T) *observer {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), pgtest.URL(t))
	must(t, err)
	t.Cleanup(pool.Close)
	o := &observer{pool: pool}
	o.before = o.schemas(t)
	return o
}

func (o *observer) schemas(t *testing.T) []string {
	t.Helper()
	rows, err := o.pool.Query(t.Context(),
		"SELECT nspname::text FROM pg_namespace WHERE starts_with(nspname::text, $1)", schemaPrefix)
	must(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	return names
}

// made lists the schemas that were not there when the observer came.
func (o *observer) made(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(o.schemas(t), func(name string) bool { return slices.Contains(o.before, name) })
}

// wantNoneLeft fails the test if what was made meanwhile is not gone, or, as
// others may replay on the same server, does not go soon.
func (o *observer) wantNoneLeft(t *testing.T) {
	t.Helper()
	made := o.made(t)
	isMade := func(name string) bool { return slices.Contains(made, name) }
	for range 100 {
		if !slices.ContainsFunc(o.schemas(t), isMade) {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Errorf("schemas left behind: %q", made)
}

// A replay drops its schema, also if it is stopped from outside.
func TestStoppedReplayLeavesNothingBehind(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("there is no interrupting another process on Windows")
	}
	tests := []struct {
		name   string
		status int
		stop   func(cmd *exec.Cmd, stdout *os.File) error
	}{
		{"interrupted", exitFailed, func(cmd *exec.Cmd, stdout *os.File) error {
			err := cmd.Process.Signal(os.Interrupt)
			_, readErr := io.Copy(io.Discard, stdout)
			return errors.Join(err, readErr)
		}},
		{"its reader gone", exitFailed, func(_ *exec.Cmd, stdout *os.File) error { return stdout.Close() }},
		{"not at all", exitOK, func(_ *exec.Cmd, stdout *os.File) error { _, err := io.Copy(io.Discard, stdout); return err }},
	}
	// Enough answers to fill the pipe: the replay cannot be done before it is
	// stopped.
	calls := strings.Repeat(`{"at": "0s", "do": "check", "limit": "l"}`+"\n", 20_000)
	file := writeFile(t, bucket+calls)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			o := observe(t)
			cmd, stdout := startReplay(t, file)
			// The first answer means that the schema is in use.
			must(t, errOf(bufio.NewReader(stdout).ReadString('\n')))
			if len(o.made(t)) == 0 {
				t.Error("no schema was made")
			}
			must(t, test.stop(cmd, stdout))
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != test.status {
				t.Errorf("got %v, want exit status %d", err, test.status)
			}
			o.wantNoneLeft(t)
		})
	}
}

// startReplay replays file on postgres in a process of its own.
func startReplay(t *testing.T, file string) (cmd *exec.Cmd, stdout *os.File) {
	t.Helper()
	stdout, write, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { stdout.Close() })
	cmd = exec.CommandContext(t.Context(), os.Args[0], "replay", "--store", "postgres", file)
	cmd.Env = append(os.Environ(), asProgram+"=1", "DATABASE_URL="+pgtest.URL(t))
	cmd.Stdout = write
	must(t, cmd.Start())
	write.Close() // the process has its own
	return cmd, stdout
}
