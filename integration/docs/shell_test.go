package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/golang-migrate/migrate/v4"
	_ "github.com/golang-migrate/migrate/v4/database/pgx/v5" // for URLs that begin with pgx5
	_ "github.com/golang-migrate/migrate/v4/source/file"
)

// prologue is what shell of pages runs behind: a PATH with the programs that pages name, and
// functions in place of what runs elsewhere: commands of the go tool, which
// TestCommandsExist looks at, and Atlas, which is no Go module.
const prologue = `
PATH=$PAGES_PROGRAMS:$PATH
go() { if [ "$1 $2" = 'run ./cmd/ratelimit' ]; then shift 2; ratelimit "$@"; fi; }
atlas() { :; }
`

// linkMigrate puts the command migrate into a directory: this program, by another name.
func linkMigrate(t *testing.T, dir string) {
	t.Helper()
	self, err := os.Executable()
	if err == nil {
		err = os.Symlink(self, filepath.Join(dir, "migrate"))
	}
	must(t, err)
}

// golangMigrate is the command migrate, of the library of golang-migrate: the command
// itself comes with drivers for two dozen databases.
func golangMigrate() error {
	flags := flag.NewFlagSet("migrate", flag.ContinueOnError)
	path := flags.String("path", "", "")
	database := flags.String("database", "", "")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return err
	}
	if flags.NArg() != 1 || flags.Arg(0) != "up" {
		return fmt.Errorf("migrate: got %q, want up", flags.Args())
	}
	m, err := migrate.New("file://"+*path, *database)
	if err != nil {
		return err
	}
	err = m.Up()
	source, target := m.Close()
	return errors.Join(err, source, target)
}

// command is a command of the go tool that a page names.
type command struct {
	at   string
	args []string
}

// commands returns those that stand in lines of shell and between backquotes. Bash takes
// them apart, so that quotes and line ends are what they are in a shell.
func commands(t *testing.T, pages []*page) (found []command) {
	t.Helper()
	var script strings.Builder
	script.WriteString(`go() { printf '%s\0' "$AT" "$#" "$@"; }` + "\n")
	for _, p := range pages {
		var texts []block
		for _, b := range p.blocks {
			if b.lang == "sh" {
				for line := range strings.Lines(b.text) {
					texts = append(texts, block{line: b.line, text: line})
				}
			}
		}
		for _, text := range append(texts, p.spans...) {
			if strings.HasPrefix(strings.TrimSpace(text.text), "go ") && strings.Count(text.text, " ") > 1 {
				fmt.Fprintf(&script, "AT=%s:%d; %s </dev/null\n", p.name, text.line, strings.TrimSpace(text.text))
			}
		}
	}
	var stderr bytes.Buffer
	cmd := exec.Command("bash", "-u")
	cmd.Stdin, cmd.Stderr = strings.NewReader(script.String()), &stderr
	out, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		t.Fatalf("%v\n%s", err, &stderr)
	}
	words := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	for i := 0; i+1 < len(words); {
		var n int
		_, err := fmt.Sscan(words[i+1], &n)
		must(t, err)
		found = append(found, command{words[i], words[i+2 : i+2+n]})
		i += 2 + n
	}
	return found
}
