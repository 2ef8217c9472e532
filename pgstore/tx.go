package pgstore

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

// rounds bounds how often a call looks again because others changed a row between
// its looking and its taking.
const rounds = 8

// decideTx decides the requests of a verb in tx.
func (b *base) decideTx(ctx context.Context, tx pgx.Tx, verb decide.Verb, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	w := b.watch(ctx, verb.Observed(reserve), ratelimit.FormTx, requests...)
	result, err := b.decideIn(ctx, tx, verb, reserve, requests)
	w.Report(&result, err)
	return result, err
}

func (b *base) decideIn(ctx context.Context, tx pgx.Tx, verb decide.Verb, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	if err := b.usableIn(tx); err != nil {
		return ratelimit.Result{}, err
	}
	if decide.Moded(requests) {
		return decide.ByMode(verb, b.Instant(), requests, func(left []ratelimit.Request) (ratelimit.Result, error) {
			return b.decideIn(ctx, tx, verb, reserve, left)
		})
	}
	call, err := b.call(verb, reserve, requests)
	switch {
	case err != nil:
		return ratelimit.Result{}, err
	case verb == decide.Look:
		return b.checkTx(ctx, tx, &call)
	case call.OnLockedRows():
		result, _, err := b.takeLocked(ctx, tx, &pgx.Batch{}, &call)
		return result, err
	case len(call.Demands) == 1 && !call.Sharded():
		return b.takeOne(ctx, tx, &call)
	}
	return b.takeSeveral(ctx, tx, &call)
}

func (b *base) checkTx(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	view, err := b.look(ctx, tx, &pgx.Batch{}, call, all)
	if err != nil {
		return ratelimit.Result{}, b.Fault("check", err)
	}
	return call.Checked(view), nil
}

// takeOne decides a call for one row. The row itself grants it. When it does not it is read,
// which gives the refusal or, since it is locked by now, the take to make: its ticks may be its
// own, or a pause is over.
func (b *base) takeOne(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	change := call.Demands[0].Change(0, 0, call.Demands[0].Count)
	var view decide.View
	for range rounds {
		taken, err := b.table.Take(ctx, tx, call.Reserve, &change, b.Clock())
		if err != nil {
			return ratelimit.Result{}, b.faultOf(call, err)
		}
		if taken.OK {
			change.After = taken.After
			return b.granted(call, []decide.Change{change}, taken.At, taken.Xid, tx), nil
		}
		if view, err = b.look(ctx, tx, &pgx.Batch{}, call, all); err != nil {
			return ratelimit.Result{}, b.Fault("look", err)
		}
		changes, ok := call.Plan(view)
		if !ok {
			break
		}
		if err := b.renew(ctx, tx, changes, view.At); err != nil {
			return ratelimit.Result{}, b.Fault("renew", err)
		}
		change = changes[0]
	}
	return call.Refused(view), nil
}

// renew writes the rows of changes anew that no take can add to, since another
// definition has written them or they have been added to for long. They mean the same
// afterwards.
func (b *base) renew(ctx context.Context, q table.Querier, changes []decide.Change, at time.Time) error {
	var batch pgx.Batch
	for i := range changes {
		b.queueRenew(&batch, &changes[i], at)
	}
	if batch.Len() == 0 {
		return nil
	}
	return q.SendBatch(ctx, &batch).Close()
}

// queueRenew puts into a batch the writing of a change's row anew, if no take can add to it.
func (b *base) queueRenew(batch *pgx.Batch, c *decide.Change, at time.Time) {
	if !c.Definition.Plain(c.Before, at) {
		as := c.Definition.Refill(c.Before, at)
		b.table.QueueRenew(batch, c.Row, c.Before, as)
		c.Before = as
	}
}

// all and unsharded choose the limits to look at.
func all(*decide.Demand) bool         { return true }
func unsharded(a *decide.Demand) bool { return !a.Sharded() }

