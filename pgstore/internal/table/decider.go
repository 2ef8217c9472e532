package table

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Decider makes decisions on their own, in transactions of their own: on a plain table or on a
// distributed one.
type Decider interface {
	// Grant takes the tokens of grants from the rows that have enough for them; Taken reports which
	// had. It passes over rows that another transaction has locked. If it meets a lock all the
	// same, nothing is taken, and the error is lock_not_available. With await there is one grant,
	// and it waits for its row, for conn.Awaited at most. A distributed table takes one grant and
	// always waits, except by [Table.Part].
	Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, await bool, now *time.Time) error

	// Decide locks rows, calls d.Decide, writes the changed rows, and commits. It passes over rows
	// that another transaction has locked, which are not found, unless the table is distributed:
	// then it waits for each. The error is lock_not_available if the awaited row stayed locked for
	// conn.Awaited.
	Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error
}

// PassesOver reports whether decisions on their own pass over rows that other transactions have
// locked. On a distributed table they wait for them.
func (t *Table) PassesOver() bool { return !t.distributed }

// plainTable decides by statements that pass over locked rows, unless they await one.
type plainTable struct{ *Table }

func (t plainTable) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, await bool, now *time.Time) error {
	if await {
		return t.inTurn(ctx, &grants[0], func() error { return t.grantInTurn(ctx, pool, &grants[0], now) })
	}
	if !prefetches(grants) {
		return t.grant(ctx, pool, grants, now)
	}
	pooled, err := acquire(ctx, pool)
	if err != nil {
		return err
	}
	defer pooled.Release()
	ctx, stop := Outlast(ctx)
	defer stop()
	return t.grant(ctx, pooled, grants, now)
}

func (t plainTable) Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error {
	lock := func(pooled *pgxpool.Conn) (*Rows, error) { return t.lockAll(ctx, pooled, d, now) }
	return d.run(ctx, pool, lock, t.queueWrite)
}

// lockAll begins a transaction that locks and reads a decision's rows. It skips rows that another
// transaction has locked. If another transaction is making a missing row, lockAll first makes the
// others in separate transactions. If it must wait for a row, it always makes the missing rows
// separately, so it holds no lock meanwhile.
func (t plainTable) lockAll(ctx context.Context, pooled *pgxpool.Conn, d *Decision, now *time.Time) (*Rows, error) {
	if d.Await == nil {
		rows, err := t.lockRows(ctx, pooled, d, d.Missing, now)
		if !conn.TimedOut(err) {
			return rows, err
		}
		rollBack(ctx, pooled)
	}
	if err := t.fillApart(ctx, pooled, d, d.Missing, now); err != nil {
		return nil, err
	}
	return t.lockRows(ctx, pooled, d, nil, now)
}

// fillApart makes rows in a transaction of its own. If another transaction is making one of them,
// it makes each half by itself.
func (t plainTable) fillApart(ctx context.Context, pooled *pgxpool.Conn, d *Decision, rows []decide.Row, now *time.Time) error {
	if len(rows) == 0 {
		return nil
	}
	batch := t.begin(conn.PassOver)
	t.queueFill(batch, rows, d.definitionsOf(rows), now)
	batch.Queue("COMMIT")
	err := pooled.SendBatch(ctx, batch).Close()
	if !conn.TimedOut(err) {
		return err
	}
	rollBack(ctx, pooled)
	if len(rows) == 1 {
		if d.OnLocked != nil {
			d.OnLocked(rows[0])
		}
		return nil
	}
	half := len(rows) / 2
	if err := t.fillApart(ctx, pooled, d, rows[:half], now); err != nil {
		return err
	}
	return t.fillApart(ctx, pooled, d, rows[half:], now)
}

// lockRows begins a transaction that makes missing rows, waits for the awaited one, and locks
// and reads the rows that no other transaction has locked.
func (t plainTable) lockRows(ctx context.Context, pooled *pgxpool.Conn, d *Decision, missing []decide.Row, now *time.Time) (*Rows, error) {
	wait := conn.PassOver
	if d.Await != nil {
		missing, wait = []decide.Row{*d.Await}, conn.Awaited
	}
	batch := t.begin(wait)
	if len(missing) > 0 {
		t.queueFill(batch, missing, d.definitionsOf(missing), now)
	}
	if d.Await != nil {
		t.QueueAwait(batch, *d.Await)
	}
	t.QueueBounds(batch, 0) // from here on the transaction waits only for locks of the whole table
	rows := &Rows{Rows: d.Rows}
	names, keys, shards := rows.columns()
	batch.Queue(t.common["lock"], names, keys, shards).Query(rows.scan(now)) // those that exist, and that no other transaction has locked
	return rows, pooled.SendBatch(ctx, batch).Close()
}

// Decision holds rows to lock, and the function that decides on them.
type Decision struct {
	Rows        []decide.Row        // in order
	Definitions []bucket.Definition // of the rows' shards
	Missing     []decide.Row        // some of Rows, to be made full before they are locked
	Await       *decide.Row         // one of Rows, to be made if it is missing, and waited for; nil for none

	// Decide is called once, with the rows that are locked as found. It sets the States of the
	// rows that it changes, and returns their places, in order.
	Decide func(read *Rows) (changed []int, err error)

	// OnLocked is called with each of Missing that another transaction has made and not committed.
	OnLocked func(decide.Row)
}

// run begins a transaction by lock, which locks and reads the rows. It decides, puts the changed
// rows into a batch by write, and commits.
func (d *Decision) run(ctx context.Context, pool *pgxpool.Pool, lock func(*pgxpool.Conn) (*Rows, error), write func(*pgx.Batch, *Rows)) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer Release(ctx, conn)
	rows, err := lock(conn)
	if err != nil {
		return err
	}
	changed, err := d.decide(rows)
	if err != nil {
		return err
	}
	var batch pgx.Batch
	if len(changed.Rows) > 0 {
		write(&batch, changed)
	}
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, &batch).Close()
}

// decide calls Decide, and returns the rows that were changed, in order.
func (d *Decision) decide(rows *Rows) (*Rows, error) {
	places, err := d.Decide(rows)
	if err != nil {
		return nil, err
	}
	changed := &Rows{}
	for _, n := range places {
		if !rows.Found[n] {
			return nil, fmt.Errorf("row %v is to be written and was not locked", rows.Rows[n])
		}
		changed.Rows, changed.States = append(changed.Rows, rows.Rows[n]), append(changed.States, rows.States[n])
	}
	return changed, nil
}

// definitionsOf returns the definitions of some of a decision's rows.
func (d *Decision) definitionsOf(rows []decide.Row) []bucket.Definition {
	definitions := make([]bucket.Definition, len(rows))
	for i, row := range rows {
		n, _ := slices.BinarySearchFunc(d.Rows, row, decide.Row.Compare)
		definitions[i] = d.Definitions[n]
	}
	return definitions
}
