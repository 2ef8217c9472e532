// Package tx decides calls in transactions: those of callers, and those in which a runner runs a
// caller's function.
package tx

import (
	"context"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/known"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// Taker decides calls in callers' transactions. It is safe for concurrent use.
type Taker struct {
	*conn.Conn
	table *table.Table
	known *known.Known
	takes atomic.Int32 // takes under way
	slow  table.Lately // the rows with a slow take lately
}

// NewTaker returns a Taker.
func NewTaker(c *conn.Conn, t *table.Table, k *known.Known) *Taker {
	return &Taker{Conn: c, table: t, known: k}
}

// rounds bounds how often a call reads again because others changed a row after it was read.
const rounds = 8

// Decide decides the requests of a verb in tx.
func (b *Taker) Decide(ctx context.Context, tx pgx.Tx, verb decide.Verb, reserve bool, requests []ratelimit.Request) (ratelimit.Result, error) {
	if err := conn.UsableIn(tx); err != nil {
		return ratelimit.Result{}, err
	}
	if call, ok := b.known.Definitions.Plain(verb, reserve, nil, requests); ok {
		return b.takeOne(ctx, tx, &call)
	}
	if decide.Moded(requests) {
		return decide.ByMode(verb, b.Instant(), requests, func(left []ratelimit.Request) (ratelimit.Result, error) {
			return b.Decide(ctx, tx, verb, reserve, left)
		})
	}
	call, err := b.known.Definitions.Call(verb, reserve, nil, requests)
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

func (b *Taker) checkTx(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	view, err := b.Look(ctx, tx, &pgx.Batch{}, call, All)
	if err != nil {
		return ratelimit.Result{}, b.FaultOf("check", call.Names(), err)
	}
	return call.Checked(view), nil
}

// takeOne decides a call for one row by a take. If the take refuses, it reads the row, which is
// locked by now. The read gives the refusal, or a take that fits the row, which may have ticks of
// its own or a pause that is over.
func (b *Taker) takeOne(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	changes := []decide.Change{call.Demands[0].Change(0, 0, call.Demands[0].Count)}
	var view decide.View
	for range rounds {
		taken, err := b.take(ctx, tx, call.Reserve, &changes[0])
		if err != nil {
			return ratelimit.Result{}, b.faultOf(call, err)
		}
		if taken.OK {
			changes[0].After = taken.After
			return b.granted(call, changes, taken.At, taken.Xid, tx), nil
		}
		if view, err = b.Look(ctx, tx, &pgx.Batch{}, call, All); err != nil {
			return ratelimit.Result{}, b.FaultOf("look at", call.Names(), err)
		}
		var ok bool
		if changes, ok = call.Plan(view); !ok {
			break
		}
		if err := b.renew(ctx, tx, changes, view.At); err != nil {
			return ratelimit.Result{}, b.faultOf(call, err)
		}
	}
	return call.Refused(view), nil
}

// slow is how long a take must last, while others are under way, for later takes of its row to wait
// for the row first.
const slow = 20 * time.Millisecond

// take takes from one row. If a take of the row was slow lately, it waits for the row first.
func (b *Taker) take(ctx context.Context, tx pgx.Tx, reserve bool, c *decide.Change) (taken table.Taken, err error) {
	begun := b.takeBegins()
	defer b.takeEnds(begun, c.Row)
	if begun.IsZero() || !b.waits(c.Row) {
		return b.table.Take(ctx, tx, reserve, c, b.Clock())
	}
	return b.takeBehind(ctx, tx, reserve, c)
}

// takeBehind waits for a row, and takes from it.
func (b *Taker) takeBehind(ctx context.Context, tx pgx.Tx, reserve bool, c *decide.Change) (taken table.Taken, err error) {
	var batch pgx.Batch
	b.table.QueueAwait(&batch, c.Row)
	b.table.QueueTake(&batch, reserve, c, b.Clock(), &taken)
	err = tx.SendBatch(ctx, &batch).Close()
	return taken, err
}

// waits reports whether takes must lock a row in a statement of its own first, because a take was
// slow lately. An upsert that waits for a lock looks the row up anew whenever a transaction ahead
// of it ends. An old snapshot keeps all versions of the row, so each look-up is slow. A locking
// statement continues from the version that it waited for. With a snapshot five minutes old, 200
// transactions a second became 46 without the lock, and 140 to 170 with it.
func (b *Taker) waits(row decide.Row) bool {
	return len(b.slow.Among(func() []int64 { return []int64{table.Lock(b.Schema, row)} })) > 0
}

// takeBegins begins a take. It returns the time if other takes are under way, otherwise zero.
func (b *Taker) takeBegins() (begun time.Time) {
	if b.takes.Add(1) > 1 {
		begun = time.Now()
	}
	return begun
}

// takeEnds ends a take, and remembers its rows if the take was slow.
func (b *Taker) takeEnds(begun time.Time, rows ...decide.Row) {
	if b.takes.Add(-1) == 0 || begun.IsZero() || !b.table.PassesOver() || time.Since(begun) < slow {
		return
	}
	for _, row := range rows {
		b.slow.Note(table.Lock(b.Schema, row), engine.Contended)
	}
}

// granted returns the result of a call with changes made at an instant in tx. xid is the ID of the
// transaction or savepoint that made them.
func (b *Taker) granted(call *decide.Call, changes []decide.Change, at time.Time, xid string, tx pgx.Tx) ratelimit.Result {
	session, _ := conn.Session(tx)
	return b.known.Granted(call, changes, at, xid, session)
}

// faultOf wraps an error of a call in a caller's transaction.
func (b *Taker) faultOf(call *decide.Call, err error) error {
	return b.FaultOf("take from", call.Names(), err)
}

// Look reads the states of a call's limits, after the statements in batch. It reads the limits for
// which at is true, and returns cached states of the others.
func (b *Taker) Look(ctx context.Context, q table.Querier, batch *pgx.Batch, call *decide.Call, at func(*decide.Demand) bool) (decide.View, error) {
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
			view.States[i] = b.known.Shards.Cached(a, view.At)
			continue
		}
		last := n + a.Definition.Shards
		view.States[i] = a.Read(rows.States[n:last], rows.Found[n:last], view.At)
		b.known.Shards.Observe(a, view.States[i])
		n = last
	}
	return view, nil
}

