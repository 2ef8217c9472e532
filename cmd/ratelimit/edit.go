package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/erase"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// An edit is a verb that changes keys of a limit.
type edit struct {
	*options
	cmd   *cobra.Command
	desk  *inspect.Inspector
	limit ratelimit.Limit
	keys  []string

	shards int // of the limit; the most that it has or gets
}

// edit opens the database for a verb that changes keys of a limit by a count, and runs it.
func (o *options) edit(cmd *cobra.Command, name string, keys []string, count float64, do func(e *edit) error) error {
	e := &edit{options: o, cmd: cmd}
	var err error
	if e.keys, err = o.keysOf(cmd, keys); err != nil {
		return err
	}
	return o.onDesk(cmd, func(d *inspect.Inspector) (err error) {
		e.desk = d
		if e.limit, err = limitOf(d, name); err != nil {
			return err
		}
		e.shards = e.limit.Definition().Shards
		for _, key := range e.keys { // all of them before the first is changed
			if err := d.Catalog.ForN(e.limit, key, count).Validate(); err != nil {
				return err
			}
		}
		o.note(cmd, d, name, e.keys...)
		return do(e)
	})
}

// keysOf reads keys as they were given, each once; "-" is those of standard input.
func (o *options) keysOf(cmd *cobra.Command, arguments []string) (keys []string, err error) {
	given := map[string]bool{}
	add := func(argument string) error {
		key, err := keyOf(argument)
		if err == nil && !given[key] {
			given[key], keys = true, append(keys, key)
		}
		return err
	}
	for _, argument := range arguments {
		if argument != "-" {
			err = add(argument)
		} else if o.definitions == "-" {
			err = bad("standard input cannot be the keys and the definitions")
		} else {
			err = readKeys(cmd.InOrStdin(), add)
		}
		if err != nil {
			return nil, err
		}
	}
	return keys, nil
}

// readKeys reads keys, one a line as ls prints them, and passes over lines that are empty.
func readKeys(from io.Reader, add func(argument string) error) error {
	_, text, err := readFile(from, "-")
	if err != nil {
		return err
	}
	n := 0
	for line := range strings.Lines(strings.TrimPrefix(string(text), "\ufeff")) {
		n++
		if line = strings.TrimRight(line, "\r\n"); line == "" {
			continue
		}
		if err := add(line); err != nil {
			return badInput{fmt.Errorf("<stdin>:%d: %w", n, err)}
		}
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return bad("standard input has no key")
	}
	return nil
}

// each changes some keys at a time. The keys after those of which one failed stay as they are. A signal
// ends it once those under way are done. change returns how many keys it has changed.
func (e *edit) each(done string, change func(keys []string) (changed int, err error)) error {
	stop, end := stoppable(e.cmd.Context())
	defer end()
	changed := 0
	for some := range slices.Chunk(e.keys, min(ratelimit.MaxRequests, ratelimit.MaxChecks/e.shards)) {
		n, err := 0, stop.Err()
		if err == nil {
			n, err = change(some)
		}
		if changed += n; err != nil && len(e.keys) > 1 {
			return fmt.Errorf("%d of %d keys are %s: %w", changed, len(e.keys), done, err)
		} else if err != nil {
			return err
		}
	}
	return nil
}

// A keyEdit changes one key by itself. It asks by a verb, and tells what is done.
type keyEdit struct {
	verb, done string
	count      float64
	change     func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error
}

// make makes an edit of some keys at once, and prints what became of each.
func (by *keyEdit) make(e *edit, keys []string) (changed int, err error) {
	ctx := e.cmd.Context()
	requests, errs := make([]ratelimit.Request, len(keys)), make([]error, len(keys))
	var all sync.WaitGroup
	for i, key := range keys {
		requests[i] = e.of(key)
		all.Go(func() {
			r := requests[i]
			r.Count = by.count
			errs[i] = by.change(ctx, e.desk.Store, r)
		})
	}
	all.Wait()
	states, unread := e.desk.Store.CheckEach(ctx, requests...)
	if unread != nil {
		unread = fmt.Errorf("%s is done; reading it again failed: %w", by.done, unread)
	}
	for i, key := range keys {
		if errs[i] != nil {
			continue
		}
		changed++
		if unread == nil {
			unread = e.done(by.done, key, &states[i])
		}
	}
	return changed, cmp.Or(cmp.Or(errs...), unread)
}

