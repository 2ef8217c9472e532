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
}

// edit opens the database for a verb that changes keys of a limit, and runs it.
func (o *options) edit(cmd *cobra.Command, name string, keys []string, do func(ctx context.Context, e *edit) error) error {
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
		for _, key := range e.keys { // all of them before the first is changed
			if err := e.of(key).Validate(); err != nil {
				return err
			}
		}
		o.note(cmd, d, name, e.keys...)
		return do(cmd.Context(), e)
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

// each changes keys, some at a time, and prints what became of each. change returns an error for each
// request. The keys after those of which one failed stay as they are. A signal ends it once those under
// way are done and told.
func (e *edit) each(ctx context.Context, done string, change func(requests []ratelimit.Request) []error) error {
	changed := 0
	stop, end := stoppable(ctx)
	defer end()
	for some := range slices.Chunk(e.keys, ratelimit.MaxRequests) {
		if err := stop.Err(); err != nil {
			return fmt.Errorf("%d of %d keys are %s: %w", changed, len(e.keys), done, err)
		}
		requests, states := make([]ratelimit.Request, len(some)), make([]ratelimit.Result, len(some))
		for i, key := range some {
			requests[i] = e.of(key)
		}
		errs := change(requests)
		unread := cmp.Or(together(len(some), func(i int) (err error) {
			if errs[i] == nil {
				states[i], err = e.now(ctx, some[i])
			}
			return err
		})...)
		for i, key := range some {
			if errs[i] != nil {
				continue
			}
			changed++
			if unread != nil {
				continue
			}
			if err := e.done(done, key, &states[i]); err != nil {
				return err
			}
		}
		failed := cmp.Or(errs...)
		if failed != nil && len(e.keys) > 1 {
			failed = fmt.Errorf("%d of %d keys are %s: %w", changed, len(e.keys), done, failed)
		}
		if unread != nil {
			unread = fmt.Errorf("%s is done; reading it again failed: %w", done, unread)
		}
		if err := cmp.Or(failed, unread); err != nil {
			return err
		}
	}
	return nil
}

// eachAlone is each by a verb that changes one key, of several keys at once.
func (e *edit) eachAlone(ctx context.Context, done string, change func(r ratelimit.Request) error) error {
	return e.each(ctx, done, func(requests []ratelimit.Request) []error {
		return together(len(requests), func(i int) error { return change(requests[i]) })
	})
}

// together runs do n times at once, and returns the errors.
func together(n int, do func(i int) error) []error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = do(i) })
	}
	all.Wait()
	return errs
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

// of is a request by the definition for a key.
func (e *edit) of(key string) ratelimit.Request { return e.desk.Catalog.For(e.limit, key) }

// now returns the state of a key.
func (e *edit) now(ctx context.Context, key string) (ratelimit.Result, error) {
	return e.desk.Store.Check(ctx, e.of(key).Limit.ForN(key, 0))
}

