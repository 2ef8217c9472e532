package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/gotool"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

const root = "../.."

// faults is a page none of whose blocks is right.
const faults = "# Faults\n" +
	"```go\npackage main\n\nfunc main() { panic(\"a fault\") }\n```\n" +
	"```go\npackage main\n\nimport \"fmt\"\n\nfunc main() {\n\tfmt.Println(1)\n\t// Output:\n\t// 2\n}\n```\n" +
	"```go\nreturn errors.New(\"a fault\")\n```\n" +
	"```go\nfmt.Println(1)\n// Output:\n// 2\n```\n" +
	"```go\nfunc TestFault(t *testing.T) { t.Error(\"a fault\") }\n```\n" +
	"```sql\nSELECT a fault;\n```\n" +
	"```json\n[{\"name\": \"no kind\"}]\n```\n" +
	"```python\nprint(1)\n\n# Output:\n# 2\n```\n" +
	"```sh\nfalse\necho after it\n```\n" +
	"```sh\necho nothing is migrated \"$DATABASE_URL\"\n```\n"

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "migrate" { // shell of a page has called it
		if err := golangMigrate(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// Every block of Go is compiled and run, every block of SQL, shell and Python is run, from the
// top of a page to its end, in a database of the page's own. A page of faults goes along,
// each block of which must fail.
func TestBlocks(t *testing.T) {
	pgtest.Long(t)
	pages, err := readPages(root)
	must(t, err)
	faults, err := parsePage("faults.md", []byte(faults))
	must(t, err)
	results := runPages(t, append(pages, faults))
	for _, p := range append(pages, faults) {
		for _, b := range p.blocks {
			at := fmt.Sprintf("%s:%d", p.name, b.line)
			result, ran := results[at]
			switch {
			case !ran && runs(b):
				t.Errorf("%s was not run", at)
			case b.lang == "python" && result.Action == "skip":
				t.Logf("%s was left out: no Python with psycopg on this machine", at)
			case ran && result.Action != "pass" && p != faults:
				t.Errorf("%s failed:\n%s", at, result.Output)
			case ran && result.Action == "pass" && p == faults:
				t.Errorf("%s was run, and its fault not found", at)
			}
		}
	}
}

// runs reports whether a block is one that is run by itself. Declarations are not, unless
// there is a test among them.
func runs(b block) bool {
	return slices.Contains([]string{"sql", "sh", "json", "python"}, b.lang) || b.lang == "go" && !isDeclarations(b.text) || strings.Contains(b.text, "func Test")
}

// event is one of go test -json.
type event struct{ Action, Test, Output string }

// runPages has the go command build what pages hold, and run it. The results are by the
// places of blocks.
func runPages(t *testing.T, pages []*page) map[string]event {
	t.Helper()
	preamble, err := parser.ParseFile(token.NewFileSet(), "preamble/preamble.go", nil, 0)
	must(t, err)
	g := &generator{t: t, preamble: preamble, sources: map[string]string{}}
	g.root = g.abs(root)
	for _, p := range pages {
		g.add(p)
	}
	dir := t.TempDir()
	overlay := g.finish(dir, pages)
	gotool.Build(t, ".", dir, "github.com/jackc/tern/v2")
	gotool.Build(t, filepath.Join(root, "cmd/ratelimit"), dir, ".")
	for _, name := range g.programs {
		gotool.Build(t, ".", dir, "-overlay", overlay, here+name)
	}
	linkMigrate(t, dir)
	// Without vet, which knows no overlay.
	cmd := exec.Command("go", "test", "-json", "-count=1", "-vet=off", "-overlay", overlay, harness)
	cmd.Env = append(os.Environ(), "PAGES_PROGRAMS="+dir)
	out, _ := cmd.CombinedOutput() // it fails, as it should, by the page of faults
	results, other := resultsOf(out)
	if len(results) == 0 {
		t.Fatalf("what pages hold does not compile, or does not start:\n%s", other)
	}
	return results
}

// resultsOf reads the output of go test -json: by the places of blocks, and what is about
// none of them.
func resultsOf(out []byte) (results map[string]event, other string) {
	outputs := map[string]string{}
	results = map[string]event{}
	for line := range bytes.Lines(out) {
		var e event
		if json.Unmarshal(line, &e) != nil {
			other += string(line)
			continue
		}
		_, at, ok := strings.Cut(e.Test, ".md/") // TestPages/docs/limits.md/docs/limits.md:12
		switch {
		case !ok:
			other += e.Output
		case e.Action == "output":
			outputs[at] += e.Output
		case e.Action == "pass" || e.Action == "fail" || e.Action == "skip":
			e.Output = outputs[at]
			results[at] = e
		}
	}
	return results, other
}

func (g *generator) abs(path string) string {
	abs, err := filepath.Abs(path)
	if err != nil {
		g.t.Fatal(err)
	}
	return abs
}

func (g *generator) writeJSON(file string, v any) string {
	text, err := json.Marshal(v)
	if err == nil {
		err = os.WriteFile(file, text, 0o644)
	}
	if err != nil {
		g.t.Fatal(err)
	}
	return file
}
