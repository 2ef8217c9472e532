package catalog

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// ErrUnknown is the error of an override for a limit that no program has published.
var ErrUnknown = errors.New("catalog: no program has published a limit of this name")

// alone runs do in a transaction of its own, and has this process see its changes at once.
func (c *Catalog) alone(ctx context.Context, do func(context.Context, pgx.Tx) error) error {
	if err := c.usable(); err != nil {
		return err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	var err error
	if c.memory != nil {
		err = do(ctx, nil)
	} else {
		err = pgx.BeginFunc(ctx, c.table.pool, func(tx pgx.Tx) error { return do(ctx, tx) })
	}
	if err != nil {
		return err
	}
	_ = c.Refresh(ctx) // the change is committed; another reading will see it
	return nil
}

// Publish writes the definitions of a program's limits into the catalog, those that differ, and
// reads it: for the program's start. It changes no override. Of several programs or versions
// that publish a name, the last one wins, for the views; each program goes by its own
// definition, with the overrides. A change of the kind is logged.
//
// Errors are [ratelimit.ErrInvalid], [ErrNotMigrated], and those of PostgreSQL and pgx. Then
// nothing is published.
func (c *Catalog) Publish(ctx context.Context, limits ...ratelimit.Limit) error {
	err := c.alone(ctx, func(ctx context.Context, tx pgx.Tx) error { return c.PublishTx(ctx, tx, limits...) })
	if err != nil {
		return err
	}
	return c.Ready()
}

// PublishTx is [Catalog.Publish] inside tx, without the reading.
func (c *Catalog) PublishTx(ctx context.Context, tx pgx.Tx, limits ...ratelimit.Limit) error {
	if err := ratelimit.Validate(limits...); err != nil {
		return err
	}
	all := make([]published, len(limits))
	for i, l := range limits {
		all[i].Definition = l.Definition()
	}
	return c.publish(ctx, tx, all)
}

// publish writes the definitions that differ, in one order, so that two programs that publish
// do not deadlock.
func (c *Catalog) publish(ctx context.Context, tx pgx.Tx, all []published) error {
	to, err := c.inTx(tx)
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b published) int { return strings.Compare(a.Name, b.Name) })
	names := make([]string, len(all))
	for i := range all {
		names[i] = all[i].Name
	}
	r, err := to.rowsOf(ctx, names, nil)
	if err != nil {
		return err
	}
	for i := range all {
		p := &all[i]
		n := slices.IndexFunc(r.published, func(was published) bool { return was.Name == p.Name })
		if n >= 0 && r.published[n].alike(p) {
			continue
		}
		if n >= 0 && r.published[n].kind() != p.kind() {
			c.config.Logger.WarnContext(ctx, "catalog: a limit of another kind was published under this name: give it another name, unless the other program is gone",
				slog.String("limit", p.Name), slog.String("was", r.published[n].kind()), slog.String("is", p.kind()))
		}
		if err := to.publish(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// Set overrides the definition of a limit for one key, in place of an override that is there.
// It holds in this process when it returns, and in others once they have looked.
//
// The override must fit the published definition: otherwise the error is
// [ratelimit.ErrInvalid]. It is [ErrUnknown] if there is none. Other errors are
// [ErrNotMigrated], and those of PostgreSQL and pgx.
func (c *Catalog) Set(ctx context.Context, name, key string, o Override) error {
	return c.alone(ctx, func(ctx context.Context, tx pgx.Tx) error { return c.SetTx(ctx, tx, name, key, o) })
}

// SetTx is [Catalog.Set] inside tx: it holds once that has committed, and processes, this one
// too, have looked.
func (c *Catalog) SetTx(ctx context.Context, tx pgx.Tx, name, key string, o Override) error {
	return c.set(ctx, tx, &Entry{Name: name, Key: key, Override: o})
}

// SetAll is [Catalog.Set] for all keys of a limit. The fields of a key's own override go before
// it.
func (c *Catalog) SetAll(ctx context.Context, name string, o Override) error {
	return c.alone(ctx, func(ctx context.Context, tx pgx.Tx) error { return c.SetAllTx(ctx, tx, name, o) })
}

// SetAllTx is [Catalog.SetAll] inside tx.
func (c *Catalog) SetAllTx(ctx context.Context, tx pgx.Tx, name string, o Override) error {
	return c.set(ctx, tx, &Entry{Name: name, All: true, Override: o})
}

func (c *Catalog) set(ctx context.Context, tx pgx.Tx, e *Entry) error {
	to, err := c.inTx(tx)
	if err != nil {
		return err
	}
	r, err := to.rowsOf(ctx, []string{e.Name}, nil)
	if err != nil {
		return err
	}
	if len(r.published) == 0 {
		return &UnknownError{Name: e.Name}
	}
	if err := e.check(&r.published[0]); err != nil {
		return err
	}
	e.Until = e.Until.Truncate(time.Microsecond)
	return to.set(ctx, e)
}

// UnknownError is an override for a limit that no program has published. It is [ErrUnknown].
type UnknownError struct{ Name string }

func (e *UnknownError) Error() string {
	return ErrUnknown.Error() + ": " + strings.ToValidUTF8(e.Name, "?")
}

// Unwrap makes errors.Is(err, ErrUnknown) true.
func (e *UnknownError) Unwrap() error { return ErrUnknown }

// Unset removes the override of a limit for one key, so that the definition is that of the code
// again, or of the override for all keys. It reports false if there was none.
func (c *Catalog) Unset(ctx context.Context, name, key string) (removed bool, err error) {
	err = c.alone(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		removed, err = c.UnsetTx(ctx, tx, name, key)
		return err
	})
	return removed && err == nil, err
}

// UnsetTx is [Catalog.Unset] inside tx.
func (c *Catalog) UnsetTx(ctx context.Context, tx pgx.Tx, name, key string) (removed bool, err error) {
	return c.unset(ctx, tx, name, &key)
}

// UnsetAll removes the override of a limit for all keys.
func (c *Catalog) UnsetAll(ctx context.Context, name string) (removed bool, err error) {
	err = c.alone(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		removed, err = c.UnsetAllTx(ctx, tx, name)
		return err
	})
	return removed && err == nil, err
}

