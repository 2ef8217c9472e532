package catalog

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

const (
	// mostTries is how often an edit is tried while other edits are faster.
	mostTries = 20

	// firstWait is the patience of an edit's first try, and the longest pause before the second.
	firstWait = 5 * time.Millisecond
)

// keeps reports whether an edit changes rows, so that what was used stays used.
func (c *Catalog) keeps(e *Edit) bool {
	p := e.before.limits[e.Name]
	return c.config.Store != nil && !e.AsIs && e.Changes() && p != nil && p.published != nil && p.published.inFlight == nil
}

// planned returns the keeping of an edit by a view. agreed is what Preview returned, or nil.
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

// keepEach makes edits of keys inside tx. It changes all rows first, then the definitions, since no
// edit may wait for a row while it keeps other edits waiting. Before it locks a row it waits for
// edits under way, since calls wait for the row. It returns errAgain if another edit was faster.
func (c *Catalog) keepEach(ctx context.Context, tx pgx.Tx, edits []KeyEdit, agreed *Edit, patience time.Duration) ([]Edit, error) {
	if err := c.table.await(ctx, tx); err != nil {
		return nil, err
	}
	kept := make([]keeping, len(edits))
	for i := range edits {
		if err := c.keepRows(ctx, tx, &kept[i], &edits[i], agreed); err != nil {
			return nil, err
		}
	}
	if err := c.table.lockFor(ctx, tx, patience); err != nil {
		return nil, err
	}
	for i := range kept {
		if err := c.unchanged(ctx, tx, &kept[i]); err != nil {
			return nil, err
		}
	}
	made := make([]Edit, len(edits))
	for i := range edits {
		var err error
		made[i], err = c.write(ctx, tx, edits[i].Name, edits[i].Key, edits[i].Override, agreed)
		if k := &kept[i]; err == nil && k.most != nil {
			made[i].Left = k.left
			err = c.table.putPending(ctx, tx, k.most, c.within(), c.config.Clock)
		}
		if err != nil {
			return nil, err
		}
	}
	return made, nil
}

// keepRows changes the rows of a key inside tx, and notes in k what to write with the definition.
func (c *Catalog) keepRows(ctx context.Context, tx pgx.Tx, k *keeping, e *KeyEdit, agreed *Edit) error {
	known, version, at, err := c.table.pending(ctx, tx, e.Name, e.Key, c.config.Clock)
	if err != nil {
		return err
	}
	r, err := c.table.rowsOf(ctx, tx, []string{e.Name}, e.Key)
	if err != nil {
		return err
	}
	v, _ := (*view)(nil).with(r, time.Now())
	if *k, err = c.planned(v, e.Name, e.Key, e.Override, agreed); err != nil {
		return err
	}
	k.pending, k.version, k.at = known, version, unlike(at, known)
	if k.limit == nil {
		return nil
	}
	from, to := k.holds(e.Key, c.config.Clock)
	if !changes(from, to) {
		return nil
	}
	replacement := k.replacement(e.Key, from, to, true)
	statuses, err := c.config.Store.ReplaceTx(ctx, tx, replacement)
	if err != nil {
		return err
	}
	k.left, k.most = leftOf(&statuses[0], to, c.within()), k.record(&replacement)
	if k.most.marks() {
		k.left.Within = c.within()
	}
	return nil
}

// unchanged returns errAgain if, since the edit was decided, the limit was edited or another edit
// marked its rows. replaced are keys whose pending entries this edit has replaced itself.
func (c *Catalog) unchanged(ctx context.Context, tx pgx.Tx, k *keeping, replaced ...string) error {
	others, version, err := c.table.pendingOfOthers(ctx, tx, k)
	if err != nil {
		return err
	}
	var known []string
	for _, p := range k.pending {
		if !slices.Contains(replaced, p.key) && !slices.ContainsFunc(k.own(), p.mark.Equal) {
			known = append(known, p.id)
		}
	}
	if version != k.version || !slices.Equal(others, known) {
		return errAgain
	}
	return nil
}

// unlike returns an instant for a mark that no other rows have, even if the clock was set back.
func unlike(at time.Time, known []pending) time.Time {
	for _, p := range known {
		if next := apart(apart(p.mark)); next.After(at) {
			at = next
		}
	}
	return at
}

// record returns the pending entry for the rows of a replacement: the definitions by which they are
// measured, and those by which processes take until all have read the edit.
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

