package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// options are the flags that several commands have.
type options struct {
	databaseURL string
	schema      string
	definitions string

	json, csv, wide bool
	yes, dryRun     bool
	who             string
}

func (o *options) addTo(root *cobra.Command) {
	root.PersistentFlags().BoolVar(&o.json, "json", false, "print JSON, one object a line")
}

// onDatabase adds the flags of a command that needs a database.
func (o *options) onDatabase(c *cobra.Command) *cobra.Command {
	c.Flags().StringVar(&o.databaseURL, "database-url", "", "the database; $DATABASE_URL if left out")
	c.Flags().StringVar(&o.schema, "schema", "", "the schema that holds the tables; the connection's search_path if left out")
	return c
}

// onLimits adds the flags of a command that needs definitions as well.
func (o *options) onLimits(c *cobra.Command) *cobra.Command {
	o.onDatabase(c)
	c.Flags().StringVar(&o.definitions, "definitions", "", "a file of definitions, as catalog export prints; the catalog in the database if left out")
	return c
}

// listing adds the flags of a command that prints a table.
func (o *options) listing(c *cobra.Command) *cobra.Command {
	c.Flags().BoolVar(&o.csv, "csv", false, "print CSV")
	c.Flags().BoolVar(&o.wide, "wide", false, "do not cut long keys on a terminal")
	return c
}

// losing adds the flags of a command by which something is lost.
func (o *options) losing(c *cobra.Command) *cobra.Command {
	c.Flags().BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	c.Flags().BoolVar(&o.dryRun, "dry-run", false, "say what would be done, and do nothing")
	return c
}

// audited adds the flag of a command that edits the catalog.
func (o *options) audited(c *cobra.Command) *cobra.Command {
	c.Flags().StringVar(&o.who, "who", "", "who makes the change, for the history; $RATELIMIT_WHO if left out")
	return c
}

// sayWho has the edits of a command say who makes them.
func (o *options) sayWho(cmd *cobra.Command) {
	cmd.SetContext(catalog.WithWho(cmd.Context(), cmp.Or(o.who, os.Getenv("RATELIMIT_WHO"))))
}

// stoppable returns a context that a signal ends, so that the error says what was waited for, or how
// much was done. The second signal ends the program.
func stoppable(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// confirmed asks whether to go on with a change that cannot be undone, unless --yes says so. It
// reports false, after it has named the change, when that is not to be made.
func (o *options) confirmed(cmd *cobra.Command, what string) (bool, error) {
	switch {
	case o.dryRun:
		fmt.Fprintln(cmd.ErrOrStderr(), "would", what)
		return false, nil
	case o.yes:
		return true, nil
	case !isTerminal(cmd.InOrStdin()):
		return false, bad("this would %s: say --yes, or --dry-run to see", what)
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "This will %s. Go on? [y/N] ", what)
	answer, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false, fmt.Errorf("read the answer: %w", err)
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return true, nil
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "Nothing was done.")
	return false, nil
}

// silent discards the catalog's logs: the command prints its errors itself.
var silent = slog.New(slog.DiscardHandler)

// onDesk runs do with the database and its definitions.
func (o *options) onDesk(cmd *cobra.Command, do func(d *inspect.Inspector) error) error {
	var fromFile *catalog.Catalog
	if o.definitions != "" {
		f, err := readDefinitions(cmd.InOrStdin(), o.definitions)
		if err != nil {
			return err
		}
		if fromFile, err = f.catalog(cmd.Context()); err != nil {
			return err
		}
	}
	return o.onStore(cmd, func(d *inspect.Inspector) error {
		err := d.Store.Ready(cmd.Context())
		if d.Catalog = fromFile; err == nil && fromFile == nil {
			err = openCatalog(cmd.Context(), d)
		}
		if err != nil {
			return err
		}
		return do(d)
	})
}

// onCatalog runs do with the catalog in the database, which has been read.
func (o *options) onCatalog(cmd *cobra.Command, do func(d *inspect.Inspector) error) error {
	o.sayWho(cmd)
	return o.onStore(cmd, func(d *inspect.Inspector) error {
		if err := readCatalog(cmd.Context(), d); err != nil {
			return err
		}
		return do(d)
	})
}

// onStore runs do with a Store that sends the statements that the table needs.
func (o *options) onStore(cmd *cobra.Command, do func(d *inspect.Inspector) error) error {
	return o.onPool(cmd, func(pool *pgxpool.Pool) error {
		d := &inspect.Inspector{Pool: pool, Schema: o.schema}
		portable, err := d.Distributed(cmd.Context())
		if err != nil {
			return err
		}
		if d.Store, err = pgstore.New(pool, &pgstore.Config{Schema: o.schema, Portable: portable}); err != nil {
			return err
		}
		return do(d)
	})
}

// onPool runs do with connections to the database.
func (o *options) onPool(cmd *cobra.Command, do func(pool *pgxpool.Pool) error) error {
	pool, err := connect(cmd.Context(), o.databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	return asBad(do(pool))
}

// readCatalog reads the catalog in the database.
func readCatalog(ctx context.Context, d *inspect.Inspector) (err error) {
	d.Catalog, err = catalog.New(d.Pool, &catalog.Config{Schema: d.Schema, Store: d.Store, Logger: silent})
	if err != nil {
		return err
	}
	return d.Catalog.Refresh(ctx)
}

// openCatalog reads the catalog in the database. Where there is none, it is empty.
func openCatalog(ctx context.Context, d *inspect.Inspector) error {
	err := readCatalog(ctx, d)
	if !errors.Is(err, catalog.ErrNotMigrated) {
		return err
	}
	d.Catalog, err = (&definitionsFile{}).catalog(ctx)
	return err
}

// limitOf returns the definition of a limit, or an error that says where to get one.
func limitOf(d *inspect.Inspector, name string) (ratelimit.Limit, error) {
	if _, err := d.InFlight(name); err == nil {
		return nil, bad("%s is a limit of how many at once, which has permits: see ratelimit inflight, show and catalog set", visible.Text(name))
	}
	limit, err := d.Limit(name)
	if err != nil {
		return nil, bad("%w: have the program publish it, or give --definitions FILE", err)
	}
	return limit, nil
}

// oneKey reads the key of a command that is about one, and reads none from standard input.
func oneKey(argument string) (string, error) {
	if argument == "-" {
		return "", bad(`-: only reset, credit, pause, resume, change and erase read keys from standard input; the key - is '"-"'`)
	}
	return keyOf(argument)
}

// keyOf reads a key as it was given.
func keyOf(argument string) (string, error) {
	key, err := visible.Parse(argument)
	if err != nil {
		return "", badInput{err}
	}
	if key == catalog.AllKeys {
		return "", bad("key %s: no key can be this", argument)
	}
	return key, nil
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
		return nil, bad("no database: give --database-url, or set DATABASE_URL")
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		// The cause may quote part of the password.
		return nil, bad("the database URL is not valid (not shown, as it may hold a password)")
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = "ratelimit"
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
