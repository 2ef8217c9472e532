package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
	"github.com/pgratelimit/ratelimit/refusals"
)

func topCommand(o *options) *cobra.Command {
	var query refusals.Query
	var every time.Duration
	var once bool
	c := &cobra.Command{
		Use:   "top [LIMIT]",
		Short: "Show which keys are refused most, over all processes, live",
		Long: `Show which keys are refused most, over all processes that record it (package refusals), and
again every few seconds until it is interrupted; once if it is not printed on a terminal, or
with --once. It reads the small table of refusals, and no limit's rows.

A count with ~ may be too high: a process counts some hundred keys of a limit.`,
		Example: `  ratelimit top
  ratelimit top send_message --since 10m --once --json`,
		GroupID: seeing,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				query.Limit = args[0]
			}
			if every < 100*time.Millisecond {
				return bad("--every %s: must be at least 100ms", every)
			}
			return o.onPool(cmd, func(pool *pgxpool.Pool) error {
				p := o.printer(cmd)
				if once || !isTerminal(p.out) {
					return o.showTop(cmd.Context(), p, pool, query)
				}
				return o.live(cmd, p, pool, query, every)
			})
		},
	}
	c.Flags().DurationVar(&query.Since, "since", 5*time.Minute, "how far back to look, up to an hour")
	c.Flags().IntVarP(&query.Most, "most", "n", 20, "at most so many keys")
	c.Flags().DurationVar(&every, "every", 2*time.Second, "how often to look again")
	c.Flags().BoolVar(&once, "once", false, "show it once")
	return o.listing(o.onDatabase(c))
}

// live shows it again and again, in place of the screen before.
func (o *options) live(cmd *cobra.Command, p *printer, pool *pgxpool.Pool, query refusals.Query, every time.Duration) error {
	ctx, stop := stoppable(cmd.Context())
	defer stop()
	terminal := p.out
	for {
		var page bytes.Buffer
		p.out = &page
		if err := o.showTop(ctx, p, pool, query); ctx.Err() != nil {
			return nil
		} else if err != nil {
			return err
		}
		if !p.json && !p.csv {
			fmt.Fprintf(terminal, "\x1b[H\x1b[2Jrefused most within %s, at %s\n\n", query.Since, inspect.Instant(time.Now()))
		}
		if _, err := io.Copy(terminal, &page); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(every):
		}
	}
}

// topJSON is a key that was refused.
type topJSON struct {
	Limit     string    `json:"limit"`
	Key       string    `json:"key"`
	Times     int64     `json:"times"`
	Uncertain int64     `json:"uncertain"`
	Last      time.Time `json:"last"`
	RetryAt   time.Time `json:"retryAt,omitzero"`
}

func (o *options) showTop(ctx context.Context, p *printer, pool *pgxpool.Pool, query refusals.Query) error {
	keys, err := refusals.Top(ctx, pool, o.schema, query)
	if err != nil {
		return err
	}
	t := p.table("REFUSED", "LAST", "LIMIT", "KEY")
	for _, k := range keys {
		times := when(k.Uncertain > 0 && !p.csv, "~") + fmt.Sprint(k.Times)
		if err := t.row(topJSON(k), times, inspect.Instant(k.Last), visible.Text(k.Limit), p.key(k.Key)); err != nil {
			return err
		}
	}
	return t.end()
}
