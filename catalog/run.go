package catalog

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"
)

// Run refreshes every Config.Every, spread by a tenth, until ctx ends. It begins at once if nothing
// has been read yet. Faults are logged, and [Catalog.Age] shows them.
func (c *Catalog) Run(ctx context.Context) {
	if c.usable() != nil {
		return
	}
	if c.view.Load() == nil {
		_ = c.Refresh(ctx)
	}
	for {
		spread := c.config.Every/10 + 1
		timer := time.NewTimer(c.config.Every - spread/2 + rand.N(spread))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
			_ = c.Refresh(ctx) // it logs errors
			if c.config.Store == nil || c.memory != nil {
				continue
			}
			if _, err := c.Complete(ctx); err != nil && ctx.Err() == nil {
				c.config.Logger.ErrorContext(ctx, "catalog: raises could not be completed", slog.String("error", err.Error()))
			}
		}
	}
}
