package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/migrations"
)

// found describes the schema before any migration. It comes from PostgreSQL's catalog, which every
// role may read. goose would create its version table only to find it empty, and fail for roles
// that may use the limits but not the versions.
type found struct {
	schema   string
	tracked  bool // whether there is a version table
	readable bool // whether this role may read it
	made     made
	columns  []string // columns of that table, and names of views beside it; nil without a table
}

// made lists what each migration of a set creates. Where another tool applied the files there is no
// version table, and the columns of the set's table show how far it came.
type made struct {
	table string
	shows map[int64]string // the column or view that each migration creates
}

var madeBy = map[migrations.Set]made{
	"":                 {"rate_limits", map[int64]string{1: "ts", 2: "paused", 3: "slots", 4: "ahead"}},
	migrations.Catalog: {"rate_limit_definitions", map[int64]string{1: "enabled", 2: "rate_limits_now"}},

	// A type of the functions' results; types are found where tables are.
	migrations.Functions: {"rate_limit_result", map[int64]string{1: "ok"}},
	migrations.Refusals:  {"rate_limit_refusals", map[int64]string{1: "uncertain"}},
	migrations.River:     {"rate_limit_parked", map[int64]string{1: "place"}},
}

// table returns the table that the target's set creates.
func (t *target) table() string { return madeBy[t.set].table }

// look reads the state of the schema. A configured schema may not exist yet.
func (t *target) look(ctx context.Context) (f found, err error) {
	f.made = madeBy[t.set]
	err = t.pool.QueryRow(ctx, `
		SELECT coalesce(s.name, ''),
			v.oid IS NOT NULL,
			coalesce(has_table_privilege(v.oid, 'SELECT'), false),
			ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = l.oid AND attnum > 0 AND NOT attisdropped)
				|| ARRAY(SELECT relname::text FROM pg_class WHERE relnamespace = n.oid AND relkind = 'v' AND l.oid IS NOT NULL)
		FROM (SELECT coalesce(nullif($1::text, ''), current_schema()::text) AS name) AS s
		LEFT JOIN pg_namespace AS n ON n.nspname = s.name
		LEFT JOIN pg_class AS v ON v.relnamespace = n.oid AND v.relname = $2::text AND v.relkind IN ('r', 'p')
		LEFT JOIN pg_class AS l ON l.relnamespace = n.oid AND l.relname = $3::text AND l.relkind IN ('r', 'p', 'c')`,
		t.schema, t.set.VersionTable(), f.made.table).Scan(&f.schema, &f.tracked, &f.readable, &f.columns)
	if err != nil {
		return f, fmt.Errorf("look for table %s: %w", t.set.VersionTable(), err)
	}
	if t.schema != "" && !f.tracked && len(f.columns) == 0 {
		return f, nil // nor need the schema
	}
	return f, t.requireSchema(ctx)
}

// forGoose reports whether to ask goose: it has a version table, or there is nothing yet.
func (f *found) forGoose() bool {
	return f.tracked && f.readable || !f.tracked && len(f.columns) == 0
}

// mark returns the migrations, marked as applied by the table's columns.
func (f *found) mark(all []Migration) ([]Migration, error) {
	if len(f.columns) > 0 && !f.has(all[0]) {
		return nil, fmt.Errorf("schema %q has a table %s that is not this library's: it has no column %q", f.schema, f.made.table, f.made.shows[all[0].Version])
	}
	for i, m := range all {
		all[i].Applied = f.has(m)
		all[i].Untracked = all[i].Applied && !f.tracked
	}
	return all, nil
}

func (f *found) has(m Migration) bool { return slices.Contains(f.columns, f.made.shows[m.Version]) }

// versions returns the versions in the version table, oldest first.
func (t *target) versions(ctx context.Context, f *found) (versions []int64, err error) {
	rows, err := t.pool.Query(ctx, "SELECT version_id FROM "+f.versions(t.set)+" GROUP BY version_id ORDER BY version_id")
	if err == nil {
		versions, err = pgx.CollectRows(rows, pgx.RowTo[int64])
	}
	if err != nil {
		return nil, fmt.Errorf("read version table %s: %w", t.set.VersionTable(), err)
	}
	return versions, nil
}

// versions names the version table in SQL.
func (f *found) versions(set migrations.Set) string {
	return pgx.Identifier{f.schema, set.VersionTable()}.Sanitize()
}