// note warns of keys that look otherwise than those by which the limit is called: nobody is kept from
// changing them.
func (o *options) note(cmd *cobra.Command, d *inspect.Inspector, name string, keys ...string) {
	ctx, cancel := context.WithTimeout(cmd.Context(), checkTimeout)
	defer cancel()
	unlike, err := d.Unlike(ctx, name, keys...)
	if err != nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "whether the limit has such keys cannot be told:", visible.Lines(err.Error()))
	}
	for i, u := range unlike {
		if i == 3 {
			fmt.Fprintf(cmd.ErrOrStderr(), "and of %d more keys\n", len(unlike)-i)
			break
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "key %s: %s\n", visible.Short(u.Key, keyWidth), u.String())
	}
}

// of is a request for nothing, by the definition for a key.
func (e *edit) of(key string) ratelimit.Request {
	r := e.desk.Catalog.ForN(e.limit, key, 0)
	r.Mode = 0
	return r
}

// done prints the state of a key after it was changed.
func (e *edit) done(what, key string, now *ratelimit.Status) error {
	p := e.printer(e.cmd)
	if p.json {
		held := e.of(key).Limit.Definition()
		return p.object(keyJSONOf(inspect.Key{Status: *now, Overridden: held != e.limit.Definition()}))
	}
	paused := ""
	if !now.PausedUntil.IsZero() {
		paused = ", paused until " + inspect.Instant(now.PausedUntil)
	}
	p.say("%s %s: %s of %s left%s", what, p.key(key), visible.Amount(now.Value), visible.Amount(now.Capacity), paused)
	return nil
}

// describe names keys of a limit for a question.
func (e *edit) describe() string {
	name := visible.Text(ratelimit.NameOf(e.limit))
	if len(e.keys) == 1 {
		return fmt.Sprintf("key %s of %s", visible.Short(e.keys[0], keyWidth), name)
	}
	return fmt.Sprintf("%d keys of %s", len(e.keys), name)
}

// confirmedFor is confirmed for a verb that changes keys: of a single one it says how many tokens it
// has.
func (e *edit) confirmedFor(verb string) (bool, error) {
	what := verb + " " + e.describe()
	if len(e.keys) == 1 {
		now, err := e.desk.Store.Check(e.cmd.Context(), e.of(e.keys[0]))
		if err != nil {
			return false, err
		}
		what += fmt.Sprintf(", which has %s of %s left", visible.Amount(now.Value), visible.Amount(now.Capacity))
	}
	return e.confirmed(e.cmd, what)
}

// fromInput ends the help of a command that changes keys.
const fromInput = ` In place of keys, - reads them from standard input, one a line as ls prints
them; with --yes, since nobody can answer then.`

// onKeys makes a command that changes keys of a limit. The edit is read from the last argument, or, if
// the keys are the last, from "".
func (o *options) onKeys(c *cobra.Command, last bool, read func(argument string) (keyEdit, error)) *cobra.Command {
	c.GroupID, c.Long, c.Args = operating, c.Long+fromInput, cobra.MinimumNArgs(2)
	if last {
		c.Args = cobra.MinimumNArgs(3)
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		keys, argument := args[1:], ""
		if last {
			keys, argument = args[1:len(args)-1], args[len(args)-1]
		}
		by, err := read(argument)
		if err != nil {
			return err
		}
		return o.edit(cmd, args[0], keys, by.count, func(e *edit) error {
			if ok, err := e.confirmedFor(by.verb); !ok {
				return err
			}
			return e.each(by.done, func(some []string) (int, error) { return by.make(e, some) })
		})
	}
	return o.losing(o.onLimits(c))
}

