package edit

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// A Replacement replaces the definition of a key by another.
type Replacement struct {
	Before, After *decide.Demand
	By            *decide.Demand // measures the rows until they are raised; After if they are not marked
	Mark          time.Time      // zero for none
	Marked        []Marked       // how rows are measured that have a mark, instead of by Before
	Only          bool           // only marked rows are changed
	Cuts          bool           // a definition of less capacity than After follows, once all rows are marked

	was, is []bucket.State // the rows before, measured by Before, and afterwards
}

// Marked says how to measure rows that were marked at an instant.
type Marked struct {
	At time.Time
	By []*bucket.Definition // for one shard: the first measured the rows then; calls have taken by all of them since
}

// Change changes the rows of a key from one definition to another, and returns the status
// afterwards. A key without rows stays without: it is full by either definition. The tokens in the
// memories of processes stay there, since the row owes them.
func (e *Editor) Change(ctx context.Context, tx pgx.Tx, before, after *decide.Demand) (ratelimit.Status, error) {
	r := Replacement{Before: before, After: after, By: after}
	at, err := e.replace(ctx, tx, &r)
	if err != nil {
		return ratelimit.Status{}, err
	}
	return decide.Shown(after.Limit, after.Key, r.is[:after.Definition.Shards], at.UTC()), nil
}

// ChangeOwn is Change in a transaction of its own.
func (e *Editor) ChangeOwn(ctx context.Context, before, after *decide.Demand) (status ratelimit.Status, err error) {
	err = e.transact(ctx, append(before.Rows(), after.Rows()...), func(ctx context.Context, tx pgx.Tx) (err error) {
		status, err = e.Change(ctx, tx, before, after)
		return err
	})
	e.known.Forget(after.KeyOf()) // again, now that others see it
	return status, err
}

// Replace makes replacements, with all rows locked in their order, and returns the statuses before.
func (e *Editor) Replace(ctx context.Context, tx pgx.Tx, all []Replacement) ([]ratelimit.Status, error) {
	each := make([]*Replacement, len(all))
	for i := range all {
		each[i] = &all[i]
	}
	some, at, err := e.marked(ctx, tx, each)
	if err == nil && len(some) > 0 {
		at, err = e.replace(ctx, tx, some...)
	}
	if err != nil {
		return nil, err
	}
	statuses := make([]ratelimit.Status, len(all))
	for i, r := range each {
		statuses[i] = decide.Shown(r.Before.Limit, r.Before.Key, r.was, at.UTC())
	}
	return statuses, nil
}

// marked returns the replacements to make. If some are of marked rows only, it reads the rows
// first, and leaves out keys without a marked row: to lock a row is to write it.
func (e *Editor) marked(ctx context.Context, tx pgx.Tx, all []*Replacement) (some []*Replacement, at time.Time, err error) {
	if !slices.ContainsFunc(all, func(r *Replacement) bool { return r.Only }) {
		return all, at, nil
	}
	var rows table.Rows
	for _, r := range all {
		rows.Rows = append(rows.Rows, r.Before.Rows()...)
	}
	if err := e.table.Read(ctx, tx, &rows, e.Clock()); err != nil {
		return nil, at, e.faultOf(all, err)
	}
	for _, r := range all {
		n := r.Before.Definition.Shards
		r.was = r.Before.Read(rows.States[:n], rows.Found[:n], rows.At)
		rows.States, rows.Found = rows.States[n:], rows.Found[n:]
		if !r.Only || slices.ContainsFunc(r.was, func(s bucket.State) bool { m, _ := r.markedBy(&s); return m != nil }) {
			some = append(some, r)
		}
	}
	return some, rows.At, nil
}

// Func runs do, which locks rows, in a transaction of the Store's own.
func (e *Editor) Func(ctx context.Context, rows []decide.Row, do func(context.Context, pgx.Tx) error) error {
	err := e.transact(ctx, rows, do)
	for _, row := range rows {
		e.known.Forget(row.Key) // again, now that others see it
	}
	return err
}