// look reads the states of those of a call's limits for which at is true, after the statements in
// batch; for the others it returns the known states.
func (b *base) look(ctx context.Context, q table.Querier, batch *pgx.Batch, call *decide.Call, at func(*decide.Demand) bool) (decide.View, error) {
	var rows table.Rows
	for i := range call.Demands {
		if a := &call.Demands[i]; at(a) {
			rows.Rows = append(rows.Rows, a.Rows()...)
		}
	}
	b.table.QueueRead(batch, &rows, b.Clock())
	if err := q.SendBatch(ctx, batch).Close(); err != nil {
		return decide.View{}, err
	}
	view, n := decide.View{States: make([][]bucket.State, len(call.Demands)), At: rows.At}, 0
	for i := range call.Demands {
		a := &call.Demands[i]
		if !at(a) {
			view.States[i] = b.shards.Cached(a, view.At)
			continue
		}
		last := n + a.Definition.Shards
		view.States[i] = a.Read(rows.States[n:last], rows.Found[n:last], view.At)
		b.shards.Observe(a, view.States[i])
		n = last
	}
	return view, nil
}

// takeSeveral decides a call for several rows. It tries the rows that most likely have enough
// without looking at them. Only when one refuses, or all shards of a limit have refused lately,
// does it read them, and refuses by their states or tries again by them. Tokens that several
// shards of a limit have only together are taken on locked rows, at one instant: the limit must
// hold by the instant that callers are told.
func (b *base) takeSeveral(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	if call.First && len(call.Demands) > 1 {
		return b.takeFirst(ctx, tx, call)
	}
	changes, ok := b.guess(call, func(i int) int {
		if shard, ok := b.heldBy(tx, &call.Demands[i]); ok {
			return shard
		}
		return b.choose(&call.Demands[i])
	})
	ok = ok && !b.shards.Refuse(call, b.Clock())
	look, undo := all, &pgx.Batch{}
	for round := 0; ; round++ {
		switch {
		case ok && call.Divides(changes):
			return b.takeDivided(ctx, tx, call)
		case ok:
			t := try{base: b, call: call, changes: changes}
			if err := t.send(ctx, tx); err != nil {
				return ratelimit.Result{}, b.faultOf(call, err)
			}
			if t.granted() {
				return t.result(tx), nil
			}
			look, undo = t.undo()
		}
		view, err := b.look(ctx, tx, undo, call, look)
		if err != nil {
			return ratelimit.Result{}, b.Fault("look", err)
		}
		if changes, ok = call.Plan(view); !ok || round == rounds {
			b.shards.Refused(call, view.At)
			return call.Refused(view), nil
		}
		look, undo = all, &pgx.Batch{}
	}
}

// takeDivided decides a call on its rows, locked, which a refusal leaves as if they had not been
// asked.
func (b *base) takeDivided(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	var batch pgx.Batch
	batch.Queue("SAVEPOINT " + table.Savepoint)
	result, _, err := b.takeLocked(ctx, tx, &batch, call)
	if err != nil || result.OK {
		return result, err
	}
	b.shards.Refused(call, result.At)
	if err := tx.SendBatch(ctx, toSavepoint()).Close(); err != nil {
		return ratelimit.Result{}, b.Fault("undo", err)
	}
	return result, nil
}

// takeFirst decides a call that takes from the first limit that can grant. Most often the first
// can, and is asked alone. If it refuses, the rows of all limits are locked, in the one order,
// and decide. So that the order holds, the first is asked behind a savepoint.
func (b *base) takeFirst(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	head, undo := call.Head(), &pgx.Batch{}
	if changes, ok := b.guess(head, func(i int) int { return b.choose(&head.Demands[i]) }); ok {
		t := try{base: b, call: head, changes: changes, behind: true}
		if err := t.send(ctx, tx); err != nil {
			return ratelimit.Result{}, b.faultOf(call, err)
		}
		if t.granted() {
			return t.result(tx), nil
		}
		_, undo = t.undo()
	}
	result, _, err := b.takeLocked(ctx, tx, undo, call)
	return result, err
}