// done prints the state of a key after it was changed.
func (e *edit) done(what, key string, result *ratelimit.Result) error {
	p := e.printer(e.cmd)
	if p.json {
		held := e.of(key).Limit.Definition()
		return p.object(keyJSONOf(inspect.Key{Status: result.Status, Overridden: held != e.limit.Definition()}))
	}
	paused := ""
	if !result.PausedUntil.IsZero() {
		paused = ", paused until " + inspect.Instant(result.PausedUntil)
	}
	p.say("%s %s: %s of %s left%s", what, p.key(key), visible.Amount(result.Value), visible.Amount(result.Capacity), paused)
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
func (e *edit) confirmedFor(ctx context.Context, verb string) (bool, error) {
	what := verb + " " + e.describe()
	if len(e.keys) == 1 {
		now, err := e.now(ctx, e.keys[0])
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
func (o *options) onKeys(c *cobra.Command, last bool, read func(argument string) (func(ctx context.Context, e *edit) error, error)) *cobra.Command {
	c.GroupID, c.Long, c.Args = operating, c.Long+fromInput, cobra.MinimumNArgs(2)
	if last {
		c.Args = cobra.MinimumNArgs(3)
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		keys, argument := args[1:], ""
		if last {
			keys, argument = args[1:len(args)-1], args[len(args)-1]
		}
		do, err := read(argument)
		if err != nil {
			return err
		}
		return o.edit(cmd, args[0], keys, do)
	}
	return o.losing(o.onLimits(c))
}

// alone reads an edit without an argument, of each key by itself. It asks by a verb, and tells what is
// done.
func alone(verb, done string, change func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error) func(string) (func(context.Context, *edit) error, error) {
	return func(string) (func(context.Context, *edit) error, error) {
		return func(ctx context.Context, e *edit) error {
			if ok, err := e.confirmedFor(ctx, verb); !ok {
				return err
			}
			return e.eachAlone(ctx, done, func(r ratelimit.Request) error { return change(ctx, e.desk.Store, r) })
		}, nil
	}
}

func resetCommand(o *options) *cobra.Command {
	return o.onKeys(&cobra.Command{
		Use:     "reset LIMIT KEY...",
		Short:   "Forget what keys have used, so that they are full",
		Long:    "Forget what keys of a limit have used: they are full again, and their debt and pause are gone.",
		Example: "  ratelimit reset failed_logins alice --yes\n  ratelimit reset failed_logins - --yes",
	}, false, alone("reset", "reset", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error {
		return s.Reset(ctx, r.Limit, r.Key)
	}))
}

func creditCommand(o *options) *cobra.Command {
	return o.onKeys(&cobra.Command{
		Use:     "credit LIMIT KEY... COUNT",
		Short:   "Give tokens back to keys",
		Long:    "Give tokens back to each of the keys of a limit, no more than fit below its capacity.",
		Example: `  ratelimit credit llm_tokens 'org 7' 5000 --yes`,
	}, true, func(argument string) (func(context.Context, *edit) error, error) {
		count, err := countOf(argument)
		return func(ctx context.Context, e *edit) error {
			for _, key := range e.keys {
				if err := e.desk.Catalog.ForN(e.limit, key, count).Validate(); err != nil {
					return err
				}
			}
			if ok, err := e.confirmedFor(ctx, "give "+visible.Amount(count)+" to"); !ok {
				return err
			}
			return e.eachAlone(ctx, "credited", func(r ratelimit.Request) error {
				r.Count = count
				_, err := e.desk.Store.Credit(ctx, r)
				return err
			})
		}, err
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
	}, true, func(argument string) (func(context.Context, *edit) error, error) {
		lasts, err := time.ParseDuration(argument)
		if err != nil {
			return nil, bad("%w: want a duration such as 30s", err)
		}
		return func(ctx context.Context, e *edit) error {
			if ok, err := e.confirmedFor(ctx, fmt.Sprintf("pause for %s", lasts)); !ok {
				return err
			}
			return e.each(ctx, "paused", func(r []ratelimit.Request) []error {
				_, err := e.desk.Store.PauseEach(ctx, r, lasts)
				return slices.Repeat([]error{err}, len(r)) // all or none
			})
		}, nil
	})
}

func resumeCommand(o *options) *cobra.Command {
	return o.onKeys(&cobra.Command{
		Use:     "resume LIMIT KEY...",
		Short:   "End a pause before its time",
		Long:    "End the pauses of keys of a limit before their time.",
		Example: `  ratelimit resume call_partner '' --yes`,
	}, false, alone("end the pause of", "resumed", func(ctx context.Context, s *pgstore.Store, r ratelimit.Request) error {
		return s.Resume(ctx, r.Limit, r.Key)
	}))
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
	return o.printer(cmd).tell(struct {
		Rows    int64 `json:"rows"`
		Changes int64 `json:"changes"`
	}{deleted, changes}, "%s", text)
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
			return o.edit(cmd, args[0], args[1:], func(ctx context.Context, e *edit) error {
				return e.change(ctx, from, to, all)
			})
		},
	}
	c.Flags().StringToStringVar(&from, "from", nil, "fields of the definition that the keys have had, such as rate=100,capacity=400")
	c.Flags().StringToStringVar(&to, "to", nil, "fields of the definition that they are to have, such as shards=8")
	c.Flags().BoolVar(&all, "all-keys", false, "all keys that have rows")
	return o.losing(o.onLimits(c))
}

func (e *edit) change(ctx context.Context, from, to map[string]string, all bool) error {
	for _, fields := range []map[string]string{from, to} { // before the first key is changed
		if _, err := with(e.limit, fields); err != nil {
			return err
		}
	}
	if all {
		was, _ := with(e.limit, from)
		for key, err := range e.desk.Keys(ctx, was, ratelimit.Page{}) {
			if err != nil {
				return err
			}
			e.keys = append(e.keys, key.Request.Key)
		}
	}
	what := "change " + e.describe()
	for _, side := range []struct {
		word   string
		fields map[string]string
	}{{" from ", from}, {" to ", to}} {
		if len(side.fields) > 0 {
			what += side.word + fields(side.fields)
		}
	}
	if ok, err := e.confirmed(e.cmd, what); !ok {
		return err
	}
	stop, end := stoppable(ctx)
	defer end()
	p, changed := e.printer(e.cmd), 0
	slices.Sort(e.keys) // the order in which rows are locked
	for some := range slices.Chunk(e.keys, ratelimit.MaxRequests) {
		if err := stop.Err(); err != nil {
			return fmt.Errorf("after %s: %w", plural(changed, "key"), err)
		}
		before, after, err := e.changeKeys(ctx, from, to, some)
		if before != nil {
			changed += len(some)
		}
		if err != nil {
			return fmt.Errorf("after %s: %w", plural(changed, "key"), err)
		}
		for i, key := range some {
			if !all && !p.json {
				p.say("changed %s: %s of %s left → %s of %s left", p.key(key), visible.Amount(before[i].Value), visible.Amount(before[i].Capacity), visible.Amount(after[i].Value), visible.Amount(after[i].Capacity))
			}
		}
	}
	if p.json {
		return p.object(struct {
			Keys int `json:"keys"`
		}{len(e.keys)})
	}
	if all {
		p.say("changed %s", plural(len(e.keys), "key"))
	}
	return nil
}

// changeKeys changes keys in one transaction, and returns their statuses before and after it. With an error
// and statuses before it, the keys are changed.
func (e *edit) changeKeys(ctx context.Context, from, to map[string]string, keys []string) (before, after []ratelimit.Status, err error) {
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
	return o.printer(cmd).tell(struct {
		Rows        int64 `json:"rows"`
		Definitions int64 `json:"definitions"`
	}{rows, definitions}, "%s", text)
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
