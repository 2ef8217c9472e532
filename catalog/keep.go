package catalog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// mostTries is how often an edit begins anew, since another one was faster.
const mostTries = 10

// errAgain is the error of an edit that was decided by what has changed meanwhile.
var errAgain = errors.New("the limit is being changed by somebody else")

// within is the time after which all processes have read an edit. Programs with a longer Config.Every
// than the default may take by the definition of before for longer.
func (c *Catalog) within() time.Duration { return 2 * max(c.config.Every, defaultEvery) }

// A keeping is an edit that keeps what was used, as far as it is known before rows are locked.
type keeping struct {
	edit    Edit
	limit   ratelimit.Limit // as it is published
	pending []pending       // of the limit, as they were read
	version int64           // of the limit's history
	at      time.Time       // by which rows are marked
}

// holds returns the limits of a key before and after the edit.
func (k *keeping) holds(key string, clock func() time.Time) (from, to ratelimit.Limit) {
	if k.limit == nil {
		return nil, nil
	}
	before := ratelimit.Request{Limit: k.limit, Key: key}
	after := before
	k.edit.before.choose(&before, clock)
	k.edit.after.choose(&after, clock)
	return before.Limit, after.Limit
}

// replacement returns the replacement of a key's limit. A row that is cut at once, in the transaction
// of the definition, needs no mark; a sliding window has counts, which no definition cuts.
func (k *keeping) replacement(key string, from, to ratelimit.Limit, alone bool) ratelimit.Replacement {
	r := ratelimit.Replacement{Key: key, From: from, To: to, Marked: marked(k.pending, key)}
	d, by := from.Definition(), to.Definition()
	if d.Kind == ratelimit.KindSlidingWindow || alone && by.Capacity <= d.Capacity {
		return r
	}
	by.Capacity = min(by.Capacity, d.Capacity)
	r.By, r.Mark = by.Limit(), k.at
	return r
}

// changes reports whether rows change when one limit replaces another.
func changes(from, to ratelimit.Limit) bool {
	a, b := from.Definition(), to.Definition()
	a.MaxReserved = b.MaxReserved
	return a != b
}

// leftOf returns what is left of a key by a status of before.
func leftOf(before *ratelimit.Status, to ratelimit.Limit, within time.Duration) *Left {
	d, was := to.Definition(), before.Request.Limit.Definition()
	l := &Left{Before: before.Value, Of: was.Capacity, AfterOf: d.Capacity, After: before.Value + d.Capacity - was.Capacity}
	if d.Kind != ratelimit.KindSlidingWindow {
		l.After = min(d.Capacity, max(l.After, min(before.Value, 0)))
		if l.After > was.Capacity && l.Before < was.Capacity {
			l.Within = within
		}
	}
	return l
}

// keeps reports whether an edit of a name changes rows.
func (c *Catalog) keeps(e *Edit) bool {
	p := e.before.limits[e.Name]
	return c.config.Store != nil && !e.AsIs && e.Changes() && p != nil && p.published != nil && p.published.inFlight == nil
}

// planned returns the keeping of an edit by a view.
func (c *Catalog) planned(v *view, name, key string, by *Override, agreed *Edit) (k keeping, err error) {
	if k.edit, err = v.edited(name, key, by); err != nil {
		return k, err
	}
	if agreed != nil {
		k.edit.AsIs = agreed.AsIs
	}
	if k.edit.keeps = c.keeps(&k.edit); k.edit.keeps {
		k.limit = v.limits[name].published.Limit()
	}
	return k, nil
}

// keepKey makes an edit of one key inside tx: first the rows, with which nobody waits for others who
// edit, then the definition. Another edit that was faster is errAgain.
func (c *Catalog) keepKey(ctx context.Context, tx pgx.Tx, name, key string, by *Override, agreed *Edit) (Edit, error) {
	of, err := c.inTx(tx)
	if err != nil {
		return Edit{}, err
	}
	known, version, at, err := c.table.pending(ctx, tx, name, c.config.Clock)
	if err != nil {
		return Edit{}, err
	}
	r, err := of.rowsOf(ctx, []string{name}, key)
	if err != nil {
		return Edit{}, err
	}
	v, _ := (*view)(nil).with(r, time.Now())
	k, err := c.planned(v, name, key, by, agreed)
	if err != nil {
		return Edit{}, err
	}
	k.pending, k.version, k.at = known, version, unlike(at, known)
	var left *Left
	var record *pending
	if k.limit != nil {
		from, to := k.holds(key, c.config.Clock)
		if changes(from, to) {
			replacement := k.replacement(key, from, to, true)
			statuses, err := c.config.Store.ReplaceTx(ctx, tx, replacement)
			if err != nil {
				return Edit{}, err
			}
			left, record = leftOf(&statuses[0], to, c.within()), k.record(&replacement)
		}
	}
	made, err := c.write(ctx, tx, name, key, by, agreed, func() error { return c.unchanged(ctx, tx, &k) })
	if err == nil && record != nil {
		err = c.table.putPending(ctx, tx, record, c.within(), c.config.Clock)
	}
	made.Left = left
	return made, err
}

