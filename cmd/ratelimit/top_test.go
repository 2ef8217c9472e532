package main

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestTop(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	w := &world{T: t, db: db}
	_, err := db.Pool.Exec(t.Context(), `INSERT INTO `+db.Schema+`.rate_limit_refusals (name, key, minute, times, uncertain, last, retry_at) VALUES
	('api', 'alice', date_trunc('minute', now()), 5, 0, now(), now()), ('api', $1, date_trunc('minute', now()), 7, 2, now(), NULL),
	('other', 'carol', date_trunc('minute', now()), 6, 0, now(), NULL), ('api', 'old', date_trunc('minute', now()) - interval '30 minutes', 99, 0, now(), NULL)`, "bob\x1b[2J")
	w.must(err)
	top := objects[topJSON](t, w.program("top", "--json").ok(t))
	if len(top) != 3 || top[0].Key != "bob\x1b[2J" || top[0].Times != 7 || top[0].Uncertain != 2 || top[1].Limit != "other" || top[2].RetryAt.IsZero() {
		t.Errorf("got %+v", top)
	}
	if top := objects[topJSON](t, w.program("top", "api", "--since", "45m", "--most", "1", "--json").ok(t)); len(top) != 1 || top[0].Key != "old" {
		t.Errorf("of a limit: %+v", top)
	}
	text := w.program("top").ok(t)
	wantIn(t, text, "~7", `"bob\x1b[2J"`, "carol", "REFUSED")
	if strings.Contains(text, "\x1b") {
		t.Errorf("an escape sequence where there is no terminal: %q", text)
	}
	// It looks at the table of refusals alone: where there is none of limits, it works.
	w.must(errOf(db.Pool.Exec(t.Context(), "DROP TABLE "+db.Schema+".rate_limits")))
	w.program("top").ok(t)
	w.program("top", "--since", "2h").wantStatus(t, exitBad, "Since")
	w.program("top", "--every", "1ms").wantStatus(t, exitBad, "--every 1ms")
	empty := pgtest.NewEmpty(t)
	execute(t, "", "top", "--schema", empty.Schema, "--database-url", empty.URL).wantStatus(t, exitFailed, "migrate up --set refusals")
}

// On a terminal it goes on until it is interrupted, and shows what is new. (script gives it one.)
func TestTopLive(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("script"); err != nil {
		t.Skip("there is no script to make a terminal")
	}
	db := pgtest.New(t, pgtest.With(migrations.Refusals))
	w := &world{T: t, db: db}
	add := func(key string) {
		w.must(errOf(db.Pool.Exec(t.Context(), `INSERT INTO `+db.Schema+`.rate_limit_refusals VALUES ('api', $1, date_trunc('minute', now()), 5, 0, now(), NULL)`, key)))
	}
	add("first")
	cmd := exec.CommandContext(t.Context(), "script", "--quiet", "--return", "--command", "exec "+os.Args[0]+" top --every 100ms --schema "+db.Schema, "/dev/null")
	cmd.Env = append(os.Environ(), asProgram+"=1", "DATABASE_URL="+db.URL)
	stdin, err := cmd.StdinPipe()
	w.must(err)
	out, err := cmd.StdoutPipe()
	w.must(err)
	w.must(cmd.Start())
	lines := bufio.NewScanner(out)
	for _, key := range []string{"first", "second"} {
		found := false
		for !found && lines.Scan() {
			found = strings.Contains(lines.Text(), key)
		}
		if !found {
			t.Fatalf("%s is not shown", key)
		}
		if key == "first" {
			add("second")
		}
	}
	w.must(errOf(stdin.Write([]byte{3}))) // Ctrl-C
	for lines.Scan() {
	}
	if err := cmd.Wait(); err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Errorf("it ended with %d", exit.ExitCode())
		}
	}
}
