package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

func showCommand(o *options) *cobra.Command {
	var reserve bool
	c := &cobra.Command{
		Use:   "show LIMIT KEY [COUNT]",
		Short: "Say why a key is refused and until when, and what a count would get",
		Long: `Say what a call for COUNT tokens (1 if left out) would get now, why, and until when it
would be refused; and what is known of the key: the definition that holds for it, who
changed it, its rows, and a transaction that has them locked. Nothing is taken. Of a limit of how
many at once COUNT is of permits, and it says which are held.`,
		Example: `  ratelimit show send_message alice
  ratelimit show llm_tokens 'org 7' 40000 --reserve`,
		GroupID: seeing,
		Args:    cobra.RangeArgs(2, 3),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := oneKey(args[1])
			if err != nil {
				return err
			}
			count := 1.0
			if len(args) == 3 {
				if count, err = countOf(args[2]); err != nil {
					return err
				}
			}
			return o.onDesk(cmd, func(d *inspect.Inspector) error {
				return show(cmd.Context(), o.printer(cmd), d, args[0], key, count, reserve)
			})
		},
	}
	c.Flags().BoolVar(&reserve, "reserve", false, "what a reservation would get, which may go into debt")
	return o.onLimits(c)
}

// show shows a key of any limit.
func show(ctx context.Context, p *printer, d *inspect.Inspector, name, key string, count float64, reserve bool) error {
	if _, err := d.InFlight(name); err == nil {
		n := int(count)
		if float64(n) != count || reserve {
			return bad("permits are whole, and are not reserved")
		}
		return showPermits(ctx, p, d, name, key, n)
	}
	if of, ok := d.GateOf(name); ok {
		return showGate(ctx, p, d, name, of, key)
	}
	if _, err := limitOf(d, name); err != nil {
		return err
	}
	story, err := d.Story(ctx, name, key, count, reserve)
	if err != nil {
		return err
	}
	if p.json {
		return p.object(storyJSONOf(story))
	}
	return p.story(story)
}

// countOf reads a count.
func countOf(argument string) (float64, error) {
	count, err := strconv.ParseFloat(argument, 64)
	if err != nil || math.IsNaN(count) || math.IsInf(count, 0) {
		return 0, bad("count %q: must be a number", argument)
	}
	return count, nil
}

// asBad makes a badInput of an error of what the command was given.
func asBad(err error) error {
	if errors.Is(err, ratelimit.ErrInvalid) || errors.Is(err, ratelimit.ErrExceedsCapacity) || errors.Is(err, catalog.ErrUnknown) {
		return badInput{err}
	}
	return err
}

// storyJSON is a story.
type storyJSON struct {
	keyJSON
	Count      float64              `json:"count"`
	Reserve    bool                 `json:"reserve"`
	OK         bool                 `json:"ok"`
	Never      bool                 `json:"never"`
	Why        string               `json:"why"`
	RetryAt    string               `json:"retryAt,omitempty"`
	RetryAfter string               `json:"retryAfter,omitempty"`
	Definition ratelimit.Definition `json:"definition"`
	Published  ratelimit.Definition `json:"published"`
	Override   *overrideJSON        `json:"override,omitempty"`
	ForAll     *overrideJSON        `json:"overrideForAll,omitempty"`
	Rows       []rowJSON            `json:"rows"`
	Unlike     string               `json:"unlike,omitempty"` // how the key differs from the limit's
	Changes    []changeJSON         `json:"changes"`
}

type rowJSON struct {
	Shard    int     `json:"shard"`
	Value    float64 `json:"value"`
	TS       string  `json:"ts"`
	Paused   string  `json:"paused,omitempty"`
	Ahead    float64 `json:"ahead,omitempty"`
	LockedBy int     `json:"lockedBy,omitempty"` // the number of the server's process
	State    string  `json:"lockedByState,omitempty"`
	Since    string  `json:"lockedSince,omitempty"`
}

type changeJSON struct {
	Version int64           `json:"version"`
	At      string          `json:"at"`
	Role    string          `json:"role"`
	Who     string          `json:"who,omitempty"`
	Limit   string          `json:"limit"`
	Key     *string         `json:"key"` // null for all keys
	Was     json.RawMessage `json:"was,omitempty"`
	Became  json.RawMessage `json:"became,omitempty"`
}

