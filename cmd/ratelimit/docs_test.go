package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit"
)

var update = flag.Bool("update", false, "write what the command prints, and its pictures, into docs")

// What docs/command.md shows is what the command prints; instants and durations of what was in a
// database may differ. With -update it is written there.
func TestDocs(t *testing.T) {
	t.Parallel()
	docs, err := filepath.Abs("../../docs")
	must(t, err)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "access.log"), []byte(accessLog()), 0o644))
	w := newWorld(t)
	message := ratelimit.TokenBucket{Name: "send_message", Rate: 10, Period: 60e9, Capacity: 20}
	w.must(w.catalog.Publish(t.Context(), message))
	w.take(message, "bob", 20)
	url := w.db.URL + "&search_path=" + w.db.Schema
	if !strings.Contains(w.db.URL, "?") {
		url = w.db.URL + "?search_path=" + w.db.Schema
	}
	for _, name := range []string{"command.md", "testing.md"} {
		w.page(dir, url, filepath.Join(docs, name))
	}
	pictures, err := filepath.Glob(filepath.Join(dir, "*.svg"))
	if err != nil || len(pictures) < 2 {
		t.Fatalf("%d pictures, %v", len(pictures), err)
	}
	if *update {
		for _, picture := range pictures {
			text, err := os.ReadFile(picture)
			w.must(err)
			w.must(os.WriteFile(filepath.Join(docs, filepath.Base(picture)), text, 0o644))
		}
		return
	}
	for _, picture := range pictures {
		want, err := os.ReadFile(picture)
		w.must(err)
		got, err := os.ReadFile(filepath.Join(docs, filepath.Base(picture)))
		w.must(err)
		if string(got) != string(want) {
			t.Errorf("docs/%s is another picture (go test -run TestDocs ./cmd/ratelimit -update)", filepath.Base(picture))
		}
	}
}

var recorded = regexp.MustCompile("(?s)```console\n(.*?)```\n")

// page compares what a page shows with what the command prints, or writes it there.
func (w *world) page(dir, url, file string) {
	w.Helper()
	page, err := os.ReadFile(file)
	w.must(err)
	made := recorded.ReplaceAllStringFunc(string(page), func(block string) string {
		var b strings.Builder
		for line := range strings.Lines(block) {
			if command, ok := strings.CutPrefix(strings.TrimSpace(line), "$ "); ok {
				b.WriteString("$ " + command + "\n" + printed(w.T, dir, url, command))
			}
		}
		return "```console\n" + b.String() + "```\n"
	})
	if len(recorded.FindAllString(made, -1)) < 2 {
		w.Errorf("%s: too few blocks, so this looks at too little", file)
	}
	switch {
	case *update:
		w.must(os.WriteFile(file, []byte(made), 0o644))
	case masked(made) != masked(string(page)):
		w.Errorf("%s shows something else (go test -run TestDocs ./cmd/ratelimit -update):\n%s", file, made)
	}
}

// changing is what is different each time of what was in a database, such as the transactions of other
// tests, with the spaces that align it.
var changing = regexp.MustCompile(`PostgreSQL [^\n]*|(nothing holds|transaction of process)[^\n]*|-?[0-9][0-9:.smµkB-]*Z?| +`)

// masked is a page without that.
func masked(page string) string {
	return recorded.ReplaceAllStringFunc(page, func(block string) string {
		if strings.Contains(block, "$ ratelimit simulate") || strings.Contains(block, "$ ratelimit replay") {
			return block
		}
		return changing.ReplaceAllString(block, "#")
	})
}

// printed is what a command prints that is run in a directory.
func printed(t *testing.T, dir, url, command string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], words(command)[1:]...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), asProgram+"=1", "DATABASE_URL="+url)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}
