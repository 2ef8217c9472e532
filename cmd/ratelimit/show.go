package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	count, err := inspect.Number(argument)
	if err != nil {
		err = bad("count %q: %w", argument, err)
	}
	return count, err
}

// asBad makes a badInput of an error of what the command was given.
func asBad(err error) error {
	if errors.Is(err, ratelimit.ErrInvalid) || errors.Is(err, ratelimit.ErrExceedsCapacity) || errors.Is(err, catalog.ErrUnknown) {
		return badInput{err}
	}
	return err
}

// knownJSON is what is known of a key of any limit.
type knownJSON struct {
	Override *overrideJSON `json:"override,omitempty"`
	ForAll   *overrideJSON `json:"overrideForAll,omitempty"`
	Unlike   string        `json:"unlike,omitempty"` // how the key differs from the limit's
	Changes  []changeJSON  `json:"changes"`
}

func knownJSONOf(k *inspect.Known) knownJSON {
	out := knownJSON{Override: overrideOf(k.ForKey), ForAll: overrideOf(k.ForAll), Changes: []changeJSON{}}
	if k.Unlike != nil {
		out.Unlike = k.Unlike.String()
	}
	for _, c := range k.Changes {
		out.Changes = append(out.Changes, changeJSONOf(c))
	}
	return out
}

// storyJSON is a story.
type storyJSON struct {
	keyJSON
	knownJSON
	Count      float64              `json:"count"`
	Reserve    bool                 `json:"reserve"`
	OK         bool                 `json:"ok"`
	Never      bool                 `json:"never"`
	Why        string               `json:"why"`
	RetryAt    string               `json:"retryAt,omitempty"`
	RetryAfter string               `json:"retryAfter,omitempty"`
	Definition ratelimit.Definition `json:"definition"`
	Published  ratelimit.Definition `json:"published"`
	Rows       []inspect.Row        `json:"rows"`
}

func storyJSONOf(s *inspect.Story) storyJSON {
	out := storyJSON{
		keyJSON: keyJSONOf(inspect.Key{Status: s.Now, Overridden: s.Holds != s.Published}), knownJSON: knownJSONOf(&s.Known),
		Count: s.Answer.Request.Count, Reserve: s.Reserve, OK: s.Answer.OK, Never: s.Never != nil, Why: s.Why(),
		Definition: s.Holds, Published: s.Published, Rows: s.Rows,
	}
	if s.Never == nil && s.Answer.RetryAfter > 0 {
		out.RetryAt, out.RetryAfter = instant(s.Answer.RetryAt), s.Answer.RetryAfter.String()
	}
	return out
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

// facts writes what is known of a key, a line each.
type facts struct {
	*tabwriter.Writer
	p *printer
}

func (p *printer) facts() facts { return facts{tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0), p} }

func (f facts) line(name, format string, args ...any) {
	f.painted("", name, fmt.Sprintf(format, args...))
}

func (f facts) painted(colour, name, text string) {
	fmt.Fprintf(f, "%s\t%s\n", name, f.p.paint(colour, visible.Lines(text)))
}

// answer writes what a caller would get.
func (f facts) answer(limit fmt.Stringer, key string, ok bool, why string, unlike *inspect.Unlike) {
	colour := green
	if !ok {
		colour = red
	}
	f.line("limit", "%s", limit)
	f.line("key", "%s", f.p.key(key))
	f.painted(colour, "answer", why)
	if unlike != nil {
		f.painted(yellow, "unlike", unlike.String())
	}
}

// holds writes the definition of the key, if another was published, and the overrides.
func (f facts) holds(holds, published fmt.Stringer, known *inspect.Known) {
	if holds != published {
		f.line("holds", "%s", holds)
	}
	if known.ForKey != nil {
		f.line("override", "%s", inspect.Override(&known.ForKey.Override))
	}
	if known.ForAll != nil {
		f.line("for all keys", "%s", inspect.Override(&known.ForAll.Override))
	}
}

