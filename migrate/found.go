package migrate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/migrations"
)

// A SchemaError reports that the schema is not as its migrations left it, such as after an object was dropped, or
// a version table was restored from another time.
type SchemaError struct {
	Fault string // what is missing, or not as it was made
	Mend  string // what to do: SQL, or a command
}

func (e *SchemaError) Error() string { return e.Fault + ": " + e.Mend }

// found describes the schema before any migration. What it has comes from PostgreSQL's catalog, which every
// role may read. goose would create its version table only to find it empty, and fail for roles
// that may use the limits but not the versions.
type found struct {
	set      migrations.Set
	schema   string
	tracked  bool    // whether there is a version table
	readable bool    // whether this role may read it
	noted    []int64 // the versions in it, oldest first
	steps    []step
	broken   []string // what is there but is not as it was made
	repairs  []string // the SQL that makes it so
}

// A step is a migration, and what it creates, such as "table rate_limits".
type step struct {
	Migration
	first      string   // the first object that it creates
	has, lacks []string // the objects that the schema has, and those that it does not have
}

// begun reports whether the first object is there. Where the role can read no version table, it decides
// whether the step counts as applied.
func (s *step) begun() bool { return slices.Contains(s.has, s.first) }

var (
	creation = regexp.MustCompile(`(?m)^CREATE TABLE (\w+) \(\n((?:.*\n)*?)\)|^ALTER TABLE (\w+) ADD COLUMN (\w+)|^CREATE (?:UNIQUE )?(FUNCTION|INDEX|TRIGGER|TYPE|VIEW) (?:@schema@\.)?(\w+)`)
	column   = regexp.MustCompile(`(?m)^    ([a-z_]+) `)
	primary  = regexp.MustCompile(`(?m)^    (?:([a-z_]+) .*)?PRIMARY KEY(?: \((.*)\))?,?$`)
)

// creations returns the objects that the SQL of a migration creates.
func creations(sql string) (all []string) {
	for _, m := range creation.FindAllStringSubmatch(sql, -1) {
		switch {
		case m[1] != "":
			all = append(all, "table "+m[1])
			for _, c := range column.FindAllStringSubmatch(m[2], -1) {
				all = append(all, "column "+c[1]+" of "+m[1])
			}
			if key := primary.FindStringSubmatch(m[2]); key != nil {
				all = append(all, "primary key of "+m[1]+" ("+key[1]+key[2]+")")
			}
		case m[3] != "":
			all = append(all, "column "+m[4]+" of "+m[3])
		default:
			all = append(all, strings.ToLower(m[5])+" "+m[6])
		}
	}
	return all
}

// objects lists a schema's objects as creations names them, a function once for each overload and a key without
// its columns; and, besides, triggers that are disabled.
const objects = `
	SELECT CASE relkind WHEN 'v' THEN 'view ' WHEN 'c' THEN 'type ' WHEN 'i' THEN 'index ' ELSE 'table ' END || relname
	FROM pg_class WHERE relnamespace = n.oid AND relname ~ '^rate_limit' AND relkind IN ('r', 'p', 'v', 'c', 'i')
	UNION ALL SELECT 'column ' || attname || ' of ' || relname
	FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
	WHERE relnamespace = n.oid AND relname ~ '^rate_limit' AND relkind IN ('r', 'p') AND attnum > 0 AND NOT attisdropped
	UNION ALL SELECT 'primary key of ' || relname
	FROM pg_class JOIN pg_index ON indrelid = pg_class.oid WHERE relnamespace = n.oid AND relname ~ '^rate_limit' AND indisprimary
	UNION ALL SELECT 'trigger ' || tgname
	FROM pg_class JOIN pg_trigger ON tgrelid = pg_class.oid WHERE relnamespace = n.oid AND tgname ~ '^rate_limit'
	UNION ALL SELECT 'disabled trigger ' || tgname || ' of ' || relname
	FROM pg_class JOIN pg_trigger ON tgrelid = pg_class.oid WHERE relnamespace = n.oid AND tgname ~ '^rate_limit' AND tgenabled IN ('D', 'R')
	UNION ALL SELECT 'function ' || proname FROM pg_proc WHERE pronamespace = n.oid AND proname ~ '^rate_limit'`

