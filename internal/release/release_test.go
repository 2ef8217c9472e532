package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var day = time.Date(2027, 2, 3, 4, 5, 6, 0, time.UTC)

const (
	head    = "# Changelog\n\n## [Unreleased]\n"
	changes = "\n### Added\n\n- A thing.\n"
)

func TestCutChangelog(t *testing.T) {
	first := "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2027-02-03\n" + changes + `
[Unreleased]: https://github.com/pgratelimit/ratelimit/compare/v0.1.0...HEAD
[0.1.0]: https://github.com/pgratelimit/ratelimit/releases/tag/v0.1.0
`
	got, err := cutChangelog([]byte(head+changes), "v0.0.0", "v0.1.0", day)
	if err != nil || string(got) != first {
		t.Fatalf("the first version: got\n%s%v, want\n%s", got, err, first)
	}

	second := "# Changelog\n\n## [Unreleased]\n\n## [0.2.0-rc.1] - 2027-02-03\n\n### Fixed\n\n- A fault.\n\n## [0.1.0] - 2027-02-03\n" + changes + `
[Unreleased]: https://github.com/pgratelimit/ratelimit/compare/v0.2.0-rc.1...HEAD
[0.2.0-rc.1]: https://github.com/pgratelimit/ratelimit/compare/v0.1.0...v0.2.0-rc.1
[0.1.0]: https://github.com/pgratelimit/ratelimit/releases/tag/v0.1.0
`
	next := strings.Replace(first, "## [Unreleased]\n", "## [Unreleased]\n\n### Fixed\n\n- A fault.\n", 1)
	got, err = cutChangelog([]byte(next), "v0.1.0", "v0.2.0-rc.1", day)
	if err != nil || string(got) != second {
		t.Fatalf("the second version: got\n%s%v, want\n%s", got, err, second)
	}

	for name, text := range map[string]string{
		"nothing new":           first,
		"no section Unreleased": "# Changelog\n",
	} {
		if got, err := cutChangelog([]byte(text), "v0.1.0", "v0.2.0", day); err == nil {
			t.Errorf("%s: got\n%s, want an error", name, got)
		}
	}
}

// smallTree is a tree with the modules that are published. Each but the root's imports that.
func smallTree(t *testing.T) (root string) {
	t.Helper()
	root = t.TempDir()
	files := map[string]string{
		"LICENSE": "none\n", "CHANGELOG.md": head + changes, "go.work": "go 1.25.0\n\nreplace " + ourPath + " v0.1.0 => .\n",
		"go.mod": "module " + ourPath + "\n\ngo 1.25.0\n", "a.go": "package ratelimit\n",
	}
	for _, m := range published[1:] {
		files[m+"/go.mod"] = "module " + ourPath + "/" + m + "\n\ngo 1.25.0\n\nrequire " + ourPath + " v0.1.0\n"
		files[m+"/a.go"] = "package a\n\nimport _ \"" + ourPath + "\"\n"
		files[m+"/go.sum"] = ourPath + " v0.1.0 h1:old=\n" + ourPath + " v0.1.0/go.mod h1:old=\n"
	}
	for name, text := range files {
		file := filepath.Join(root, name)
		must(t, os.MkdirAll(filepath.Dir(file), 0o755))
		must(t, os.WriteFile(file, []byte(text), 0o644))
	}
	return root
}

func read(t *testing.T, root, file string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, file))
	must(t, err)
	return string(text)
}

// TestCut tidies a tree, which changes nothing, and then cuts a version of it.
func TestCut(t *testing.T) {
	root := smallTree(t)
	old := read(t, root, "migrate/go.sum")
	must(t, tidy(t.Context(), root))
	if mod, sum := read(t, root, "migrate/go.mod"), read(t, root, "migrate/go.sum"); !strings.Contains(mod, ourPath+" v0.1.0\n") || sum != old {
		t.Errorf("tidy: go.mod\n%s\ngo.sum\n%s", mod, sum)
	}
	must(t, cut(t.Context(), root, "v0.2.0", day))
	for _, m := range published[1:] {
		if text := read(t, root, m+"/go.mod"); strings.Contains(text, "v0.1.0") || !strings.Contains(text, ourPath+" v0.2.0") {
			t.Errorf("%s/go.mod:\n%s", m, text)
		}
		sums := read(t, root, m+"/go.sum")
		if strings.Contains(sums, "old") || !strings.HasPrefix(sums, ourPath+" v0.2.0 h1:") || !strings.Contains(sums, "\n"+ourPath+" v0.2.0/go.mod h1:") {
			t.Errorf("%s/go.sum:\n%s", m, sums)
		}
	}
	if text := read(t, root, "go.work"); !strings.HasSuffix(text, "\nreplace "+ourPath+" v0.2.0 => .\n") {
		t.Errorf("go.work:\n%s", text)
	}
	if text := read(t, root, "CHANGELOG.md"); !strings.Contains(text, "## [0.2.0] - 2027-02-03\n") {
		t.Errorf("CHANGELOG.md:\n%s", text)
	}
}

// What cut refuses changes nothing: not even the changelog, which it writes first.
func TestCutRefuses(t *testing.T) {
	for _, test := range []struct {
		name, version string
		file, text    string // appended to the file, if any
		want          string
	}{
		{"no version", "0.2.0", "", "", "is none as Go has them"},
		{"half a version", "v0.2", "", "", "is none as Go has them"},
		{"a build", "v0.2.0+linux", "", "", "is none as Go has them"},
		{"the same version", "v0.1.0", "", "", "does not come after v0.1.0"},
		{"an earlier version", "v0.1.0-rc.1", "", "", "does not come after v0.1.0"},
		{"another path", "v2.0.0", "", "", "paths end with /v2"},
		{"a replacement", "v0.2.0", "migrate/go.mod", "\nreplace " + ourPath + " => ../\n", "migrate replaces another one"},
		{"several versions", "v0.2.0", "httplimit/go.mod", "\nrequire " + ourPath + "/migrate v0.1.1\n", "and another one v0.1.0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := smallTree(t)
			if test.file != "" {
				must(t, os.WriteFile(filepath.Join(root, test.file), []byte(read(t, root, test.file)+test.text), 0o644))
			}
			if err := cut(t.Context(), root, test.version, day); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
			if read(t, root, "CHANGELOG.md") != head+changes {
				t.Error("the changelog has changed")
			}
		})
	}
}

// What is released first gets its place in a go.sum by its path.
func TestAddLines(t *testing.T) {
	file := filepath.Join(t.TempDir(), "go.sum")
	must(t, os.WriteFile(file, []byte("a.example v1.9.0 h1:b=\na.example v1.10.0 h1:c=\nz.example v1.1.0 h1:d=\n"), 0o644))
	must(t, addLines(file, []string{ourPath + " v0.1.0 h1:e=\n", ourPath + " v0.1.0/go.mod h1:f=\n"}))
	want := "a.example v1.9.0 h1:b=\na.example v1.10.0 h1:c=\n" + ourPath + " v0.1.0 h1:e=\n" + ourPath + " v0.1.0/go.mod h1:f=\nz.example v1.1.0 h1:d=\n"
	if got := read(t, "", file); got != want {
		t.Errorf("got\n%s, want\n%s", got, want)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"v0.1.0", "v0.2.0"}} {
		var out bytes.Buffer
		if err := run(t.Context(), &out, args); err == nil || out.Len() > 0 {
			t.Errorf("%q: got %v and %q, want an error alone", args, err, &out)
		}
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