// again runs an edit until no other edit was faster. It pauses between tries, since edits that do
// not pause would overtake each other for ever. While a try with locked rows waits for another
// edit, calls wait for the rows. So it waits for its patience at most, which grows.
func again(ctx context.Context, do func(patience time.Duration) error) (err error) {
	for i := range mostTries {
		patience := firstWait << min(i, 6)
		if err = do(patience); !errors.Is(err, errAgain) {
			return err
		}
		select {
		case <-time.After(rand.N(patience)):
		case <-ctx.Done():
			return fmt.Errorf("catalog: %w: %w", err, ctx.Err())
		}
	}
	return fmt.Errorf("catalog: %w", err)
}

// editOwn makes edits in a transaction of their own. An edit for all keys that changes rows takes
// several transactions.
func (c *Catalog) editOwn(ctx context.Context, agreed *Edit, edits ...KeyEdit) (made []Edit, err error) {
	if err := c.usable(); err != nil {
		return nil, err
	}
	err = again(ctx, func(patience time.Duration) error {
		switch {
		case c.memory != nil:
			made, err = c.eachInMemory(ctx, edits, agreed)
		case c.config.Store == nil || agreed != nil && agreed.AsIs:
			err = c.transact(ctx, func(ctx context.Context, tx pgx.Tx) error {
				made, err = c.writeEach(ctx, tx, edits, agreed)
				return err
			})
		case edits[0].Key == AllKeys:
			made = make([]Edit, 1)
			made[0], err = c.keepAll(ctx, edits[0].Name, edits[0].Override, agreed)
		default:
			made, err = c.keepOwn(ctx, edits, agreed, patience)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	_ = c.Refresh(ctx) // the change is committed; another reading will see it
	return made, nil
}

// keepOwn makes edits of keys in a transaction of its own. It keeps no row locked while it waits
// for another transaction's row.
func (c *Catalog) keepOwn(ctx context.Context, edits []KeyEdit, agreed *Edit, patience time.Duration) (made []Edit, err error) {
	do := func(ctx context.Context, tx pgx.Tx) (err error) {
		made, err = c.keepEach(ctx, tx, edits, agreed, patience)
		return err
	}
	ctx, cancel := c.bounded(ctx)
	defer cancel()
	var rows []ratelimit.Request
	for _, e := range edits {
		if f := c.families()[e.Name]; f != nil && f.published != nil && f.published.inFlight == nil {
			rows = append(rows, ratelimit.Request{Limit: f.published.Limit(), Key: e.Key})
		}
	}
	err = c.config.Store.ReplaceFunc(ctx, rows, do)
	return made, err
}

// keepTx makes edits inside tx. They are behind a savepoint, to which it rolls back if another edit
// was faster.
func (c *Catalog) keepTx(ctx context.Context, tx pgx.Tx, edits ...KeyEdit) (made []Edit, err error) {
	if _, err := c.inTx(tx); err != nil {
		return nil, err
	}
	switch {
	case c.memory != nil:
		return c.eachInMemory(ctx, edits, nil)
	case c.config.Store == nil:
		err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			made, err = c.writeEach(ctx, tx, edits, nil)
			return err
		})
		return made, err
	}
	for i := range edits {
		if edits[i].Key == AllKeys {
			return nil, invalid("Key", "AllKeys", "is not for a transaction of the caller's with a Config.Store: it would keep the rows of all keys locked")
		}
	}
	err = again(ctx, func(patience time.Duration) error {
		return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) (err error) {
			made, err = c.keepEach(ctx, tx, edits, nil, patience)
			return err
		})
	})
	return made, err
}