// look reads the state of the schema. A configured schema may not exist yet.
func (t *target) look(ctx context.Context) (f found, err error) {
	f.set = t.set
	var has []string
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly} // of objects and versions
	err = pgx.BeginTxFunc(ctx, t.pool, snapshot, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, `
			SELECT coalesce(s.name, ''), v.oid IS NOT NULL, coalesce(has_table_privilege(v.oid, 'SELECT'), false), ARRAY(`+objects+`)
			FROM (SELECT coalesce(nullif($1::text, ''), current_schema()::text) AS name) AS s
			LEFT JOIN pg_namespace AS n ON n.nspname = s.name
			LEFT JOIN pg_class AS v ON v.relnamespace = n.oid AND v.relname = $2::text AND v.relkind IN ('r', 'p')`,
			t.schema, t.set.VersionTable()).Scan(&f.schema, &f.tracked, &f.readable, &has)
		if err != nil || !f.readable {
			return err
		}
		rows, err := tx.Query(ctx, "SELECT DISTINCT version_id FROM "+f.versionTable()+" ORDER BY version_id")
		if err == nil {
			f.noted, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		}
		return err
	})
	if err != nil {
		return f, fmt.Errorf("look for table %s: %w", t.set.VersionTable(), err)
	}
	if err := f.compare(has); err != nil || t.schema != "" && !f.tracked && len(has) == 0 {
		return f, err // the schema need not be there
	}
	return f, t.requireSchema(ctx)
}

// compare lists the set's steps, and what the schema lacks of each.
func (f *found) compare(has []string) error {
	left := map[string]int{}
	for _, object := range has {
		left[object]++
	}
	names, err := fs.Glob(f.set.FS(), "*.sql")
	for i, name := range names {
		text, err := fs.ReadFile(f.set.FS(), name)
		if err != nil {
			return err
		}
		creates := creations(string(text))
		s := step{Migration: Migration{Version: int64(i + 1), Name: name}, first: creates[0]}
		for _, object := range creates {
			f.examine(object, has)
			_, table, isPart := strings.Cut(object, " of ")
			if strings.HasPrefix(object, "primary key ") {
				continue
			}
			if left[object]--; left[object] >= 0 {
				s.has = append(s.has, object)
			} else if !isPart || slices.Contains(has, "table "+table) {
				s.lacks = append(s.lacks, object)
			}
		}
		s.Applied = slices.Contains(f.noted, s.Version)
		f.steps = append(f.steps, s)
	}
	for later, i := false, len(f.steps)-1; i >= 0 && !f.readable; i-- {
		later = later || f.steps[i].begun()
		f.steps[i].Applied, f.steps[i].Untracked = later, later && !f.tracked
	}
	return err
}

// examine notes an object that is there, but not as it was made: a table without its key, a trigger that is
// disabled, or a table in place of a view.
func (f *found) examine(object string, has []string) {
	if key, isKey := strings.CutPrefix(object, "primary key of "); isKey {
		table, columns, _ := strings.Cut(key, " ")
		if slices.Contains(has, "table "+table) && !slices.Contains(has, "primary key of "+table) {
			f.broken = append(f.broken, table+" has no primary key")
			f.repairs = append(f.repairs, "ALTER TABLE "+f.qualified(table)+" ADD PRIMARY KEY "+columns)
		}
		return
	}
	kind, name, _ := strings.Cut(object, " ")
	for _, h := range has {
		if other, same := strings.CutSuffix(h, " "+name); same && other != kind && (kind == "table" || kind == "view") && (other == "table" || other == "view") {
			f.broken = append(f.broken, name+" is a "+other+", and not a "+kind)
			f.repairs = append(f.repairs, "ALTER "+other+" "+f.qualified(name)+" RENAME TO "+name+"_else")
		}
		if table, disabled := strings.CutPrefix(h, "disabled "+object+" of "); disabled {
			f.broken = append(f.broken, object+" is disabled")
			f.repairs = append(f.repairs, "ALTER TABLE "+f.qualified(table)+" ENABLE "+object)
		}
	}
}

