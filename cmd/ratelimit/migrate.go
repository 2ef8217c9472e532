package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
)

const migrateHelp = `usage: ratelimit migrate up|down|status [--database-url URL] [--schema NAME] [--set NAME]
       ratelimit migrate print [--set NAME] [--from VERSION] [--down]

Put the schema in place, or take it back.

  up       bring the schema to the newest version; does nothing if it is there
  down     take the newest migration back; taking back the first one drops the
           table, and all limits are full again
  status   show which migrations the database has
  print    print the SQL that builds the newest schema from nothing, for other
           migration tools; needs no database

  --database-url URL   the database; $DATABASE_URL if left out
  --schema NAME        the schema that holds the tables, made if need be; the
                       first of the connection's search_path if left out
  --set NAME           another set of migrations than that of the limits, with
                       versions of its own: catalog; apply it after that one
  --from VERSION       print what a schema needs that has the versions before, such
                       as after an upgrade of the library
  --down               print the SQL that takes back what would be printed without

Example: ratelimit migrate up --database-url postgres://localhost/app
`

// migrateFlags are the arguments of migrate.
type migrateFlags struct {
	action      string
	databaseURL string
	schema      string
	set         string
	from        int
	down        bool
}

// migrateActions are the actions that need a database.
var migrateActions = map[string]func(context.Context, io.Writer, *pgxpool.Pool, *migrate.Config) error{
	"up":     migrateUp,
	"down":   migrateDown,
	"status": migrateStatus,
}

func parseMigrate(args []string) (f migrateFlags, err error) {
	flags := newFlags("migrate")
	flags.StringVar(&f.databaseURL, "database-url", "", "")
	flags.StringVar(&f.schema, "schema", "", "")
	flags.StringVar(&f.set, "set", "", "")
	flags.IntVar(&f.from, "from", 0, "")
	flags.BoolVar(&f.down, "down", false, "")
	operands, err := parse(flags, args)
	if err != nil {
		return f, err
	}
	if len(operands) == 1 {
		f.action = operands[0]
	}
	_, needsDatabase := migrateActions[f.action]
	switch {
	case !needsDatabase && f.action != "print":
		err = errors.New("want one of up, down, status and print")
	case !slices.Contains(migrations.Sets(), migrations.Set(f.set)):
		err = fmt.Errorf("--set %q: want one of %q", f.set, migrations.Sets()[1:])
	case needsDatabase && f.down:
		err = errors.New("--down is for print only")
	case needsDatabase && isSet(flags, "from"):
		err = errors.New("--from is for print only")
	case !needsDatabase && f.databaseURL+f.schema != "":
		err = errors.New("print takes neither --database-url nor --schema: its names are unqualified")
	}
	if err != nil {
		return f, badUsage(flags.Name(), err)
	}
	if !isSet(flags, "from") {
		f.from = 1
	}
	return f, nil
}

func isSet(flags *flag.FlagSet, name string) (set bool) {
	flags.Visit(func(f *flag.Flag) { set = set || f.Name == name })
	return set
}

func runMigrate(ctx context.Context, std streams, args []string) error {
	f, err := parseMigrate(args)
	if err != nil {
		return err
	}
	if f.action == "print" {
		return migratePrint(std.out, f)
	}
	pool, err := connect(ctx, f.databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	return migrateActions[f.action](ctx, std.out, pool, &migrate.Config{Schema: f.schema, Set: migrations.Set(f.set)})
}

func migratePrint(w io.Writer, f migrateFlags) error {
	sql := migrations.Set(f.set).UpSQLFrom
	if f.down {
		sql = migrations.Set(f.set).DownSQLFrom
	}
	text, err := sql(f.from)
	if err != nil {
		return badUsage("migrate", err)
	}
	_, err = io.WriteString(w, text)
	return err
}

func migrateUp(ctx context.Context, w io.Writer, pool *pgxpool.Pool, cfg *migrate.Config) error {
	applied, err := migrate.Up(ctx, pool, cfg)
	if err != nil {
		return err
	}
	for _, m := range applied {
		fmt.Fprintln(w, "applied", m.Name)
	}
	if len(applied) > 0 {
		return nil
	}
	fmt.Fprintln(w, "nothing to apply")
	all, err := migrate.Status(ctx, pool, cfg)
	tellUntracked(w, cfg, all)
	return err
}

func migrateDown(ctx context.Context, w io.Writer, pool *pgxpool.Pool, cfg *migrate.Config) error {
	undone, err := migrate.Down(ctx, pool, cfg)
	if err != nil {
		return err
	}
	if undone == nil {
		fmt.Fprintln(w, "nothing to take back")
		return nil
	}
	fmt.Fprintln(w, "took back", undone.Name)
	return nil
}

func migrateStatus(ctx context.Context, w io.Writer, pool *pgxpool.Pool, cfg *migrate.Config) error {
	all, err := migrate.Status(ctx, pool, cfg)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "VERSION\tAPPLIED\tMIGRATION")
	for _, m := range all {
		fmt.Fprintf(table, "%d\t%s\t%s\n", m.Version, yesNo(m.Applied), m.Name)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	tellUntracked(w, cfg, all)
	return nil
}

// tellUntracked says that another tool made the table, if it did.
func tellUntracked(w io.Writer, cfg *migrate.Config, all []migrate.Migration) {
	if len(all) > 0 && all[0].Untracked {
		fmt.Fprintf(w, "another tool made the table: there is no %s\n", cfg.Set.VersionTable())
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// connectTimeout bounds the first attempt to reach the database.
const connectTimeout = 10 * time.Second

// connect opens a pool on the database at url, or else at $DATABASE_URL, and
// makes sure that it answers. No error shows a password.
func connect(ctx context.Context, url string) (*pgxpool.Pool, error) {
	if url == "" {
		url = os.Getenv("DATABASE_URL")
	}
	if url == "" {
		return nil, badInput{errors.New("no database: give --database-url, or set DATABASE_URL")}
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		// The cause may quote part of the password.
		return nil, badInput{errors.New("the database URL is not valid (not shown, as it may hold a password)")}
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open a pool: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, fmt.Errorf("reach the database: %w", err)
	}
	return pool, nil
}
