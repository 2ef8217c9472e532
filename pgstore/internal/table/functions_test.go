package table

import (
	_ "embed"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

//go:embed functions.tmpl
var functions string

// notations are of what many functions have in common: those that are granted to roles, those that are
// statements, and those that look a definition up.
var notations = []struct{ notation, text string }{
	{`\{\{verb (.+(?:\n\t.+)?)\}\}\n\t(.*);\n`, "CREATE FUNCTION @schema@.$1\nRETURNS @schema@.rate_limit_result {{verb}} AS $$body$$\nBEGIN\n\tRETURN $2;\nEND\n$$body$$;\n"},
	{`\{\{verb: (\S+) (.+)\}\}\n\t(.*);\n`, "CREATE FUNCTION @schema@.$2\nRETURNS $1 {{verb}} AS $$body$$\nBEGIN\n\tRETURN $3;\nEND\n$$body$$;\n"},
	{`\{\{overrides\}\}`, `FROM @schema@.rate_limit_definitions AS p
	LEFT JOIN @schema@.rate_limit_definitions AS a ON a.name = p.name AND a.key IS NULL AND a.kind IS NULL
		AND a.enabled AND (a.until IS NULL OR a.until > now)
	LEFT JOIN @schema@.rate_limit_definitions AS o ON o.name = p.name AND o.key = $$2
		AND o.enabled AND (o.until IS NULL OR o.until > now)
	WHERE p.name = $$1`},
	{`\{\{verb\}\}`, "LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan"},
	{`\{\{statement (\S+) (.*\)) \((.*)\)\}\}\n`, "CREATE FUNCTION @schema@.$2\nRETURNS TABLE ($3) LANGUAGE plpgsql AS $$body$$\n#variable_conflict use_column\nBEGIN\nRETURN QUERY {{$1}};\nEND\n$$body$$;\n"},
}

const functionsFile = "../../../migrations/functions/00001_functions.sql"

var write = flag.Bool("write", false, "write the SQL functions")

// The SQL functions are made from the statements that Go sends. Once a version was released
// its file stays, and what has changed since goes into the next.
func TestFunctionsAreOfTheStatements(t *testing.T) {
	functions := functions
	for _, n := range notations {
		functions = regexp.MustCompile(n.notation).ReplaceAllString(functions, n.text)
	}
	made := regexp.MustCompile(`\{\{(\S+\.sql)\}\}`).ReplaceAllStringFunc(functions, func(marker string) string {
		return text("sql/"+strings.Trim(marker, "{}"), "@schema@."+conn.Table)
	})
	var signatures []string // REVOKE and DROP tell functions by them, since a name has several
	for _, match := range regexp.MustCompile(`(?s)CREATE FUNCTION (@schema@\.\w+)\((.*?)\)\s+RETURNS`).FindAllStringSubmatch(functions, -1) {
		var types []string
		for _, argument := range strings.Split(match[2], ",") {
			if strings.HasPrefix(strings.TrimSpace(argument), "OUT ") {
				continue
			}
			argument, _, _ = strings.Cut(argument, " DEFAULT ")
			words := strings.Fields(argument)
			types = append(types, words[len(words)-1])
		}
		signatures = append(signatures, match[1]+"("+strings.Join(types, ", ")+")")
	}
	if n := strings.Count(functions, "CREATE FUNCTION"); len(signatures) != n {
		t.Fatalf("read %d signatures of %d functions", len(signatures), n)
	}
	made = strings.ReplaceAll(made, "{{functions}}", strings.Join(signatures, ",\n\t"))
	if *write {
		noError(t, os.WriteFile(functionsFile, []byte(made), 0o644))
	}
	text, err := os.ReadFile(functionsFile)
	noError(t, err)
	if string(text) != made {
		t.Errorf("%s is not made of the statements as they are: go test ./pgstore/internal/table -run Functions -write", functionsFile)
	}
}
