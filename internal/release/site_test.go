package main

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/semver"
)

// next is a version after all that will be released.
const next = "v0.9999.0"

var released = flag.Bool("released", false, "test the checkout as users would get it, for two minutes")

// sums matches the hashes of ours in a go.sum.
var sums = regexp.MustCompile(`(?m)^` + ourPath + `.*\n`)

// The checkout, as users would get it if it were released now: by the tags of a repository, in folders of
// their own, with a go command that has seen none of it before.
func TestReleased(t *testing.T) {
	if !*released {
		t.Skip("compiles all of it: go test ./internal/release -released, which is a step of .ci/run")
	}
	work, err := command{}.run(t.Context(), "go", "env", "GOWORK")
	must(t, err)
	root := filepath.Dir(work)
	all, _, err := modules(root)
	must(t, err)
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	checkout, err := newSite(t.Context(), root, t.TempDir())
	must(t, err)
	must(t, checkout.git(t.Context(), "add", "--all"))
	must(t, checkout.git(t.Context(), "checkout-index", "--all", "--prefix="+tree+"/"))

	s, err := newSite(t.Context(), tree, dir)
	must(t, err)
	must(t, s.writeVersion(t.Context(), all, next))
	withoutOurs := func(file string) string {
		text, _ := os.ReadFile(file) // a module that requires nothing has no go.sum
		return requirement.ReplaceAllString(sums.ReplaceAllString(string(text), ""), "$1")
	}
	for _, m := range all {
		for _, file := range []string{"go.mod", "go.sum"} {
			if file = filepath.Join(m, file); withoutOurs(filepath.Join(tree, file)) != withoutOurs(filepath.Join(root, file)) {
				t.Errorf("%s is not tidy: go run ./internal/release tidy", file)
			}
		}
	}
	s.environ = append(s.environ, "GOSUMDB=off") // others' modules were checked when they came into the cache
	// One after the other: they share the machine with the tests of other packages.
	t.Run("modules in any order", s.testOrders)
	t.Run("the command", s.testCommand)
	t.Run("an importer", s.testImporter)
	t.Run("each module on its own", func(t *testing.T) { s.testAlone(t, all) })
	t.Run("the workspace", s.testWorkspace)
}

// with is s with more in its environment.
func (s *site) with(environ ...string) *site {
	return &site{s.root, s.repo, slices.Concat(s.environ, environ)}
}

// must runs a program in a directory.
func (s *site) must(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	out, err := command{dir, s.environ}.run(t.Context(), name, args...)
	must(t, err)
	return out
}

// program makes a module of somebody who imports the packages.
func (s *site) program(t *testing.T, imports ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	s.must(t, dir, "go", "mod", "init", "example.com/program")
	source := "package main\n\n"
	for _, path := range imports {
		source += fmt.Sprintf("import _ %q\n", path)
	}
	must(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte(source+"\nfunc main() {}\n"), 0o644))
	return dir
}

// Whichever module a program gets first, it gets, and the others after it.
func (s *site) testOrders(t *testing.T) {
	libraries := published[:len(published)-1] // the last is a command
	for order := range turns(libraries) {
		var imports []string
		for _, m := range libraries {
			imports = append(imports, path.Join(ourPath, m))
		}
		imports[0] += "/pgstore"
		dir := s.program(t, imports...)
		for _, m := range order {
			s.must(t, dir, "go", "get", path.Join(ourPath, m))
		}
		s.must(t, dir, "go", "list", "-deps", ".") // finds every package, and its hash
	}
}

// turns yields the orders of list in which each element is the first once, forwards and
// backwards, so that of any two neighbours each is once before the other.
func turns[T any](list []T) func(yield func([]T) bool) {
	return func(yield func([]T) bool) {
		list := slices.Clone(list)
		for range 2 {
			for i := range list {
				if !yield(slices.Concat(list[i:], list[:i])) {
					return
				}
			}
			slices.Reverse(list)
		}
	}
}

func (s *site) testCommand(t *testing.T) {
	bin := t.TempDir()
	s.with("GOBIN="+bin).must(t, bin, "go", "install", ourPath+"/cmd/ratelimit@"+next)
	ratelimit := filepath.Join(bin, "ratelimit")
	if got := s.must(t, bin, ratelimit, "--version"); !strings.HasPrefix(got, "ratelimit "+next+" ") {
		t.Errorf("--version: got %q, want %s", got, next)
	}
	s.must(t, bin, ratelimit, "replay", "--verify", filepath.Join(s.root, "testdata", "conformance", "gcra.jsonl"))
}

// Who imports the library gets nothing but what pgx brings anyway.
func (s *site) testImporter(t *testing.T) {
	const pgxpool = "github.com/jackc/pgx/v5/pgxpool"
	list := func(imports ...string) map[string]bool {
		dir := s.program(t, imports...)
		s.must(t, dir, "go", "mod", "tidy")
		s.must(t, dir, "go", "build", "-o", os.DevNull, ".")
		modules := map[string]bool{}
		for path := range strings.FieldsSeq(s.must(t, dir, "go", "list", "-m", "-f", "{{.Path}}", "all")) {
			modules[path] = true
		}
		return modules
	}
	with := list(pgxpool, ourPath, ourPath+"/memstore", ourPath+"/migrations", ourPath+"/pgstore")
	without := list(pgxpool)
	if !with[ourPath] || len(without) < 2 {
		t.Errorf("with: %v, without: %v", with, without)
	}
	maps.DeleteFunc(with, func(path string, _ bool) bool { return without[path] || path == ourPath })
	if len(with) > 0 {
		t.Errorf("importers get more than pgx and the library: %v", slices.Sorted(maps.Keys(with)))
	}
}

// Every module, published or not, is complete without the workspace, and wants no newer Go than what it
// requires does.
func (s *site) testAlone(t *testing.T, all []string) {
	for _, m := range all {
		t.Run(m, func(t *testing.T) {
			dir := filepath.Join(s.root, m)
			s.must(t, dir, "go", "build", "-o", os.DevNull, "./...")
			s.must(t, dir, "go", "vet", "./...")
			if !slices.Contains(published, m) {
				return
			}
			needed, own := "v0", ""
			for line := range strings.Lines(s.must(t, dir, "go", "list", "-m", "-f", "{{.Main}} v{{.GoVersion}}", "all")) {
				main, version, _ := strings.Cut(strings.TrimSpace(line), " ")
				if main == "true" {
					own = version
				} else if semver.Compare(version, needed) > 0 {
					needed = version
				}
			}
			if semver.Compare(own, needed) > 0 {
				t.Errorf("needs Go %s, and what it requires %s", own, needed)
			}
		})
	}
}

// In the checkout of a release, the go command asks nobody for our modules, and adds nothing to go.work.sum.
func (s *site) testWorkspace(t *testing.T) {
	in := s.with("GOWORK="+filepath.Join(s.root, "go.work"), "GONOPROXY=none")
	before := read(t, s.root, "go.work.sum")
	in.must(t, s.root, "go", "build", "./...")
	in.must(t, s.root, "go", "list", "-m", "all")
	in.must(t, s.root, "go", "doc", ".")
	if read(t, s.root, "go.work.sum") != before {
		t.Error("go.work.sum has changed: it lacks hashes (go list -m all, and commit)")
	}
}
