package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

func catalogCommand(o *options) *cobra.Command {
	c := &cobra.Command{
		Use:     "catalog",
		Short:   "See and change the definitions that the database knows",
		GroupID: operating,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bad("catalog: want one of ls, set, on, off, unset, complete, import, export and history")
		},
	}
	c.AddCommand(catalogLs(o), catalogSet(o), catalogSwitch(o, "on", catalog.On), catalogSwitch(o, "off", catalog.Off), catalogUnset(o), catalogComplete(o), catalogImport(o), catalogExport(o), catalogHistory(o))
	return c
}

func catalogLs(o *options) *cobra.Command {
	return o.listing(o.onDatabase(&cobra.Command{
		Use:     "ls [LIMIT]",
		Short:   "List definitions, or a limit's overrides",
		Example: "  ratelimit catalog ls\n  ratelimit catalog ls send_message",
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.onCatalog(cmd, func(d *inspect.Inspector) error {
				if len(args) == 0 {
					return listDefinitions(o.printer(cmd), d.Catalog)
				}
				return listOverrides(o.printer(cmd), d, args[0])
			})
		},
	}))
}

// published returns the limits of a catalog, and how each reads.
func published(c *catalog.Catalog) (all []limitJSON, described []string) {
	for _, d := range c.Definitions() {
		all, described = append(all, limitJSON{Name: d.Name, Definition: &d}), append(described, d.String())
	}
	for _, l := range c.InFlights() {
		all, described = append(all, limitJSON{Name: l.Name, InFlight: new(inFlightJSONOf(l))}), append(described, l.String())
	}
	return all, described
}

