// Release cuts a version of all modules of this repository, which are released
// together and require each other at that version. From the root:
//
//	go run ./internal/release v0.2.0
//
// writes the version into every go.mod and into go.work, the hashes of what is
// released into every go.sum, gives the section Unreleased of CHANGELOG.md its
// heading, and prints the commands that publish: the modules in the order in which
// they require each other. It runs none of them.
//
// Between releases, go.work has the checkout in place of the modules' versions. The tests
// of this program show what a module is without it.
//
//	go run ./internal/release tidy
//
// runs go mod tidy in every module, against the checkout and not what was released last.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, os.Args[1:]); err != nil {
		stop()
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, w io.Writer, args []string) error {
	if len(args) != 1 {
		return errors.New("want a version, such as v0.2.0, or tidy")
	}
	work, err := command{}.run(ctx, "go", "env", "GOWORK")
	if err != nil {
		return err
	}
	root := filepath.Dir(strings.TrimSpace(work))
	if !filepath.IsAbs(root) {
		return errors.New("must run in a checkout of the repository, with its go.work")
	}
	if args[0] == "tidy" {
		return tidy(ctx, root)
	}
	// What is not committed would be hashed, and not be in the tag.
	switch changed, err := (command{dir: root}).run(ctx, "git", "status", "--porcelain"); {
	case err != nil:
		return err
	case changed != "":
		return fmt.Errorf("commit first what has changed:\n%s", changed)
	}
	version := args[0]
	if err := cut(ctx, root, version, time.Now()); err != nil {
		return err
	}
	fmt.Fprintf(w, "%s is written. Look at it, and then:\n\n", version)
	fmt.Fprintf(w, "git commit --all --message 'Release %s'\n", version)
	for _, m := range published {
		fmt.Fprintf(w, "git tag %s\n", path.Join(m, version))
	}
	fmt.Fprint(w, "git push origin HEAD\n")
	for _, m := range published {
		fmt.Fprintf(w, "git push origin %s\n", path.Join(m, version))
	}
	return nil
}

// command is where a program runs, and with what environment.
type command struct {
	dir     string
	environ []string
}

// run runs a program, and returns what it printed.
func (c command) run(ctx context.Context, name string, args ...string) (string, error) {
	var errs strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env, cmd.Stderr = c.dir, c.environ, &errs
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, errs.String(), out)
	}
	return string(out), nil
}
