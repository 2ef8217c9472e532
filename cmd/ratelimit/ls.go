package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/gate"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

func lsCommand(o *options) *cobra.Command {
	var f pageFlags
	var short bool
	c := &cobra.Command{
		Use:   "ls [LIMIT]",
		Short: "List limits, or a limit's keys with what there is of each now",
		Long: `List the limits that are defined or have rows; or the keys of one that are not full,
in the order of their bytes, with what there is of each now.

A key that is not in the list is full.`,
		Example: `  ratelimit ls
  ratelimit ls send_message --prefix eu/ --most 20
  ratelimit ls send_message --short`,
		GroupID: seeing,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			page, err := f.page()
			if err != nil {
				return err
			}
			return o.onDesk(cmd, func(d *inspect.Inspector) error {
				if len(args) == 0 {
					return listLimits(cmd, o.printer(cmd), d)
				}
				limit, err := limitOf(d, args[0])
				if err != nil {
					return err
				}
				return listKeys(cmd, o.printer(cmd), d, limit, page, short)
			})
		},
	}
	f.addTo(c)
	c.Flags().BoolVar(&short, "short", false, "only keys that are paused or have less than one token")
	return o.listing(o.onLimits(c))
}

// pageFlags are the flags of lists of keys.
type pageFlags struct {
	prefix, after string
	most          int
}

func (f *pageFlags) addTo(c *cobra.Command) {
	c.Flags().StringVar(&f.prefix, "prefix", "", "only keys that begin so")
	c.Flags().StringVar(&f.after, "after", "", "only keys after this one: the next page")
	c.Flags().IntVarP(&f.most, "most", "n", 100, "at most so many keys; 0 for all")
}

func (f *pageFlags) page() (ratelimit.Page, error) {
	if f.most < 0 {
		return ratelimit.Page{}, bad("--most %d: must not be negative", f.most)
	}
	prefix, err := keyOf(f.prefix)
	if err != nil {
		return ratelimit.Page{}, err
	}
	after, err := keyOf(f.after)
	return ratelimit.Page{Prefix: prefix, After: after, Most: f.most}, err
}

// limitJSON is a limit in the list of limits.
type limitJSON struct {
	Name       string                `json:"name"`
	Definition *ratelimit.Definition `json:"definition,omitempty"`
	InFlight   *inFlightJSON         `json:"inFlight,omitempty"`
	Overrides  int                   `json:"overrides"`
	Rows       int                   `json:"rows"`
	More       bool                  `json:"more"` // rows than these
	Parked     int                   `json:"parked,omitempty"`
	Since      string                `json:"parkedSince,omitempty"` // the first of them
}

func listLimits(cmd *cobra.Command, p *printer, d *inspect.Inspector) error {
	limits, err := d.Limits(cmd.Context())
	if err != nil {
		return err
	}
	t := p.table("ROWS", "OVERRIDES", "LIMIT")
	for _, l := range limits {
		more := l.Rows > inspect.MostCounted
		rows := fmt.Sprint(l.Rows)
		if more {
			l.Rows = inspect.MostCounted
			rows = fmt.Sprintf("%d+", inspect.MostCounted)
		}
		described := visible.Text(l.Name) + ": no definition is known"
		var permits *inFlightJSON
		switch {
		case l.Definition != nil:
			described = visible.Lines(l.Definition.String())
		case l.InFlight != nil:
			described, permits = visible.Lines(l.InFlight.String()), new(inFlightJSONOf(*l.InFlight))
		case strings.HasSuffix(l.Name, gate.Line) && l.GateOf != "":
			described = visible.Text(l.Name) + ": places of the jobs refused by " + visible.Text(l.GateOf)
		case l.GateOf != "":
			described = visible.Text(l.Name) + ": bounds the starts of jobs by " + visible.Text(l.GateOf)
		}
		since := ""
		if l.Parked.Jobs > 0 {
			since = instant(l.Parked.Since)
			described += fmt.Sprintf("; %d jobs in line, since %s", l.Parked.Jobs, inspect.Instant(l.Parked.Since))
		}
		if err := t.row(limitJSON{l.Name, l.Definition, permits, l.Overrides, l.Rows, more, l.Parked.Jobs, since}, rows, fmt.Sprint(l.Overrides), described); err != nil {
			return err
		}
	}
	return t.end()
}

// keyJSON is the state of a key.
type keyJSON struct {
	Limit       string   `json:"limit"`
	Key         string   `json:"key"`
	Value       float64  `json:"value"`
	Remaining   int64    `json:"remaining"`
	Capacity    float64  `json:"capacity"`
	Share       float64  `json:"share"`
	PausedUntil string   `json:"pausedUntil,omitempty"`
	FullAt      string   `json:"fullAt"`
	At          string   `json:"at"`
	Overridden  bool     `json:"overridden"`
	MaxReserved *float64 `json:"maxReserved"` // null for unlimited
}

func keyJSONOf(k inspect.Key) keyJSON {
	return keyJSON{
		Limit: ratelimit.NameOf(k.Request.Limit), Key: k.Request.Key, Value: k.Value, Remaining: k.Remaining, Capacity: k.Capacity,
		Share: k.Share(), PausedUntil: instant(k.PausedUntil), FullAt: instant(k.FullAt()), At: instant(k.At), Overridden: k.Overridden,
		MaxReserved: number(k.Request.Limit.Definition().MaxReserved),
	}
}

func listKeys(cmd *cobra.Command, p *printer, d *inspect.Inspector, limit ratelimit.Limit, page ratelimit.Page, short bool) error {
	most := page.Most
	page.Most = 0 // of those that are listed
	t := p.table("LEFT", "OF", "FULL IN", "PAUSED UNTIL", "OVERRIDE", "KEY")
	listed := 0
	for key, err := range d.Keys(cmd.Context(), limit, page) {
		if err != nil {
			return err
		}
		if short && !key.Short() || key.Full() {
			continue
		}
		paused, fullIn := "", inspect.Span(key.ResetAfter)
		if !key.PausedUntil.IsZero() {
			paused = inspect.Instant(key.PausedUntil)
		}
		if p.csv {
			paused, fullIn = instant(key.PausedUntil), fmt.Sprint(key.ResetAfter.Seconds())
		}
		err := t.row(keyJSONOf(key), visible.Amount(key.Value), visible.Amount(key.Capacity), fullIn, paused, yesNo(key.Overridden), p.key(key.Request.Key))
		if err != nil {
			return err
		}
		if listed++; listed == most {
			break
		}
	}
	return t.end()
}