func changeJSONOf(c catalog.Change) changeJSON {
	out := changeJSON{Version: c.Version, At: instant(c.At), Role: c.Role, Who: c.Who, Limit: c.Name, Was: c.Was, Became: c.Became}
	if c.Key != catalog.AllKeys {
		out.Key = &c.Key
	}
	return out
}

func changesJSON(changes []catalog.Change) []changeJSON {
	out := []changeJSON{}
	for _, c := range changes {
		out = append(out, changeJSONOf(c))
	}
	return out
}

// overrideJSONOf returns nil for no override.
func overrideJSONOf(e *catalog.Entry) *overrideJSON {
	if e == nil {
		return nil
	}
	return new(overrideOf(e))
}

func storyJSONOf(s *inspect.Story) storyJSON {
	out := storyJSON{
		keyJSON: keyJSONOf(inspect.Key{Status: s.Now, Overridden: s.Holds != s.Published}),
		Count:   s.Answer.Request.Count, Reserve: s.Reserve, OK: s.Answer.OK, Never: s.Never != nil, Why: s.Why(),
		Definition: s.Holds, Published: s.Published, Override: overrideJSONOf(s.ForKey), ForAll: overrideJSONOf(s.ForAll),
		Rows: rowsJSON(s.Rows), Unlike: unlikeOf(s.Unlike), Changes: changesJSON(s.Changes),
	}
	if s.Never == nil && s.Answer.RetryAfter > 0 {
		out.RetryAt, out.RetryAfter = instant(s.Answer.RetryAt), s.Answer.RetryAfter.String()
	}
	return out
}

func rowsJSON(rows []inspect.Row) []rowJSON {
	out := []rowJSON{}
	for _, r := range rows {
		row := rowJSON{Shard: r.Shard, Value: r.Value, TS: instant(r.TS), Paused: instant(r.Paused), Ahead: r.Ahead}
		if h := r.Holder; h != nil {
			row.LockedBy, row.State, row.Since = h.PID, h.State, instant(h.Since)
		}
		out = append(out, row)
	}
	return out
}

// unlikeOf returns how a key differs from the limit's; "" if it does not.
func unlikeOf(u *inspect.Unlike) string {
	if u == nil {
		return ""
	}
	return u.String()
}

// facts writes what is known of a key, a line each.
type facts struct {
	*tabwriter.Writer
	p *printer
}

func (p *printer) facts() facts { return facts{tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0), p} }

func (f facts) line(name, format string, args ...any) {
	fmt.Fprintf(f, "%s\t%s\n", name, visible.Lines(fmt.Sprintf(format, args...)))
}

func (f facts) answer(ok bool, why string) {
	colour := green
	if !ok {
		colour = red
	}
	fmt.Fprintf(f, "answer\t%s\n", f.p.paint(colour, visible.Lines(why)))
}

func (f facts) unlike(u *inspect.Unlike) {
	if u != nil {
		fmt.Fprintf(f, "unlike\t%s\n", f.p.paint(yellow, visible.Lines(u.String())))
	}
}

func (f facts) overrides(own, all *catalog.Entry) {
	if own != nil {
		f.line("override", "%s", inspect.Override(&own.Override))
	}
	if all != nil {
		f.line("for all keys", "%s", inspect.Override(&all.Override))
	}
}

func (f facts) rows(rows []inspect.Row) {
	for _, r := range rows {
		f.line("row", "shard %d: %s at %s%s", r.Shard, visible.Amount(r.Value), inspect.Instant(r.TS), aheadOf(r))
		if r.Holder != nil {
			f.line("locked by", "%s", r.Holder)
		}
	}
}

func (f facts) changes(changes []catalog.Change) {
	for _, c := range changes {
		f.line("changed", "%s", describeChange(c))
	}
}

// permitsJSON is what is known of a key of a limit of how many at once.
type permitsJSON struct {
	Key       string        `json:"key"`
	OK        bool          `json:"ok"`
	Why       string        `json:"why"`
	Published inFlightJSON  `json:"published"`
	Holds     inFlightJSON  `json:"definition"`
	Override  *overrideJSON `json:"override,omitempty"`
	ForAll    *overrideJSON `json:"overrideForAll,omitempty"`
	Held      []permitJSON  `json:"held"`
	Unlike    string        `json:"unlike,omitempty"`
	Changes   []changeJSON  `json:"changes"`
}

