package table

import (
	_ "embed"
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

//go:embed functions.tmpl
var functions string

const functionsFile = "../../migrations/functions/00001_functions.sql"

var write = flag.Bool("write", false, "write the SQL functions")

// The SQL functions are made from the statements that Go sends. Once a version was released
// its file stays, and what has changed since goes into the next.
func TestFunctionsAreOfTheStatements(t *testing.T) {
	made := regexp.MustCompile(`\{\{(\w+\.sql) (\w+)\}\}`).ReplaceAllStringFunc(functions, func(marker string) string {
		file, name, _ := strings.Cut(strings.Trim(marker, "{}"), " ")
		texts, _ := load(file)
		text := texts.in("@schema@." + Name)[name]
		if text == "" {
			t.Fatalf("%s has no statement %s", file, name)
		}
		return text
	})
	var names []string
	for _, match := range regexp.MustCompile(`CREATE FUNCTION (@schema@\.\w+)`).FindAllStringSubmatch(functions, -1) {
		names = append(names, match[1])
	}
	slices.Sort(names)
	if distinct := len(slices.Compact(slices.Clone(names))); distinct != len(names) || distinct < 10 {
		t.Fatalf("%d functions of %d names", len(names), distinct) // REVOKE and DROP tell them by their names
	}
	made = strings.ReplaceAll(made, "{{functions}}", strings.Join(names, ", "))
	if *write {
		if err := os.WriteFile(functionsFile, []byte(made), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(functionsFile)
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != made {
		t.Errorf("%s is not made of the statements as they are: go test ./internal/table -run Functions -write", functionsFile)
	}
}
