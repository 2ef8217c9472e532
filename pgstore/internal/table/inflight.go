package table

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// A permit is a row: shard is its number, ts the end of its lease, and value its fence. The fence
// grows with each take, and is at least the instant of the take in microseconds since 1970. A
// released permit has a ts of long ago, so it is free whatever the clock does. Leases are in
// microseconds. A renewal ends the lease one Lease from now, even if the clock went back.
//
// A held permit can be claimed: paused is the end of the claim, and ahead is the turn of the waiter
// that collects. When the permit is released, that waiter gets it with a new fence, until the end
// of the claim. A permit that is taken is not claimed.

// PermitOp is an operation on a permit.
type PermitOp struct {
	Row   decide.Row
	Lease time.Duration // 0 to release it
	Fence int64         // by which the permit is held; 0 to take a free one
	Next  bool          // take the permit anew, with a new fence
	New   bool          // the row may not exist yet
	Lock  int64         // the advisory lock held by a transaction that changes the row
	Alone bool          // take without that lock if another transaction has it
	Rest  PermitSet     // the other operations of a set; this is the first

	Done PermitDone
}

// PermitSet holds operations on different permits, in the order of their rows. All are made, or
// none.
type PermitSet []*PermitOp

// columns returns the operations as arrays. A take has no fence.
func (s PermitSet) columns() (names, keys []string, numbers []int32, leases []float64, fences []*int64) {
	for _, op := range s {
		names, keys, numbers = append(names, op.Row.Name), append(keys, op.Row.Key.Key), append(numbers, int32(op.Row.Shard))
		fence := &op.Fence
		if op.take() {
			fence = nil
		}
		leases, fences = append(leases, micros(op.Lease)), append(fences, fence)
	}
	return names, keys, numbers, leases, fences
}

// new returns the operations whose rows may not exist yet.
func (s PermitSet) new() PermitSet {
	return slices.DeleteFunc(slices.Clone(s), func(op *PermitOp) bool { return !op.New })
}

// PermitDone is the outcome of a PermitOp.
type PermitDone struct {
	OK    bool
	Given bool // released to a waiter that had claimed it
	Fence int64
	At    time.Time // when it was decided
	Until time.Time
}

// take reports whether the operation takes a free permit.
func (op *PermitOp) take() bool { return op.Fence == 0 }

// releases reports whether the operation's holder loses the permit.
func (op *PermitOp) releases() bool { return op.Lease == 0 || op.Next }

// done returns the outcome of an operation whose statement returned a fence and an end.
func (op *PermitOp) done(fence int64, until time.Time, given bool) PermitDone {
	if fence == 0 { // the row did not exist
		return PermitDone{}
	}
	return PermitDone{OK: true, Given: given && op.releases(), Fence: fence, At: until.Add(-op.Lease).UTC(), Until: until.UTC()}
}

// PermitView is a permit as it was read.
type PermitView struct {
	Number int
	Fence  int64
	Until  time.Time
	Locked bool // by a transaction
}

// PermitLook reads a key's permits at an instant, as far as they have rows.
type PermitLook struct {
	Key    decide.Key
	PartOf int // to read the next part: the Limit; 0 to read all

	Permits  []PermitView
	At       time.Time
	From, To int // the numbers that were read, without To; none if another process had the turn
}

const (
	// A look at a part reads at most PermitPart permits. After it no process reads the next part
	// for PermitTurn.
	PermitPart = 1000
	PermitTurn = 60 * time.Millisecond
)

// arguments returns the name and arguments of the statement for an operation. The statement returns
// a row if and only if the operation was made. It leaves no predicate lock under SERIALIZABLE,
// except in a subtransaction. In permit_keep the proposed row's paused is the new end of the lease,
// since the conflict clause cannot read the clock.
func (op *PermitOp) arguments(now *time.Time) (name string, args []any) {
	args = []any{op.Row.Name, op.Row.Key.Key, int32(op.Row.Shard), micros(op.Lease), now}
	if op.take() {
		return "permit_take", args
	}
	return "permit_keep", append(args, op.Fence, op.Next)
}