// unchanged is errAgain if a limit was edited, or its rows were marked by somebody else, since an edit
// of it was decided.
func (c *Catalog) unchanged(ctx context.Context, tx pgx.Tx, k *keeping) error {
	known, version, _, err := c.table.pending(ctx, tx, k.edit.Name, c.config.Clock)
	if err != nil {
		return err
	}
	known = slices.DeleteFunc(known, func(p pending) bool { return p.mark.Equal(k.at) || p.mark.Equal(apart(k.at)) })
	if version != k.version || !slices.EqualFunc(known, k.pending, func(a, b pending) bool { return a.id == b.id }) {
		return errAgain
	}
	return nil
}

// apart is the mark of rows of an edit for all keys that are measured otherwise than most.
func apart(mark time.Time) time.Time { return mark.Add(time.Microsecond) }

// unlike returns an instant for a mark that no other rows have, also by a clock that was set back.
func unlike(at time.Time, known []pending) time.Time {
	for _, p := range known {
		if next := apart(apart(p.mark)); next.After(at) {
			at = next
		}
	}
	return at
}

// record returns what is pending of the rows of a replacement: by what they are measured, and by what
// they are taken from until all processes have read the edit.
func (k *keeping) record(r *ratelimit.Replacement) *pending {
	p := &pending{name: k.edit.Name, key: r.Key, mark: r.Mark}
	if r.By == nil {
		return p
	}
	p.by = []ratelimit.Limit{r.By, r.From, r.To}
	for _, m := range r.Marked {
		for _, l := range m.By {
			if !slices.Contains(p.by[1:], l) {
				p.by = append(p.by, l)
			}
		}
	}
	return p
}

// again runs an edit until no other one has been faster.
func again(do func() error) (err error) {
	for range mostTries {
		if err = do(); !errors.Is(err, errAgain) {
			return err
		}
	}
	return fmt.Errorf("catalog: %w", err)
}

// editOwn makes an edit in a transaction of its own, or of an edit for all keys in several.
func (c *Catalog) editOwn(ctx context.Context, name, key string, by *Override, agreed *Edit) (made Edit, err error) {
	if err := c.usable(); err != nil {
		return Edit{}, err
	}
	err = again(func() error {
		switch {
		case c.config.Store == nil || agreed != nil && agreed.AsIs:
			return c.alone(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
				made, err = c.write(ctx, tx, name, key, by, agreed, nil)
				return err
			})
		case c.memory != nil:
			made, err = c.keepInMemory(ctx, name, key, by, agreed)
		case key == AllKeys:
			made, err = c.keepAll(ctx, name, by, agreed)
		default:
			made, err = c.keepOne(ctx, name, key, by, agreed)
		}
		return err
	})
	if err != nil {
		return Edit{}, err
	}
	_ = c.Refresh(ctx) // the change is committed; another reading will see it
	return made, nil
}

// keepOne makes an edit of a key in a transaction of its own.
func (c *Catalog) keepOne(ctx context.Context, name, key string, by *Override, agreed *Edit) (made Edit, err error) {
	do := func(ctx context.Context, tx pgx.Tx) (err error) {
		made, err = c.keepKey(ctx, tx, name, key, by, agreed)
		return err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	if f := c.families()[name]; f != nil && f.published != nil && f.published.inFlight == nil {
		return made, c.config.Store.ReplaceFunc(ctx, f.published.Limit(), []string{key}, do)
	}
	return made, pgx.BeginFunc(ctx, c.table.pool, func(tx pgx.Tx) error { return do(ctx, tx) })
}

// keepTx makes an edit inside tx, behind a savepoint that it gives up if another edit was faster.
func (c *Catalog) keepTx(ctx context.Context, tx pgx.Tx, name, key string, by *Override) (made Edit, err error) {
	switch _, err := c.inTx(tx); {
	case err != nil:
		return Edit{}, err
	case c.config.Store == nil:
		return c.write(ctx, tx, name, key, by, nil, nil)
	case c.memory != nil:
		return c.keepInMemory(ctx, name, key, by, nil)
	case key == AllKeys:
		return Edit{}, invalid("Key", "AllKeys", "is not for a transaction of the caller's with a Config.Store: their rows are changed in several")
	}
	err = again(func() error {
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) (err error) {
			made, err = c.keepKey(ctx, tx, name, key, by, nil)
			return err
		})
	})
	if err != nil {
		return Edit{}, err
	}
	return made, nil
}

