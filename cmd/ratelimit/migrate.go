package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
)

const migrateLong = `Put the schema in place, or take it back.

  up       bring the schema to the newest version; does nothing if it is there
  down     take the newest migration back; asks if something is lost by that
  status   show which migrations the database has; exit status 1 if it lacks one
  print    print the SQL that builds the newest schema from nothing, for other
           migration tools; needs no database

It is about the table of the limits, unless --set names another set of migrations: each has
versions of its own. A table that is locked, such as by a dump, is tried again each second.`

// migrateFlags are the arguments of migrate.
type migrateFlags struct {
	action string
	set    string
	all    bool
	from   int
	down   bool
}

// migrateActions are the actions that need a database.
var migrateActions = map[string]func(*migrating) error{
	"up":     (*migrating).up,
	"down":   (*migrating).down,
	"status": (*migrating).status,
}

// migrating is an action on sets.
type migrating struct {
	*options
	*printer
	cmd  *cobra.Command
	pool *pgxpool.Pool
	sets []migrations.Set
}

func migrateCommand(o *options) *cobra.Command {
	var f migrateFlags
	c := &cobra.Command{
		Use:       "migrate up|down|status|print",
		Short:     "Put the schema in place, take it back, or print it",
		Long:      migrateLong,
		Example:   `  ratelimit migrate up --all --database-url postgres://localhost/app`,
		GroupID:   operating,
		ValidArgs: []string{"up", "down", "status", "print"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				f.action = args[0]
			}
			if err := f.check(cmd, o); err != nil {
				return badInput{fmt.Errorf("migrate: %w (see \"ratelimit migrate --help\")", err)}
			}
			m := &migrating{options: o, printer: o.printer(cmd), cmd: cmd, sets: []migrations.Set{migrations.Set(f.set)}}
			if f.all {
				m.sets = migrations.Sets()
			}
			if f.action == "print" {
				return m.print(f)
			}
			return o.onPool(cmd, func(pool *pgxpool.Pool) error {
				m.pool = pool
				return migrateActions[f.action](m)
			})
		},
	}
	c.Flags().StringVar(&f.set, "set", "", "another set of migrations than that of the limits: "+setNames()+"; apply it after that one")
	c.Flags().BoolVar(&f.all, "all", false, "all sets, in the order in which they are applied; not for down")
	c.Flags().IntVar(&f.from, "from", 1, "print what a schema needs that has the versions before, such as after an upgrade of the library")
	c.Flags().BoolVar(&f.down, "down", false, "print the SQL that takes back what would be printed without")
	_ = c.RegisterFlagCompletionFunc("set", cobra.FixedCompletions(strings.Split(setNames(), ", "), cobra.ShellCompDirectiveNoFileComp)) // the flag is there
	return o.losing(o.onDatabase(c))
}

// setNames names the sets that are not that of the limits.
func setNames() string {
	var names []string
	for _, set := range migrations.Sets()[1:] {
		names = append(names, string(set))
	}
	return strings.Join(names, ", ")
}

// check reports arguments that make no sense.
func (f *migrateFlags) check(cmd *cobra.Command, o *options) error {
	_, needsDatabase := migrateActions[f.action]
	switch {
	case !needsDatabase && f.action != "print":
		return errors.New("want one of up, down, status and print")
	case !slices.Contains(migrations.Sets(), migrations.Set(f.set)):
		return fmt.Errorf("--set %q: want one of %s", f.set, setNames())
	case f.all && (cmd.Flags().Changed("set") || f.action == "down" || cmd.Flags().Changed("from") || f.down):
		return errors.New("--all is for up, status and print, without --set, --from and --down")
	case f.action != "down" && (o.yes || o.dryRun):
		return errors.New("--yes and --dry-run are for down only, by which something is lost")
	case needsDatabase && f.down:
		return errors.New("--down is for print only")
	case needsDatabase && cmd.Flags().Changed("from"):
		return errors.New("--from is for print only")
	case !needsDatabase && o.databaseURL+o.schema != "":
		return errors.New("print takes neither --database-url nor --schema: its names are unqualified")
	case !needsDatabase && o.json:
		return errors.New("print prints SQL, and takes no --json")
	}
	return nil
}

