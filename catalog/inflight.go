package catalog

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// InFlight is [Catalog.For] for a limit of how many at once. It returns the limit of key: limit
// itself, or with the AtOnce, the Lease and the Mode of an override. It is a look-up in memory.
//
//	permit, err := store.Permits().Acquire(ctx, limits.InFlight(Calls, org).For(org))
//
// A smaller AtOnce takes no permit away: until the present leases end, as many as before may be
// held.
func (c *Catalog) InFlight(limit ratelimit.InFlight, key string) ratelimit.InFlight {
	if c == nil {
		return limit
	}
	return c.view.Load().inFlight(limit, key, c.config.Clock)
}

// InFlightTx is [Catalog.InFlight] by the overrides as tx sees them. It is one statement more.
func (c *Catalog) InFlightTx(ctx context.Context, tx pgx.Tx, limit ratelimit.InFlight, key string) (ratelimit.InFlight, error) {
	of, err := c.inTx(tx)
	if err == nil {
		err = limit.ValidateKey(key)
	}
	if err != nil {
		return limit, err
	}
	r, err := of.rowsOf(ctx, tx, []string{limit.Name}, key)
	if err != nil {
		return limit, err
	}
	v, _ := (*view)(nil).with(r, time.Now())
	return v.inFlight(limit, key, c.config.Clock), nil
}

// PublishInFlight is [Catalog.Publish] for limits of how many at once.
func (c *Catalog) PublishInFlight(ctx context.Context, limits ...ratelimit.InFlight) error {
	err := c.alone(ctx, func(ctx context.Context, tx pgx.Tx) error { return c.PublishInFlightTx(ctx, tx, limits...) })
	if err != nil {
		return err
	}
	return c.Ready()
}

// PublishInFlightTx is [Catalog.PublishInFlight] inside tx, without the reading.
func (c *Catalog) PublishInFlightTx(ctx context.Context, tx pgx.Tx, limits ...ratelimit.InFlight) error {
	all := make([]published, len(limits))
	for i, l := range limits {
		if err := l.Validate(); err != nil {
			return err
		}
		all[i] = inFlightOf(l)
	}
	return c.publish(ctx, tx, all)
}