// showPermits shows a key of a limit of how many at once.
func showPermits(ctx context.Context, p *printer, d *inspect.Inspector, name, key string, n int) error {
	s, err := d.PermitStory(ctx, name, key, n)
	if err != nil {
		return err
	}
	if p.json {
		out := permitsJSON{
			Key: key, OK: s.OK(), Why: s.Why(), Published: inFlightJSONOf(s.Published), Holds: inFlightJSONOf(s.Holds),
			Override: overrideJSONOf(s.ForKey), ForAll: overrideJSONOf(s.ForAll), Held: []permitJSON{}, Unlike: unlikeOf(s.Unlike), Changes: changesJSON(s.Changes),
		}
		for _, h := range s.Held {
			out.Held = append(out.Held, permitJSON{name, key, h.Number, h.Fence, instant(h.Until)})
		}
		return p.object(out)
	}
	f := p.facts()
	f.line("limit", "%s", s.Published)
	f.line("key", "%s", p.key(key))
	f.answer(s.OK(), s.Why())
	f.unlike(s.Unlike)
	if s.Holds != s.Published {
		f.line("holds", "%s", s.Holds)
	}
	f.overrides(s.ForKey, s.ForAll)
	for _, h := range s.Held {
		f.line("held", "permit %d, fence %d, until %s", h.Number, h.Fence, inspect.Instant(h.Until))
	}
	f.changes(s.Changes)
	return f.Flush()
}

// gateJSON is what is known of a key of a gate.
type gateJSON struct {
	Gate string    `json:"gate"`
	Of   string    `json:"of"`
	Key  string    `json:"key"`
	Rows []rowJSON `json:"rows"`
}

// showGate shows a key of a gate of starts of jobs.
func showGate(ctx context.Context, p *printer, d *inspect.Inspector, name, of, key string) error {
	rows, err := d.Rows(ctx, name, key)
	if err != nil {
		return err
	}
	if p.json {
		return p.object(gateJSON{name, of, key, rowsJSON(rows)})
	}
	f := p.facts()
	f.line("limit", "%s bounds the starts of River's jobs by %s (HardStart): its definition is the program's own", visible.Text(name), visible.Text(of))
	f.line("key", "%s", p.key(key))
	f.rows(rows)
	return f.Flush()
}

// story writes a story for people.
func (p *printer) story(s *inspect.Story) error {
	f := p.facts()
	line := f.line
	line("limit", "%s", s.Published)
	line("key", "%s", p.key(s.Now.Request.Key))
	f.answer(s.Never == nil && s.Answer.OK, s.Why())
	f.unlike(s.Unlike)
	line("left", "%s of %s, full at %s", visible.Amount(s.Now.Value), visible.Amount(s.Now.Capacity), inspect.Instant(s.Now.FullAt()))
	if !s.Now.PausedUntil.IsZero() {
		line("paused", "until %s", inspect.Instant(s.Now.PausedUntil))
	}
	if s.Holds != s.Published {
		line("holds", "%s", s.Holds)
	}
	f.overrides(s.ForKey, s.ForAll)
	if len(s.Rows) == 0 {
		line("row", "none, so it is full")
	}
	f.rows(s.Rows)
	f.changes(s.Changes)
	return f.Flush()
}

func aheadOf(r inspect.Row) string {
	if r.Ahead == 0 {
		return ""
	}
	return fmt.Sprintf(", %s more in memories of processes", visible.Amount(r.Ahead))
}

// describeChange is a change of the catalog in a line.
func describeChange(c catalog.Change) string {
	what := "changed from " + string(c.Was) + " to " + string(c.Became)
	switch {
	case c.Was == nil && c.Became == nil:
		what = "all was forgotten"
	case c.Was == nil:
		what = "set to " + string(c.Became)
	case c.Became == nil:
		what = "removed, was " + string(c.Was)
	}
	return fmt.Sprintf("%s by %s: %s", inspect.Instant(c.At), inspect.By(&c), what)
}
