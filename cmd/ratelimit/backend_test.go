package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

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

// ownDatabase makes a database for replays, and returns its URL and what lists the schemas in it.
func ownDatabase(t *testing.T) (url string, schemas func() int) {
	t.Helper()
	db := pgtest.NewEmpty(t)
	name := db.Schema + "_replays"
	must(t, errOf(db.Pool.Exec(t.Context(), "CREATE DATABASE "+name)))
	t.Cleanup(func() { must(t, errOf(db.Pool.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)"))) })
	config := db.Pool.Config()
	config.ConnConfig.Database = name
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	t.Cleanup(pool.Close)
	url = fmt.Sprintf("host=%s port=%d user=%s password='%s' dbname=%s", config.ConnConfig.Host, config.ConnConfig.Port, config.ConnConfig.User, config.ConnConfig.Password, name)
	return url, func() (n int) {
		must(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_namespace WHERE starts_with(nspname::text, $1)", schemaPrefix).Scan(&n))
		return n
	}
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
			url, schemas := ownDatabase(t)
			cmd, stdout := startReplay(t, url, file)
			// The first answer means that the schema is in use.
			must(t, errOf(bufio.NewReader(stdout).ReadString('\n')))
			if schemas() == 0 {
				t.Error("no schema was made")
			}
			must(t, test.stop(cmd, stdout))
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != test.status {
				t.Errorf("got %v, want exit status %d", err, test.status)
			}
			if left := schemas(); left > 0 {
				t.Errorf("%d schemas are left behind", left)
			}
		})
	}
}

// startReplay replays file on postgres in a process of its own.
func startReplay(t *testing.T, url, file string) (cmd *exec.Cmd, stdout *os.File) {
	t.Helper()
	stdout, write, err := os.Pipe()
	must(t, err)
	t.Cleanup(func() { stdout.Close() })
	cmd = exec.CommandContext(t.Context(), os.Args[0], "replay", "--store", "postgres", file)
	cmd.Env = append(os.Environ(), asProgram+"=1", "DATABASE_URL="+url)
	cmd.Stdout = write
	must(t, cmd.Start())
	write.Close() // the process has its own
	return cmd, stdout
}