// keepInMemory makes an edit in memory, where all calls take by the new definition at once. It
// makes cuts before the definition changes, and raises after it.
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
		err = c.eachKeys(ctx, k.limit, "", add)
	default:
		err = add([]string{key})
	}
	var statuses, more []ratelimit.Status
	if err == nil {
		statuses, err = c.replace(ctx, cuts)
	}
	if err == nil {
		made, err = c.write(ctx, nil, name, key, by, agreed)
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

// keepAll makes an edit for all keys. It writes the pending entry first, then marks the rows in
// batches, and then writes the definition. If the process dies in between, another completes the
// rows by the definition in force, which is still the old one.
func (c *Catalog) keepAll(ctx context.Context, name string, by *Override, agreed *Edit) (made Edit, err error) {
	known, version, at, err := c.pendingOfAll(ctx, name)
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
	if from, to := k.holds(AllKeys, c.config.Clock); k.limit != nil && changes(from, to) { // more than a mode changes
		r := k.replacement(AllKeys, from, to, false)
		if k.most = k.record(&r); r.By != nil {
			err = c.begin(ctx, &k)
		}
		if err == nil {
			err = c.eachKeys(ctx, k.limit, "", func(keys []string) error {
				return c.besideEdits(ctx, &k, by, agreed, func() error { return c.keepKeys(ctx, &k, keys) })
			})
		}
		if err != nil {
			return Edit{}, err
		}
	}
	err = c.besideEdits(ctx, &k, by, agreed, func() (err error) {
		made, err = c.define(ctx, &k, by, agreed)
		return err
	})
	return made, err
}

// besideEdits runs a part of an edit for all keys. If single keys were edited meanwhile, it marks
// their rows anew and runs the part again: in a limit with many keys, some key is edited before all
// are marked. If more has changed, it returns errAgain.
func (c *Catalog) besideEdits(ctx context.Context, k *keeping, by *Override, agreed *Edit, do func() error) error {
	for range mostTries {
		if err := do(); !errors.Is(err, errAgain) || !k.most.marks() {
			return err
		}
		known, version, _, err := c.pendingOfAll(ctx, k.edit.Name)
		if err != nil {
			return err
		}
		keys, err := c.changedSince(ctx, k.edit.Name, k.version)
		if err == nil {
			err = c.Refresh(ctx)
		}
		if err != nil {
			return err
		}
		if slices.Contains(keys, AllKeys) || !slices.ContainsFunc(known, func(p pending) bool { return p.id == k.most.id }) {
			return errAgain
		}
		plan, err := c.planned(c.view.Load(), k.edit.Name, AllKeys, by, agreed)
		if err != nil {
			return err
		}
		seen := k.version
		k.edit, k.limit, k.pending, k.version = plan.edit, plan.limit, known, version
		for some := range slices.Chunk(keys, keptAtOnce) {
			if err = c.keepKeys(ctx, k, some); errors.Is(err, errAgain) {
				k.version = seen
				break
			} else if err != nil {
				return err
			}
		}
		// They now include the entries that keepKeys wrote.
		if k.pending, _, _, err = c.pendingOfAll(ctx, k.edit.Name); err != nil {
			return err
		}
	}
	return errAgain
}

// define writes the definition of an edit for all keys, once their rows are marked. With it, it
// changes the rows that could not be marked, because they are paused. A cut is completed at once.
func (c *Catalog) define(ctx context.Context, k *keeping, by *Override, agreed *Edit) (made Edit, err error) {
	slices.Sort(k.paused)
	k.paused = slices.Compact(k.paused)
	do := func(ctx context.Context, tx pgx.Tx) error {
		done, err := c.replaceKeys(ctx, tx, k, k.paused, true)
		switch {
		case err != nil:
		case len(k.paused) > 0: // their rows are locked now
			err = c.table.lockFor(ctx, tx, lockWait)
		default:
			_, err = c.table.lock(ctx, tx)
		}
		if err == nil {
			err = c.unchanged(ctx, tx, k, done.apart...)
		}
		if err != nil {
			return err
		}
		made, err = c.write(ctx, tx, k.edit.Name, AllKeys, by, agreed)
		if err != nil || !k.most.marks() {
			return err
		}
		after := c.within()
		if k.most.cuts() {
			after = 0
		}
		if err = c.putOff(ctx, tx, k.most, after); err == nil {
			err = c.table.release(ctx, tx, k.most.name, time.Time{}, c.within(), c.config.Clock)
		}
		return err
	}
	if len(k.paused) > 0 {
		err = c.config.Store.ReplaceFunc(ctx, requests(k.limit, k.paused), do)
	} else {
		err = c.transact(ctx, do)
	}
	if err == nil && k.most.cuts() {
		_, _ = c.Complete(ctx) // otherwise another process completes it
	}
	return made, err
}

// begin writes the pending entry of an edit before any row has its mark.
func (c *Catalog) begin(ctx context.Context, k *keeping) error {
	return c.transact(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := c.table.lock(ctx, tx)
		if err == nil {
			err = c.unchanged(ctx, tx, k)
		}
		if err == nil {
			err = c.table.addPending(ctx, tx, k.most, leased, c.config.Clock)
		}
		return err
	})
}

