// Package migrations holds the schema of ratelimit: one table, as SQL files in
// the format of goose (https://github.com/pressly/goose). The package depends
// on nothing, goose included. Tables that a team may choose besides are a [Set] of their own.
//
// There are three ways to put the schema in place. Choose one and stay with it,
// or make sure that all of them use [VersionTable]:
//
// In one call, with package github.com/pgratelimit/ratelimit/migrate.
//
// With your own goose, as a Provider beside the one for your own migrations.
// It needs a version table of its own, and must not pick up Go migrations that
// your program registered globally:
//
//	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS,
//		goose.WithTableName(migrations.VersionTable),
//		goose.WithDisableGlobalRegistry(true))
//	if err != nil {
//		return err
//	}
//	_, err = provider.Up(ctx)
//
// or with goose on the command line:
//
//	dir=$(go list -m -f '{{.Dir}}' github.com/pgratelimit/ratelimit)/migrations
//	goose -dir "$dir" -table rate_limits_version postgres "$DATABASE_URL?lock_timeout=1s" up
//
// The time-out is in [FS], and not in the files themselves: see there.
//
// With any other tool, from the plain SQL that [UpSQL] returns. Print it into a
// migration of your own, and look at the changelog when you upgrade: new files
// may have been added, and [UpSQLFrom] returns those alone. Files that were released
// never change.
//
// All names in the files are unqualified, so the table lands in the first
// schema of the connection's search_path. For a schema of its own, which must
// exist, say so to the connections that goose is given, and leave [VersionTable]
// as it is: a name with a schema in it moves the version table alone.
//
//	config.RuntimeParams["search_path"] = "limits" // of the pgx.ConnConfig
//	db := stdlib.OpenDB(*config)
//
// or on the command line
//
//	goose -dir "$dir" -table rate_limits_version postgres "$DATABASE_URL?search_path=limits&lock_timeout=1s" up
package migrations

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing/fstest"
)

// VersionTable is the name of the table in which goose notes which of the
// migrations in [FS] it has applied.
//
// It must not be the table of the application's own migrations, which is
// goose_db_version unless told otherwise. Goose knows migrations by their
// number alone: it would find a version 1 in there, the application's, and
// silently skip the version 1 in here.
const VersionTable = "rate_limits_version"

// FS holds the migrations at its root, where goose looks for them.
//
// Each part of a migration begins with a lock_timeout of 1 s for its own transaction. A lock
// on the table that is waited for keeps all decisions waiting behind it, so a migration that
// comes while a dump or a report reads the table fails with SQLSTATE 55P03 after a second and
// has changed nothing: run it again a second later. Package migrate does that by itself.
var FS = bounded(limits, ".")

//go:embed *.sql
var limits embed.FS

// A Set is a sequence of migrations with versions of its own. The zero value is that of the
// limits, which every program needs, and which the functions of this package are about; the
// others are for teams that choose them, and are applied after it.
type Set string

// Catalog is the set of package catalog: a table of definitions and overrides, with its
// history, and views of the keys that are limited now.
const Catalog Set = "catalog"

// Functions is the set of the verbs as SQL functions, for triggers, psql and programs that are
// not in Go. It lands in the schema in which rate_limits is found, and needs all of the
// migrations of that.
const Functions Set = "functions"

// Refusals is the set of package refusals: a small table of the keys that were refused most.
const Refusals Set = "refusals"

// River is the set of package riverlimit: a table of the jobs that wait in line for a permit.
const River Set = "river"

// Sets returns all sets, that of the limits first.
func Sets() []Set { return []Set{"", Catalog, Functions, Refusals, River} }

//go:embed catalog/*.sql functions/*.sql refusals/*.sql river/*.sql
var others embed.FS

// FS returns the set's migrations, at its root. That of a set that there is not is empty.
func (s Set) FS() fs.FS {
	switch s {
	case "":
		return FS
	case Catalog, Functions, Refusals, River:
		return bounded(others, string(s))
	}
	return embed.FS{}
}

// lockTimeout bounds how long a migration waits for a lock, and how long others wait behind it.
// LOCAL ends with its transaction: a pooler hands a session's setting on to others.
const lockTimeout = "SET LOCAL lock_timeout = '1s';"