func resetCommand(o *options) *cobra.Command {
	return o.onKeys(&cobra.Command{
		Use:     "reset LIMIT KEY...",
		Short:   "Forget what keys have used, so that they are full",
		Long:    "Forget what keys of a limit have used: they are full again, and their debt and pause are gone.",
		Example: "  ratelimit reset failed_logins alice --yes\n  ratelimit reset failed_logins - --yes",
	}, false, func(string) (keyEdit, error) {
		return keyEdit{"reset", "reset", 0, func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error {
			return s.Reset(ctx, r.Limit, r.Key)
		}}, nil
	})
}

func creditCommand(o *options) *cobra.Command {
	return o.onKeys(&cobra.Command{
		Use:     "credit LIMIT KEY... COUNT",
		Short:   "Give tokens back to keys",
		Long:    "Give tokens back to each of the keys of a limit, no more than fit below its capacity.",
		Example: `  ratelimit credit llm_tokens 'org 7' 5000 --yes`,
	}, true, func(argument string) (keyEdit, error) {
		count, err := countOf(argument)
		return keyEdit{"give " + visible.Amount(count) + " to", "credited", count, func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error {
			_, err := s.Credit(ctx, r)
			return err
		}}, err
	})
}

func pauseCommand(o *options) *cobra.Command {
	return o.onKeys(&cobra.Command{
		Use:   "pause LIMIT KEY... DURATION",
		Short: "Let nothing be allowed for some time",
		Long: `Let nothing be allowed to keys of a limit, and nothing come in, for a duration such as 30s
or 2h. What is there is gone. The later of two pauses holds. The key of a limit that is not
divided by keys is ''.`,
		Example: `  ratelimit pause call_partner '' 30s --yes`,
	}, true, func(argument string) (keyEdit, error) {
		lasts, err := time.ParseDuration(argument)
		if err != nil {
			err = bad("%w: want a duration such as 30s", err)
		}
		return keyEdit{fmt.Sprintf("pause for %s", lasts), "paused", 0, func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error {
			_, err := s.Pause(ctx, r.Limit, r.Key, lasts)
			return err
		}}, err
	})
}

func resumeCommand(o *options) *cobra.Command {
	return o.onKeys(&cobra.Command{
		Use:     "resume LIMIT KEY...",
		Short:   "End a pause before its time",
		Long:    "End the pauses of keys of a limit before their time.",
		Example: `  ratelimit resume call_partner '' --yes`,
	}, false, func(string) (keyEdit, error) {
		return keyEdit{"end the pause of", "resumed", 0, func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error {
			return s.Resume(ctx, r.Limit, r.Key)
		}}, nil
	})
}

func pruneCommand(o *options) *cobra.Command {
	var history time.Duration
	c := &cobra.Command{
		Use:   "prune",
		Short: "Delete rows that mean the same as no row",
		Long: `Delete the rows that are full, have been for a minute and are not paused, by every definition
and override that is known of their limit. Nothing is lost. Rows of limits that are not
defined stay: see forget. It may run beside any traffic. With --history-age it deletes old
changes of the catalog as well, and asks.

When definitions are from a file, it must have all plans of a limit, as overrides.`,
		Example: `  ratelimit prune
  ratelimit prune --history-age 2160h --yes`,
		GroupID: operating,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if history < 0 {
				return bad("--history-age %s: must not be negative", history)
			}
			return o.onDesk(cmd, func(d *inspect.Inspector) error {
				if cmd.Flags().Changed("history-age") { // 0s is all changes but the newest
					return o.prune(cmd, d, &history)
				}
				return o.prune(cmd, d, nil)
			})
		},
	}
	c.Flags().DurationVar(&history, "history-age", 0, "delete changes of the catalog that are older, too, but not the newest one")
	return o.losing(o.onLimits(c))
}