func (e *Editor) faultOf(all []*Replacement, err error) error {
	names := make([]string, len(all))
	for i, r := range all {
		names[i] = r.Before.Definition.Name
	}
	return e.FaultOf("change", names, err)
}

// replace makes replacements, and returns their instant.
func (e *Editor) replace(ctx context.Context, tx pgx.Tx, all ...*Replacement) (time.Time, error) {
	demands := make([]*decide.Demand, len(all))
	for i, r := range all {
		demands[i] = r.Before
	}
	rows, at, err := e.lockEach(ctx, tx, demands...)
	if err != nil {
		return at, e.faultOf(all, err)
	}
	var batch pgx.Batch
	for i, r := range all {
		r.decide(&rows[i], at)
		for shard, state := range r.is {
			if row := (decide.Row{Key: r.After.KeyOf(), Shard: shard}); rows[i].made && r.Mark.IsZero() {
				e.table.QueueRemove(&batch, row)
			} else {
				e.table.QueuePut(&batch, row, state)
			}
		}
	}
	if err := tx.SendBatch(ctx, &batch).Close(); err != nil {
		return at, e.faultOf(all, err)
	}
	for _, r := range all {
		e.known.Forget(r.After.KeyOf())
	}
	return at, nil
}

// decide sets what the rows become. A paused row becomes as After has it, without a mark, since no
// call takes from it. Other rows become as By has them, and are marked.
//
// But if more was used than a cut to By leaves, the result would not show what was there. Then a
// row that After cuts becomes as After has it, without a mark: callers who do not know of a raise
// would not have got as much. Any other row keeps the capacity of Before, and is marked uncut.
//
// A row that was marked already, and has more than By's capacity, becomes as By has it even so, in
// debt: a take by By would clip it. A missing row is made to be marked: one that a call by Before
// makes would not be raised.
func (r *Replacement) decide(rows *locked, at time.Time) {
	d, marked, left, less := &r.Before.Definition, false, 0.0, 0.0
	r.was = slices.Clone(rows.states)
	for i := range r.was {
		if m, uncut := r.markedBy(&r.was[i]); m != nil {
			marked, r.was[i] = true, d.Shard().Raise(m.By, uncut, r.was[i], rows.outs[i], m.At, at)
		}
		left += r.was[i].Value
	}
	to, mark := r.By.Definition, time.Time{}
	if !r.Mark.IsZero() {
		mark = bucket.Mark(r.Mark)
	}
	switch paused := slices.ContainsFunc(r.was, func(s bucket.State) bool { return s.Paused.After(at) }); {
	case r.Only && !marked:
		if rows.made {
			r.is = r.was // to be removed
		}
		return
	case paused:
		to = r.After.Definition
	case mark.IsZero() || !d.Floors(&to, r.was, rows.outs, at):
	case marked && !r.Cuts && left > to.Capacity:
		less = (r.After.Definition.Capacity - to.Capacity) / float64(to.Shards)
		to = r.After.Definition
	case r.Only || r.After.Definition.Capacity < d.Capacity:
		to, mark = r.After.Definition, time.Time{}
	default:
		to.Capacity, mark = d.Capacity, bucket.MarkUncut(r.Mark)
	}
	r.is = d.Change(&to, r.After.Key, r.was, rows.outs, at)
	for i := range r.is {
		if s := &r.is[i]; !s.Paused.After(at) && (marked || !mark.IsZero()) {
			s.Paused = mark
		}
		r.is[i].Value -= less
	}
}

// markedBy returns how a row is measured by its mark; nil if none of Marked has this mark. uncut
// reports that the row is marked uncut.
func (r *Replacement) markedBy(s *bucket.State) (m *Marked, uncut bool) {
	for i := range r.Marked {
		if m, uncut = &r.Marked[i], s.Paused.Equal(bucket.MarkUncut(r.Marked[i].At)); uncut || s.Paused.Equal(bucket.Mark(m.At)) {
			return m, uncut
		}
	}
	return nil, false
}