// takeLocked decides a call on its rows, all of which it locks and reads in one round trip,
// after the statements that batch has already; and writes the takes in another. It returns the
// takes, too.
func (b *base) takeLocked(ctx context.Context, tx pgx.Tx, batch *pgx.Batch, call *decide.Call) (ratelimit.Result, *try, error) {
	view, made, err := b.lockAll(ctx, tx, batch, call)
	if err != nil {
		return ratelimit.Result{}, nil, b.faultOf(call, err)
	}
	changes, ok := call.Plan(view)
	write, t := &pgx.Batch{}, &try{base: b, call: call, changes: changes, taken: make([]table.Taken, max(len(changes), 1))}
	if ok {
		for i := range changes {
			c := &changes[i]
			b.table.QueuePut(write, c.Row, c.After)
			t.taken[i] = table.Taken{OK: true, After: c.After, At: view.At}
			delete(made, c.Row)
		}
		table.QueueXid(write, &t.taken[0].Xid)
	}
	for row := range made {
		b.table.QueueRemove(write, row)
	}
	if write.Len() > 0 {
		if err := tx.SendBatch(ctx, write).Close(); err != nil {
			return ratelimit.Result{}, nil, b.faultOf(call, err)
		}
	}
	if !ok {
		return call.Refused(view), t, nil
	}
	if call.First {
		t.call, t.changes = call.Chosen(changes)
	}
	return t.result(tx), t, nil
}

// lockAll locks all rows of a call, and reads them; it returns also those that it has made, full.
func (b *base) lockAll(ctx context.Context, tx pgx.Tx, batch *pgx.Batch, call *decide.Call) (view decide.View, made map[decide.Row]bool, err error) {
	var changes []decide.Change
	for _, i := range call.Locking() {
		for shard := range call.Demands[i].Definition.Shards {
			changes = append(changes, call.Demands[i].Change(i, shard, 0))
		}
	}
	given, at, err := b.touch(ctx, tx, batch, changes)
	if err != nil {
		return view, nil, err
	}
	made = make(map[decide.Row]bool)
	view = decide.View{States: make([][]bucket.State, len(call.Demands)), At: at}
	for i, c := range changes {
		view.States[c.Demand] = append(view.States[c.Demand], given[i].Taken.After)
		if given[i].Taken.Made {
			made[c.Row] = true
		}
	}
	b.saw(call, view)
	return view, made, nil
}

// touch locks the rows of changes, after the statements in batch, and reads them. It gives them
// nothing rather than reads them, so it leaves no predicate locks under SERIALIZABLE.
func (b *base) touch(ctx context.Context, q table.Querier, batch *pgx.Batch, changes []decide.Change) ([]table.Give, time.Time, error) {
	given := make([]table.Give, len(changes))
	for i := range changes {
		given[i].Change = &changes[i]
	}
	at, err := b.table.Give(ctx, q, batch, given, b.Clock())
	return given, at, err
}

// guess names one row for each of the call's limits; false if a count fits no
// single shard.
func (b *base) guess(call *decide.Call, choose func(i int) int) ([]decide.Change, bool) {
	changes := make([]decide.Change, len(call.Demands))
	for i := range call.Demands {
		a := &call.Demands[i]
		if !a.Sharded() {
			changes[i] = a.Change(i, 0, a.Count)
			continue
		}
		changes[i] = a.Change(i, choose(i), a.Count)
		if a.Count > changes[i].Definition.Capacity {
			return nil, false
		}
		changes[i].Floor = 0 // debt only when no shard has enough, which is not known yet
	}
	return changes, true
}

// choose is the shard to try first.
func (b *base) choose(a *decide.Demand) int {
	return b.shards.Choose(a, decide.UpTo(a.Definition.Shards))
}

