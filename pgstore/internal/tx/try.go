package tx

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// try takes changes of one row each, in one round trip.
//
// Rows of limits without shards are not behind a savepoint. Under SERIALIZABLE the newest minor
// versions of PostgreSQL keep a predicate lock on each row written behind one. With more than two
// of these on a page, transactions that touch none of the rows are aborted. Instead, tokens taken
// in vain are put back. To know what to put back, try reads each row as it locks it, by giving it 0
// tokens: the taken tokens, added to what is left, would be another number at another time. Rows
// that refused stay locked, as a single one does.
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