// ChangePermit makes an operation by a statement of its own. If another transaction has the row locked,
// the error is lock_not_available.
func (t *Table) ChangePermit(ctx context.Context, pool *pgxpool.Pool, op *PermitOp, now *time.Time) error {
	return oneTrip(ctx, pool, func(batch *pgx.Batch) {
		t.QueueBounds(batch, conn.PassOver)
		t.QueuePermit(batch, op, now)
	})
}

// QueuePermit puts an operation in a caller's transaction into a batch. A take passes over a permit
// that another transaction is about to take or release: the statement tries for the advisory lock.
// For a row whose transaction could not get that lock it waits a millisecond at most. It restores
// the caller's lock_timeout; after an error, the rollback to the savepoint does. The holder of a
// permit always writes its row.
func (t *Table) QueuePermit(batch *pgx.Batch, op *PermitOp, now *time.Time) {
	name, args := op.arguments(now)
	sql, guarded := t.inflight[name+"_tx"]
	switch {
	case !guarded:
		sql = t.inflight[name]
	case op.take():
		args = append(args, op.Lock, op.Alone)
	default:
		args = append(args, op.Lock)
	}
	batch.Queue(sql, args...).QueryRow(op.scan)
}

func (op *PermitOp) scan(row pgx.Row) error {
	var (
		fence int64
		until time.Time
		given bool
	)
	err := row.Scan(&fence, &until, &given)
	if errors.Is(err, pgx.ErrNoRows) {
		op.Done = PermitDone{}
		return nil
	}
	if err == nil {
		op.Done = op.done(fence, until, given)
	}
	return err
}

// ChangePermits makes operations on different rows, each by itself, in one transaction and round
// trip. If another transaction has a row locked that could not be passed over, nothing happens, and
// the error is lock_not_available. It makes the missing rows of takes.
func (t *Table) ChangePermits(ctx context.Context, pool *pgxpool.Pool, ops []*PermitOp, now *time.Time) error {
	return oneTrip(ctx, pool, func(batch *pgx.Batch) {
		t.queueChange(batch, ops, now)
		t.queueCreate(batch, ops, now)
	})
}

// LookAtPermits reads permits in the order of looks.
func (t *Table) LookAtPermits(ctx context.Context, pool *pgxpool.Pool, looks []*PermitLook, now *time.Time) error {
	return oneTrip(ctx, pool, func(batch *pgx.Batch) {
		for _, look := range looks {
			t.queueLook(batch, look, now)
		}
	})
}

// oneTrip sends statements as one transaction, in one round trip.
func oneTrip(ctx context.Context, pool *pgxpool.Pool, queue func(*pgx.Batch)) error {
	pooled, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer Release(ctx, pooled)
	var batch pgx.Batch
	batch.Queue(beginSQL)
	queue(&batch)
	batch.Queue("COMMIT")
	return pooled.SendBatch(ctx, &batch).Close()
}

// queueCreate makes missing rows, after queueChange. It leaves existing rows alone.
func (t *Table) queueCreate(batch *pgx.Batch, ops []*PermitOp, now *time.Time) {
	missing := PermitSet(ops).new()
	if len(missing) == 0 { // as nearly always, once a process knows its permits
		return
	}
	made := make(map[decide.Row]*PermitOp)
	for _, op := range missing {
		made[op.Row] = op
	}
	names, keys, numbers, leases, _ := missing.columns()
	var (
		row   decide.Row
		fence int64
		until time.Time
	)
	batch.Queue(t.inflight["permit_make"], names, keys, numbers, leases, now).Query(each([]any{&row.Name, &row.Key.Key, &row.Shard, &fence, &until}, func() {
		if op := made[row]; op != nil {
			op.Done = op.done(fence, until, false)
		}
	}))
}