// All and unsharded choose limits to read.
func All(*decide.Demand) bool { return true }

func unsharded(a *decide.Demand) bool { return !a.Sharded() }

// renew rewrites rows to which no take can add, because another definition wrote them or many takes
// added to them. Their meaning stays the same.
func (b *Taker) renew(ctx context.Context, q table.Querier, changes []decide.Change, at time.Time) error {
	var batch pgx.Batch
	for i := range changes {
		b.queueRenew(&batch, &changes[i], at)
	}
	if batch.Len() == 0 {
		return nil
	}
	return q.SendBatch(ctx, &batch).Close()
}

// queueRenew puts the rewriting of a change's row into a batch, if no take can add to the row.
func (b *Taker) queueRenew(batch *pgx.Batch, c *decide.Change, at time.Time) {
	if !c.Definition.Plain(c.Before, at) {
		as := c.Definition.Refill(c.Before, at)
		b.table.QueueRenew(batch, c.Row, c.Before, as)
		c.Before = as
	}
}

// takeSeveral decides a call for several rows. It tries the rows that most likely have enough
// without reading them. It reads them only if one refuses, or if all shards of a limit have refused
// lately. Then it refuses by their states, or tries again. If only several shards of a limit
// together have enough, it takes on locked rows, at one instant: the limit must hold by the instant
// that callers are told.
func (b *Taker) takeSeveral(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	if call.First && len(call.Demands) > 1 {
		return b.takeFirst(ctx, tx, call)
	}
	changes, ok := b.known.Guess(call, func(i int) int {
		if shard, ok := b.HeldBy(tx, &call.Demands[i]); ok {
			return shard
		}
		return b.known.Choose(&call.Demands[i])
	})
	ok = ok && !b.known.Shards.Refuse(call, b.Clock())
	look, undo := All, &pgx.Batch{}
	for round := 0; ; round++ {
		switch {
		case ok && call.Divides(changes):
			return b.takeDivided(ctx, tx, call)
		case ok:
			t := try{taker: b, call: call, changes: changes}
			if err := t.send(ctx, tx); err != nil {
				return ratelimit.Result{}, b.faultOf(call, err)
			}
			if t.granted() {
				return t.result(tx), nil
			}
			look, undo = t.undo()
		}
		view, err := b.Look(ctx, tx, undo, call, look)
		if err != nil {
			return ratelimit.Result{}, b.FaultOf("look at", call.Names(), err)
		}
		if changes, ok = call.Plan(view); !ok || round == rounds {
			b.known.Shards.Refused(call, view.At)
			return call.Refused(view), nil
		}
		look, undo = All, &pgx.Batch{}
	}
}