// prune prunes rows, and changes of the catalog that are older than an age if it is not nil.
func (o *options) prune(cmd *cobra.Command, d *inspect.Inspector, history *time.Duration) error {
	if history != nil || o.dryRun { // without the history, nothing is lost
		what, err := wouldPrune(cmd.Context(), d, history)
		if err != nil {
			return err
		}
		if ok, err := o.confirmed(cmd, what); !ok {
			return err
		}
	}
	deleted, err := d.Catalog.Prune(cmd.Context(), d.Store, d.Store.Permits())
	if err != nil {
		return fmt.Errorf("after %s: %w", plural(int(deleted), "row"), err)
	}
	var changes int64
	if history != nil {
		if changes, err = d.Catalog.PruneHistory(cmd.Context(), *history); err != nil {
			return err
		}
	}
	text := "deleted " + plural(int(deleted), "row")
	if history != nil {
		text += fmt.Sprintf("\ndeleted %s of the history", plural(int(changes), "change"))
	}
	return o.printer(cmd).tell(map[string]int64{"rows": deleted, "changes": changes}, "%s", text)
}

// A counting counts what a store would prune.
type counting struct{ store *pgstore.Store }

func (c counting) PruneOverridden(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (int64, error) {
	return c.store.Prunable(ctx, overrides, limits...)
}

func (c counting) Prune(ctx context.Context, limits ...ratelimit.InFlight) (int64, error) {
	return c.store.Permits().Prunable(ctx, limits...)
}

// wouldPrune says what would be pruned.
func wouldPrune(ctx context.Context, d *inspect.Inspector, history *time.Duration) (string, error) {
	rows, err := d.Catalog.Prune(ctx, counting{d.Store}, counting{d.Store})
	what := fmt.Sprintf("delete %s that %s the same as no row", plural(int(rows), "row"), when(rows == 1, "means")+when(rows != 1, "mean"))
	if history != nil {
		what += fmt.Sprintf(", and changes of the catalog that are older than %s", *history)
	}
	return what, err
}

func changeCommand(o *options) *cobra.Command {
	var from, to map[string]string
	var all bool
	c := &cobra.Command{
		Use:   "change LIMIT [KEY...] --to FIELD=VALUE,...",
		Short: "Change keys to another definition, with what they used kept",
		Long: `Change what keys of a limit hold to what it is by another definition, with what they have used
kept: an added capacity is there at once, and a smaller one is less what was used. The definition
itself stays as it is: change that in the program, or in the catalog. Name the fields in which
the new one differs by --to, or if the definition is the new one already, those of the old one by
--from, in the words of its JSON. A capacity that is the rate follows it.

Processes that still have the old definition cut what a raise adds; with other shards they and
the others exceed the limit by up to its rate: pause the keys for as long as a roll-out takes.`,
		Example: `  ratelimit change api acme --to rate=200 --yes
  ratelimit change api --all-keys --to shards=8 --yes
  ratelimit change api acme --from rate=100,capacity=400 --yes`,
		GroupID: operating,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case all == (len(args) > 1):
				return bad("name keys, or say --all-keys")
			case len(from)+len(to) == 0:
				return bad("say in what the new definition differs by --to, or the old one by --from")
			}
			return o.edit(cmd, args[0], args[1:], 0, func(e *edit) error { return e.change(from, to, all) })
		},
	}
	c.Flags().StringToStringVar(&from, "from", nil, "fields of the definition that the keys have had, such as rate=100,capacity=400")
	c.Flags().StringToStringVar(&to, "to", nil, "fields of the definition that they are to have, such as shards=8")
	c.Flags().BoolVar(&all, "all-keys", false, "all keys that have rows")
	return o.losing(o.onLimits(c))
}

