// Package internal_test holds the library's layout to its direction: definition,
// decision, store. What is further to the right knows what is further to the left,
// and not the other way round.
package internal_test

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	module = "github.com/pgratelimit/ratelimit"
	root   = ".."                      // of the module
	pgx    = "github.com/jackc/pgx/v5" // and the packages in it
)

// mayImport is what the packages of the root module may import besides the standard
// library: packages of the module by their directories, and others by their paths.
var mayImport = map[string][]string{
	".":                        {"internal/bucket", "internal/exact", "internal/receipt", "internal/valid"},
	"internal/exact":           {},
	"internal/valid":           {"internal/exact"},
	"internal/bucket":          {"internal/exact", "internal/slots"},
	"internal/receipt":         {"internal/bucket"},
	"internal/slots":           {},
	"internal/batch":           {},
	"internal/keyqueue":        {},
	"internal/intx":            {pgx},
	"internal/decide":          {".", "internal/bucket", "internal/exact", "internal/receipt", "internal/valid"},
	"internal/curve":           {"."},
	"internal/flight":          {".", "internal/decide"},
	"pgstore/internal/escrow":  {".", "internal/bucket", "internal/exact", "internal/decide", "internal/receipt"},
	"pgstore/internal/conn":    {".", "internal/intx", "internal/watch", pgx},
	"pgstore/internal/permits": {".", "internal/batch", "internal/intx", "internal/decide", "internal/flight", "pgstore/internal/conn", "pgstore/internal/table", pgx},
	"pgstore/internal/table":   {".", "internal/bucket", "internal/intx", "internal/exact", "internal/slots", "internal/decide", "pgstore/internal/conn", pgx},
	"pgstore/internal/known":   {".", "internal/bucket", "internal/decide"},
	"pgstore/internal/engine":  {".", "internal/batch", "internal/bucket", "internal/decide", "internal/watch", "pgstore/internal/conn", "pgstore/internal/known", "pgstore/internal/table"},
	"pgstore/internal/memory":  {".", "internal/bucket", "internal/intx", "internal/decide", "internal/watch", "pgstore/internal/conn", "pgstore/internal/engine", "pgstore/internal/escrow", "pgstore/internal/known", "pgstore/internal/table"},
	"pgstore/internal/tx":      {".", "internal/bucket", "internal/intx", "internal/decide", "internal/keyqueue", "internal/receipt", "internal/watch", "pgstore/internal/conn", "pgstore/internal/engine", "pgstore/internal/known", "pgstore/internal/memory", "pgstore/internal/table", pgx},
	"pgstore/internal/edit":    {".", "internal/bucket", "internal/decide", "internal/receipt", "pgstore/internal/conn", "pgstore/internal/known", "pgstore/internal/memory", "pgstore/internal/table", "pgstore/internal/tx", pgx},
	"internal/wait":            {"."},
	"internal/mask":            {"."},
	"internal/edge":            {".", "internal/keyqueue", "internal/mask", "internal/watch"},
	"internal/visible":         {},
	"internal/gate":            {},
	"internal/parked":          {pgx},
	"internal/chart":           {"internal/visible"},
	"internal/trial":           {".", "internal/chart", "memstore"},
	"internal/scenario":        {"."},
	"internal/inspect":         {".", "catalog", "internal/edge", "internal/gate", "internal/parked", "internal/visible", "pgstore", pgx},
	"internal/watch":           {".", "internal/receipt"},
	"internal/leak":            {},
	"fallback":                 {".", "internal/bucket", "internal/decide", "internal/receipt", "internal/watch"},
	"catalog":                  {".", "internal/bucket", "internal/intx", "internal/visible", pgx},
	"console":                  {".", "catalog", "internal/inspect", "internal/parked", "internal/visible", "pgstore", "refusals", pgx},
	"refusals":                 {".", pgx},
	"erase":                    {".", "internal/parked", pgx},
	"memstore":                 {".", "internal/bucket", "internal/decide", "internal/flight", "internal/receipt", "internal/wait", "internal/watch", pgx},
	"migrations":               {},
	"pgstore":                  {".", "internal/bucket", "internal/decide", "internal/flight", "internal/receipt", "internal/wait", "internal/watch", "pgstore/internal/conn", "pgstore/internal/edit", "pgstore/internal/engine", "pgstore/internal/known", "pgstore/internal/memory", "pgstore/internal/permits", "pgstore/internal/table", "pgstore/internal/tx", pgx},
	"sqltx":                    {".", pgx},
	"internal/throwaway":       {pgx},
	"internal/machine":         {},
	"internal/lab":             {pgx},
	"internal/gotool":          {},
	"internal/traced":          {pgx},
	"internal/pgtest":          {"internal/throwaway", "migrations", pgx},
	"internal/relay":           {pgx},
	"internal/ormtest":         {".", "pgstore", "sqltx"},
}