// versionTable names the version table in SQL.
func (f *found) versionTable() string { return f.qualified(f.set.VersionTable()) }

// qualified names a table in SQL.
func (f *found) qualified(table string) string { return pgx.Identifier{f.schema, table}.Sanitize() }

// forGoose reports whether to ask goose: it has a version table, or there is nothing yet.
func (f *found) forGoose() bool { return f.readable || !f.tracked && !f.steps[0].Applied }

// migrations returns all migrations, oldest first, and last those of a newer program.
func (f *found) migrations() (all []Migration) {
	for _, s := range f.steps {
		all = append(all, s.Migration)
	}
	return append(all, f.newer()...)
}

// newer returns the migrations in the version table that this program does not know, oldest first.
func (f *found) newer() (newer []Migration) {
	for _, v := range f.noted {
		if v > int64(len(f.steps)) {
			newer = append(newer, Migration{Version: v, Name: fmt.Sprintf("version %d of a newer program", v), Applied: true, Newer: true})
		}
	}
	return newer
}

// require returns an error if the schema is not as the applied migrations left it.
func (f *found) require() error {
	var lacks []string
	for _, s := range f.steps {
		for _, object := range s.lacks {
			if column, table, isColumn := strings.Cut(object, " of "); isColumn && s.begun() {
				return &SchemaError{
					fmt.Sprintf("table %s of schema %q has no %s: it is another library's, or the column was dropped", table, f.schema, column),
					"choose another schema, or restore the table",
				}
			}
		}
		if s.Applied {
			lacks = append(lacks, s.lacks...)
		}
	}
	if err := f.requireVersions(); err != nil || len(f.newer()) > 0 {
		return err // a newer program may have dropped something
	}
	switch {
	case len(f.broken) > 0:
		return &SchemaError{fmt.Sprintf("schema %q is not as migrations left it (%s)", f.schema, strings.Join(f.broken, ", ")), strings.Join(f.repairs, "; ")}
	case len(lacks) == 0:
		return nil
	}
	if more := len(lacks) - 6; more > 1 {
		lacks = append(lacks[:6], fmt.Sprintf("%d more", more))
	}
	mend := f.again()
	if f.tracked && len(f.steps[0].has) == 0 {
		mend = "if your goose made it in another schema, ALTER TABLE … SET SCHEMA; otherwise, " + mend
	}
	return &SchemaError{fmt.Sprintf("schema %q lacks what migrations of it have made (%s)", f.schema, strings.Join(lacks, ", ")), mend}
}

// again says how to create what is missing.
func (f *found) again() string {
	how, sql := "to create it again, without rows, run this, which fails for what is there", command("print", f.set, "")
	if f.set == migrations.Functions { // in one statement
		how, sql = "to create all of the set again, without the rights that were granted, run this", sql+" --down; "+sql
	}
	settings := "SET search_path = " + pgx.Identifier{f.schema}.Sanitize() + "; SET lock_timeout = 1000;"
	return fmt.Sprintf(`%s: { echo %s; %s; } | psql -X "$DATABASE_URL"`, how, visible.Shell(settings), sql)
}

// requireVersions returns an error if the version table lacks a version that the schema has.
func (f *found) requireVersions() error {
	if !f.readable {
		return nil
	}
	fault, rows := "lacks a version that the schema has", []string(nil)
	if len(f.noted) == 0 {
		fault, rows = "is empty, and does not say what was applied", []string{"(0, true)"}
	}
	for _, s := range f.steps {
		if s.begun() && !s.Applied {
			rows = append(rows, fmt.Sprintf("(%d, true)", s.Version))
		}
	}
	if rows == nil {
		return nil
	}
	return &SchemaError{
		"version table " + f.set.VersionTable() + " " + fault,
		fmt.Sprintf("INSERT INTO %s (version_id, is_applied) VALUES %s", f.versionTable(), strings.Join(rows, ", ")),
	}
}