// try takes changes of one row each, in one round trip.
//
// Rows of limits without shards are not behind a savepoint. Under SERIALIZABLE the newest minor
// versions of PostgreSQL keep a predicate lock on each row written behind one. With more than two
// of these on a page, transactions that touch none of the rows are aborted. Instead, tokens taken
// in vain are put back. To know what to put back, try first locks and reads each row, by giving it
// 0 tokens: adding the taken tokens to what is left would give another number. Rows that refused
// stay locked, as a single one does.
//
// A shard that refused must not stay locked: two transactions that go on to each other's shards
// would deadlock. So shards come last, behind a savepoint. A row that must be rewritten is
// rewritten just before its take. On a distributed table all rows are behind the savepoint, because
// it does not report which rows a take made.
type try struct {
	taker   *Taker
	call    *decide.Call
	changes []decide.Change
	behind  bool          // all changes are behind the savepoint, also of limits without shards
	before  []table.Taken // the rows without shards as they were
	taken   []table.Taken
}

func (t *try) send(ctx context.Context, q table.Querier) error {
	t.before, t.taken = make([]table.Taken, len(t.changes)), make([]table.Taken, len(t.changes))
	var batch pgx.Batch
	now, rows := t.taker.Clock(), make([]decide.Row, len(t.changes))
	for i := range t.changes {
		if t.saved(i) && (i == 0 || !t.saved(i-1)) {
			batch.Queue("SAVEPOINT " + table.Savepoint)
		}
		rows[i] = t.changes[i].Row
		if t.taker.waits(rows[i]) {
			t.taker.table.QueueAwait(&batch, rows[i])
		}
		if c := &t.changes[i]; !c.Past.IsZero() {
			t.taker.queueRenew(&batch, c, c.Past)
		}
		if !t.saved(i) {
			t.taker.table.QueueTouch(&batch, &t.changes[i], now, &t.before[i])
		}
		t.taker.table.QueueTake(&batch, t.call.Reserve, &t.changes[i], now, &t.taken[i])
	}
	defer t.taker.takeEnds(t.taker.takeBegins(), rows...)
	return q.SendBatch(ctx, &batch).Close()
}

func (t *try) sharded(i int) bool { return t.call.Demands[t.changes[i].Demand].Sharded() }

// saved reports whether a change stands behind the savepoint.
func (t *try) saved(i int) bool { return t.behind || !t.taker.table.ReportsMade() || t.sharded(i) }

// granted reports whether all was taken.
func (t *try) granted() bool {
	return !slices.ContainsFunc(t.taken, func(taken table.Taken) bool { return !taken.OK })
}

// at returns the latest instant of the takes, and completes the changes with the states that they
// left.
func (t *try) at() (at time.Time) {
	for i := range t.taken {
		t.changes[i].After = t.taken[i].After
		if t.taken[i].At.After(at) {
			at = t.taken[i].At
		}
	}
	return at
}

// result returns the result of the call, which was granted in tx.
func (t *try) result(tx pgx.Tx) ratelimit.Result {
	for i := range t.changes {
		if t.sharded(i) {
			t.taker.hold(tx, t.changes[i].Row)
		}
	}
	return t.taker.granted(t.call, t.changes, t.at(), t.taken[0].Xid, tx)
}

// undo begins a batch that puts the taken tokens back. It returns which limits to read after it. If
// a limit without shards has refused, sharded limits need not be read.
func (t *try) undo() (look func(*decide.Demand) bool, batch *pgx.Batch) {
	look, batch = All, &pgx.Batch{}
	if t.saved(len(t.changes) - 1) {
		batch = table.ToSavepoint()
	}
	for i := range t.changes {
		if !t.taken[i].OK && !t.sharded(i) {
			look = unsharded
		}
		switch {
		case t.saved(i) || !t.taken[i].OK && !t.before[i].Made:
		case t.before[i].Made:
			t.taker.table.QueueRemove(batch, t.changes[i].Row)
		default:
			t.taker.table.QueuePut(batch, t.changes[i].Row, t.before[i].After)
		}
	}
	return look, batch
}

