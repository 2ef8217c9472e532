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
// of this program show what a module is without it: they serve the checkout as a version
// to come, from a module proxy in a directory.
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
	root, err := findRoot(ctx)
	if err != nil {
		return err
	}
	if args[0] == "tidy" {
		return tidy(ctx, root)
	}
	version := args[0]
	if err := requireClean(ctx, root); err != nil {
		return err
	}
	if err := cut(ctx, root, version, time.Now()); err != nil {
		return err
	}
	fmt.Fprintf(w, "%s is written. Look at it, and then:\n\n", version)
	fmt.Fprintf(w, "git commit --all --message 'Release %s'\n", version)
	for _, m := range published {
		fmt.Fprintf(w, "git tag %s\n", m.tag(version))
	}
	fmt.Fprint(w, "git push origin HEAD\n")
	for _, m := range published {
		fmt.Fprintf(w, "git push origin %s\n", m.tag(version))
	}
	return nil
}

// requireClean returns the error of a checkout with changes that git does not have: they
// would be hashed, and not be in the tag.
func requireClean(ctx context.Context, root string) error {
	out, err := exec.CommandContext(ctx, "git", "-C", root, "status", "--porcelain").Output()
	if err != nil {
		return fmt.Errorf("git status: %w", err)
	}
	if len(out) > 0 {
		return fmt.Errorf("commit first what has changed:\n%s", out)
	}
	return nil
}
