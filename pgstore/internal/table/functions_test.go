package table

import (
	"flag"
	"os"
	"regexp"
	"testing"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

const functionsFile = "../../../migrations/functions/00001_functions.sql"

var write = flag.Bool("write", false, "copy Go's statements into the SQL functions")

// copied matches a statement of Go's in the SQL functions, below the name of its file.
var copied = regexp.MustCompile(`(?s)-- (sql/\S+\.sql)\n(.*?);\nEND\n`)

// Once a version was released its file stays, and what has changed since goes into the next.
func TestFunctionsAreOfTheStatements(t *testing.T) {
	file, err := os.ReadFile(functionsFile)
	noError(t, err)
	if n := len(copied.FindAll(file, -1)); n != 10 {
		t.Errorf("%d statements of Go's in the SQL functions, want 10", n)
	}
	made := copied.ReplaceAllStringFunc(string(file), func(old string) string {
		name := copied.FindStringSubmatch(old)[1]
		return "-- " + name + "\n" + text(name, "@schema@."+conn.Table) + ";\nEND\n"
	})
	if *write {
		noError(t, os.WriteFile(functionsFile, []byte(made), 0o644))
	} else if string(file) != made {
		t.Errorf("%s has other statements than Go: go test ./pgstore/internal/table -run Functions -write", functionsFile)
	}
}
