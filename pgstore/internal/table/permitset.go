package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Set returns the set of an operation and its Rest.
func (op *PermitOp) Set() PermitSet { return append(PermitSet{op}, op.Rest...) }

// Clone returns a copy of an operation and its Rest.
func (op *PermitOp) Clone() *PermitOp {
	c := *op
	if len(op.Rest) > 0 {
		c.Rest = make(PermitSet, len(op.Rest))
		for i, o := range op.Rest {
			c.Rest[i] = o.Clone()
		}
	}
	return &c
}

// undone notes that they were not made, and leaves it at that if one was not.
func (s PermitSet) undone() (some bool) {
	for _, op := range s {
		some = some || !op.Done.OK
	}
	for _, op := range s {
		if some {
			op.Done = PermitDone{}
		}
	}
	return some
}

// columns returns what tells the permits of a set apart.
func (s PermitSet) columns(of func(*PermitOp) bool) (names, keys []string, numbers []int32) {
	for _, op := range s {
		if of(op) {
			names, keys, numbers = append(names, op.Row.Name), append(keys, op.Row.Key.Key), append(numbers, int32(op.Row.Shard))
		}
	}
	return names, keys, numbers
}

func every(*PermitOp) bool { return true }

// queueFreePermits makes those rows that may not be there.
func (t *Table) queueFreePermits(batch *pgx.Batch, s PermitSet) {
	if names, keys, numbers := s.columns(func(op *PermitOp) bool { return op.New }); len(names) > 0 {
		batch.Queue(t.inflight["permit_fill"], names, keys, numbers)
	}
}

// overPermits queues a statement over a set behind the making of rows that are missing, in one round trip.
// If another transaction is making one of these, which may take long, it goes on without that one.
func (t *Table) overPermits(ctx context.Context, pool *pgxpool.Pool, set PermitSet, queue func(*pgx.Batch)) error {
	trip := func(missing PermitSet) error {
		return oneTrip(ctx, pool, func(batch *pgx.Batch) {
			t.QueueBounds(batch, conn.PassOver)
			t.queueFreePermits(batch, missing)
			queue(batch)
		})
	}
	err := trip(set)
	if !conn.TimedOut(err) {
		return err
	}
	if err := t.makeFreePermits(ctx, pool, set); err != nil {
		return err
	}
	return trip(nil)
}

// makeFreePermits makes those rows that may not be there, by halves until the one that another
// transaction is making is by itself, and left out.
func (t *Table) makeFreePermits(ctx context.Context, pool *pgxpool.Pool, s PermitSet) error {
	err := oneTrip(ctx, pool, func(batch *pgx.Batch) {
		t.QueueBounds(batch, conn.PassOver)
		t.queueFreePermits(batch, s)
	})
	switch half := len(s) / 2; {
	case !conn.TimedOut(err):
		return err
	case half == 0:
		return nil
	default:
		if err := t.makeFreePermits(ctx, pool, s[:half]); err != nil {
			return err
		}
		return t.makeFreePermits(ctx, pool, s[half:])
	}
}

// ChangePermitSet makes a set, in one statement and round trip unless permits are missing. It passes
// over a row that another transaction has locked: then it is none, or lock_not_available. On a
// distributed table each permit is a statement, and COMMIT another round trip.
func (t *Table) ChangePermitSet(ctx context.Context, pool *pgxpool.Pool, set PermitSet, now *time.Time) error {
	for _, op := range set {
		op.Done = PermitDone{}
	}
	if !t.PassesOver() {
		return t.changeEach(ctx, pool, set, now)
	}
	return t.overPermits(ctx, pool, set, func(batch *pgx.Batch) {
		names, keys, numbers := set.columns(every)
		leases, fences := make([]float64, len(set)), make([]*int64, len(set))
		for i, op := range set {
			if leases[i] = micros(op.Lease); !op.take() {
				fences[i] = &op.Fence
			}
		}
		batch.Queue(t.inflight["permit_all"], names, keys, numbers, leases, fences, now).Query(changed(set))
	})
}

func (t *Table) changeEach(ctx context.Context, pool *pgxpool.Pool, set PermitSet, now *time.Time) error {
	pooled, err := acquire(ctx, pool)
	if err != nil {
		return err
	}
	defer Release(ctx, pooled)
	batch := t.begin(conn.PassOver)
	for _, op := range set {
		t.QueuePermit(batch, op, now)
	}
	err = pooled.SendBatch(ctx, batch).Close()
	undone := set.undone()
	if err != nil {
		return err
	}
	if undone {
		_, err = pooled.Exec(ctx, "ROLLBACK")
		return err
	}
	_, err = pooled.Exec(ctx, "COMMIT")
	return err
}

