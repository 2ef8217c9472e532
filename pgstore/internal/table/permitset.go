package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Set returns the set of an operation and its Rest.
func (op *PermitOp) Set() PermitSet { return append(PermitSet{op}, op.Rest...) }

// Names returns the names of the limits of an operation and its Rest, one for each permit.
func (op *PermitOp) Names() []string {
	set := op.Set()
	names := make([]string, len(set))
	for i, o := range set {
		names[i] = o.Row.Name
	}
	return names
}

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

// undone reports whether an operation of the set was not made. Then it clears the outcomes of all.
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

// queueFreePermits puts into a batch the making of rows that may be missing.
func (t *Table) queueFreePermits(batch *pgx.Batch, s PermitSet) {
	if names, keys, numbers, _, _ := s.new().columns(); len(names) > 0 {
		batch.Queue(t.inflight["permit_fill"], names, keys, numbers)
	}
}

// overPermits runs a statement over a set, after the making of its missing rows, in one round trip.
// If another transaction is making one of those rows, which may take long, it goes on without that
// row.
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

// makeFreePermits makes the rows that may be missing. If another transaction is making one of them,
// it makes each half by itself, down to that row, which it leaves out.
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

// ChangePermitSet makes a set in one statement and, unless rows are missing, one round trip. If
// another transaction has a row locked, none is made; the error may be lock_not_available. On a
// distributed table each permit is a statement, and COMMIT is another round trip.
func (t *Table) ChangePermitSet(ctx context.Context, pool *pgxpool.Pool, set PermitSet, now *time.Time) error {
	for _, op := range set {
		op.Done = PermitDone{}
	}
	if !t.PassesOver() {
		return t.changeEach(ctx, pool, set, now)
	}
	return t.overPermits(ctx, pool, set, func(batch *pgx.Batch) {
		names, keys, numbers, leases, fences := set.columns()
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

// ChangePermitSetIn makes a set in a caller's transaction, behind a savepoint. If an operation
// cannot be made, it rolls back to the savepoint.
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
	if set[0].take() && conn.TimedOut(err) { // in a statement of its own: pgx first prepares a batch, which fails before the rollback
		_, err = tx.Exec(ctx, "ROLLBACK TO SAVEPOINT "+Savepoint)
	}
	if err != nil || !undone {
		return err
	}
	return tx.SendBatch(ctx, ToSavepoint()).Close()
}

// HoldsPermits reports whether all permits of a set are held by its fences, even if their rows are
// locked.
func (t *Table) HoldsPermits(ctx context.Context, q Querier, set PermitSet, now *time.Time) (held bool, err error) {
	names, keys, numbers, _, fences := set.columns()
	err = q.QueryRow(ctx, t.inflight["permit_find"], names, keys, numbers, fences, now).Scan(&held)
	return held, err
}

// turnNumber is the number of the row that names the waiter that collects.
const turnNumber = 10_001

// Collection holds the permits that a waiter collects.
type Collection struct {
	Key     decide.Key
	Limit   int
	Wanted  int
	Lease   time.Duration
	From    int   // for one permit of a limit above PermitPart: the first number of the part to read, which stays during a turn
	Turn    int64 // the turn's fence; 0 before the turn, and if it was lost; another one once the turn is over
	Permits []PermitView
	At      time.Time
	Until   time.Time
}

// CollectPermits takes free permits of a key for the waiter that collects, and claims held ones, if
// the waiter has the turn or no waiter has. When all are there it returns them as Permits, and ends
// the claims and the turn. The next turn begins after as long as this one lasted, so that others
// are served meanwhile. Before a turn for several permits it makes all missing rows.
//
// It passes over rows that another transaction has locked. One of these may be about to give the
// waiter a permit too many, which AbandonPermits frees.
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
	from, to := 0, ratelimit.MaxInFlight
	if c.Wanted == 1 && c.Limit > PermitPart {
		from, to = c.From, c.From+PermitPart
	}
	return t.overPermits(ctx, pool, missing, func(batch *pgx.Batch) {
		batch.Queue(t.inflight["permit_collect"], c.Key.Name, c.Key.Key, int32(c.Limit), int32(c.Wanted), micros(c.Lease), began, now, int32(from), int32(to)).Query(c.scan())
	})
}

func (c *Collection) scan() func(pgx.Rows) error {
	var (
		number int
		fence  int64
		what   string
		done   bool
	)
	return each([]any{&number, &fence, &what, &done, &c.At, &c.Until}, func() {
		switch {
		case what == "turn":
			c.Turn = fence
		case done && (what == "take" || what == "keep"):
			c.Permits = append(c.Permits, PermitView{Number: number, Fence: fence})
		}
	})
}

// AbandonPermits ends a waiter's turn and its claims, and frees the permits collected in the turn.
// It returns the number of rows that it skipped because another transaction had locked them.
func (t *Table) AbandonPermits(ctx context.Context, q Querier, key decide.Key, turn int64) (left int, err error) {
	err = q.QueryRow(ctx, t.inflight["permit_abandon"], key.Name, key.Key, turn).Scan(&left)
	return left, err
}