// UnsetAllTx is [Catalog.UnsetAll] inside tx.
func (c *Catalog) UnsetAllTx(ctx context.Context, tx pgx.Tx, name string) (removed bool, err error) {
	return c.unset(ctx, tx, name, nil)
}

func (c *Catalog) unset(ctx context.Context, tx pgx.Tx, name string, key *string) (bool, error) {
	to, err := c.inTx(tx)
	if err != nil {
		return false, err
	}
	n, err := to.unset(ctx, name, key)
	return n > 0, err
}

// Forget removes a limit from the catalog, with all its overrides: for one that has left the
// program. It says how many rows those were. Its tokens stay: see the store's Forget.
func (c *Catalog) Forget(ctx context.Context, name string) (removed int64, err error) {
	err = c.alone(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		to, err := c.inTx(tx)
		if err == nil {
			removed, err = to.forget(ctx, name)
		}
		return err
	})
	return removed, err
}

// History returns the changes of a limit's definition and overrides, "" for all limits, the
// newest first; at most so many, unless that is 0.
func (c *Catalog) History(ctx context.Context, name string, most int) ([]Change, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}
	if most < 0 {
		return nil, invalid("Most", most, "must not be negative")
	}
	if c.memory != nil {
		return c.memory.history(name, most), ctx.Err()
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.table.history(ctx, name, most)
}

// PruneHistory deletes changes that are older than an age, but never the newest one, and says
// how many. A process that has not looked for as long reads all when it does.
func (c *Catalog) PruneHistory(ctx context.Context, age time.Duration) (deleted int64, err error) {
	if err := c.usable(); err != nil {
		return 0, err
	}
	if age < 0 {
		return 0, invalid("Age", age, "must not be negative")
	}
	if c.memory != nil {
		return c.memory.pruneHistory(age), ctx.Err()
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.table.pruneHistory(ctx, age)
}

// Pruner is the part of a store that [Catalog.Prune] needs: a *pgstore.Store or a
// *memstore.Store.
type Pruner interface {
	Prune(ctx context.Context, limits ...ratelimit.Limit) (deleted int64, err error)
}

// PermitPruner is the same of a store's Permits().
type PermitPruner interface {
	Prune(ctx context.Context, limits ...ratelimit.InFlight) (deleted int64, err error)
}

// Prune has a store delete the rows that mean the same as no row, of all limits that the
// catalog knows, by every definition and override of their name, those that are off or over
// as well, and free permits: so a cron needs no list of limits, and none of its own plans. It
// reads the catalog first, and prunes nothing if it cannot. It returns how many rows were deleted.
func (c *Catalog) Prune(ctx context.Context, store Pruner, permits PermitPruner) (deleted int64, err error) {
	if err := c.Refresh(ctx); err != nil {
		return 0, err
	}
	var limits []ratelimit.Limit
	for _, f := range c.families() {
		limits = append(limits, f.definitions()...)
	}
	if len(limits) > 0 {
		deleted, err = store.Prune(ctx, limits...)
	}
	if inFlight := c.InFlights(); err == nil && len(inFlight) > 0 {
		var more int64
		more, err = permits.Prune(ctx, inFlight...)
		deleted += more
	}
	return deleted, err
}
