package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/semver"
)

// The checkout, as users would get it if it were released now: from a module proxy, in
// folders of their own, with a go command that has seen none of it before.
func TestReleased(t *testing.T) {
	root, err := findRoot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s, err := newSite(t.Context(), root, t.TempDir(), next)
	if err != nil {
		t.Fatal(err)
	}
	// One after the other: they share the machine with the tests of other packages.
	t.Run("modules in every order", s.testOrders)
	t.Run("the command", s.testCommand)
	t.Run("an importer", s.testImporter)
	t.Run("each module on its own", s.testAlone)
	t.Run("the workspace", s.testWorkspace)
	t.Run("tags", s.testTags)
}

// must runs the go command in a directory.
func (s *site) must(t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, err := s.run(t.Context(), dir, "go", args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// program makes a module of somebody who imports the packages.
func (s *site) program(t *testing.T, imports ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	s.must(t, dir, "mod", "init", "example.com/program")
	source := "package main\n\n"
	for _, path := range imports {
		source += fmt.Sprintf("import _ %q\n", path)
	}
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(source+"\nfunc main() {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Whichever module a program gets first, it gets, and the others after it.
func (s *site) testOrders(t *testing.T) {
	libraries := published[:len(published)-1] // the last is a command
	for order := range permutations(libraries) {
		var imports []string
		for _, m := range libraries {
			imports = append(imports, m.path())
		}
		imports[0] += "/pgstore"
		dir := s.program(t, imports...)
		for _, m := range order {
			s.must(t, dir, "get", m.path())
		}
		s.must(t, dir, "list", "-deps", ".") // finds every package, and its hash
	}
}

// permutations yields all orders of list.
func permutations[T any](list []T) func(yield func([]T) bool) {
	return func(yield func([]T) bool) {
		var from func(int) bool
		list := slices.Clone(list)
		from = func(i int) bool {
			if i == len(list) {
				return yield(slices.Clone(list))
			}
			for j := i; j < len(list); j++ {
				list[i], list[j] = list[j], list[i]
				if !from(i + 1) {
					return false
				}
				list[i], list[j] = list[j], list[i]
			}
			return true
		}
		from(0)
	}
}

func (s *site) testCommand(t *testing.T) {
	bin := t.TempDir()
	installer := *s
	installer.environ = append(slices.Clone(s.environ), "GOBIN="+bin)
	installer.must(t, bin, "install", ourPath+"/cmd/ratelimit@"+s.version)
	command := filepath.Join(bin, "ratelimit")
	if got, err := s.run(t.Context(), bin, command, "--version"); err != nil || !strings.HasPrefix(got, "ratelimit "+s.version+" ") {
		t.Errorf("--version: got %q, %v, want %s", got, err, s.version)
	}
	scenario := filepath.Join(s.tree, "testdata", "conformance", "gcra.jsonl")
	if _, err := s.run(t.Context(), bin, command, "replay", "--verify", scenario); err != nil {
		t.Error(err)
	}
}

// Who imports the library gets nothing but what pgx brings anyway.
func (s *site) testImporter(t *testing.T) {
	const pgxpool = "github.com/jackc/pgx/v5/pgxpool"
	list := func(imports ...string) map[string]bool {
		dir := s.program(t, imports...)
		s.must(t, dir, "mod", "tidy")
		s.must(t, dir, "build", "-o", os.DevNull, ".")
		modules := map[string]bool{}
		for path := range strings.FieldsSeq(s.must(t, dir, "list", "-m", "-f", "{{.Path}}", "all")) {
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
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		t.Run(m.path(), func(t *testing.T) {
			dir := filepath.Join(s.tree, string(m))
			s.must(t, dir, "build", "-o", os.DevNull, "./...")
			s.must(t, dir, "vet", "./...")
			if out, err := s.run(t.Context(), dir, "go", "mod", "tidy", "-diff"); err != nil {
				t.Errorf("not tidy (go run ./internal/release tidy): %v\n%s", err, out)
			}
			if !slices.Contains(published, m) {
				return
			}
			needed, own := "v0", ""
			for line := range strings.Lines(s.must(t, dir, "list", "-m", "-f", "{{.Main}} v{{.GoVersion}}", "all")) {
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
	in := *s
	in.environ = append(slices.Clone(s.environ), "GOWORK="+workFile(s.tree), "GOPROXY="+withoutOurs(s.environ))
	before := read(t, s.tree, "go.work.sum")
	in.must(t, s.tree, "build", "./...")
	in.must(t, s.tree, "list", "-m", "all")
	in.must(t, s.tree, "doc", ".")
	if read(t, s.tree, "go.work.sum") != before {
		t.Error("go.work.sum has changed: it lacks hashes (go list -m all, and commit)")
	}
}

// withoutOurs is the proxies of an environment, but for ours.
func withoutOurs(environ []string) (proxies string) {
	for _, v := range environ {
		if list, ok := strings.CutPrefix(v, "GOPROXY="); ok {
			_, proxies, _ = strings.Cut(list, ",")
		}
	}
	return proxies
}

// The go command makes of the tags what was hashed.
func (s *site) testTags(t *testing.T) {
	if _, err := exec.LookPath("git"); err != nil {
		t.Skip("there is no git")
	}
	clone := t.TempDir()
	if _, err := copyTo(t.Context(), s.tree, clone); err != nil {
		t.Fatal(err)
	}
	commands := [][]string{
		{"init", "--quiet"},
		{"add", "--all"},
		{"-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false", "commit", "--quiet", "--message", "x"},
	}
	for _, m := range published {
		commands = append(commands, []string{"tag", m.tag(s.version)})
	}
	for _, args := range commands {
		if _, err := s.run(t.Context(), clone, "git", args...); err != nil {
			t.Fatal(err)
		}
	}
	direct := *s
	direct.environ = append(slices.Clone(s.environ), "GOPROXY=direct", "GOMODCACHE="+t.TempDir(),
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=url.file://"+filepath.ToSlash(clone)+".insteadOf", "GIT_CONFIG_VALUE_0="+repository)
	for _, m := range published {
		var tagged, served struct{ Sum, GoModSum string }
		for into, from := range map[*struct{ Sum, GoModSum string }]*site{&tagged: &direct, &served: s} {
			if err := json.Unmarshal([]byte(from.must(t, clone, "mod", "download", "-json", m.path()+"@"+s.version)), into); err != nil {
				t.Fatal(err)
			}
		}
		if tagged != served || tagged.Sum == "" {
			t.Errorf("%s: tag gives %v, proxy %v", m.path(), tagged, served)
		}
	}
}
