// Package migrations holds the schema of ratelimit: one table, as SQL files in
// the format of goose (https://github.com/pressly/goose). The package depends
// on nothing, goose included.
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
//	goose -dir "$dir" -table rate_limits_version postgres "$DATABASE_URL" up
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
//	goose -dir "$dir" -table rate_limits_version postgres "$DATABASE_URL?search_path=limits" up
package migrations

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"
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
//go:embed *.sql
var FS embed.FS

// UpSQL returns the SQL that builds the newest schema from nothing: the Up
// parts of all migrations, oldest first, without goose's annotations.
//
// It writes nothing into [VersionTable]. Goose, run over the same schema later,
// takes none of it for applied.
func UpSQL() string {
	return join(files(), up)
}

// UpSQLFrom is UpSQL without the migrations before a version, for a schema that has
// those. An error says that there is no such version.
func UpSQLFrom(version int) (string, error) {
	names, err := filesFrom(version)
	return join(names, up), err
}

// DownSQL returns the SQL that undoes [UpSQL]: the Down parts of all
// migrations, newest first, without goose's annotations. All limits are lost.
func DownSQL() string {
	return join(backwards(files()), down)
}

// DownSQLFrom returns the SQL that undoes [UpSQLFrom].
func DownSQLFrom(version int) (string, error) {
	names, err := filesFrom(version)
	return join(backwards(names), down), err
}

// A direction is the annotation that opens a part of a migration.
type direction string

const (
	annotation = "-- +goose "

	up   direction = "Up"
	down direction = "Down"
)

// files returns the names of the migrations, oldest first: they begin with a
// number of fixed width.
func files() []string {
	names, err := fs.Glob(FS, "*.sql")
	if err != nil {
		panic(fmt.Sprintf("migrations: %v", err)) // the pattern is a constant
	}
	return names
}

// filesFrom returns the names of the migrations from a version on. Versions have no
// gaps.
func filesFrom(version int) ([]string, error) {
	names := files()
	if version < 1 || version > len(names) {
		return nil, fmt.Errorf("migrations: there is no version %d: they are 1 to %d", version, len(names))
	}
	return names[version-1:], nil
}

func backwards(names []string) []string {
	slices.Reverse(names)
	return names
}

// join returns one part of each of the files, in the order given.
func join(names []string, want direction) string {
	parts := make([]string, 0, len(names))
	for _, name := range names {
		text, err := FS.ReadFile(name)
		if err != nil {
			panic(fmt.Sprintf("migrations: %v", err)) // an embedded file
		}
		parts = append(parts, part(string(text), want))
	}
	return strings.Join(parts, "\n")
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
