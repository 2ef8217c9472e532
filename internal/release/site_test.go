package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"
)

// A site is the checkout as it would be once it is released: a copy that has the
// version, and a module proxy that serves it.
type site struct {
	tree    string // the copy
	environ []string
}

// next is a version after all that will be released.
const next = "v0.9999.0"

var released = flag.Bool("released", false, "test the checkout as users would get it, for two minutes")

// The checkout, as users would get it if it were released now: from a module proxy, in
// folders of their own, with a go command that has seen none of it before. Nobody is asked
// over a network but for what others' modules the user's cache lacks, by the first part.
func TestReleased(t *testing.T) {
	if !*released {
		t.Skip("compiles all of it: go test ./internal/release -released, which is a step of .ci/run")
	}
	root, err := findRoot(t.Context())
	must(t, err)
	t.Run("tidy", func(t *testing.T) { testTidy(t, root) })
	s := newSite(t, root)
	// One after the other: they share the machine with the tests of other packages.
	t.Run("modules in any order", s.testOrders)
	t.Run("the command", s.testCommand)
	t.Run("an importer", s.testImporter)
	t.Run("each module on its own", s.testAlone)
	t.Run("the workspace", s.testWorkspace)
	t.Run("tags", s.testTags)
}

// testTidy finds what go mod tidy would change, and fills the user's module cache.
func testTidy(t *testing.T, root string) {
	tree := t.TempDir()
	all, err := tidied(t.Context(), root, tree)
	must(t, err)
	for _, m := range all {
		mod, sum, err := broughtBack(tree, root, m)
		must(t, err)
		if read(t, root, string(m)+"/go.mod") != string(mod) || len(sum) > 0 && read(t, root, string(m)+"/go.sum") != string(sum) {
			t.Errorf("module %s is not tidy: go run ./internal/release tidy", m.path())
		}
	}
	// Of the workspace the go command looks at more than of its modules.
	if _, err := (command{dir: root, environ: os.Environ()}).run(t.Context(), "go", "list", "-m", "all"); err != nil {
		t.Error(err)
	}
}

// newSite gives a copy of the checkout the version, and serves it.
func newSite(t *testing.T, root string) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{tree: filepath.Join(dir, "tree")}
	files, err := copyTo(t.Context(), root, s.tree)
	must(t, err)
	all, err := modules(s.tree)
	must(t, err)
	must(t, errOf(releasedVersion(s.tree, all)))
	must(t, writeVersion(t.Context(), s.tree, all, next))
	proxy := filepath.Join(dir, "proxy")
	must(t, serve(proxy, s.tree, files, next))
	users, err := command{environ: os.Environ()}.run(t.Context(), "go", "env", "GOMODCACHE")
	must(t, err)
	s.environ = append(os.Environ(),
		"GOWORK=off",
		"GOPROXY="+fileURL(proxy)+","+fileURL(filepath.Join(strings.TrimSpace(users), "cache", "download")),
		"GOSUMDB=off", // what others' modules are, was checked when they came into the cache
		"GOMODCACHE="+filepath.Join(dir, "modcache"),
		"GOFLAGS=-modcacherw -trimpath", // -trimpath: what was compiled elsewhere need not be again
	)
	return s
}

func fileURL(dir string) string { return "file://" + filepath.ToSlash(dir) }

// serve writes the version of the modules that are published into a directory that the
// go command takes for a module proxy.
func serve(dir, root string, files []string, version string) error {
	for _, m := range published {
		escaped, err := module.EscapePath(m.path())
		if err != nil {
			return err
		}
		var archived bytes.Buffer
		if err := archive(&archived, root, files, m, version); err != nil {
			return fmt.Errorf("module %s: %w", m.path(), err)
		}
		mod, err := os.ReadFile(m.modFile(root))
		if err != nil {
			return err
		}
		info, err := json.Marshal(map[string]any{"Version": version, "Time": time.Unix(0, 0).UTC()})
		if err != nil {
			return err
		}
		at := filepath.Join(dir, filepath.FromSlash(escaped), "@v")
		if err := os.MkdirAll(at, 0o755); err != nil {
			return err
		}
		for name, text := range map[string][]byte{
			"list": []byte(version + "\n"), version + ".info": info, version + ".mod": mod, version + ".zip": archived.Bytes(),
		} {
			if err := os.WriteFile(filepath.Join(at, name), text, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// with is s with more in its environment.
func (s *site) with(environ ...string) *site {
	return &site{s.tree, slices.Concat(s.environ, environ)}
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
			imports = append(imports, m.path())
		}
		imports[0] += "/pgstore"
		dir := s.program(t, imports...)
		for _, m := range order {
			s.must(t, dir, "go", "get", m.path())
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
	s.must(t, bin, ratelimit, "replay", "--verify", filepath.Join(s.tree, "testdata", "conformance", "gcra.jsonl"))
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

// Every module, published or not, is complete without the workspace, and tidy, and wants
// no newer Go than what it requires does.
func (s *site) testAlone(t *testing.T) {
	all, err := modules(s.tree)
	must(t, err)
	for _, m := range all {
		t.Run(m.path(), func(t *testing.T) {
			dir := filepath.Join(s.tree, string(m))
			s.must(t, dir, "go", "build", "-o", os.DevNull, "./...")
			s.must(t, dir, "go", "vet", "./...")
			s.must(t, dir, "go", "mod", "tidy", "-diff") // with the hashes of ours
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

// In the checkout of a release, the go command asks nobody for our modules, and adds
// nothing to go.work.sum.
func (s *site) testWorkspace(t *testing.T) {
	_, others, _ := strings.Cut(s.proxies(t), ",")
	in := s.with("GOWORK="+workFile(s.tree), "GOPROXY="+others)
	before := read(t, s.tree, "go.work.sum")
	in.must(t, s.tree, "go", "build", "./...")
	in.must(t, s.tree, "go", "list", "-m", "all")
	in.must(t, s.tree, "go", "doc", ".")
	if read(t, s.tree, "go.work.sum") != before {
		t.Error("go.work.sum has changed: it lacks hashes (go list -m all, and commit)")
	}
}

// proxies is what the go command of the site asks.
func (s *site) proxies(t *testing.T) string {
	t.Helper()
	return strings.TrimSpace(s.must(t, s.tree, "go", "env", "GOPROXY"))
}

// The go command makes of the tags what was hashed.
func (s *site) testTags(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("there is no git")
	}
	clone := t.TempDir()
	must(t, errOf(copyTo(t.Context(), s.tree, clone)))
	s.must(t, clone, "git", "init", "--quiet")
	s.must(t, clone, "git", "add", "--all")
	s.must(t, clone, "git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false", "commit", "--quiet", "--message", "x")
	for _, m := range published {
		s.must(t, clone, "git", "tag", m.tag(next))
	}
	direct := s.with("GOPROXY=direct", "GOMODCACHE="+t.TempDir(),
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=url."+fileURL(clone)+".insteadOf", "GIT_CONFIG_VALUE_0="+repository)
	for _, m := range published {
		var tagged, served struct{ Sum, GoModSum string }
		for into, from := range map[*struct{ Sum, GoModSum string }]*site{&tagged: direct, &served: s} {
			must(t, json.Unmarshal([]byte(from.must(t, clone, "go", "mod", "download", "-json", m.path()+"@"+next)), into))
		}
		if tagged != served || tagged.Sum == "" {
			t.Errorf("%s: tag gives %v, proxy %v", m.path(), tagged, served)
		}
	}
}