// try is the taking of changes, one row each, in one round trip.
//
// It puts no savepoint around the rows of limits without shards: the newest minor versions of
// PostgreSQL keep a predicate lock on each row that is written behind one under SERIALIZABLE,
// and more than two of those on a page abort strangers. Tokens taken in vain are put back
// instead, for which each row is read as it is locked, by giving it 0 tokens; the tokens taken,
// added to those left, would be another number, and at another time. The rows that were asked
// stay locked, as one that is asked alone does. A shard that was asked in vain must not: two
// transactions that go on to each other's would deadlock. So shards are behind a savepoint,
// after all else; and a row that has to be written anew is so when it is its turn. In the
// portable form all rows are: that does not tell which rows a take made.
type try struct {
	base    *base
	call    *decide.Call
	changes []decide.Change
	behind  bool          // the savepoint, with or without shards
	before  []table.Taken // the states of the rows without shards
	taken   []table.Taken
}

// toSavepoint begins a batch that undoes all that is behind the savepoint.
func toSavepoint() *pgx.Batch {
	var batch pgx.Batch
	batch.Queue("ROLLBACK TO SAVEPOINT " + table.Savepoint)
	batch.Queue("RELEASE SAVEPOINT " + table.Savepoint)
	return &batch
}

func (t *try) send(ctx context.Context, q table.Querier) error {
	t.before, t.taken = make([]table.Taken, len(t.changes)), make([]table.Taken, len(t.changes))
	var batch pgx.Batch
	now := t.base.Clock()
	for i := range t.changes {
		if t.saved(i) && (i == 0 || !t.saved(i-1)) {
			batch.Queue("SAVEPOINT " + table.Savepoint)
		}
		if c := &t.changes[i]; !c.Past.IsZero() {
			t.base.queueRenew(&batch, c, c.Past)
		}
		if !t.saved(i) {
			t.base.table.QueueTouch(&batch, &t.changes[i], now, &t.before[i])
		}
		t.base.table.QueueTake(&batch, t.call.Reserve, &t.changes[i], now, &t.taken[i])
	}
	return q.SendBatch(ctx, &batch).Close()
}

func (t *try) sharded(i int) bool { return t.call.Demands[t.changes[i].Demand].Sharded() }

// saved reports whether a change is made behind the savepoint.
func (t *try) saved(i int) bool { return t.behind || !t.base.table.TellsMade() || t.sharded(i) }

// granted reports whether all was taken.
func (t *try) granted() bool {
	return !slices.ContainsFunc(t.taken, func(taken table.Taken) bool { return !taken.OK })
}

// at is the instant by which all was decided.
func (t *try) at() (at time.Time) {
	for i := range t.taken {
		t.changes[i].After = t.taken[i].After
		if t.taken[i].At.After(at) {
			at = t.taken[i].At
		}
	}
	return at
}

// result is that of the call, which was granted in tx.
func (t *try) result(tx pgx.Tx) ratelimit.Result {
	for i := range t.changes {
		if t.sharded(i) {
			t.base.hold(tx, t.changes[i].Row)
		}
	}
	return t.base.granted(t.call, t.changes, t.at(), t.taken[0].Xid, tx)
}

// undo begins a batch that puts the taken tokens back, and returns which limits to read behind
// it. If a limit without shards has refused, the states of the others are not needed.
func (t *try) undo() (look func(*decide.Demand) bool, batch *pgx.Batch) {
	look, batch = all, &pgx.Batch{}
	if t.saved(len(t.changes) - 1) {
		batch = toSavepoint()
	}
	for i := range t.changes {
		if !t.taken[i].OK && !t.sharded(i) {
			look = unsharded
		}
		switch {
		case t.saved(i) || !t.taken[i].OK && !t.before[i].Made:
		case t.before[i].Made:
			t.base.table.QueueRemove(batch, t.changes[i].Row)
		default:
			t.base.table.QueuePut(batch, t.changes[i].Row, t.before[i].After)
		}
	}
	return look, batch
}
