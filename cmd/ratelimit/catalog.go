package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

func catalogCommand(o *options) *cobra.Command {
	c := &cobra.Command{
		Use:     "catalog",
		Short:   "See and change the definitions that the database knows",
		GroupID: operating,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bad("catalog: want one of ls, set, unset, import, export and history")
		},
	}
	c.AddCommand(catalogLs(o), catalogSet(o), catalogUnset(o), catalogImport(o), catalogExport(o), catalogHistory(o))
	return c
}

// onCatalog runs do with the catalog in the database, which has been read.
func (o *options) onCatalog(cmd *cobra.Command, do func(pool *pgxpool.Pool, c *catalog.Catalog) error) error {
	pool, err := connect(cmd.Context(), o.databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	c, err := catalog.New(pool, &catalog.Config{Schema: o.schema, Logger: silent})
	if err != nil {
		return err
	}
	if err := c.Refresh(cmd.Context()); err != nil {
		return err
	}
	err = do(pool, c)
	if errors.Is(err, catalog.ErrUnknown) {
		return badInput{err}
	}
	return asBad(err)
}

func catalogLs(o *options) *cobra.Command {
	return o.listing(o.onDatabase(&cobra.Command{
		Use:     "ls [LIMIT]",
		Short:   "List definitions, or a limit's overrides",
		Example: "  ratelimit catalog ls\n  ratelimit catalog ls send_message",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.onCatalog(cmd, func(_ *pgxpool.Pool, c *catalog.Catalog) error {
				if len(args) == 0 {
					return listDefinitions(o.printer(cmd), c)
				}
				return listOverrides(o.printer(cmd), c, args[0])
			})
		},
	}))
}

func listDefinitions(p *printer, c *catalog.Catalog) error {
	t := p.table("OVERRIDES", "LIMIT")
	row := func(name, described string, v limitJSON) error {
		v.Name, v.Overrides = name, len(c.Overrides(name))
		return t.row(v, fmt.Sprint(v.Overrides), visible.Lines(described))
	}
	for _, d := range c.Definitions() {
		if err := row(d.Name, d.String(), limitJSON{Definition: &d}); err != nil {
			return err
		}
	}
	for _, l := range c.InFlights() {
		if err := row(l.Name, l.String(), limitJSON{InFlight: new(inFlightJSONOf(l))}); err != nil {
			return err
		}
	}
	if err := t.end(); err != nil {
		return err
	}
	for _, fault := range c.Ignored() {
		p.say("not used: %s", visible.Lines(fault.Error()))
	}
	return nil
}

func listOverrides(p *printer, c *catalog.Catalog, name string) error {
	if err := (&inspect.Inspector{Catalog: c}).Known(name); err != nil {
		return badInput{err}
	}
	t := p.table("OVERRIDE", "KEY")
	for _, e := range c.Overrides(name) {
		key := "(all keys)"
		if !e.All {
			key = p.key(e.Key)
		}
		if err := t.row(overrideOf(&e), visible.Lines(inspect.Override(&e.Override)), key); err != nil {
			return err
		}
	}
	return t.end()
}

// overrideFlags are an override as flags have it.
type overrideFlags struct {
	rate                  float64
	period                time.Duration
	capacity, maxReserved string
	slots, atOnce         int
	lease                 time.Duration
	mode, until           string
	off, all              bool
	note                  string
}

func catalogSet(o *options) *cobra.Command {
	var f overrideFlags
	c := &cobra.Command{
		Use:   "set LIMIT KEY | set LIMIT --all-keys",
		Short: "Override a limit's definition, for a key or for all",
		Long: `Override the definition of a limit for one key, or for all keys, in place of an override that
is there. What is left out stays as the program has it.`,
		Example: `  ratelimit catalog set send_message alice --rate 100 --capacity 200 --until 48h --note 'moving house'
  ratelimit catalog set send_message --all-keys --mode refuse --until 10m`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := keyOrAll(args, f.all)
			if err != nil {
				return err
			}
			override, err := f.override(cmd, time.Now())
			if err != nil {
				return err
			}
			e := &catalog.Entry{Name: args[0], Key: key, All: f.all, Override: override}
			return o.onCatalog(cmd, func(_ *pgxpool.Pool, c *catalog.Catalog) error {
				if o.dryRun {
					_, err := o.confirmed(cmd, "set "+inspect.Override(&e.Override))
					return err
				}
				if err := setEntry(cmd.Context(), c, e); err != nil {
					return err
				}
				p := o.printer(cmd)
				if p.json {
					return p.object(overrideOf(e))
				}
				p.say("set: %s", visible.Lines(inspect.Override(&e.Override)))
				return nil
			})
		},
	}
	flags := c.Flags()
	flags.Float64Var(&f.rate, "rate", 0, "tokens that are refilled in each period")
	flags.DurationVar(&f.period, "period", 0, "the period, such as 1m")
	flags.StringVar(&f.capacity, "capacity", "", `the most tokens that accumulate, or "none"`)
	flags.StringVar(&f.maxReserved, "max-reserved", "", `the deepest debt, "none" or "unlimited"`)
	flags.IntVar(&f.slots, "slots", 0, "of a sliding window")
	flags.IntVar(&f.atOnce, "at-once", 0, "of a limit of how many at once: slots for each key")
	flags.DurationVar(&f.lease, "lease", 0, "of a limit of how many at once")
	flags.StringVar(&f.mode, "mode", "", `"shadow" decides and refuses nobody, "refuse" refuses all calls, "enforce" is as usual`)
	flags.StringVar(&f.until, "until", "", "when it ends: an instant such as 2026-12-31T00:00:00Z, or a duration from now such as 48h")
	flags.BoolVar(&f.off, "off", false, "keep the override, and do not use it")
	flags.StringVar(&f.note, "note", "", "why, and for whom")
	flags.BoolVar(&f.all, "all-keys", false, "for all keys that have no override of their own")
	flags.BoolVar(&o.dryRun, "dry-run", false, "say what would be done, and do nothing")
	return o.onDatabase(c)
}

