package migrate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/migrations"
)

// found is what there is before anything is done. It is read from the catalog, for which
// no right is needed: goose would create its version table to find nothing in it, and
// fail where the role may use the limits and not read versions.
type found struct {
	schema   string
	tracked  bool     // there is a version table
	readable bool     // and this role may read it
	columns  []string // of table rate_limits; none if there is no such table
}

// shows has a column that each migration makes: by these, a table is known of which no
// version table tells.
var shows = map[int64]string{1: "ts", 2: "paused", 3: "slots", 4: "ahead"}

// look returns what there is in the schema, which need not exist if it was configured.
func (t *target) look(ctx context.Context) (f found, err error) {
	err = t.pool.QueryRow(ctx, `
		SELECT coalesce(s.name, ''),
			v.oid IS NOT NULL,
			coalesce(has_table_privilege(v.oid, 'SELECT'), false),
			ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = l.oid AND attnum > 0 AND NOT attisdropped)
		FROM (SELECT coalesce(nullif($1::text, ''), current_schema()::text) AS name) AS s
		LEFT JOIN pg_namespace AS n ON n.nspname = s.name
		LEFT JOIN pg_class AS v ON v.relnamespace = n.oid AND v.relname = $2::text AND v.relkind IN ('r', 'p')
		LEFT JOIN pg_class AS l ON l.relnamespace = n.oid AND l.relname = 'rate_limits' AND l.relkind IN ('r', 'p')`,
		t.schema, migrations.VersionTable).Scan(&f.schema, &f.tracked, &f.readable, &f.columns)
	if err != nil {
		return f, fmt.Errorf("look for table %s: %w", migrations.VersionTable, err)
	}
	if t.schema != "" && !f.tracked && len(f.columns) == 0 {
		return f, nil // nor need the schema exist
	}
	return f, t.requireSchema(ctx)
}

// forGoose reports whether goose is to be asked: it knows, or there is nothing yet.
func (f *found) forGoose() bool {
	return f.tracked && f.readable || !f.tracked && len(f.columns) == 0
}

// mark returns the migrations as the table's columns show them.
func (f *found) mark(all []Migration) ([]Migration, error) {
	if len(f.columns) > 0 && !f.has(all[0]) {
		return nil, fmt.Errorf("schema %q has a table rate_limits that is not this library's: it has no column %q", f.schema, shows[all[0].Version])
	}
	for i, m := range all {
		all[i].Applied = f.has(m)
		all[i].Untracked = all[i].Applied && !f.tracked
	}
	return all, nil
}

func (f *found) has(m Migration) bool { return slices.Contains(f.columns, shows[m.Version]) }

// requireAll is the error of a table that lacks migrations which goose cannot be asked to
// apply.
func (f *found) requireAll(all []Migration) error {
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
		return fmt.Errorf("schema %q lacks %s, and this role may not read %s: it takes a role that may create tables there", f.schema, lacks, migrations.VersionTable)
	}
	return fmt.Errorf("schema %q has a table rate_limits that another tool made, as there is no %s, and that lacks %s: "+
		"apply it with that tool (ratelimit migrate print --from %d)", f.schema, migrations.VersionTable, lacks, all[0].Version)
}

// foreign is err, from applying a migration, with what it means if that finds its work
// done.
func foreign(err error) error {
	const duplicateTable, duplicateColumn = "42P07", "42701"
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && (pgErr.Code == duplicateTable || pgErr.Code == duplicateColumn) {
		return fmt.Errorf("another tool made or changed table rate_limits, and %s does not know of it: %w", migrations.VersionTable, err)
	}
	return err
}