// ChangePermitSetIn makes a set in a caller's transaction, behind a savepoint to which it is undone.
func (t *Table) ChangePermitSetIn(ctx context.Context, tx Querier, set PermitSet, now *time.Time) error {
	passes := t.distributed && set[0].take()
	var timeout, propagate string // the transaction's
	if passes {
		if err := tx.QueryRow(ctx, lockTimeoutSQL).Scan(&timeout, &propagate); err != nil {
			return err
		}
	}
	var batch pgx.Batch
	batch.Queue("SAVEPOINT " + Savepoint)
	if passes {
		t.queueLockTimeout(&batch, milliseconds(conn.PassOver), "local")
	}
	for _, op := range set {
		t.QueuePermit(&batch, op, now)
	}
	if passes {
		t.queueLockTimeout(&batch, timeout, propagate)
	}
	err := tx.SendBatch(ctx, &batch).Close()
	undone := set.undone()
	if set[0].take() && conn.TimedOut(err) { // by itself, as pgx prepares a batch first, which fails until then
		_, err = tx.Exec(ctx, "ROLLBACK TO SAVEPOINT "+Savepoint)
	}
	if err != nil || !undone {
		return err
	}
	return tx.SendBatch(ctx, ToSavepoint()).Close()
}

// HoldsPermits reports whether all permits of a set are held by its fences, even while rows are locked.
func (t *Table) HoldsPermits(ctx context.Context, q Querier, set PermitSet, now *time.Time) (held bool, err error) {
	names, keys, numbers := set.columns(every)
	fences := make([]int64, len(set))
	for i, op := range set {
		fences[i] = op.Fence
	}
	err = q.QueryRow(ctx, t.inflight["permit_find"], names, keys, numbers, fences, now).Scan(&held)
	return held, err
}

// turnNumber is the number of the row that says which waiter collects.
const turnNumber = 10_001

// Collection is the permits that a waiter collects.
type Collection struct {
	Key     decide.Key
	Limit   int
	Wanted  int
	Lease   time.Duration
	Turn    int64 // its fence; 0 until it has the turn, and when it has lost it; another number when it is over
	Permits []PermitView
	At      time.Time
	Until   time.Time
}

// CollectPermits takes what is free of a key's permits for the one waiter that collects, if it has the
// turn or nobody has, and claims what is held. When all are there, they are its Permits, its claims are
// over, and the turn is nobody's for as long as it lasted, so that others are served between two that
// collect. When it takes the turn for several, it makes all permits that are missing.
//
// It passes over rows that another transaction has locked. One of these may be about to give the waiter a
// permit too many: AbandonPermits frees that.
func (t *Table) CollectPermits(ctx context.Context, pool *pgxpool.Pool, c *Collection, now *time.Time) error {
	began := c.Turn
	c.Turn, c.Permits = 0, nil
	var missing PermitSet
	if began == 0 {
		missing = PermitSet{{Row: decide.Row{Key: c.Key, Shard: turnNumber}, New: true}}
		for n := 0; c.Wanted > 1 && n < c.Limit; n++ {
			missing = append(missing, &PermitOp{Row: decide.Row{Key: c.Key, Shard: n}, New: true})
		}
	}
	return t.overPermits(ctx, pool, missing, func(batch *pgx.Batch) {
		batch.Queue(t.inflight["permit_collect"], c.Key.Name, c.Key.Key, int32(c.Limit), int32(c.Wanted), micros(c.Lease), began, now).Query(c.scan)
	})
}

func (c *Collection) scan(rows pgx.Rows) error {
	var (
		number int
		fence  int64
		what   string
		done   bool
	)
	_, err := pgx.ForEachRow(rows, []any{&number, &fence, &what, &done, &c.At, &c.Until}, func() error {
		switch {
		case what == "turn":
			c.Turn = fence
		case done && (what == "take" || what == "keep"):
			c.Permits = append(c.Permits, PermitView{Number: number, Fence: fence})
		}
		return nil
	})
	return err
}

// AbandonPermits frees what a waiter has collected in a turn and not got, and lets go of its claims and its
// turn. It returns how many rows are left to do, since another transaction has them locked.
func (t *Table) AbandonPermits(ctx context.Context, q Querier, key decide.Key, turn int64) (left int, err error) {
	err = q.QueryRow(ctx, t.inflight["permit_abandon"], key.Name, key.Key, turn).Scan(&left)
	return left, err
}
