package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Commands that pages name exist: the programs, their flags, the packages, and for each
// part of a pattern after -run, -bench or -fuzz a test, a benchmark or a fuzz target.
func TestCommandsExist(t *testing.T) {
	found := commands(t, allPages(t))
	if len(found) < 50 {
		t.Errorf("got %d commands, so this looks at too little", len(found))
	}
	for _, c := range found {
		if err := check(c.args); err != nil {
			t.Errorf("%s: go %s: %v", c.at, strings.Join(c.args, " "), err)
		}
	}
}

// A command that is not there is found.
func TestCommandsAreLookedAt(t *testing.T) {
	for _, text := range []string{
		"go run ./examples/nothing",
		"go run ./integration/report --nothing",
		"go test -run NoSuchTest ./pgstore",
		"go test ./pgstore -nothing",
		"go test -run 'GrantsWhatThereIs|NoSuchTest' ./pgstore",
		"go test ./pgstore -run '^$' -bench NoSuchBenchmark",
		"go test -run NeverOver ./nothing",
		"go get " + module + "/nothing",
		"go doc -all ./nothing",
		"go frobnicate ./pgstore",
	} {
		p, err := parsePage("page.md", []byte("`"+text+"`\n"))
		must(t, err)
		for _, c := range commands(t, []*page{p}) {
			if err := check(c.args); err == nil {
				t.Errorf("%s: got no error", text)
			}
		}
	}
}

// allPages are all pages of the repository.
func allPages(t *testing.T) []*page {
	t.Helper()
	pages, err := readPages(root)
	must(t, err)
	for _, name := range []string{"ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "testdata/conformance/README.md"} {
		p, err := readPage(root, filepath.Join(root, name))
		must(t, err)
		pages = append(pages, p)
	}
	return pages
}

// check reports what a command of the go tool names that there is not.
func check(args []string) error {
	switch args[0] {
	case "run":
		args = slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return arg == "-race" })
		if len(args) == 1 {
			return nil // about the command as such
		}
		if dir, ok := strings.CutPrefix(args[1], "./"); ok {
			return checkProgram(dir, args[2:])
		}
	case "test":
		return checkTest(args[1:])
	case "get", "install":
		for _, arg := range args[1:] {
			path, _, _ := strings.Cut(arg, "@")
			if dir, ok := strings.CutPrefix(path, module); ok {
				if _, err := os.Stat(filepath.Join(root, dir)); err != nil {
					return err
				}
			}
		}
		return nil
	case "doc", "vet":
		_, err := os.Stat(filepath.Join(root, args[len(args)-1]))
		return err
	case "-C", "mod", "list", "work", "build", "env", "version", "tool":
		return nil
	}
	return fmt.Errorf("is no command that is known here")
}

var (
	word    = regexp.MustCompile(`^[a-z]+$`) // a subcommand, and not a version or a file
	flagged = regexp.MustCompile(`^--?[a-z]`)
)

// checkProgram looks for a program, and for its flags and subcommands among its strings.
func checkProgram(dir string, args []string) error {
	all, err := source(dir, false)
	if err != nil {
		return err
	}
	if !strings.Contains(all, "package main\n") {
		return fmt.Errorf("%s is no program", dir)
	}
	for i, arg := range args {
		name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		isWord := i == 0 && word.MatchString(arg)
		// A command of cobra's begins the text of its usage.
		known := strings.Contains(all, `"`+name+`"`) || isWord && strings.Contains(all, `"`+name+" ")
		if (flagged.MatchString(arg) || isWord) && !known {
			return fmt.Errorf("%s knows no %q", dir, arg)
		}
	}
	return nil
}

// checkTest looks for packages, and in them for what patterns name.
func checkTest(args []string) error {
	patterns := map[string]string{} // by prefix of function
	var dirs, flags []string
	for i := 0; i < len(args); i++ {
		arg := args[i]
		switch {
		case arg == "-run" || arg == "-bench" || arg == "-fuzz":
			i++
			patterns[map[string]string{"-run": "Test", "-bench": "Benchmark", "-fuzz": "Fuzz"}[arg]] = args[i]
		case arg == "-benchtime":
			i++
		case arg == "work" || arg == "./...":
			dirs = append(dirs, ".")
		case arg == "." || strings.HasPrefix(arg, "./"):
			dirs = append(dirs, arg)
		case arg == "-v" || arg == "-short" || arg == "-race" || strings.HasPrefix(arg, "-count="):
		case flagged.MatchString(arg): // of the tests' own
			flags = append(flags, fmt.Sprintf("flag.Bool(%q", strings.TrimLeft(arg, "-")))
		default:
			return fmt.Errorf("%q is not known here", arg)
		}
	}
	for _, dir := range dirs {
		text, err := source(dir, true)
		if err != nil {
			return err
		}
		flags = slices.DeleteFunc(flags, func(flag string) bool { return strings.Contains(text, flag) })
	}
	if len(flags) > 0 {
		return fmt.Errorf("no test has %q", flags)
	}
	for prefix, pattern := range patterns {
		if pattern == "^$" || pattern == "." {
			continue
		}
		for part := range strings.SplitSeq(pattern, "|") {
			if err := checkPart(dirs, prefix, part); err != nil {
				return err
			}
		}
	}
	return nil
}

// testFunc is a function that go test takes for one of a flag.
var testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz|Example)\w*)\(`)

// checkPart reports an error unless a part of a pattern names a function in one of dirs. Examples and
// the corpora of fuzz targets are run by -run as well.
func checkPart(dirs []string, prefix, part string) error {
	part, _, _ = strings.Cut(part, "/") // subtests have names at run time only
	match, err := regexp.Compile(part)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		text, err := source(dir, true)
		if err != nil {
			return err
		}
		for _, f := range testFunc.FindAllStringSubmatch(text, -1) {
			is := strings.HasPrefix(f[1], prefix) || prefix == "Test" && !strings.HasPrefix(f[1], "Benchmark")
			if is && match.MatchString(f[1]) {
				return nil
			}
		}
	}
	return fmt.Errorf("%q matches no function %s… in %s", part, prefix, strings.Join(dirs, ", "))
}

// source returns the text of all files of Go in a directory, those of tests or the others.
func source(dir string, tests bool) (string, error) {
	files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	var all strings.Builder
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") != tests {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		all.Write(text)
	}
	if all.Len() == 0 && err == nil {
		err = fmt.Errorf("there is no Go in %s", dir)
	}
	return all.String(), err
}