// keyOrAll is the key of LIMIT KEY, or "" with --all-keys.
func keyOrAll(args []string, all bool) (string, error) {
	if all == (len(args) == 2) {
		return "", bad("name a key, or say --all-keys")
	}
	if all {
		return "", nil
	}
	return keyOf(args[1])
}

func (f *overrideFlags) override(cmd *cobra.Command, now time.Time) (catalog.Override, error) {
	o := catalog.Override{Rate: f.rate, Period: f.period, Slots: f.slots, AtOnce: f.atOnce, Lease: f.lease, Off: f.off, Note: f.note}
	for name, set := range map[string]bool{"rate": f.rate != 0, "period": f.period != 0, "slots": f.slots != 0, "at-once": f.atOnce != 0, "lease": f.lease != 0} {
		if cmd.Flags().Changed(name) && !set {
			return o, bad("--%s 0: must not be 0", name)
		}
	}
	var err error
	if o.Capacity, err = amountOf("--capacity", f.capacity); err != nil {
		return o, err
	}
	if o.MaxReserved, err = amountOf("--max-reserved", f.maxReserved); err != nil {
		return o, err
	}
	if f.mode != "" {
		if o.Mode, err = ratelimit.ParseMode(f.mode); err != nil {
			return o, bad("--mode %q: must be enforce, shadow or refuse", f.mode)
		}
	}
	if f.until == "" {
		return o, nil
	}
	if lasts, err := time.ParseDuration(f.until); err == nil {
		o.Until = now.Add(lasts)
	} else if o.Until, err = time.Parse(time.RFC3339, f.until); err != nil {
		return o, bad("--until %q: want an instant such as 2026-12-31T00:00:00Z, or a duration such as 48h", f.until)
	}
	if !o.Until.After(now) {
		return o, bad("--until %s: is over", f.until)
	}
	return o, nil
}

// amountOf reads an amount of a flag; "" is 0.
func amountOf(flag, text string) (float64, error) {
	switch text {
	case "":
		return 0, nil
	case "none", "0":
		return ratelimit.None, nil
	case "unlimited":
		return math.Inf(1), nil
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0, bad(`%s %q: must be a number, "none" or "unlimited"`, flag, text)
	}
	return v, nil
}

func catalogUnset(o *options) *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use:     "unset LIMIT KEY | unset LIMIT --all-keys",
		Short:   "Remove an override",
		Example: `  ratelimit catalog unset send_message alice --yes`,
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := keyOrAll(args, all)
			if err != nil {
				return err
			}
			return o.onCatalog(cmd, func(_ *pgxpool.Pool, c *catalog.Catalog) error {
				return o.unset(cmd, c, args[0], key, all)
			})
		},
	}
	c.Flags().BoolVar(&all, "all-keys", false, "the override for all keys")
	return o.losing(o.onDatabase(c))
}

func (o *options) unset(cmd *cobra.Command, c *catalog.Catalog, name, key string, all bool) error {
	what := "for all keys"
	if !all {
		what = "of key " + visible.Short(key, keyWidth)
	}
	if ok, err := o.confirmed(cmd, fmt.Sprintf("remove the override of %s %s", visible.Text(name), what)); !ok {
		return err
	}
	unset := func() (bool, error) { return c.Unset(cmd.Context(), name, key) }
	if all {
		unset = func() (bool, error) { return c.UnsetAll(cmd.Context(), name) }
	}
	removed, err := unset()
	if err != nil {
		return err
	}
	p := o.printer(cmd)
	if p.json {
		return p.object(struct {
			Removed bool `json:"removed"`
		}{removed})
	}
	if removed {
		p.say("removed")
	} else {
		p.say("there was none")
	}
	return nil
}

