package main

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// onTerminal runs the program on a terminal, which script makes, and returns all that it writes
// there.
func onTerminal(t *testing.T, url, typed string, env []string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath("script"); err != nil || runtime.GOOS != "linux" {
		t.Skip("there is no script of util-linux to make a terminal")
	}
	quoted := []string{os.Args[0]}
	for _, arg := range args {
		quoted = append(quoted, "'"+arg+"'")
	}
	cmd := exec.CommandContext(t.Context(), "script", "--quiet", "--return", "--command", strings.Join(quoted, " "), "/dev/null")
	cmd.Env = append(append(os.Environ(), asProgram+"=1", "DATABASE_URL="+url, "TERM=xterm"), env...)
	cmd.Stdin = strings.NewReader(typed)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// Colours, a question and a bar are for terminals, and long keys are cut there.
func TestTerminal(t *testing.T) {
	pgtest.Long(t)
	t.Parallel()
	w := newWorld(t)
	long := strings.Repeat("k", 500)
	w.take(api, long, 20)
	run := func(typed string, env []string, args ...string) string {
		t.Helper()
		return onTerminal(t, w.db.URL, typed, env, append(args, "--schema", w.db.Schema)...)
	}
	if text := run("", nil, "show", "api", "x"); !strings.Contains(text, "\x1b["+green+"mgranted") {
		t.Errorf("without colour: %q", text)
	}
	for _, env := range []string{"NO_COLOR=1", "TERM=dumb"} {
		if text := run("", []string{env}, "show", "api", "x"); strings.Contains(text, "\x1b[3") {
			t.Errorf("%s: with colour: %q", env, text)
		}
	}
	if text := run("", nil, "ls", "api"); strings.Contains(text, long) || !strings.Contains(text, "kkk…") {
		t.Errorf("a long key: %s", text)
	}
	wantIn(t, run("", nil, "ls", "api", "--wide"), long)

	wantIn(t, run("n\n", nil, "reset", "api", long), "This will reset key", "Nothing was done.")
	if left := w.left(api, long); left != 0 {
		t.Errorf("%d left after a no", left)
	}
	run("y\n", nil, "reset", "api", long)
	if left := w.left(api, long); left != 20 {
		t.Errorf("%d left after a yes", left)
	}
	file := writeFile(t, strings.Repeat(accessLog(), 5000))
	wantIn(t, onTerminal(t, "", "", nil, "replay", file, "--limit", "10 per 1m"), "█", " % reading ", "LONGEST WAIT")
}
