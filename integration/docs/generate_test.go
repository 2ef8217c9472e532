package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// What is generated is in no directory of the repository: the go command reads it by its
// flag -overlay, as packages below this one and as a test of the harness.
const (
	here      = module + "/integration/docs/"
	harness   = here + "fragment"
	signature = "(t *testing.T, ctx context.Context, pool *pgxpool.Pool, store *pgstore.Store, tx pgx.Tx, databaseURL string, w http.ResponseWriter, r *http.Request) (err error)"
)

// imports are the packages that fragments use without an import of their own.
var imports = func() map[string]string {
	byName := map[string]string{}
	for _, path := range []string{
		"bytes", "cmp", "context", "crypto/rand", "database/sql", "encoding/json", "errors", "fmt", "hash/fnv", "io", "log", "log/slog", "math",
		"net/http", "net/http/httptest", "net/netip", "os", "os/signal", "path/filepath", "slices", "strconv", "strings", "sync", "syscall", "testing", "testing/synctest", "time",
		"github.com/jackc/pgx/v5", "github.com/jackc/pgx/v5/pgconn", "github.com/jackc/pgx/v5/pgxpool", "github.com/jackc/pgx/v5/stdlib",
		"github.com/pressly/goose/v3", "github.com/riverqueue/river", "github.com/riverqueue/river/riverdriver/riverpgxv5",
		"github.com/riverqueue/river/rivertype", "golang.org/x/text/unicode/norm", "golang.org/x/time/rate", "go.opentelemetry.io/otel",
		"google.golang.org/grpc", "google.golang.org/grpc/codes", "google.golang.org/grpc/credentials",
		module, module + "/catalog", module + "/console", module + "/erase", module + "/fallback", module + "/grpclimit", module + "/httplimit", module + "/memstore", module + "/migrate", module + "/migrations", module + "/otellimit", module + "/refusals", module + "/pgstore", module + "/riverlimit", module + "/sqltx",
		harness,
	} {
		name := regexp.MustCompile(`/v\d+$`).ReplaceAllString(path, "")
		byName[name[strings.LastIndex(name, "/")+1:]] = path
	}
	return byName
}()

// output is what a block says that it prints, as an example of go test does.
var output = regexp.MustCompile(`(?m)^\s*// Output:\n?((?:\s*//.*\n?)*)\s*}?\s*$`)

func wantedOutput(text string) string {
	m := output.FindStringSubmatch(text)
	if m == nil {
		return ""
	}
	return regexp.MustCompile(`(?m)^\s*// ?`).ReplaceAllString(m[1], "")
}

// generator makes code of pages.
type generator struct {
	t        *testing.T
	root     string
	preamble *ast.File
	sources  map[string]string // by path below here
	programs []string          // packages
}

// add makes a package of a page, and one of each whole program in it.
func (g *generator) add(p *page) {
	var declared, calls strings.Builder
	names := map[string]bool{}
	for i, b := range p.blocks {
		at := fmt.Sprintf("%s:%d", p.name, b.line)
		line := fmt.Sprintf("//line %s:%d\n", filepath.Join(g.root, p.name), b.line)
		switch b.lang {
		case "sql":
			fmt.Fprintf(&calls, "\tp.SQL(%q, %q)\n", at, b.text)
			continue
		case "sh":
			fmt.Fprintf(&calls, "\tp.Shell(%q, %q, %q)\n", at, prologue, b.text)
			continue
		case "python":
			program, printed, _ := strings.Cut(b.text, "\n# Output:\n")
			fmt.Fprintf(&calls, "\tp.Python(%q, %q, %q)\n", at, program, strings.ReplaceAll("\n"+printed, "\n# ", "\n"))
			continue
		case "json":
			fmt.Fprintf(&calls, "\tp.JSON(%q, %q)\n", at, b.text)
			continue
		case "go":
		default:
			continue
		}
		if strings.HasPrefix(b.text, "package main\n") {
			name := fmt.Sprintf("%s_%d", packageName(p), i)
			g.sources[name+"/main.go"] = line + b.text
			g.programs = append(g.programs, name)
			fmt.Fprintf(&calls, "\tp.Program(%q, filepath.Join(os.Getenv(\"PAGES_PROGRAMS\"), %q), %q)\n", at, name, wantedOutput(b.text))
			continue
		}
		if file, err := parseDeclarations(b.text); err == nil {
			fmt.Fprintf(&declared, "%s%s\n", line, b.text)
			for _, decl := range file.Decls {
				maps.Copy(names, namesOf(decl))
				if f, ok := decl.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
					fmt.Fprintf(&calls, "\tp.Test(%q, %s)\n", at, f.Name.Name)
				}
			}
			continue
		}
		fmt.Fprintf(&calls, "\tp.Go(%q, %q, func%s {\n\t{\n%s%s\n%s\t}\n\treturn nil\n})\n",
			at, wantedOutput(b.text), signature, line, b.text, g.use(at, b.text))
	}
	var b strings.Builder
	fmt.Fprintf(&b, "package %s\n", packageName(p))
	body := g.preambleWithout(names) + declared.String() + "//line generated.go:1\nfunc Run(p *fragment.Page) {\n" + calls.String() + "}\n"
	for _, path := range g.importsOf(p.name, body) {
		fmt.Fprintf(&b, "import %q\n", path)
	}
	b.WriteString(body)
	g.sources[packageName(p)+"/page.go"] = b.String()
}