func (m *migrating) print(f migrateFlags) error {
	for i, set := range m.sets {
		sql := set.UpSQLFrom
		if f.down {
			sql = set.DownSQLFrom
		}
		text, err := sql(f.from)
		if err != nil {
			return badInput{fmt.Errorf("migrate: %w", err)}
		}
		if i > 0 {
			text = "\n" + text
		}
		if _, err := io.WriteString(m.out, text); err != nil {
			return err
		}
	}
	return nil
}

func (m *migrating) config(set migrations.Set) *migrate.Config {
	return &migrate.Config{Schema: m.schema, Set: set}
}

func (m *migrating) up() error {
	ctx, stop := stoppable(m.cmd.Context())
	defer stop()
	count := 0
	for _, set := range m.sets {
		applied, err := migrate.Up(ctx, m.pool, m.config(set))
		if err := cmp.Or(m.done("applied", applied...), err); err != nil {
			return err
		}
		count += len(applied)
	}
	if count > 0 {
		return nil
	}
	return m.nothing("nothing to apply")
}

// nothing says that there is nothing to do, and of which sets another tool made the tables.
func (m *migrating) nothing(to string) error {
	m.say("%s", to)
	for _, set := range m.sets {
		all, err := migrate.Status(m.cmd.Context(), m.pool, m.config(set))
		if err != nil {
			return err
		}
		m.tellUntracked(set, all)
	}
	return nil
}

func (m *migrating) down() error {
	set := m.sets[0]
	newest, err := migrate.Newest(m.cmd.Context(), m.pool, m.config(set))
	if err != nil {
		return err
	}
	if newest == nil {
		return m.nothing("nothing to take back")
	}
	if loses := newest.Loses(); loses != "" || m.dryRun {
		what := "take back " + newest.Name + when(loses != "", ": "+loses)
		if ok, err := m.confirmed(m.cmd, what); !ok {
			return err
		}
	}
	ctx, stop := stoppable(m.cmd.Context())
	defer stop()
	undone, err := migrate.Down(ctx, m.pool, m.config(set))
	if err != nil {
		return err
	}
	if undone == nil {
		m.say("nothing to take back") // by now
		return nil
	}
	return m.done("took back", *undone)
}

// done prints migrations that were applied or taken back.
func (m *migrating) done(what string, all ...migrate.Migration) error {
	for _, a := range all {
		if err := m.tell(migrationJSON(a), "%s %s", what, a.Name); err != nil {
			return err
		}
	}
	return nil
}

func (m *migrating) status() error {
	missing := 0
	var faults error
	for _, set := range m.sets {
		all, err := migrate.Status(m.cmd.Context(), m.pool, m.config(set))
		if faults = errors.Join(faults, err); all == nil {
			continue
		}
		for _, a := range all {
			if !a.Applied {
				missing++
			}
		}
		if err := m.show(set, all); err != nil {
			return err
		}
	}
	if missing == 0 || faults != nil {
		return faults
	}
	return fmt.Errorf("%s not applied: %s", plural(missing, "migration"), upCommand(m.sets[0], m.schema)+when(len(m.sets) > 1, " --all"))
}

// upCommand returns the command that applies a set.
func upCommand(set migrations.Set, schema string) string {
	return "ratelimit migrate up" + when(set != "", " --set "+string(set)) + when(schema != "", " --schema "+visible.Shell(schema))
}

// show prints the migrations of a set.
func (m *migrating) show(set migrations.Set, all []migrate.Migration) error {
	if set != "" && len(m.sets) > 1 {
		m.say("\nset %s", set)
	}
	t := m.table("VERSION", "APPLIED", "MIGRATION")
	for _, a := range all {
		if err := t.row(migrationJSON(a), fmt.Sprint(a.Version), yesNo(a.Applied), a.Name); err != nil {
			return err
		}
	}
	if err := t.end(); err != nil {
		return err
	}
	m.tellUntracked(set, all)
	return nil
}

type migrationJSON struct {
	Version   int64  `json:"version"`
	Name      string `json:"name"`
	Applied   bool   `json:"applied"`
	Untracked bool   `json:"untracked,omitempty"` // another tool made it
	Newer     bool   `json:"newer,omitempty"`     // a newer program made it
}

// tellUntracked says that another tool made the table, if it did.
func (p *printer) tellUntracked(set migrations.Set, all []migrate.Migration) {
	if len(all) > 0 && all[0].Untracked {
		p.say("another tool made the table: there is no %s", set.VersionTable())
	}
}