func listDefinitions(p *printer, c *catalog.Catalog) error {
	t := p.table("OVERRIDES", "LIMIT")
	all, described := published(c)
	for i, v := range all {
		v.Overrides = len(c.Overrides(v.Name))
		if err := t.row(v, fmt.Sprint(v.Overrides), visible.Lines(described[i])); err != nil {
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

func listOverrides(p *printer, d *inspect.Inspector, name string) error {
	if err := d.Known(name); err != nil {
		return badInput{err}
	}
	t := p.table("OVERRIDE", "KEY")
	for _, e := range d.Catalog.Overrides(name) {
		if err := t.row(overrideOf(&e), visible.Lines(inspect.Override(&e.Override)), p.keyOrAll(e.Key)); err != nil {
			return err
		}
	}
	return t.end()
}

// An editing is an edit of an override, which is confirmed.
type editing struct {
	*options
	all, lower, asIs bool
}

func catalogSet(o *options) *cobra.Command {
	var cleared []string
	c := &cobra.Command{
		Use:   "set LIMIT KEY | set LIMIT --all-keys",
		Short: "Override a limit's definition, for a key or for all",
		Long: `Override the definition of a limit for one key, or for all keys. Of an override that is there
the fields that are named are changed, and the rest stays; --clear takes fields away. It says
what was and what it becomes, and asks. With --all-keys it says how many keys that concerns, and
how many of them would be refused now. What grants less than the program has published is asked
for once more: where nobody can answer, say --lower.

What was used stays used: a raise adds what it is larger by to what is left, within 10 seconds, and
a cut takes it away. With --as-is what is left stays, as far as the new capacity has room.`,
		Example: `  ratelimit catalog set send_message alice --rate 100 --capacity 200 --until 48h --note 'moving house' --yes
  ratelimit catalog set send_message alice --until never
  ratelimit catalog set send_message --all-keys --mode refuse --until 10m --yes --lower`,
	}
	for _, f := range inspect.Fields {
		c.Flags().String(f.Name, "", f.Usage)
	}
	c.Flags().StringSliceVar(&cleared, "clear", nil, `fields that are to be as in the program again, such as "rate,until"`)
	return o.editing(c, func(cmd *cobra.Command) (*catalog.Override, error) { return flaggedOverride(cmd, cleared) })
}

// flaggedOverride returns the edit that the flags name.
func flaggedOverride(cmd *cobra.Command, cleared []string) (*catalog.Override, error) {
	var o catalog.Override
	var names []string
	for _, f := range inspect.Fields {
		names = append(names, f.Name)
		flag := cmd.Flags().Lookup(f.Name)
		if !flag.Changed {
			continue
		}
		if err := f.Read(&o, flag.Value.String(), time.Now()); err != nil {
			return nil, bad("--%s %q: %w", f.Name, flag.Value, err)
		}
	}
	for _, name := range cleared {
		i := slices.Index(names, name)
		if i < 0 {
			return nil, bad("--clear %q: must be among %s", name, strings.Join(names, ", "))
		}
		o.Clear |= 1 << i
	}
	return &o, nil
}

func catalogSwitch(o *options, word string, to catalog.Switch) *cobra.Command {
	return o.editing(&cobra.Command{
		Use:     word + " LIMIT KEY | " + word + " LIMIT --all-keys",
		Short:   "Switch an override " + word + ", and keep it as it is",
		Example: "  ratelimit catalog " + word + " send_message alice --yes",
	}, func(*cobra.Command) (*catalog.Override, error) { return &catalog.Override{Switch: to}, nil })
}

func catalogUnset(o *options) *cobra.Command {
	return o.editing(&cobra.Command{
		Use:     "unset LIMIT KEY | unset LIMIT --all-keys",
		Short:   "Remove an override",
		Example: `  ratelimit catalog unset send_message alice --yes`,
	}, func(*cobra.Command) (*catalog.Override, error) { return nil, nil })
}

// editing makes a command of an edit.
func (o *options) editing(c *cobra.Command, by func(cmd *cobra.Command) (*catalog.Override, error)) *cobra.Command {
	e := &editing{options: o}
	c.Args = cobra.RangeArgs(1, 2)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		key, err := keyOrAll(args, e.all)
		if err != nil {
			return err
		}
		override, err := by(cmd)
		if err != nil {
			return err
		}
		return o.onCatalog(cmd, func(d *inspect.Inspector) error { return e.make(cmd, d, args[0], key, override) })
	}
	c.Flags().BoolVar(&e.all, "all-keys", false, "for all keys; fields of a key's own override go before")
	c.Flags().BoolVar(&e.asIs, "as-is", false, "leave what is left as it is, in place of what was used")
	c.Flags().BoolVar(&e.lower, "lower", false, "do not ask again when it grants less than the program has published")
	return o.losing(o.audited(o.onDatabase(c)))
}

// keyOrAll is the key of LIMIT KEY, or AllKeys with --all-keys.
func keyOrAll(args []string, all bool) (string, error) {
	if all == (len(args) == 2) {
		return "", bad("name a key, or say --all-keys")
	}
	if all {
		return catalog.AllKeys, nil
	}
	return oneKey(args[1])
}

// mostTries is how often an edit that nobody is asked about begins anew, since others edit it too.
const mostTries = 20

// make makes an edit, once it is confirmed.
func (e *editing) make(cmd *cobra.Command, d *inspect.Inspector, name, key string, by *catalog.Override) error {
	for try := 1; ; try++ {
		err := e.makeOnce(cmd, d, name, key, by, try)
		if !e.yes || try == mostTries || !errors.Is(err, catalog.ErrChanged) {
			return err
		}
	}
}

func (e *editing) makeOnce(cmd *cobra.Command, d *inspect.Inspector, name, key string, by *catalog.Override, try int) error {
	edit, err := d.Catalog.Preview(cmd.Context(), name, key, by)
	if err != nil {
		return err
	}
	if key != catalog.AllKeys && by != nil && try == 1 {
		e.note(cmd, d, name, key)
	}
	if edit.AsIs = e.asIs; e.asIs {
		edit.Left = nil
	}
	if edit.Changes() {
		if ok, err := e.agreed(cmd, d, &edit); !ok {
			return err
		}
		if err := d.Catalog.Apply(cmd.Context(), &edit); err != nil {
			return err
		}
	}
	p := e.printer(cmd)
	switch {
	case p.json:
		return p.object(editJSONOf(&edit))
	case by == nil && edit.Was == nil:
		p.say("there was none")
	case !edit.Changes():
		p.say("it is so already: %s", visible.Lines(inspect.Override(edit.Became)))
	default:
		p.say("%s", visible.Lines(inspect.Edit(&edit)))
		if edit.Left != nil {
			p.say("%s: %s", p.key(key), edit.Left)
		}
	}
	return nil
}

// catalogComplete is for a cron where no program's catalog has a store.
func catalogComplete(o *options) *cobra.Command {
	return o.onDatabase(&cobra.Command{
		Use:     "complete",
		Short:   "Complete raises that are due, where no program does it",
		Example: "  ratelimit catalog complete",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.onCatalog(cmd, func(d *inspect.Inspector) error {
				n, err := d.Catalog.Complete(cmd.Context())
				if err != nil {
					return fmt.Errorf("after %s: %w", plural(n, "key"), err)
				}
				o.printer(cmd).say("looked at %s", plural(n, "key"))
				return nil
			})
		},
	})
}

// agreed asks whether an edit is to be made, and once more if it grants less than the program
// has published.
func (e *editing) agreed(cmd *cobra.Command, d *inspect.Inspector, edit *catalog.Edit) (bool, error) {
	whose := "all keys"
	if edit.Key != catalog.AllKeys {
		whose = "key " + visible.Short(edit.Key, keyWidth)
	}
	what := fmt.Sprintf("change the override of %s of %s: %s", whose, visible.Text(edit.Name), visible.Lines(inspect.Edit(edit)))
	if edit.Left != nil {
		what += "; " + edit.Left.String()
	}
	if edit.Key == catalog.AllKeys {
		ctx, cancel := context.WithTimeout(cmd.Context(), checkTimeout)
		what += "; " + d.ReachText(ctx, edit)
		cancel()
	}
	lower := inspect.Lower(edit)
	if lower != "" {
		what += "; " + lower
	}
	ok, err := e.confirmed(cmd, what)
	switch {
	case !ok || lower == "" || e.lower:
		return ok, err
	case e.yes:
		return false, bad("%s: say --lower as well", lower)
	}
	return e.confirmed(cmd, "grant less than the program has published")
}

// editJSON is an edit of an override.
type editJSON struct {
	Was    *overrideJSON `json:"was"`
	Became *overrideJSON `json:"became"`
	Lower  []string      `json:"lower,omitempty"`
	Left   *catalog.Left `json:"left,omitempty"`
}

func editJSONOf(e *catalog.Edit) editJSON {
	out := editJSON{Lower: e.Lower, Left: e.Left}
	if e.Was != nil {
		out.Was = overrideOf(&catalog.Entry{Name: e.Name, Key: e.Key, Override: *e.Was})
	}
	if e.Became != nil {
		out.Became = overrideOf(&catalog.Entry{Name: e.Name, Key: e.Key, Override: *e.Became})
	}
	return out
}

func catalogImport(o *options) *cobra.Command {
	return o.losing(o.audited(o.onDatabase(&cobra.Command{
		Use:   "import FILE",
		Short: "Write definitions and overrides from a file into the catalog",
		Long: `Write definitions and overrides from a file, as export prints them, in place of those that are
there: all, or on an error none. What the file does not name stays, and so does what is left of keys. - is standard input, with
--yes.`,
		Example: `  ratelimit catalog import limits.jsonl --yes`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := readDefinitions(cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}
			return o.onCatalog(cmd, func(d *inspect.Inspector) error {
				if ok, err := o.confirmed(cmd, "write "+f.describe()+" into the catalog"); !ok {
					return err
				}
				asIs, err := catalog.New(d.Pool, &catalog.Config{Schema: o.schema, Logger: silent})
				if err == nil {
					err = intx.Do(cmd.Context(), d.Pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return f.publish(cmd.Context(), txEditor{asIs, tx}) })
				}
				if err != nil {
					return err
				}
				o.printer(cmd).say("wrote %s", f.describe())
				return nil
			})
		},
	})))
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

