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

// Publish writes the definitions of a program's limits into the catalog where they differ, and
// reads the catalog. It is for the program's start. It changes no override. If several programs or
// versions publish a name, the views show the last one; each program uses its own definition, with
// the overrides. A change of the kind is logged.
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
	r, err := to.rowsOf(ctx, tx, names, AllKeys)
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
		if err := to.publish(ctx, tx, p); err != nil {
			return err
		}
	}
	return nil
}

// Set changes the override of a limit for one key, or for [AllKeys]: it sets the fields that o
// names, and keeps the rest. Fields of a key's own override replace those for all keys. A change
// holds in this process when Set returns, and in others once they have looked. The Edit has the
// override before and after; see also [Catalog.Preview].
//
// With a [Config.Store] what was used stays used, and the Edit says what is Left. A cut takes from
// the rows of the key at once. A raise fills them after ten seconds, once all processes know of it;
// see [Catalog.Complete]. For all keys this is done in batches, which may take long. If the context
// ends meanwhile, everything is as before after half a minute. Without a Store, rows stay as they
// are.
//
// The new override must fit the published definition and replace something; otherwise the error is
// [ratelimit.ErrInvalid]. It is [ErrUnknown] if no program has published the limit. Other errors
// are [ErrNotMigrated], and those of the Store, PostgreSQL and pgx. Then nothing is changed, unless the
// error is [ErrOutcomeUnknown].
func (c *Catalog) Set(ctx context.Context, name, key string, o Override) (Edit, error) {
	return first(c.editOwn(ctx, nil, KeyEdit{name, key, &o}))
}

// SetTx is [Catalog.Set] inside tx. The change holds in a process, this one too, once tx has
// committed and the process has looked. Until tx ends no other edit begins. With a [Config.Store]
// it is not for [AllKeys], since the rows of all keys would be locked until tx ends. For several
// edits see [Catalog.SetEachTx].
func (c *Catalog) SetTx(ctx context.Context, tx pgx.Tx, name, key string, o Override) (Edit, error) {
	return first(c.keepTx(ctx, tx, KeyEdit{name, key, &o}))
}

// Unset removes the override of a limit for one key, or for [AllKeys], so that the definition is
// that of the code again, or of the override for all keys. Edit.Was is nil if there was none; that
// is [ErrUnknown] if no program has published the limit either.
func (c *Catalog) Unset(ctx context.Context, name, key string) (Edit, error) {
	return first(c.editOwn(ctx, nil, KeyEdit{name, key, nil}))
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

// Apply makes an edit that Preview has returned, after a person has agreed to it. If the override
// has changed since, it changes nothing and returns [ErrChanged]. Other errors are those of Set.
func (c *Catalog) Apply(ctx context.Context, e *Edit) error {
	made, err := first(c.editOwn(ctx, e, KeyEdit{e.Name, e.Key, e.by}))
	if err == nil {
		e.Left = made.Left
	}
	return err
}

// Forget removes a limit that has left the program from the catalog, with all its overrides. It
// returns how many rows those were. Its tokens stay: see the store's Forget.
func (c *Catalog) Forget(ctx context.Context, name string) (removed int64, err error) {
	err = c.alone(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		to, err := c.writer(ctx, tx)
		if err == nil {
			removed, err = to.forget(ctx, tx, name)
		}
		return err
	})
	return removed, err
}

// History returns the changes of a limit's definition and overrides, the newest first; of all
// limits if name is "". It returns the newest most changes, or all if most is 0.
func (c *Catalog) History(ctx context.Context, name string, most int) ([]Change, error) {
	return c.history(ctx, name, nil, most)
}

// KeyHistory returns what [Catalog.History] does for one key: the changes of its own override, and
// those for all keys.
func (c *Catalog) KeyHistory(ctx context.Context, name, key string, most int) ([]Change, error) {
	return c.history(ctx, name, &key, most)
}

// InMemory reports whether the catalog is in memory. Then its history is of this process only, with
// the role "memory".
func (c *Catalog) InMemory() bool { return c != nil && c.memory != nil }

// history reads the history, of a key unless that is nil.
func (c *Catalog) history(ctx context.Context, name string, key *string, most int) ([]Change, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}
	if most < 0 {
		return nil, invalid("Most", most, "must not be negative")
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.rows.history(ctx, name, key, most)
}

// PruneHistory deletes changes that are older than age, but never the newest one, and returns how
// many. A process that has not looked for that long reads everything when it does.
func (c *Catalog) PruneHistory(ctx context.Context, age time.Duration) (deleted int64, err error) {
	if err := c.usable(); err != nil {
		return 0, err
	}
	if age < 0 {
		return 0, invalid("Age", age, "must not be negative")
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	return c.rows.pruneHistory(ctx, age)
}

// Pruner is the part of a store that [Catalog.Prune] needs: a *pgstore.Store or a
// *memstore.Store.
type Pruner interface {
	PruneOverridden(ctx context.Context, overrides []ratelimit.Request, limits ...ratelimit.Limit) (deleted int64, err error)
}

// PermitPruner is the part of a store's Permits() that [Catalog.Prune] needs.
type PermitPruner interface {
	Prune(ctx context.Context, limits ...ratelimit.InFlight) (deleted int64, err error)
}

// Prune deletes a store's rows that mean the same as no row, of all limits that the catalog knows,
// and free permits. So a cron job needs no list of limits or of plans. It measures rows by every
// definition of a name, including the override for all keys, and the rows of a key also by its own
// override; it includes overrides that are off or over. It reads the catalog first, and prunes
// nothing if that fails. It returns how many rows were deleted.
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