// note returns the SQL that notes in the version table which of all migrations the schema has, but for
// those that are noted; "" if there is none.
func (f *found) note(set migrations.Set, all []Migration, noted []int64) string {
	var rows []string
	if len(noted) == 0 {
		rows = append(rows, "(0, true)")
	}
	for _, m := range all {
		if f.has(m) && !slices.Contains(noted, m.Version) {
			rows = append(rows, fmt.Sprintf("(%d, true)", m.Version))
		}
	}
	if rows == nil {
		return ""
	}
	return fmt.Sprintf("INSERT INTO %s (version_id, is_applied) VALUES %s", f.versions(set), strings.Join(rows, ", "))
}

// newer returns the migrations in the version table that this program does not know, oldest first. A
// table that somebody emptied is an error, which says what to write into it.
func (t *target) newer(ctx context.Context, f *found) (newer []Migration, err error) {
	versions, err := t.versions(ctx, f)
	if err != nil {
		return nil, err
	}
	all := t.migrations()
	if len(versions) == 0 {
		return nil, fmt.Errorf("version table %s is empty, and does not say what was applied. As the schema is: %s", t.set.VersionTable(), f.note(t.set, all, nil))
	}
	known := slices.DeleteFunc(slices.Clone(all), func(m Migration) bool { return m.Version > versions[len(versions)-1] })
	if note := f.note(t.set, known, versions); note != "" {
		return nil, fmt.Errorf("version table %s lacks a version before its newest. As the schema is: %s", t.set.VersionTable(), note)
	}
	for _, v := range versions {
		if v > all[len(all)-1].Version {
			newer = append(newer, Migration{Version: v, Name: fmt.Sprintf("version %d of a newer program", v), Applied: true, Newer: true})
		}
	}
	return newer, nil
}

// requireAll returns an error if another tool made the table and migrations are missing.
func (f *found) requireAll(set migrations.Set, all []Migration) error {
	all, err := f.mark(all)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(m Migration) bool { return m.Applied })
	if len(all) == 0 {
		return nil
	}
	names := make([]string, len(all))
	for i, m := range all {
		names[i] = m.Name
	}
	lacks := strings.Join(names, ", ")
	if f.tracked {
		return fmt.Errorf("schema %q lacks %s, and this role may not read %s: it takes a role that may create tables there", f.schema, lacks, set.VersionTable())
	}
	command := fmt.Sprintf("ratelimit migrate print --from %d", all[0].Version)
	if set != "" {
		command += " --set " + string(set)
	}
	return fmt.Errorf("schema %q has a table %s that another tool made, as there is no %s, and that lacks %s: "+
		"apply it with that tool (%s)", f.schema, f.made.table, set.VersionTable(), lacks, command)
}

// foreign returns err of a migration. If the migration's work was there already, the error says so, and
// how to go on.
func (t *target) foreign(ctx context.Context, err error) error {
	const duplicateTable, duplicateColumn, duplicateObject, duplicateFunction = "42P07", "42701", "42710", "42723"
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || !slices.Contains([]string{duplicateTable, duplicateColumn, duplicateObject, duplicateFunction}, pgErr.Code) {
		return err
	}
	f, lookErr := t.look(ctx)
	if lookErr != nil {
		return err
	}
	versions, lookErr := t.versions(ctx, &f)
	if lookErr != nil {
		return err
	}
	if note := f.note(t.set, t.migrations(), versions); note != "" {
		return fmt.Errorf("another tool made or changed table %s, and %s does not know of it: %w. As the schema is: %s", t.table(), t.set.VersionTable(), err, note)
	}
	return fmt.Errorf("something that %s does not know of has the name of what the migration makes: drop or rename it: %w", t.set.VersionTable(), err)
}

// usedBy lists the sets that use what a set makes, in the order in which they are taken back. PostgreSQL
// knows nothing of what functions use.
var usedBy = map[migrations.Set][]migrations.Set{
	"":                 {migrations.Functions, migrations.Catalog},
	migrations.Catalog: {migrations.Functions},
}

// requireUnneeded returns an error if other sets use this one.
func (t *target) requireUnneeded(ctx context.Context) error {
	for _, set := range usedBy[t.set] {
		f, err := (&target{schema: t.schema, set: set, pool: t.pool}).look(ctx)
		if err != nil {
			return err
		}
		if len(f.columns) > 0 {
			then := "the limits' own"
			if t.set != "" {
				then = string(t.set)
			}
			return fmt.Errorf("the set %s depends on table %s: take that back first (ratelimit migrate down --set %s), and then %s", set, t.table(), set, then)
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
