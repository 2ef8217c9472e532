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
	taker   *Taker
	call    *decide.Call
	changes []decide.Change
	behind  bool          // the savepoint, with or without shards
	before  []table.Taken // the states of the rows without shards
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

// saved reports whether a change is made behind the savepoint.
func (t *try) saved(i int) bool { return t.behind || !t.taker.table.ReportsMade() || t.sharded(i) }

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
			t.taker.hold(tx, t.changes[i].Row)
		}
	}
	return t.taker.granted(t.call, t.changes, t.at(), t.taken[0].Xid, tx)
}

// undo begins a batch that puts the taken tokens back, and returns which limits to read behind
// it. If a limit without shards has refused, the states of the others are not needed.
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