func (e *edit) change(from, to map[string]string, all bool) error {
	was, err := with(e.limit, from) // before the first key is changed
	if err != nil {
		return err
	}
	is, err := with(e.limit, to)
	if err != nil {
		return err
	}
	e.shards = max(was.Definition().Shards, is.Definition().Shards)
	if all {
		for key, err := range e.desk.Keys(e.cmd.Context(), was, ratelimit.Page{}) {
			if err != nil {
				return err
			}
			e.keys = append(e.keys, key.Request.Key)
		}
	}
	what := "change " + e.describe() + when(len(from) > 0, " from "+fields(from)) + when(len(to) > 0, " to "+fields(to))
	if ok, err := e.confirmed(e.cmd, what); !ok {
		return err
	}
	p := e.printer(e.cmd)
	slices.Sort(e.keys) // the order in which rows are locked
	err = e.each("changed", func(some []string) (int, error) {
		before, after, err := e.changeKeys(from, to, some)
		for i := range after {
			if !all {
				p.say("changed %s: %s of %s left → %s of %s left", p.key(some[i]), visible.Amount(before[i].Value), visible.Amount(before[i].Capacity), visible.Amount(after[i].Value), visible.Amount(after[i].Capacity))
			}
		}
		return len(before), err
	})
	switch {
	case err != nil:
		return err
	case p.json:
		return p.object(map[string]int{"keys": len(e.keys)})
	case all:
		p.say("changed %s", plural(len(e.keys), "key"))
	}
	return nil
}

// changeKeys changes keys in one transaction, and returns their statuses before and after it. With an error
// and statuses before it, the keys are changed.
func (e *edit) changeKeys(from, to map[string]string, keys []string) (before, after []ratelimit.Status, err error) {
	ctx := e.cmd.Context()
	changes := make([]ratelimit.Replacement, len(keys))
	asked, rows := make([]ratelimit.Request, len(keys)), make([]ratelimit.Request, len(keys)) // rows may be locked
	for i, key := range keys {
		r := ratelimit.Replacement{Key: key}
		if r.From, err = with(e.of(key).Limit, from); err == nil {
			r.To, err = with(e.of(key).Limit, to)
		}
		if err != nil {
			return nil, nil, err
		}
		changes[i], asked[i] = r, ratelimit.Request{Limit: r.To, Key: key}
		if rows[i] = asked[i]; r.From.Definition().Shards > r.To.Definition().Shards {
			rows[i].Limit = r.From
		}
	}
	err = e.desk.Store.ReplaceFunc(ctx, rows, func(ctx context.Context, tx pgx.Tx) (err error) {
		before, err = e.desk.Store.ReplaceTx(ctx, tx, changes...)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	after, err = e.desk.Store.CheckEach(ctx, asked...)
	return before, after, err
}

// fields prints fields and their values in order.
func fields(of map[string]string) string {
	texts := make([]string, 0, len(of))
	for name, value := range of {
		texts = append(texts, name+"="+value)
	}
	slices.Sort(texts)
	return visible.Text(strings.Join(texts, ","))
}

// replaced are the fields for which others stand.
var replaced = map[string][]string{"period": {"every", "zone", "anchor", "time"}, "every": {"period", "start"}}

// with returns a limit with other values of some fields, as the JSON of its definition has them.
func with(limit ratelimit.Limit, fields map[string]string) (ratelimit.Limit, error) {
	if len(fields) == 0 {
		return limit, nil
	}
	d := limit.Definition()
	text, err := json.Marshal(d)
	var all map[string]any
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		return nil, err
	}
	if fields["rate"] != "" && d.Capacity == d.Rate {
		delete(all, "capacity")
	}
	for name, value := range fields {
		for _, other := range replaced[name] {
			delete(all, other)
		}
		all[name] = value
		if n, err := strconv.ParseFloat(value, 64); err == nil && !math.IsNaN(n) && !math.IsInf(n, 0) {
			all[name] = n
		}
	}
	if text, err = json.Marshal(all); err == nil {
		err = d.UnmarshalJSON(text)
	}
	return d.Limit(), err
}

func forgetCommand(o *options) *cobra.Command {
	var fromCatalog bool
	c := &cobra.Command{
		Use:   "forget LIMIT",
		Short: "Delete all rows of a limit that has left the program",
		Long: `Delete all rows of a limit's name, whatever is in them, and with --catalog its definition and
its overrides as well. It is for a limit that has left the program: for one that is in use
it is a reset of all its keys.`,
		Example: `  ratelimit forget old_limit --dry-run`,
		GroupID: operating,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if fromCatalog && o.definitions != "" {
				return bad("--catalog is for the catalog in the database, and --definitions names a file")
			}
			o.sayWho(cmd)
			return o.onDesk(cmd, func(d *inspect.Inspector) error { return o.forget(cmd, d, args[0], fromCatalog) })
		},
	}
	c.Flags().BoolVar(&fromCatalog, "catalog", false, "forget its definition and its overrides, too")
	return o.losing(o.audited(o.onLimits(c)))
}