func (f facts) rows(rows []inspect.Row) {
	for _, r := range rows {
		ahead := when(r.Ahead != 0, fmt.Sprintf(", %s more in memories of processes", visible.Amount(r.Ahead)))
		f.line("row", "shard %d: %s at %s%s", r.Shard, visible.Amount(r.Value), inspect.Instant(r.TS), ahead)
		if r.Holder != nil {
			f.line("locked by", "%s", r.Text())
		}
	}
}

// end writes the changes of the catalog, and then all lines.
func (f facts) end(changes []catalog.Change) error {
	for _, c := range changes {
		what := "changed from " + string(c.Was) + " to " + string(c.Became)
		switch {
		case c.Was == nil && c.Became == nil:
			what = "all was forgotten"
		case c.Was == nil:
			what = "set to " + string(c.Became)
		case c.Became == nil:
			what = "removed, was " + string(c.Was)
		}
		f.line("changed", "%s by %s: %s", inspect.Instant(c.At), inspect.By(&c), what)
	}
	return f.Flush()
}

// permitsJSON is what is known of a key of a limit of how many at once.
type permitsJSON struct {
	knownJSON
	Key       string       `json:"key"`
	OK        bool         `json:"ok"`
	Why       string       `json:"why"`
	Published inFlightJSON `json:"published"`
	Holds     inFlightJSON `json:"definition"`
	Held      []permitJSON `json:"held"`
}

// showPermits shows a key of a limit of how many at once.
func showPermits(ctx context.Context, p *printer, d *inspect.Inspector, name, key string, n int) error {
	s, err := d.PermitStory(ctx, name, key, n)
	if err != nil {
		return err
	}
	if p.json {
		out := permitsJSON{knownJSONOf(&s.Known), key, s.OK(), s.Why(), inFlightJSONOf(s.Published), inFlightJSONOf(s.Holds), []permitJSON{}}
		for _, h := range s.Held {
			out.Held = append(out.Held, permitJSONOf(h))
		}
		return p.object(out)
	}
	f := p.facts()
	f.answer(s.Published, key, s.OK(), s.Why(), s.Unlike)
	f.holds(s.Holds, s.Published, &s.Known)
	for _, h := range s.Held {
		f.line("held", "permit %d, fence %d, until %s", h.Number, h.Fence, inspect.Instant(h.Until))
	}
	return f.end(s.Changes)
}

// gateJSON is what is known of a key of a gate.
type gateJSON struct {
	Gate string        `json:"gate"`
	Of   string        `json:"of"`
	Key  string        `json:"key"`
	Rows []inspect.Row `json:"rows"`
}

// showGate shows a key of a gate of starts of jobs.
func showGate(ctx context.Context, p *printer, d *inspect.Inspector, name, of, key string) error {
	rows, err := d.Rows(ctx, name, key)
	if err != nil {
		return err
	}
	if p.json {
		return p.object(gateJSON{name, of, key, rows})
	}
	f := p.facts()
	f.line("limit", "%s bounds the starts of River's jobs by %s (HardStart): its definition is the program's own", visible.Text(name), visible.Text(of))
	f.line("key", "%s", p.key(key))
	f.rows(rows)
	return f.end(nil)
}

// story writes a story for people.
func (p *printer) story(s *inspect.Story) error {
	f := p.facts()
	f.answer(s.Published, s.Now.Request.Key, s.Never == nil && s.Answer.OK, s.Why(), s.Unlike)
	f.line("left", "%s of %s, full at %s", visible.Amount(s.Now.Value), visible.Amount(s.Now.Capacity), inspect.Instant(s.Now.FullAt()))
	if !s.Now.PausedUntil.IsZero() {
		f.line("paused", "until %s", inspect.Instant(s.Now.PausedUntil))
	}
	f.holds(s.Holds, s.Published, &s.Known)
	if len(s.Rows) == 0 {
		f.line("row", "none, so it is full")
	}
	f.rows(s.Rows)
	return f.end(s.Changes)
}
