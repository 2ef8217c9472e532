package main

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
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

// smallTree is a tree with the modules that are published, and no code.
func smallTree(t *testing.T) (root string) {
	t.Helper()
	root = t.TempDir()
	files := map[string]string{
		"LICENSE": "none\n", "CHANGELOG.md": head + changes,
		"go.mod":               "module " + ourPath + "\n\ngo 1.25.0\n",
		"cmd/ratelimit/go.mod": "module " + ourPath + "/cmd/ratelimit\n\ngo 1.25.0\n\nrequire (\n\t" + ourPath + " v0.1.0\n\t" + ourPath + "/migrate v0.1.0\n)\n",
	}
	uses := ""
	for _, m := range published {
		uses += "\t./" + string(m) + "\n"
	}
	files["go.work"] = "go 1.25.0\n\nuse (\n" + uses + ")\n\nreplace " + ourPath + " v0.1.0 => .\n"
	for _, m := range published[1:] {
		if file := string(m) + "/go.mod"; files[file] == "" {
			files[file] = "module " + m.path() + "\n\ngo 1.25.0\n\nrequire " + ourPath + " v0.1.0\n"
		}
		files[string(m)+"/go.sum"] = "a.example/x v1.0.0 h1:x=\n" + ourPath + " v0.1.0 h1:old=\n" + ourPath + " v0.1.0/go.mod h1:old=\n"
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

// snapshot is all files of a tree.
func snapshot(t *testing.T, root string) map[string]string {
	t.Helper()
	files, err := walk(root)
	must(t, err)
	texts := map[string]string{}
	for _, file := range files {
		texts[file] = read(t, root, file)
	}
	return texts
}

func TestCut(t *testing.T) {
	root := smallTree(t)
	must(t, cut(t.Context(), root, "v0.2.0", day))
	for _, m := range published[1:] {
		if text := read(t, root, string(m)+"/go.mod"); strings.Contains(text, "v0.1.0") || !strings.Contains(text, ourPath+" v0.2.0") {
			t.Errorf("%s/go.mod:\n%s", m, text)
		}
		sums := read(t, root, string(m)+"/go.sum")
		if strings.Contains(sums, "old") || !strings.HasPrefix(sums, "a.example/x v1.0.0 h1:x=\n"+ourPath+" v0.2.0 h1:") ||
			!strings.Contains(sums, "\n"+ourPath+" v0.2.0/go.mod h1:") {
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
		{"a replacement", "v0.2.0", "migrate/go.mod", "\nreplace " + ourPath + " => ../\n", "replaces " + ourPath},
		{"several versions", "v0.2.0", "httplimit/go.mod", "\nrequire " + ourPath + "/migrate v0.1.1\n", "and another one v0.1.0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := smallTree(t)
			if test.file != "" {
				must(t, os.WriteFile(filepath.Join(root, test.file), []byte(read(t, root, test.file)+test.text), 0o644))
			}
			before := snapshot(t, root)
			if err := cut(t.Context(), root, test.version, day); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
			if !maps.Equal(snapshot(t, root), before) {
				t.Error("files have changed")
			}
		})
	}
}

func TestFormatSum(t *testing.T) {
	const text = "b.example v1.9.0/go.mod h1:b=\nb.example v1.10.0 h1:c=\nc.example v1.1.0 h1:d=\nc.example v1.1.0/go.mod h1:e=\n"
	file := filepath.Join(t.TempDir(), "go.sum")
	must(t, os.WriteFile(file, []byte(text), 0o644))
	sums, err := readSum(file)
	if got := string(formatSum(sums)); err != nil || got != text {
		t.Errorf("got\n%s%v, want\n%s", got, err, text)
	}
}

// What is published comes after all that it requires, so that nobody ever gets a module
// whose requirements there are not yet.
func TestOrder(t *testing.T) {
	root, err := findRoot(t.Context())
	must(t, err)
	for i, m := range published {
		mod, err := readMod(root, m)
		must(t, err)
		for _, require := range mod.Require {
			at := slices.IndexFunc(published, func(p ourModule) bool { return p.path() == require.Mod.Path })
			if at >= i || at < 0 && strings.HasPrefix(require.Mod.Path, ourPath) {
				t.Errorf("%s requires %s, which is not published before", m, require.Mod.Path)
			}
		}
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

// What was tidied is brought back without the replacements, and with the hashes that the
// checkout has.
func TestBroughtBack(t *testing.T) {
	const m ourModule = "migrate"
	root, tree := smallTree(t), t.TempDir()
	must(t, errOf(copyTo(t.Context(), root, tree)))
	must(t, replaceOthers(tree, m))
	if text := read(t, tree, "migrate/go.mod"); !strings.Contains(text, "\nreplace "+ourPath+" => "+tree+"\n") {
		t.Errorf("replaced:\n%s", text)
	}
	const tidied = "b.example/y v1.0.0 h1:y=\n"
	must(t, os.WriteFile(m.sumFile(tree), []byte(tidied), 0o644))
	mod, sum, err := broughtBack(tree, root, m)
	must(t, err)
	if want := read(t, root, "migrate/go.mod"); string(mod) != want {
		t.Errorf("go.mod: got\n%s, want\n%s", mod, want)
	}
	if _, ours, _ := strings.Cut(read(t, root, "migrate/go.sum"), "\n"); string(sum) != tidied+ours {
		t.Errorf("go.sum: got\n%s, want\n%s", sum, tidied+ours)
	}
}

// must fails the test for an error.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// errOf returns the error of a call that returns a value besides.
func errOf[T any](_ T, err error) error { return err }