func catalogImport(o *options) *cobra.Command {
	return o.losing(o.onDatabase(&cobra.Command{
		Use:   "import FILE",
		Short: "Write definitions and overrides from a file into the catalog",
		Long: `Write definitions and overrides from a file, as export prints them, in place of those that are
there: all, or on an error none. What the file does not name stays. - is standard input, with
--yes.`,
		Example: `  ratelimit catalog import limits.jsonl --yes`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := readDefinitions(cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}
			return o.onCatalog(cmd, func(pool *pgxpool.Pool, c *catalog.Catalog) error {
				if ok, err := o.confirmed(cmd, "write "+f.describe()+" into the catalog"); !ok {
					return err
				}
				err := pgx.BeginFunc(cmd.Context(), pool, func(tx pgx.Tx) error { return f.into(cmd.Context(), tx, c) })
				if err != nil {
					return err
				}
				o.printer(cmd).say("wrote %s", f.describe())
				return nil
			})
		},
	}))
}

// describe counts the entries of the file.
func (f *definitionsFile) describe() string {
	definitions := 0
	for _, e := range f.entries {
		if e.override == nil {
			definitions++
		}
	}
	return plural(definitions, "definition") + " and " + plural(len(f.entries)-definitions, "override")
}

// txEditor writes into the catalog inside a transaction.
type txEditor struct {
	*catalog.Catalog
	tx pgx.Tx
}

func (e txEditor) Publish(ctx context.Context, limits ...ratelimit.Limit) error {
	return e.PublishTx(ctx, e.tx, limits...)
}

func (e txEditor) PublishInFlight(ctx context.Context, limits ...ratelimit.InFlight) error {
	return e.PublishInFlightTx(ctx, e.tx, limits...)
}

func (e txEditor) Set(ctx context.Context, name, key string, o catalog.Override) error {
	return e.SetTx(ctx, e.tx, name, key, o)
}

func (e txEditor) SetAll(ctx context.Context, name string, o catalog.Override) error {
	return e.SetAllTx(ctx, e.tx, name, o)
}

// into writes the file into a catalog inside tx.
func (f *definitionsFile) into(ctx context.Context, tx pgx.Tx, c *catalog.Catalog) error {
	return f.publish(ctx, txEditor{c, tx})
}

func catalogExport(o *options) *cobra.Command {
	return o.onDatabase(&cobra.Command{
		Use:     "export [LIMIT]",
		Short:   "Print definitions and overrides, for import, and for --definitions",
		Example: `  ratelimit catalog export >limits.jsonl`,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.onCatalog(cmd, func(_ *pgxpool.Pool, c *catalog.Catalog) error {
				only := ""
				if len(args) == 1 {
					only = args[0]
					if err := (&inspect.Inspector{Catalog: c}).Known(only); err != nil {
						return badInput{err}
					}
				}
				return export(o.printer(cmd), c, only)
			})
		},
	})
}

// export prints what the catalog has, or what it has of a name.
func export(p *printer, c *catalog.Catalog, only string) error {
	put := func(name string, definition map[string]any) error {
		if only != "" && name != only {
			return nil
		}
		if err := p.object(definition); err != nil {
			return err
		}
		for _, e := range c.Overrides(name) {
			if err := p.object(map[string]any{"override": overrideOf(&e)}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, d := range c.Definitions() {
		if err := put(d.Name, map[string]any{"limit": d}); err != nil {
			return err
		}
	}
	for _, l := range c.InFlights() {
		if err := put(l.Name, map[string]any{"inFlight": inFlightJSONOf(l)}); err != nil {
			return err
		}
	}
	return nil
}

func catalogHistory(o *options) *cobra.Command {
	var most int
	c := &cobra.Command{
		Use:     "history [LIMIT]",
		Short:   "List changes of definitions and overrides, the newest first",
		Example: `  ratelimit catalog history send_message`,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if most < 0 {
				return bad("--most %d: must not be negative", most)
			}
			return o.onCatalog(cmd, func(_ *pgxpool.Pool, c *catalog.Catalog) error {
				name := ""
				if len(args) == 1 {
					name = args[0]
				}
				changes, err := c.History(cmd.Context(), name, most)
				if err != nil {
					return err
				}
				return listChanges(o.printer(cmd), changes)
			})
		},
	}
	c.Flags().IntVarP(&most, "most", "n", 50, "at most so many changes; 0 for all")
	return o.listing(o.onDatabase(c))
}

func listChanges(p *printer, changes []catalog.Change) error {
	t := p.table("WHEN", "WHO", "LIMIT", "WAS", "BECAME", "KEY")
	for _, c := range changes {
		key := "(all keys)"
		if !c.All {
			key = p.key(c.Key)
		}
		was, became := visible.JSON(c.Was), visible.JSON(c.Became)
		if err := t.row(changeJSONOf(c), inspect.Instant(c.At), visible.Text(c.Who), visible.Text(c.Name), was, became, key); err != nil {
			return err
		}
	}
	return t.end()
}