// putOff makes a pending entry due after a time. If the entry is gone, others have completed it,
// and the error is errAgain.
func (c *Catalog) putOff(ctx context.Context, tx pgx.Tx, p *pending, after time.Duration) error {
	there, err := c.table.putOff(ctx, tx, p, after, c.config.Clock)
	if err == nil && !there {
		return errAgain
	}
	return err
}

// keepKeys marks the rows of some keys. It remembers paused rows, from which no call takes: they
// are changed with the definition.
func (c *Catalog) keepKeys(ctx context.Context, k *keeping, keys []string) error {
	var done replaced
	err := c.config.Store.ReplaceFunc(ctx, requests(k.limit, keys), func(ctx context.Context, tx pgx.Tx) (err error) {
		if done, err = c.replaceKeys(ctx, tx, k, keys, false); err == nil {
			err = c.unchanged(ctx, tx, k, done.apart...)
		}
		if err == nil && k.most.marks() {
			err = c.putOff(ctx, tx, k.most, leased)
		}
		return err
	})
	if err == nil {
		k.paused = append(k.paused, done.paused...)
		k.pending = slices.DeleteFunc(k.pending, func(p pending) bool { return slices.Contains(done.apart, p.key) })
	}
	return err
}

// replaced holds keys of an edit for all keys: those that are paused, and those with pending
// entries of their own.
type replaced struct{ paused, apart []string }

// replaceKeys changes the rows of some keys of an edit for all keys. sure says that tx has written
// the definition. Before that, rows that cannot be marked are left alone. If a key's override makes
// its definitions differ from those of most keys, the key gets a pending entry of its own.
func (c *Catalog) replaceKeys(ctx context.Context, tx pgx.Tx, k *keeping, keys []string, sure bool) (done replaced, err error) {
	var all []ratelimit.Replacement
	var others []*pending
	for _, key := range keys {
		is, will := k.holds(key, c.config.Clock)
		if !changes(is, will) {
			continue
		}
		r := k.replacement(key, is, will, sure)
		if r.By != nil && !k.asMost(key, is, will) {
			r.Mark = apart(r.Mark)
			others, done.apart = append(others, k.record(&r)), append(done.apart, key)
		}
		if r.By != nil && !sure {
			r.To, r.Cuts = is, will.Definition().Capacity < is.Definition().Capacity
		}
		all = append(all, r)
	}
	statuses, err := c.config.Store.ReplaceTx(ctx, tx, all...)
	for i := range statuses {
		if s := &statuses[i]; all[i].By != nil && s.PausedUntil.After(s.At) {
			done.paused = append(done.paused, s.Request.Key)
		}
	}
	for i := 0; i < len(others) && err == nil; i++ {
		err = c.table.putPending(ctx, tx, others[i], unsure, c.config.Clock)
	}
	return done, err
}

// KeyEdit is one of the edits that [Catalog.SetEach] makes together: of a limit's override for one
// key.
type KeyEdit struct {
	Name, Key string
	Override  *Override // as for [Catalog.Set]; nil removes it
}

// first returns the only one of edits.
func first(made []Edit, err error) (Edit, error) {
	if err != nil {
		return Edit{}, err
	}
	return made[0], nil
}

// eachInMemory makes edits in memory; none if one of several is invalid.
func (c *Catalog) eachInMemory(ctx context.Context, edits []KeyEdit, agreed *Edit) (made []Edit, err error) {
	if len(edits) > 1 {
		if err := c.Refresh(ctx); err != nil {
			return nil, err
		}
		for i := range edits {
			if _, err := c.planned(c.view.Load(), edits[i].Name, edits[i].Key, edits[i].Override, nil); err != nil {
				return nil, err
			}
		}
	}
	if c.config.Store == nil {
		return c.writeEach(ctx, nil, edits, agreed)
	}
	made = make([]Edit, len(edits))
	for i := range edits {
		if made[i], err = c.keepInMemory(ctx, edits[i].Name, edits[i].Key, edits[i].Override, agreed); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// writeEach makes edits that leave rows as they are.
func (c *Catalog) writeEach(ctx context.Context, tx pgx.Tx, edits []KeyEdit, agreed *Edit) (made []Edit, err error) {
	made = make([]Edit, len(edits))
	for i := range edits {
		if made[i], err = c.write(ctx, tx, edits[i].Name, edits[i].Key, edits[i].Override, agreed); err != nil {
			return nil, err
		}
	}
	return made, nil
}
