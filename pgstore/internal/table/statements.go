package table

import (
	"embed"
	"maps"
	"regexp"
	"strings"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// The statements are in files, each under a line that names it. Most are sent as they are written
// but for the table's schema; some are derived at start (see below). They can be tried in psql:
//
//	PREPARE grant_ AS <statement>;
//	EXECUTE grant_('name', 'key', 0, 1, 1, 10, 10, 60e6, NULL);
//
//go:embed *.sql
var files embed.FS

// statements are the texts of statements, by their names.
type statements map[string]string

// tableless is the statements that need no table.
var tableless, _ = load("maintenance.sql")

// load reads the statements of a file, and for each the parameters that the comment above it
// names, in their order.
func load(file string) (texts statements, names map[string][]string) {
	text, err := files.ReadFile(file)
	if err != nil {
		panic("table: " + err.Error()) // it is embedded
	}
	name := ""
	texts, names = make(statements), make(map[string][]string)
	for line := range strings.Lines(string(text)) {
		if of, ok := strings.CutPrefix(line, "-- name: "); ok {
			name = strings.TrimSpace(of)
		} else if !strings.HasPrefix(line, "--") {
			texts[name] += line
		} else {
			for _, named := range parameter.FindAllStringSubmatch(line, -1) {
				names[name] = append(names[name], named[1])
			}
		}
	}
	delete(texts, "") // the empty lines before the first
	return texts, names
}

// parameter is how a comment names a parameter.
var parameter = regexp.MustCompile(`\$\d+ (\w+)`)

// in returns the statements for a table.
func (s statements) in(table string) statements {
	in := make(statements, len(s))
	for name, text := range s {
		in[name] = strings.ReplaceAll(strings.TrimSpace(text), conn.Table, table)
	}
	return in
}

// inTurn adds, for each statement that passes over rows which another transaction has locked, one
// that waits for its row. (It is one statement, and need not lock the row first, since a row that
// has changed during the wait is read again.) They are part of a transaction, which may have
// waited before them.
func (s statements) inTurn() {
	for name, text := range maps.Clone(s) {
		if waiting := passing.ReplaceAllString(text, "WHERE "); waiting != text {
			s[name+inTurn] = strings.ReplaceAll(waiting, "CURRENT_TIMESTAMP", "statement_timestamp()")
		}
	}
}

// inTurn ends the names of statements that wait.
const inTurn = "_in_turn"

// passing is the conditions that pass over rows that another transaction has locked.
var passing = regexp.MustCompile(`(?s)WHERE \(?(SELECT )?set_config\(.*pg_current_snapshot\(\)\)\)\s+AND `)

// distribute has upserts return their values by a SELECT around them, since a table that is
// distributed takes no clock in RETURNING; and adds the take that computes nothing, which is
// several times faster there.
func (s statements) distribute() {
	for name, text := range s {
		upsert, returned, ok := strings.Cut(text, "\nRETURNING ")
		columns, computed, computes := strings.Cut(returned, ",\n\t")
		if !ok || !computes {
			continue
		}
		upsert += "\nRETURNING " + columns
		s[name] = "WITH written AS (" + upsert + ")\nSELECT " + columns + ", " + elsewhere.Replace(computed) + " FROM written"
		if name == "take" {
			s[name+bare] = upsert
		}
	}
}

// bare ends the name of the take that computes nothing.
const bare = "_bare"

// elsewhere replaces expressions that hold only on the node of the row.
var elsewhere = strings.NewReplacer("xmin::text", "pg_current_xact_id()::text", "xmax = 0", "false")

// guarded adds the upserts for callers' transactions. They take an advisory lock, their last
// argument, so that no call waits for a permit that another transaction is about to take or to
// release: it is passed over. The holder of a permit writes it in any case.
func (s statements) guarded() {
	s["permit_take_tx"] = inserted.ReplaceAllString(s["permit_take"], "SELECT $1\nWHERE pg_try_advisory_xact_lock($$6::int8)\nON CONFLICT")
	s["permit_keep_tx"] = inserted.ReplaceAllString(s["permit_keep"], "SELECT $1\nWHERE pg_try_advisory_xact_lock($$8::int8) IS NOT NULL\nON CONFLICT")
}

// apart replaces expressions that a distributed table does not support.
func (s statements) apart() {
	s["permit_prune"] = s["permit_prune_each"]
	s["permit_look"] = locked.ReplaceAllString(s["permit_look"], "false")
}

// locked is the column that tells whether another transaction has a row locked.
var locked = regexp.MustCompile(`(?s)NOT \(r\.xmax.*pg_current_snapshot\(\)\)\)`)

// inserted is the values of an upsert.
var inserted = regexp.MustCompile(`(?s)VALUES \((.*)\)\nON CONFLICT`)