// stillUsed says of a name that it is known to be in use.
func stillUsed(d *inspect.Inspector, name string) string {
	if of, ok := d.GateOf(name); ok {
		return ", which bounds the starts of jobs by " + visible.Text(of)
	}
	if d.Known(name) == nil {
		return ", which a program has published"
	}
	return ""
}

func (o *options) forget(cmd *cobra.Command, d *inspect.Inspector, name string, fromCatalog bool) error {
	count, err := d.CountRows(cmd.Context(), name)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("delete %s of %s%s", plural(count, "row"), visible.Text(name), stillUsed(d, name))
	if fromCatalog {
		what += fmt.Sprintf(", its definition and %s", plural(len(d.Catalog.Overrides(name)), "override"))
	}
	if ok, err := o.confirmed(cmd, what); !ok {
		return err
	}
	rows, err := d.Store.Forget(cmd.Context(), name)
	if err != nil {
		return err
	}
	var definitions int64
	if fromCatalog {
		if definitions, err = d.Catalog.Forget(cmd.Context(), name); err != nil {
			return err
		}
	}
	text := "deleted " + plural(int(rows), "row")
	if fromCatalog {
		text += fmt.Sprintf("\ndeleted %s of the catalog", plural(int(definitions), "row"))
	}
	return o.printer(cmd).tell(map[string]int64{"rows": rows, "definitions": definitions}, "%s", text)
}

func eraseCommand(o *options) *cobra.Command {
	return o.losing(o.onDatabase(&cobra.Command{
		Use:   "erase KEY...",
		Short: "Delete all that is known of keys, in all limits",
		Long: `Delete keys from all tables: their rows in all limits, their overrides, the history of these, and
their refusals. It is for who must forget a person, once no program calls with the key any more. Of
what is made of several parts or of a hash, name each key: see "ratelimit key".` + fromInput,
		Example: `  ratelimit erase ann@example.com --dry-run`,
		GroupID: operating,
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			keys, err := o.keysOf(cmd, args)
			if err != nil {
				return err
			}
			return o.onPool(cmd, func(pool *pgxpool.Pool) error {
				return intx.Do(cmd.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error { return o.erase(cmd, tx, keys) })
			})
		},
	}))
}

func (o *options) erase(cmd *cobra.Command, tx pgx.Tx, keys []string) error {
	of, err := erase.Count(cmd.Context(), tx, o.schema, keys...)
	if err != nil {
		return err
	}
	what := plural(len(keys), "key")
	if len(keys) == 1 {
		what = "key " + visible.Short(keys[0], keyWidth)
	}
	if ok, err := o.confirmed(cmd, fmt.Sprintf("erase %s: %s", what, of)); !ok {
		return err
	}
	erased, err := erase.Keys(cmd.Context(), tx, o.schema, keys...)
	if err != nil {
		return err
	}
	return o.printer(cmd).tell(erased, "erased %s", erased)
}
