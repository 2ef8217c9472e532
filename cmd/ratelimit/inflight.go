package main

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

func inflightCommand(o *options) *cobra.Command {
	c := &cobra.Command{
		Use:   "inflight",
		Short: "See and free the permits of limits of how many at once",
		Long: `See and free the permits of limits of how many at once. Any name can be given that is not known
to be of another limit: the program need not have published it.`,
		GroupID: operating,
		Args:    cobra.NoArgs,
		RunE:    func(*cobra.Command, []string) error { return bad("inflight: want one of ls, release and reset") },
	}
	c.AddCommand(inflightLs(o), inflightRelease(o), inflightReset(o))
	return c
}

// anyPermits is a limit of a name, of which any permit that is held can be seen.
func anyPermits(name string) ratelimit.InFlight {
	return ratelimit.InFlight{Name: name, Limit: ratelimit.MaxInFlight}
}

// permitJSON is a permit that is held.
type permitJSON struct {
	Limit  string `json:"limit"`
	Key    string `json:"key"`
	Number int    `json:"number"`
	Fence  int64  `json:"fence"`
	Until  string `json:"until"`
}

func permitJSONOf(p ratelimit.Permit) permitJSON {
	return permitJSON{p.InFlight.Name, p.Key, p.Number, p.Fence, instant(p.Until)}
}

func inflightLs(o *options) *cobra.Command {
	var f pageFlags
	c := &cobra.Command{
		Use:     "ls LIMIT [KEY]",
		Short:   "List the permits that are held",
		Example: "  ratelimit inflight ls exports\n  ratelimit inflight ls exports alice",
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var keys []string
			if len(args) == 2 {
				key, err := oneKey(args[1])
				if err != nil {
					return err
				}
				keys = []string{key}
			}
			page, err := f.page()
			if err != nil {
				return err
			}
			return o.onDesk(cmd, func(d *inspect.Inspector) error {
				if err := notARate(d, args[0]); err != nil {
					return err
				}
				if keys == nil {
					if keys, err = d.PermitKeys(cmd.Context(), args[0], page); err != nil {
						return err
					}
				}
				return listPermits(cmd, o.printer(cmd), d, args[0], keys)
			})
		},
	}
	f.addTo(c)
	return o.listing(o.onLimits(c))
}

// notARate is the error of a name that is known to be of a limit of another sort, whose rows are
// no permits.
func notARate(d *inspect.Inspector, name string) error {
	if limit, err := d.Limit(name); err == nil {
		return bad("%s is no limit of how many at once", limit.Definition())
	}
	return nil
}

func listPermits(cmd *cobra.Command, p *printer, d *inspect.Inspector, name string, keys []string) error {
	t := p.table("PERMIT", "FENCE", "HELD UNTIL", "KEY")
	for _, key := range keys {
		permits, err := d.Store.Permits().Held(cmd.Context(), anyPermits(name), key)
		if err != nil {
			return err
		}
		for _, s := range permits {
			err := t.row(permitJSONOf(s), fmt.Sprint(s.Number), fmt.Sprint(s.Fence), inspect.Instant(s.Until), p.key(key))
			if err != nil {
				return err
			}
		}
	}
	return t.end()
}

func inflightRelease(o *options) *cobra.Command {
	return o.losing(o.onLimits(&cobra.Command{
		Use:   "release LIMIT KEY PERMIT FENCE",
		Short: "Free a permit, if it is still the one that was listed",
		Long: `Free a permit that ls has listed, unless it was released or taken by somebody else since. Its
holder finds it lost when it renews or releases it, and may be at work still.`,
		Example: `  ratelimit inflight release exports alice 0 1780000000000000 --yes`,
		Args:    cobra.ExactArgs(4),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := oneKey(args[1])
			if err != nil {
				return err
			}
			number, err := strconv.Atoi(args[2])
			if err != nil {
				return bad("permit %q: must be a whole number", args[2])
			}
			fence, err := strconv.ParseInt(args[3], 10, 64)
			if err != nil {
				return bad("fence %q: must be a whole number", args[3])
			}
			permit := ratelimit.Permit{InFlight: anyPermits(args[0]), Key: key, OK: true, Number: number, Fence: fence}
			if err := permit.Validate(); err != nil {
				return badInput{err}
			}
			return o.onPermits(cmd, args[0], fmt.Sprintf("release permit %d of key %s of %s", number, visible.Short(key, keyWidth), visible.Text(args[0])), func(d *inspect.Inspector) error {
				err := d.Store.Permits().Release(cmd.Context(), permit)
				if errors.Is(err, ratelimit.ErrLeaseLost) {
					return errors.New("the permit is not held any more by that fence: nothing was done")
				}
				return err
			})
		},
	}))
}

func inflightReset(o *options) *cobra.Command {
	return o.losing(o.onLimits(&cobra.Command{
		Use:   "reset LIMIT KEY",
		Short: "Free all permits of a key",
		Long: `Free all permits of a key. Their holders find them lost when they renew or release them, and may
be at work still.`,
		Example: `  ratelimit inflight reset exports alice --yes`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, err := oneKey(args[1])
			if err != nil {
				return err
			}
			if err := anyPermits(args[0]).ValidateKey(key); err != nil {
				return badInput{err}
			}
			return o.onPermits(cmd, args[0], fmt.Sprintf("free all permits of key %s of %s", visible.Short(key, keyWidth), visible.Text(args[0])), func(d *inspect.Inspector) error {
				return d.Store.Permits().Reset(cmd.Context(), anyPermits(args[0]), key)
			})
		},
	}))
}

// onPermits does what frees permits, once it is confirmed.
func (o *options) onPermits(cmd *cobra.Command, name, what string, do func(*inspect.Inspector) error) error {
	return o.onDesk(cmd, func(d *inspect.Inspector) error {
		if err := notARate(d, name); err != nil {
			return err
		}
		if ok, err := o.confirmed(cmd, what); !ok {
			return err
		}
		if err := do(d); err != nil {
			return err
		}
		return o.printer(cmd).tell(map[string]bool{"done": true}, "done")
	})
}
