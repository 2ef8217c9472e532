package internal_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	testFunc  = regexp.MustCompile(`(?m)^func ((?:(?:Test|Fuzz)\w+)|Example\w*)\((?:[tf] |\))`)
	named     = regexp.MustCompile("`([a-z/]*|\\.)\\.(Test\\w+)`")
	invariant = regexp.MustCompile(`(?m)^\d+\. `)
)

// testsOf returns the tests of all packages of the repository, by directory and name.
func testsOf(t *testing.T) map[string]bool {
	t.Helper()
	tests := map[string]bool{}
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(file))
		for _, match := range testFunc.FindAllStringSubmatch(string(text), -1) {
			tests[strings.TrimPrefix(filepath.ToSlash(dir), ".")+"."+match[1]] = true
		}
		return err
	})
	must(t, err)
	return tests
}

func TestInvariantsNameTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "INVARIANTS.md"))
	must(t, err)
	tests, sentences := testsOf(t), invariant.Split(string(text), -1)[1:]
	if len(sentences) < 15 {
		t.Errorf("got %d sentences, want at least 15", len(sentences))
	}
	for i, sentence := range sentences {
		names := named.FindAllStringSubmatch(sentence, -1)
		if len(names) == 0 {
			t.Errorf("%d names no test", i+1)
		}
		for _, name := range names {
			if id := name[1] + "." + name[2]; !tests[id] {
				t.Errorf("%d: there is no test %s", i+1, id)
			}
		}
	}
}

// Each fault that can be planted again names tests that there are.
func TestMutantsNameTests(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "integration/mutants/faults/*.patch"))
	if err != nil || len(files) < 30 {
		t.Fatalf("got %d faults, %v", len(files), err)
	}
	tests := testsOf(t)
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		_, line, _ := strings.Cut(string(text), "\nTest: ")
		line, _, _ = strings.Cut(line, "\n")
		dir, names, _ := strings.Cut(line, " ")
		for name := range strings.SplitSeq(names, "|") {
			if id := strings.TrimPrefix(strings.TrimPrefix(dir, "."), "/") + "." + name; !tests[id] {
				t.Errorf("%s: there is no test %s", filepath.Base(file), id)
			}
		}
	}
}
