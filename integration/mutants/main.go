// Command mutants plants known faults again, each by a patch of a few lines in a copy of
// the repository, and runs the tests that must find it. It fails if one finds nothing,
// or if a patch does not fit the code any more.
//
//	go run ./integration/mutants             # all, a quarter of an hour
//	go run ./integration/mutants --only turn # those whose names match
//	go run ./integration/mutants --check     # only that each fits the code, and compiles
//
// savepoint-keeps-predicate-locks is found only on the newest minor versions of PostgreSQL: 15.18
// keeps no such locks, and 15.20 does.
package main

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

//go:embed faults
var faults embed.FS

// mutant is a fault, as a file of faults says it: two lines, and a patch.
type mutant struct {
	name, fault   string
	module, tests string
	patch         []byte
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "mutants: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	pattern := flag.String("only", "", "the mutants whose names match this regular expression")
	fits := flag.Bool("check", false, "test nothing: see whether each mutant fits the code, and compiles")
	flag.Parse()
	only, err := regexp.Compile(*pattern)
	if err != nil {
		return err
	}
	mutants, err := read()
	if err != nil {
		return err
	}
	mutants = slices.DeleteFunc(mutants, func(m mutant) bool { return !only.MatchString(m.name) })
	if len(mutants) == 0 {
		return fmt.Errorf("no mutant's name matches %s", only)
	}
	dir, err := os.MkdirTemp("", "ratelimit-mutants")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := copyTree(ctx, dir); err != nil {
		return err
	}
	if *fits {
		return check(ctx, dir, mutants)
	}
	return killAll(ctx, dir, mutants)
}

// killAll plants one mutant after the other, and tells which test finds each.
func killAll(ctx context.Context, dir string, mutants []mutant) error {
	killed := 0
	for _, m := range mutants {
		begun := time.Now()
		finder, err := m.kill(ctx, dir)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		verdict := "killed by " + finder
		switch {
		case err != nil:
			verdict = fmt.Sprintf("NOT DECIDED: %v", err)
		case finder == "":
			verdict = "SURVIVED " + m.tests
		default:
			killed++
		}
		fmt.Printf("%-36s %s (%d s)\n    %s\n", m.name, verdict, int(time.Since(begun).Seconds()+0.5), m.fault)
	}
	fmt.Printf("\n%d killed of %d planted\n", killed, len(mutants))
	if killed < len(mutants) {
		return errors.New("not all were killed")
	}
	return nil
}

// check sees whether each mutant fits the code and compiles, as many of them at a time as
// fit beside each other. It tells of all that do not.
func check(ctx context.Context, dir string, mutants []mutant) error {
	bad := 0
	for rest := mutants; len(rest) > 0 && ctx.Err() == nil; {
		together := 0
		for together < len(rest) && rest[together].apply(ctx, dir) == nil {
			together++
		}
		err := compile(ctx, dir)
		for _, m := range slices.Backward(rest[:together]) {
			err = errors.Join(err, m.apply(ctx, dir, "-R"))
		}
		if together == 0 || err != nil { // none of them, one of them, or they do not go together
			together = max(together, 1)
			for i := range together {
				if err := rest[i].compiles(ctx, dir); err != nil {
					fmt.Printf("%s %v\n", rest[i].name, err)
					bad++
				}
			}
		}
		rest = rest[together:]
	}
	fmt.Printf("%d of %d faults can be planted\n", len(mutants)-bad, len(mutants))
	if bad > 0 {
		return errors.New("not all can be planted")
	}
	return ctx.Err()
}

// compiles plants a mutant alone, and takes it out again.
func (m *mutant) compiles(ctx context.Context, dir string) error {
	if err := m.apply(ctx, dir); err != nil {
		return fmt.Errorf("does not fit: %w", err)
	}
	err := compile(ctx, dir)
	if err != nil {
		err = fmt.Errorf("does not compile: %w", err)
	}
	return errors.Join(err, m.apply(context.WithoutCancel(ctx), dir, "-R"))
}

func compile(ctx context.Context, dir string) error {
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "./...", "./riverlimit/...")
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out[:min(len(out), 600)])
	}
	return nil
}

func read() (mutants []mutant, err error) {
	names, err := fs.Glob(faults, "faults/*.patch")
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		text, err := faults.ReadFile(name)
		if err != nil {
			return nil, err
		}
		m := mutant{name: strings.TrimSuffix(path.Base(name), ".patch"), patch: text}
		for line := range strings.Lines(string(text)) {
			if fault, ok := strings.CutPrefix(line, "Fault: "); ok {
				m.fault = strings.TrimSpace(fault)
			}
			if tests, ok := strings.CutPrefix(line, "Test: "); ok {
				m.module, m.tests, _ = strings.Cut(strings.TrimSpace(tests), " ")
			}
		}
		if m.fault == "" || m.tests == "" {
			return nil, fmt.Errorf("%s does not say which fault it is, or which tests find it", name)
		}
		mutants = append(mutants, m)
	}
	return mutants, nil
}

// copyTree copies what git knows of the repository, as it is now, into a directory.
func copyTree(ctx context.Context, to string) error {
	root, err := exec.CommandContext(ctx, "git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return fmt.Errorf("this needs a clone of the repository: %w", err)
	}
	from := strings.TrimSpace(string(root))
	list := exec.CommandContext(ctx, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	list.Dir = from
	names, err := list.Output()
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(from, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted, and not committed
		}
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

const longest = 2 * time.Minute // of one mutant's tests

// leftOut is a test, of those of a package, that was skipped.
var leftOut = regexp.MustCompile(`(?m)^--- SKIP: `)

// kill plants the fault in the copy, runs the tests, and takes it out again. It returns
// the tests that failed.
func (m *mutant) kill(ctx context.Context, dir string) (finder string, err error) {
	if err := m.apply(ctx, dir); err != nil {
		return "", fmt.Errorf("the patch does not fit: %w", err)
	}
	defer func() { err = errors.Join(err, m.apply(context.WithoutCancel(ctx), dir, "-R")) }()
	// Without paths of this copy in it, what is built can be used for the next one. A test that
	// is left out is told with -v only.
	test := exec.CommandContext(ctx, "go", "test", "-trimpath", "-v", "-count=1", "-failfast",
		"-timeout", longest.String(), "-run", "^("+m.tests+")$", ".")
	test.Dir = filepath.Join(dir, m.module)
	out, err := test.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil && bytes.Contains(out, []byte("no tests to run")):
		return "", errors.New("there is no such test")
	case err == nil && leftOut.Match(out):
		return "", errors.New("a test was left out")
	case err == nil:
		return "", nil
	case !errors.As(err, &exit):
		return "", err
	}
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(line, "--- FAIL: "); ok {
			name, _, _ := strings.Cut(name, " ")
			return name, nil
		}
		if strings.HasPrefix(line, "panic: test timed out") {
			return "a test that did not end", nil
		}
	}
	return "", fmt.Errorf("the tests could not be run: %s", out[max(0, len(out)-600):])
}

// apply applies the patch, with little heed of what is around the lines that it changes.
func (m *mutant) apply(ctx context.Context, dir string, more ...string) error {
	apply := exec.CommandContext(ctx, "git", append([]string{"apply", "-C1", "--whitespace=nowarn"}, more...)...)
	apply.Dir, apply.Stdin = dir, bytes.NewReader(m.patch)
	if out, err := apply.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}