func (e txEditor) Set(ctx context.Context, name, key string, o catalog.Override) (catalog.Edit, error) {
	return e.SetTx(ctx, e.tx, name, key, o)
}

func catalogExport(o *options) *cobra.Command {
	return o.onDatabase(&cobra.Command{
		Use:     "export [LIMIT]",
		Short:   "Print definitions and overrides, for import, and for --definitions",
		Example: `  ratelimit catalog export >limits.jsonl`,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.onCatalog(cmd, func(d *inspect.Inspector) error {
				only := ""
				if len(args) == 1 {
					only = args[0]
					if err := d.Known(only); err != nil {
						return badInput{err}
					}
				}
				return export(o.printer(cmd), d.Catalog, only)
			})
		},
	})
}

// export prints what the catalog has, or what it has of a name.
func export(p *printer, c *catalog.Catalog, only string) error {
	all, _ := published(c)
	for _, l := range all {
		if only != "" && l.Name != only {
			continue
		}
		lines := []map[string]any{{"limit": l.Definition}}
		if l.InFlight != nil {
			lines = []map[string]any{{"inFlight": l.InFlight}}
		}
		for _, e := range c.Overrides(l.Name) {
			lines = append(lines, map[string]any{"override": overrideOf(&e)})
		}
		for _, line := range lines {
			if err := p.object(line); err != nil {
				return err
			}
		}
	}
	return nil
}

func catalogHistory(o *options) *cobra.Command {
	var most int
	c := &cobra.Command{
		Use:     "history [LIMIT [KEY]]",
		Short:   "List changes of definitions and overrides, the newest first",
		Long:    "List changes of definitions and overrides, the newest first; of a key those of its override, and those for all keys.",
		Example: "  ratelimit catalog history send_message\n  ratelimit catalog history send_message alice",
		Args:    cobra.MaximumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if most < 0 {
				return bad("--most %d: must not be negative", most)
			}
			key := ""
			if len(args) == 2 {
				var err error
				if key, err = oneKey(args[1]); err != nil {
					return err
				}
			}
			return o.onCatalog(cmd, func(d *inspect.Inspector) (err error) {
				var changes []catalog.Change
				if len(args) == 2 {
					changes, err = d.Catalog.KeyHistory(cmd.Context(), args[0], key, most)
				} else {
					changes, err = d.Catalog.History(cmd.Context(), strings.Join(args, ""), most)
				}
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
		was, became := visible.JSON(c.Was), visible.JSON(c.Became)
		if err := t.row(changeJSONOf(c), inspect.Instant(c.At), inspect.By(&c), visible.Text(c.Name), was, became, p.keyOrAll(c.Key)); err != nil {
			return err
		}
	}
	return t.end()
}