// takeDivided decides a call on locked rows. After a refusal they are unlocked again.
func (b *Taker) takeDivided(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	var batch pgx.Batch
	batch.Queue("SAVEPOINT " + table.Savepoint)
	result, _, err := b.takeLocked(ctx, tx, &batch, call)
	if err != nil || result.OK {
		return result, err
	}
	b.known.Shards.Refused(call, result.At)
	if err := tx.SendBatch(ctx, table.ToSavepoint()).Close(); err != nil {
		return ratelimit.Result{}, b.Fault("undo", err)
	}
	return result, nil
}

// takeFirst decides a call that takes from the first limit that can grant. Most often that is the
// first, which is asked alone, behind a savepoint. If it refuses, the savepoint releases its row,
// and the rows of all limits are locked in the one order and decide.
func (b *Taker) takeFirst(ctx context.Context, tx pgx.Tx, call *decide.Call) (ratelimit.Result, error) {
	head, undo := call.Head(), &pgx.Batch{}
	if changes, ok := b.known.Guess(head, func(i int) int { return b.known.Choose(&head.Demands[i]) }); ok {
		t := try{taker: b, call: head, changes: changes, behind: true}
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

// takeLocked decides a call on its rows. It locks and reads them all in one round trip, after the
// statements in batch, and writes the takes in another. It returns the takes, too.
func (b *Taker) takeLocked(ctx context.Context, tx pgx.Tx, batch *pgx.Batch, call *decide.Call) (ratelimit.Result, *try, error) {
	view, made, err := b.lockAll(ctx, tx, batch, call)
	if err != nil {
		return ratelimit.Result{}, nil, b.faultOf(call, err)
	}
	changes, ok := call.Plan(view)
	write, t := &pgx.Batch{}, &try{taker: b, call: call, changes: changes, taken: make([]table.Taken, max(len(changes), 1))}
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

// lockAll locks and reads all rows of a call. made has the rows that it created, full.
func (b *Taker) lockAll(ctx context.Context, tx pgx.Tx, batch *pgx.Batch, call *decide.Call) (view decide.View, made map[decide.Row]bool, err error) {
	var changes []decide.Change
	for _, i := range call.Locking() {
		for shard := range call.Demands[i].Definition.Shards {
			changes = append(changes, call.Demands[i].Change(i, shard, 0))
		}
	}
	given, at, err := b.Touch(ctx, tx, batch, changes)
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
	b.known.Observe(call, view)
	return view, made, nil
}

// Touch locks and reads the rows of changes by giving them 0 tokens, after the statements in batch.
// Unlike SELECT, that leaves no predicate locks under SERIALIZABLE.
func (b *Taker) Touch(ctx context.Context, q table.Querier, batch *pgx.Batch, changes []decide.Change) ([]table.Give, time.Time, error) {
	given := make([]table.Give, len(changes))
	for i := range changes {
		given[i].Change = &changes[i]
	}
	at, err := b.table.Give(ctx, q, batch, given, b.Clock())
	return given, at, err
}

// heldShard is the shard from which a transaction took last. Only its connection keeps it, because
// a closed connection must not stay in memory.
type heldShard struct {
	by    *Taker
	tx    pgx.Tx
	key   decide.Key
	shard int
}

// heldKey is the key under which a connection keeps its heldShard.
const heldKey = "ratelimit.shard"

// hold notes that a transaction has locked a shard. A later step of the transaction takes from the
// same shard, because two transactions that each want the other's shard deadlock.
func (b *Taker) hold(tx pgx.Tx, row decide.Row) {
	if reflect.TypeOf(tx).Kind() != reflect.Pointer { // the caller's own type may not be comparable
		return
	}
	if _, data := conn.Session(tx); data != nil {
		data[heldKey] = heldShard{b, tx, row.Key, row.Shard}
	}
}

// HeldBy returns the shard of a limit that a transaction has locked; false if it knows none.
func (b *Taker) HeldBy(tx pgx.Tx, a *decide.Demand) (shard int, ok bool) {
	_, data := conn.Session(tx)
	held, ok := data[heldKey].(heldShard)
	return held.shard, ok && held.by == b && held.tx == tx && held.key == a.KeyOf() && held.shard < a.Definition.Shards
}