var partBegins = regexp.MustCompile(`(?m)^-- \+goose (Up|Down)$`)

// bounded returns the migrations in a directory, with lockTimeout at the beginning of each part.
func bounded(files embed.FS, dir string) fs.FS {
	all := fstest.MapFS{} // which is in no way bound to tests
	err := fs.WalkDir(files, dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := files.ReadFile(name)
		all[path.Base(name)] = &fstest.MapFile{Mode: 0o444, Data: partBegins.ReplaceAll(text, []byte("$0\n"+lockTimeout))}
		return err
	})
	if err != nil {
		panic(fmt.Sprintf("migrations: %v", err)) // embedded files
	}
	return all
}

// VersionTable returns the name of the table in which goose notes which migrations of the
// set it has applied. That of the limits is [VersionTable].
func (s Set) VersionTable() string {
	if s == "" {
		return VersionTable
	}
	return "rate_limits_" + string(s) + "_version"
}

// UpSQL returns the SQL that builds the newest schema from nothing: the Up
// parts of all migrations, oldest first, without goose's annotations.
//
// It writes nothing into [VersionTable]. Goose, run over the same schema later,
// takes none of it for applied.
func UpSQL() string { return Set("").UpSQL() }

// UpSQLFrom is UpSQL without the migrations before a version, for a schema that has
// those. An error says that there is no such version.
func UpSQLFrom(version int) (string, error) { return Set("").UpSQLFrom(version) }

// DownSQL returns the SQL that undoes [UpSQL]: the Down parts of all
// migrations, newest first, without goose's annotations. All limits are lost.
func DownSQL() string { return Set("").DownSQL() }

// DownSQLFrom returns the SQL that undoes [UpSQLFrom].
func DownSQLFrom(version int) (string, error) { return Set("").DownSQLFrom(version) }

// UpSQL is the package's UpSQL of the set; "" if there is no such set.
func (s Set) UpSQL() string {
	text, _ := s.sql(up, 1)
	return text
}

// DownSQL is the package's DownSQL of the set; "" if there is no such set.
func (s Set) DownSQL() string {
	text, _ := s.sql(down, 1)
	return text
}

// UpSQLFrom is the package's UpSQLFrom of the set.
func (s Set) UpSQLFrom(version int) (string, error) { return s.sql(up, version) }

// DownSQLFrom is the package's DownSQLFrom of the set.
func (s Set) DownSQLFrom(version int) (string, error) { return s.sql(down, version) }

// A direction is the annotation that opens a part of a migration.
type direction string

const (
	annotation = "-- +goose "

	up   direction = "Up"
	down direction = "Down"
)

// sql returns one part of the migrations from a version on: oldest first, or for down newest first. Versions
// have no gaps, and names begin with a number of fixed width.
func (s Set) sql(want direction, from int) (string, error) {
	names, err := fs.Glob(s.FS(), "*.sql")
	switch {
	case err != nil:
		return "", err
	case len(names) == 0:
		return "", fmt.Errorf("migrations: there is no set %q", string(s))
	case from < 1 || from > len(names):
		return "", fmt.Errorf("migrations: there is no version %d: they are 1 to %d", from, len(names))
	}
	var parts []string
	for _, name := range names[from-1:] {
		text, err := fs.ReadFile(s.FS(), name)
		if err != nil {
			return "", err
		}
		parts = append(parts, part(string(text), want))
	}
	if want == down {
		slices.Reverse(parts)
	}
	return strings.Join(parts, "\n"), nil
}

// part returns the lines of a migration that belong to one direction.
func part(text string, want direction) string {
	var (
		b  strings.Builder
		in direction
	)
	for line := range strings.Lines(text) {
		word, isAnnotation := strings.CutPrefix(strings.TrimSpace(line), annotation)
		switch {
		case isAnnotation && (word == string(up) || word == string(down)):
			in = direction(word)
		case isAnnotation: // StatementBegin and the like: only goose needs them
		case in == want:
			b.WriteString(line)
		}
	}
	return strings.TrimSpace(b.String()) + "\n"
}