// keepInMemory makes an edit in memory, where all take by what holds: a cut before it, a raise after it.
func (c *Catalog) keepInMemory(ctx context.Context, name, key string, by *Override, agreed *Edit) (made Edit, err error) {
	c.memory.keeping.Lock()
	defer c.memory.keeping.Unlock()
	if err := c.Refresh(ctx); err != nil {
		return Edit{}, err
	}
	k, err := c.planned(c.view.Load(), name, key, by, agreed)
	if err != nil {
		return Edit{}, err
	}
	var cuts, raises []ratelimit.Replacement
	add := func(keys []string) error {
		for _, key := range keys {
			from, to := k.holds(key, c.config.Clock)
			switch r := k.replacement(key, from, to, true); {
			case !changes(from, to):
			case r.By == nil:
				cuts = append(cuts, r)
			default:
				raises = append(raises, r)
			}
		}
		return nil
	}
	switch {
	case k.limit == nil:
	case key == AllKeys:
		err = c.eachKeys(ctx, k.limit, add)
	default:
		err = add([]string{key})
	}
	var statuses, more []ratelimit.Status
	if err == nil {
		statuses, err = c.replace(ctx, cuts)
	}
	if err == nil {
		made, err = c.write(ctx, nil, name, key, by, agreed, nil)
	}
	if err == nil {
		_ = c.Refresh(ctx)
		more, err = c.replace(ctx, raises)
	}
	if all := append(cuts, raises...); err == nil && key != AllKeys && len(all) == 1 {
		made.Left = leftOf(&append(statuses, more...)[0], all[0].To, 0)
	}
	return made, err
}

func (c *Catalog) replace(ctx context.Context, all []ratelimit.Replacement) ([]ratelimit.Status, error) {
	if len(all) == 0 {
		return nil, nil
	}
	return c.config.Store.ReplaceTx(ctx, nil, all...)
}

// keepAll makes an edit for all keys: what is pending, then the rows in batches, which are marked, and
// then the definition. If the process dies between, the rows are raised, when that is due, to what holds
// then: that is as it was before.
func (c *Catalog) keepAll(ctx context.Context, name string, by *Override, agreed *Edit) (Edit, error) {
	known, version, at, err := c.table.pending(ctx, c.table.pool, name, c.config.Clock)
	if err == nil {
		err = c.Refresh(ctx)
	}
	if err != nil {
		return Edit{}, err
	}
	k, err := c.planned(c.view.Load(), name, AllKeys, by, agreed)
	if err != nil {
		return Edit{}, err
	}
	k.version, k.at, k.pending = version, unlike(at, known), known
	own := &pending{}
	if from, to := k.holds(AllKeys, c.config.Clock); k.limit != nil && changes(from, to) { // and not a mode
		r := k.replacement(AllKeys, from, to, false)
		if own = k.record(&r); r.By != nil {
			err = c.begin(ctx, own, &k)
		}
		if err == nil {
			err = c.eachKeys(ctx, k.limit, func(keys []string) error { return c.keepKeys(ctx, &k, own, to, keys) })
		}
		if err != nil {
			return Edit{}, err
		}
	}
	var made Edit
	err = pgx.BeginFunc(ctx, c.table.pool, func(tx pgx.Tx) (err error) {
		made, err = c.write(ctx, tx, name, AllKeys, by, agreed, func() error { return c.unchanged(ctx, tx, &k) })
		if err == nil && len(own.by) > 0 {
			if err = c.putOff(ctx, tx, own, c.within()); err == nil {
				_, err = tx.Exec(ctx, c.table.sql(dropPending), name, nil, own.mark) // their rows are marked anew
			}
		}
		return err
	})
	return made, err
}

// begin writes what is pending of an edit, before any row has its mark.
func (c *Catalog) begin(ctx context.Context, own *pending, k *keeping) error {
	return pgx.BeginFunc(ctx, c.table.pool, func(tx pgx.Tx) error {
		err := c.table.lock(ctx, tx)
		if err == nil {
			err = c.unchanged(ctx, tx, k)
		}
		if err == nil {
			err = c.table.addPending(ctx, tx, own, leased, c.config.Clock)
		}
		return err
	})
}

// putOff has what is pending be due after a time. If it is gone, others have completed it.
func (c *Catalog) putOff(ctx context.Context, tx pgx.Tx, p *pending, after time.Duration) error {
	there, err := c.table.putOff(ctx, tx, p, after, c.config.Clock)
	if err == nil && !there {
		return errAgain
	}
	return err
}

// keepKeys makes an edit for all keys of some. A key whose override leaves it concerned, but measured
// otherwise, is pending by itself.
func (c *Catalog) keepKeys(ctx context.Context, k *keeping, own *pending, to ratelimit.Limit, keys []string) error {
	return c.config.Store.ReplaceFunc(ctx, k.limit, keys, func(ctx context.Context, tx pgx.Tx) error {
		var all []ratelimit.Replacement
		var others []*pending
		for _, key := range keys {
			is, will := k.holds(key, c.config.Clock)
			if !changes(is, will) {
				continue
			}
			r := k.replacement(key, is, will, false)
			if will != to && r.By != nil {
				r.Mark = apart(r.Mark)
				others = append(others, k.record(&r))
			}
			all = append(all, r)
		}
		if _, err := c.config.Store.ReplaceTx(ctx, tx, all...); err != nil {
			return err
		}
		err := c.unchanged(ctx, tx, k)
		for i := 0; i < len(others) && err == nil; i++ {
			err = c.table.putPending(ctx, tx, others[i], leased, c.config.Clock)
		}
		if err == nil && len(own.by) > 0 {
			err = c.putOff(ctx, tx, own, leased)
		}
		return err
	})
}