func (t *Table) queueChange(batch *pgx.Batch, ops []*PermitOp, now *time.Time) {
	names, keys, numbers, leases, fences := PermitSet(ops).columns()
	nexts := make([]bool, len(ops))
	for i, op := range ops {
		nexts[i], op.Done = op.Next || op.take(), PermitDone{}
	}
	batch.Queue(t.inflight["permit_change"], names, keys, numbers, leases, fences, nexts, now).Query(changed(ops))
}

// changed returns the function that reads the outcomes of operations from their statement.
func changed(ops []*PermitOp) func(pgx.Rows) error {
	var (
		fence, i  int64
		until, at time.Time
		given     bool
	)
	return each([]any{&fence, &until, &at, &i, &given}, func() {
		op := ops[i-1]
		op.Done = PermitDone{OK: true, Given: given && op.releases(), Fence: fence, At: at.UTC(), Until: until.UTC()}
	})
}

// LookAtPermitsIn reads the permits of a key in a caller's transaction.
func (t *Table) LookAtPermitsIn(ctx context.Context, q Querier, look *PermitLook, now *time.Time) error {
	var batch pgx.Batch
	t.queueLook(&batch, look, now)
	return q.SendBatch(ctx, &batch).Close()
}

func (t *Table) queueLook(batch *pgx.Batch, look *PermitLook, now *time.Time) {
	QueueNow(batch, now, &look.At)
	if look.PartOf > 0 && t.PassesOver() {
		t.queuePart(batch, look)
		return
	}
	look.Permits, look.From, look.To = nil, 0, ratelimit.MaxInFlight
	var v PermitView
	batch.Queue(t.inflight["permit_look"], look.Key.Name, look.Key.Key).Query(each([]any{&v.Number, &v.Fence, &v.Until, &v.Locked}, func() {
		v.Until = v.Until.UTC()
		look.Permits = append(look.Permits, v)
	}))
}

// queuePart reads the next part, unless a process has read one less than PermitTurn ago. So all
// waiting processes together read a bounded number of rows a second. The row with the number 10000,
// which no permit has, keeps the turn: value is the first number of the part that was read last, ts
// when it was read.
func (t *Table) queuePart(batch *pgx.Batch, look *PermitLook) {
	look.Permits, look.From, look.To = nil, 0, 0
	var (
		number *int
		fence  *int64
		until  *time.Time
		locked *bool
	)
	read := each([]any{&look.From, &number, &fence, &until, &locked}, func() {
		look.To = look.From + PermitPart
		if number != nil {
			look.Permits = append(look.Permits, PermitView{*number, *fence, until.UTC(), *locked})
		}
	})
	batch.Queue(t.inflight["permit_look_part"], look.Key.Name, look.Key.Key, look.PartOf, PermitPart, micros(PermitTurn)).Query(read)
}

// ResetPermits frees the permits of a key. Their fences grow, so no holder has them any more.
func (t *Table) ResetPermits(ctx context.Context, q Querier, key decide.Key) error {
	_, err := q.Exec(ctx, t.inflight["permit_reset"], key.Name, key.Key)
	return err
}

// PrunablePermits returns how many permits of a name PrunePermits would delete if most did not
// bound it.
func (t *Table) PrunablePermits(ctx context.Context, q Querier, name string, before time.Time) (n int64, err error) {
	err = q.QueryRow(ctx, t.inflight["permit_prunable"], name, before).Scan(&n)
	return n, err
}

// PrunePermits deletes the rows of a name's permits that have been free since before an instant.
// The argument most bounds their number, except on a distributed table. The next fence of such a
// permit is still larger, since a fence is the instant of the take.
func (t *Table) PrunePermits(ctx context.Context, q Querier, name string, before time.Time, most int) (deleted int64, err error) {
	tag, err := q.Exec(ctx, t.inflight["permit_prune"], name, before, int64(most))
	return tag.RowsAffected(), err
}
