package catalog

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

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
	to, err := c.writer(ctx, tx)
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b published) int { return strings.Compare(a.Name, b.Name) })
	names := make([]string, len(all))
	for i := range all {
		names[i] = all[i].Name
	}
	r, err := to.rowsOf(ctx, names, AllKeys)
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

// Set changes the override of a limit for one key, or for [AllKeys]: the fields that o names, and
// the rest stays. Fields of a key's own override go before those for all keys. A change holds in
// this process when Set returns, and in others once they have looked. The Edit says what the
// override was, and what it became; see also [Catalog.Preview].
//
// With a [Config.Store] what was used stays used, and the Edit says what is Left: a cut takes from the
// rows of the key at once, and a raise gives them as much more once all processes know of it, after ten
// seconds; see [Catalog.Complete]. For all keys that is done in batches, which may take long: of a
// context that ends meanwhile, nothing is left after half a minute. Without one, rows stay as they are.
//
// What the override becomes must fit the published definition, and replace something:
// otherwise the error is [ratelimit.ErrInvalid]. It is [ErrUnknown] if no program has published
// the limit. Other errors are [ErrNotMigrated], and those of PostgreSQL and pgx. Then nothing is
// changed.
func (c *Catalog) Set(ctx context.Context, name, key string, o Override) (Edit, error) {
	return c.editOwn(ctx, name, key, &o, nil)
}

// SetTx is [Catalog.Set] inside tx: it holds once that has committed, and processes, this one
// too, have looked. Until then no other edit begins. With a [Config.Store] it is not for [AllKeys], since
// the rows of all keys would be locked until tx ends. For several edits see [Catalog.SetEachTx].
func (c *Catalog) SetTx(ctx context.Context, tx pgx.Tx, name, key string, o Override) (Edit, error) {
	return first(c.keepTx(ctx, tx, KeyEdit{name, key, &o}))
}

// Unset removes the override of a limit for one key, or for [AllKeys], so that the definition is
// that of the code again, or of the override for all keys. Edit.Was is nil if there was none; that
// is [ErrUnknown] if no program has published the limit either.
func (c *Catalog) Unset(ctx context.Context, name, key string) (Edit, error) {
	return c.editOwn(ctx, name, key, nil, nil)
}

// UnsetTx is [Catalog.Unset] inside tx.
func (c *Catalog) UnsetTx(ctx context.Context, tx pgx.Tx, name, key string) (Edit, error) {
	return first(c.keepTx(ctx, tx, KeyEdit{name, key, nil}))
}

// Preview returns what Set would do at this moment, or Unset if o is nil, and changes nothing. It
// reads the catalog. Its errors are those of Set.
func (c *Catalog) Preview(ctx context.Context, name, key string, o *Override) (Edit, error) {
	if err := c.Refresh(ctx); err != nil {
		return Edit{}, err
	}
	k, err := c.planned(c.view.Load(), name, key, o, nil)
	if err != nil || k.limit == nil || key == AllKeys {
		return k.edit, err
	}
	if from, to := k.holds(key, c.config.Clock); changes(from, to) {
		statuses, err := c.config.Store.CheckEach(ctx, ratelimit.Request{Limit: from, Key: key, Overridden: true})
		if err != nil {
			return Edit{}, err
		}
		k.edit.Left = leftOf(&statuses[0], to, c.within())
	}
	return k.edit, nil
}

// Apply makes an edit that Preview has returned, once somebody has agreed to it. It is
// [ErrChanged], and changes nothing, if the override is not what it was any more. Other errors
// are those of Set.
func (c *Catalog) Apply(ctx context.Context, e *Edit) error {
	made, err := c.editOwn(ctx, e.Name, e.Key, e.by, e)
	if err == nil {
		e.Left = made.Left
	}
	return err
}

// Forget removes a limit from the catalog, with all its overrides: for one that has left the
// program. It says how many rows those were. Its tokens stay: see the store's Forget.
func (c *Catalog) Forget(ctx context.Context, name string) (removed int64, err error) {
	err = c.alone(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		to, err := c.writer(ctx, tx)
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
	return c.history(ctx, name, nil, most)
}

// KeyHistory is [Catalog.History] of one key: the changes of its own override, and those for all keys.
func (c *Catalog) KeyHistory(ctx context.Context, name, key string, most int) ([]Change, error) {
	return c.history(ctx, name, &key, most)
}

// InMemory reports whether the catalog is in memory: its history is of this process, and names nobody.
func (c *Catalog) InMemory() bool { return c != nil && c.memory != nil }

// history reads the history, of a key unless that is nil.
func (c *Catalog) history(ctx context.Context, name string, key *string, most int) ([]Change, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}
	if most < 0 {
		return nil, invalid("Most", most, "must not be negative")
	}
	if c.memory != nil {
		return c.memory.history(name, key, most), ctx.Err()
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.table.history(ctx, name, key, most)
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
	PruneOverridden(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (deleted int64, err error)
}

// PermitPruner is the same of a store's Permits().
type PermitPruner interface {
	Prune(ctx context.Context, limits ...ratelimit.InFlight) (deleted int64, err error)
}

// Prune has a store delete the rows that mean the same as no row, of all limits that the
// catalog knows, and free permits: so a cron needs no list of limits, and none of its own plans.
// It goes by every definition of a name, the override for all keys included, and for a key by its
// own override as well, also those that are off or over. It reads the catalog first, and prunes
// nothing if it cannot. It returns how many rows were deleted.
//
// The catalog knows no gates of package riverlimit: see riverlimit.Middleware.Pruner.
func (c *Catalog) Prune(ctx context.Context, store Pruner, permits PermitPruner) (deleted int64, err error) {
	if err := c.Refresh(ctx); err != nil {
		return 0, err
	}
	var (
		limits    []ratelimit.Limit
		overrides []ratelimit.Request
	)
	for _, f := range c.families() {
		some, own := f.definitions()
		limits, overrides = append(limits, some...), append(overrides, own...)
	}
	if len(limits) > 0 {
		deleted, err = store.PruneOverridden(ctx, overrides, limits...)
	}
	if inFlight := c.InFlights(); err == nil && len(inFlight) > 0 {
		var more int64
		more, err = permits.Prune(ctx, inFlight...)
		deleted += more
	}
	return deleted, err
}