func TestImportsPointOneWay(t *testing.T) {
	packages := importsOf(t)
	for dir, imports := range packages {
		may, ok := mayImport[dir]
		if !ok {
			t.Errorf("package %s is not in the layout: say what it may import", dir)
		}
		for _, imported := range imports {
			if !slices.Contains(may, imported) {
				t.Errorf("package %s imports %s, want at most %q", dir, imported, may)
			}
		}
	}
	for dir := range mayImport {
		if _, ok := packages[dir]; !ok {
			t.Errorf("the layout has a package %s, which there is not", dir)
		}
	}
}

// importsOf returns what the packages of the root module import, without tests and
// the standard library.
func importsOf(t *testing.T) map[string][]string {
	t.Helper()
	packages := map[string][]string{}
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && file != root && (isModule(file) || strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata") {
			return fs.SkipDir
		}
		if !isSource(entry.Name()) {
			return nil
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(file))
		dir = filepath.ToSlash(dir)
		packages[dir] = append(packages[dir], importsIn(parsed)...)
		return err
	})
	must(t, err)
	return packages
}

// importsIn returns what a file imports, in the terms of mayImport.
func importsIn(file *ast.File) (imports []string) {
	for _, spec := range file.Imports {
		imported := strings.Trim(spec.Path.Value, `"`)
		dir, ours := strings.CutPrefix(imported+"/", module+"/")
		first, _, _ := strings.Cut(imported, "/")
		switch {
		case ours:
			imports = append(imports, path.Clean(dir))
		case strings.HasPrefix(imported+"/", pgx+"/"):
			imports = append(imports, pgx)
		case strings.Contains(first, "."):
			imports = append(imports, imported)
		}
	}
	return imports
}

func isSource(name string) bool {
	return strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go")
}

func isModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

// Inside these packages, too, the arrows between files point one way: a file uses what
// others declare, and none of those uses, in however many steps, what it declares. (Package escrow is
// one type, the entry of a key, whose methods stand in several files by subject.)
func TestFilesPointOneWay(t *testing.T) {
	if testing.Short() {
		t.Skip("left out with -short")
	}
	for _, dir := range []string{"catalog", "console", "fallback", "pgstore", "memstore", "internal/decide", "internal/edge", "pgstore/internal/table"} {
		t.Run(dir, func(t *testing.T) { filesPointOneWay(t, dir) })
	}
}

func filesPointOneWay(t *testing.T, dir string) {
	uses := usesBetween(t, dir)
	if len(uses) < 2 {
		t.Fatalf("got arrows from %d files, so this tests nothing", len(uses))
	}
	for _, cycle := range cycles(uses) {
		var b strings.Builder
		for _, from := range cycle {
			for _, to := range cycle {
				if names := uses[from][to]; len(names) > 0 {
					fmt.Fprintf(&b, "\n\t%s -> %s: %s", from, to, strings.Join(slices.Sorted(maps.Keys(names)), ", "))
				}
			}
		}
		t.Errorf("%d files use each other:%s", len(cycle), &b)
	}
}

// arrows says which names a file uses that another declares.
type arrows map[string]map[string]map[string]bool