func parseDeclarations(text string) (*ast.File, error) {
	return parser.ParseFile(token.NewFileSet(), "", "package p\n"+text, parser.SkipObjectResolution)
}

// isDeclarations reports whether code is declarations, and not a program or statements.
func isDeclarations(text string) bool {
	_, err := parseDeclarations(text)
	return err == nil
}

func packageName(p *page) string {
	name := strings.TrimSuffix(filepath.Base(p.name), ".md")
	return "page_" + strings.ToLower(strings.ReplaceAll(name, "-", "_"))
}

// use returns a statement that uses the variables which a fragment declares: it shows how
// they are made, and need not use them.
func (g *generator) use(at, text string) string {
	file, err := parser.ParseFile(token.NewFileSet(), "", "package p\nfunc _() {\n"+text+"\n}", parser.SkipObjectResolution)
	if err != nil {
		g.t.Errorf("%s: is neither a program, nor declarations, nor statements: %v", at, err)
		return ""
	}
	var names []string
	for _, stmt := range file.Decls[0].(*ast.FuncDecl).Body.List {
		switch stmt := stmt.(type) {
		case *ast.AssignStmt:
			for _, left := range stmt.Lhs {
				if ident, ok := left.(*ast.Ident); ok && stmt.Tok == token.DEFINE && ident.Name != "_" {
					names = append(names, ident.Name)
				}
			}
		case *ast.DeclStmt:
			if decl, ok := stmt.Decl.(*ast.GenDecl); ok && decl.Tok == token.VAR {
				names = append(names, slices.Sorted(maps.Keys(namesOf(decl)))...)
			}
		}
	}
	var b strings.Builder
	for _, name := range names {
		fmt.Fprintf(&b, "_ = %s\n", name)
	}
	return b.String()
}

// namesOf returns what a declaration declares in its package; methods are not.
func namesOf(decl ast.Decl) map[string]bool {
	names := map[string]bool{}
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		if decl.Recv == nil {
			names[decl.Name.Name] = true
		}
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				names[spec.Name.Name] = true
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					names[name.Name] = true
				}
			}
		}
	}
	return names
}

// preambleWithout returns the preamble but for what a page declares itself.
func (g *generator) preambleWithout(names map[string]bool) string {
	var b strings.Builder
	for _, decl := range g.preamble.Decls {
		if d, ok := decl.(*ast.GenDecl); ok && d.Tok == token.IMPORT {
			continue
		}
		theirs := false
		for name := range namesOf(decl) {
			theirs = theirs || names[name]
		}
		if f, ok := decl.(*ast.FuncDecl); ok && f.Recv != nil {
			theirs = names[f.Recv.List[0].Type.(*ast.Ident).Name]
		}
		if !theirs {
			if err := format.Node(&b, token.NewFileSet(), decl); err != nil {
				g.t.Fatal(err)
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// importsOf returns the packages that code uses by name.
func (g *generator) importsOf(at, code string) []string {
	file, err := parser.ParseFile(token.NewFileSet(), "", "package p\n"+code, 0)
	if err != nil {
		g.t.Fatalf("%s: %v", at, err)
	}
	paths := map[string]bool{}
	for _, ident := range file.Unresolved {
		if path, ok := imports[ident.Name]; ok {
			paths[path] = true
		}
	}
	return slices.Sorted(maps.Keys(paths))
}

// finish adds the test that runs all pages, and returns the flag -overlay.
func (g *generator) finish(dir string, pages []*page) (overlay string) {
	var b bytes.Buffer
	b.WriteString("package fragment_test\nimport (\n\t\"testing\"\n\t" + strconv.Quote(harness) + "\n")
	for _, p := range pages {
		fmt.Fprintf(&b, "\t%q\n", here+packageName(p))
	}
	b.WriteString(")\nfunc TestMain(m *testing.M) { fragment.Main(m) }\nfunc TestPages(t *testing.T) {\n")
	for _, p := range pages {
		fmt.Fprintf(&b, "\tt.Run(%q, func(t *testing.T) { %s.Run(fragment.New(t, %q)) })\n", p.name, packageName(p), packageName(p))
	}
	b.WriteString("}\n")
	g.sources["fragment/pages_test.go"] = b.String()

	replace := map[string]string{}
	for name, text := range g.sources {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			g.t.Fatal(err)
		}
		replace[g.abs(filepath.FromSlash(name))] = file
	}
	return g.writeJSON(filepath.Join(dir, "overlay.json"), map[string]any{"Replace": replace})
}
