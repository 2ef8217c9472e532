package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/migrate"
	"github.com/pgratelimit/ratelimit/migrations"
)

const migrateLong = `Put the schema in place, or take it back.

  up       bring the schema to the newest version; does nothing if it is there
  down     take the newest migration back; taking back the first one drops the
           table, and all limits are full again
  status   show which migrations the database has
  print    print the SQL that builds the newest schema from nothing, for other
           migration tools; needs no database`

// migrateFlags are the arguments of migrate.
type migrateFlags struct {
	action string
	set    string
	from   int
	down   bool
}

// migrateActions are the actions that need a database.
var migrateActions = map[string]func(context.Context, *printer, *pgxpool.Pool, *migrate.Config) error{
	"up":     migrateUp,
	"down":   migrateDown,
	"status": migrateStatus,
}

func migrateCommand(o *options) *cobra.Command {
	var f migrateFlags
	c := &cobra.Command{
		Use:       "migrate up|down|status|print",
		Short:     "Put the schema in place, take it back, or print it",
		Long:      migrateLong,
		Example:   `  ratelimit migrate up --database-url postgres://localhost/app`,
		GroupID:   operating,
		ValidArgs: []string{"up", "down", "status", "print"},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				f.action = args[0]
			}
			if err := f.check(cmd, o); err != nil {
				return badInput{fmt.Errorf("migrate: %w (see \"ratelimit migrate --help\")", err)}
			}
			p := o.printer(cmd)
			if f.action == "print" {
				return migratePrint(p.out, f)
			}
			pool, err := connect(cmd.Context(), o.databaseURL)
			if err != nil {
				return err
			}
			defer pool.Close()
			return migrateActions[f.action](cmd.Context(), p, pool, &migrate.Config{Schema: o.schema, Set: migrations.Set(f.set)})
		},
	}
	c.Flags().StringVar(&f.set, "set", "", "another set of migrations than that of the limits, with versions of its own: catalog or functions; apply it after that one")
	c.Flags().IntVar(&f.from, "from", 1, "print what a schema needs that has the versions before, such as after an upgrade of the library")
	c.Flags().BoolVar(&f.down, "down", false, "print the SQL that takes back what would be printed without")
	return o.onDatabase(c)
}

// check reports arguments that make no sense.
func (f *migrateFlags) check(cmd *cobra.Command, o *options) error {
	_, needsDatabase := migrateActions[f.action]
	switch {
	case !needsDatabase && f.action != "print":
		return errors.New("want one of up, down, status and print")
	case !slices.Contains(migrations.Sets(), migrations.Set(f.set)):
		return fmt.Errorf("--set %q: want one of %q", f.set, migrations.Sets()[1:])
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

func migratePrint(w io.Writer, f migrateFlags) error {
	sql := migrations.Set(f.set).UpSQLFrom
	if f.down {
		sql = migrations.Set(f.set).DownSQLFrom
	}
	text, err := sql(f.from)
	if err != nil {
		return badInput{fmt.Errorf("migrate: %w", err)}
	}
	_, err = io.WriteString(w, text)
	return err
}

func migrateUp(ctx context.Context, p *printer, pool *pgxpool.Pool, cfg *migrate.Config) error {
	applied, err := migrate.Up(ctx, pool, cfg)
	if err != nil {
		return err
	}
	for _, m := range applied {
		p.say("applied %s", m.Name)
	}
	if p.json {
		return p.migrations(applied)
	}
	if len(applied) > 0 {
		return nil
	}
	p.say("nothing to apply")
	all, err := migrate.Status(ctx, pool, cfg)
	p.tellUntracked(cfg, all)
	return err
}

func migrateDown(ctx context.Context, p *printer, pool *pgxpool.Pool, cfg *migrate.Config) error {
	undone, err := migrate.Down(ctx, pool, cfg)
	if err != nil {
		return err
	}
	if undone == nil {
		p.say("nothing to take back")
		return nil
	}
	if p.json {
		return p.migrations([]migrate.Migration{*undone})
	}
	p.say("took back %s", undone.Name)
	return nil
}

func migrateStatus(ctx context.Context, p *printer, pool *pgxpool.Pool, cfg *migrate.Config) error {
	all, err := migrate.Status(ctx, pool, cfg)
	if err != nil {
		return err
	}
	if p.json {
		return p.migrations(all)
	}
	table := tabwriter.NewWriter(p.out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "VERSION\tAPPLIED\tMIGRATION")
	for _, m := range all {
		fmt.Fprintf(table, "%d\t%s\t%s\n", m.Version, yesNo(m.Applied), m.Name)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	p.tellUntracked(cfg, all)
	return nil
}

// migrations writes migrations as JSON.
func (p *printer) migrations(all []migrate.Migration) error {
	for _, m := range all {
		err := p.object(struct {
			Version   int64  `json:"version"`
			Name      string `json:"name"`
			Applied   bool   `json:"applied"`
			Untracked bool   `json:"untracked,omitempty"` // another tool made it
		}{int64(m.Version), m.Name, m.Applied, m.Untracked})
		if err != nil {
			return err
		}
	}
	return nil
}

// tellUntracked says that another tool made the table, if it did.
func (p *printer) tellUntracked(cfg *migrate.Config, all []migrate.Migration) {
	if len(all) > 0 && all[0].Untracked {
		p.say("another tool made the table: there is no %s", cfg.Set.VersionTable())
	}
}