// usesBetween returns the arrows between the files of a package, by its
// package-level names and methods.
func usesBetween(t *testing.T, dir string) arrows {
	t.Helper()
	fset := token.NewFileSet()
	names, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	must(t, err)
	var files []*ast.File
	for _, name := range names {
		if !isSource(name) {
			continue
		}
		file, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		must(t, err)
		files = append(files, file)
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: importer.ForCompiler(fset, "gc", exportsFor(t, dir))}
	pkg, err := config.Check(module+"/"+dir, fset, files, &info)
	must(t, err)
	fileOf := func(at token.Pos) string { return filepath.Base(fset.Position(at).Filename) }
	uses := arrows{}
	for ident, object := range info.Uses {
		name, ok := declared(pkg, object)
		from, to := fileOf(ident.Pos()), fileOf(object.Pos())
		if !ok || from == to {
			continue
		}
		if uses[from] == nil {
			uses[from] = map[string]map[string]bool{}
		}
		if uses[from][to] == nil {
			uses[from][to] = map[string]bool{}
		}
		uses[from][to][name] = true
	}
	return uses
}

// exportsFor returns a look-up of what go has compiled of the packages that a package
// imports: to read it takes a hundredth of the time of reading their sources.
func exportsFor(t *testing.T, dir string) importer.Lookup {
	t.Helper()
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", "./"+dir)
	list.Dir, list.Stderr = root, os.Stderr
	text, err := list.Output()
	must(t, err)
	exports := map[string]string{}
	for line := range strings.Lines(string(text)) {
		path, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[path] = file
	}
	return func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) }
}

// declared returns the name of what a package declares at its top level or as a
// method.
func declared(pkg *types.Package, object types.Object) (name string, ok bool) {
	if object.Pkg() != pkg {
		return "", false
	}
	if f, ok := object.(*types.Func); ok && f.Signature().Recv() != nil {
		receiver := f.Signature().Recv().Type()
		if pointer, ok := receiver.(*types.Pointer); ok {
			receiver = pointer.Elem()
		}
		named, ok := receiver.(*types.Named)
		if !ok {
			return "", false
		}
		return named.Obj().Name() + "." + f.Name(), true
	}
	return object.Name(), object.Parent() == pkg.Scope()
}

// cycles returns the sets of files that use each other, in however many steps.
func cycles(uses arrows) (sets [][]string) {
	reach := map[string]map[string]bool{}
	var visit func(from, at string)
	visit = func(from, at string) {
		for to := range uses[at] {
			if !reach[from][to] {
				reach[from][to] = true
				visit(from, to)
			}
		}
	}
	for from := range uses {
		reach[from] = map[string]bool{}
		visit(from, from)
	}
	seen := map[string]bool{}
	for _, from := range slices.Sorted(maps.Keys(uses)) {
		if seen[from] || !reach[from][from] {
			continue
		}
		set := []string{}
		for _, to := range slices.Sorted(maps.Keys(reach[from])) {
			if reach[to][from] {
				seen[to] = true
				set = append(set, to)
			}
		}
		sets = append(sets, set)
	}
	slices.SortFunc(sets, func(a, b []string) int { return cmp.Compare(len(a), len(b)) })
	return sets
}

func TestCycles(t *testing.T) {
	name := map[string]bool{"f": true}
	for _, test := range []struct {
		name string
		uses arrows
		want string
	}{
		{"none", arrows{"a": {"b": name, "c": name}, "b": {"c": name}}, "[]"},
		{"two", arrows{"a": {"b": name}, "b": {"a": name, "c": name}}, "[[a b]]"},
		{"in three steps, and apart", arrows{"a": {"b": name}, "b": {"c": name}, "c": {"a": name, "d": name}, "d": {"e": name}, "e": {"d": name}}, "[[d e] [a b c]]"},
	} {
		if got := fmt.Sprint(cycles(test.uses)); got != test.want {
			t.Errorf("%s: got %s, want %s", test.name, got, test.want)
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