// requireAll returns an error if another tool made the table and migrations are missing.
func (f *found) requireAll() error {
	var names []string
	first := int64(0)
	for _, s := range slices.Backward(f.steps) {
		if !s.Applied {
			names, first = append([]string{s.Name}, names...), s.Version
		}
	}
	if names == nil {
		return nil
	}
	lacks := strings.Join(names, ", ")
	if f.tracked {
		return fmt.Errorf("schema %q lacks %s, and this role may not read %s: it takes a role that may create tables there", f.schema, lacks, f.set.VersionTable())
	}
	from := fmt.Sprintf("%s --from %d", command("print", f.set, ""), first)
	return fmt.Errorf("schema %q has a %s that another tool made, as there is no %s, and that lacks %s: "+
		"apply it with that tool (%s)", f.schema, f.steps[0].first, f.set.VersionTable(), lacks, from)
}

// foreign returns err of a migration. If something has the name of what the migration creates, the error says so.
func (f *found) foreign(err error) error {
	const duplicateTable, duplicateColumn, duplicateObject, duplicateFunction = "42P07", "42701", "42710", "42723"
	if !slices.Contains([]string{duplicateTable, duplicateColumn, duplicateObject, duplicateFunction}, intx.Code(err)) {
		return err
	}
	var has []string
	for _, s := range f.steps {
		if !s.Applied {
			has = append(has, s.has...)
		}
	}
	return fmt.Errorf("something that %s does not know of has the name of what the migration makes: drop or rename it (%s): %w", f.set.VersionTable(), strings.Join(has, ", "), err)
}

// command returns the command line that does the same as a function of this package.
func command(verb string, set migrations.Set, schema string) string {
	line := "ratelimit migrate " + verb
	if set != "" {
		line += " --set " + string(set)
	}
	if schema != "" {
		line += " --schema " + visible.Shell(schema)
	}
	return line
}

// usedBy lists the sets that use what a set makes, in the order in which they are taken back. PostgreSQL
// knows nothing of what functions use.
var usedBy = map[migrations.Set][]migrations.Set{
	"":                 {migrations.Functions, migrations.Catalog},
	migrations.Catalog: {migrations.Functions},
}

// requireBase returns an error if the set uses the limits' own, and the schema lacks a part of that.
func (t *target) requireBase(ctx context.Context) error {
	if !slices.Contains(usedBy[""], t.set) {
		return nil
	}
	f, err := (&target{schema: t.schema, pool: t.pool}).look(ctx)
	if err == nil && len(f.newer()) == 0 && slices.ContainsFunc(f.steps, func(s step) bool { return !s.begun() }) {
		err = fmt.Errorf("schema %q lacks migrations of the limits' own, which the set %s needs: apply them first (%s)", f.schema, t.set, command("up", "", t.schema))
	}
	return err
}

// requireUnneeded returns an error if other sets use this one.
func (t *target) requireUnneeded(ctx context.Context, table string) error {
	for _, set := range usedBy[t.set] {
		f, err := (&target{schema: t.schema, set: set, pool: t.pool}).look(ctx)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(f.steps, func(s step) bool { return len(s.has) > 0 }) {
			then := "the limits' own"
			if t.set != "" {
				then = string(t.set)
			}
			return fmt.Errorf("the set %s depends on %s: take that back first (%s), and then %s", set, table, command("down", set, t.schema), then)
		}
	}
	return nil
}

// needed returns err of taking a migration back, and names what depends on it.
func needed(err error) error {
	const dependentObjectsStillExist = "2BP01"
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == dependentObjectsStillExist {
		return fmt.Errorf("others depend on what would be dropped: %s: drop or change them first: %w", strings.ReplaceAll(pgErr.Detail, "\n", "; "), err)
	}
	return err
}
