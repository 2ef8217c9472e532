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
)

// distributedTable decides by the statements of callers' transactions, which change one row each,
// and wait for it.
type distributedTable struct{ *Table }

// Prefetches implements [Decider]: what is left of a sliding window's lease cannot be put
// back into its slot by an upsert.
func (distributedTable) Prefetches(kind bucket.Kind) bool { return kind != bucket.SlidingWindow }

func (t distributedTable) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, _ bool, now *time.Time) (err error) {
	if len(grants) != 1 {
		return fmt.Errorf("%d grants, of which a distributed table takes one", len(grants))
	}
	g := &grants[0]
	if g.Taken = (Taken{}); g.Need > g.capacity() { // which a row that is not there would grant
		return nil
	}
	c := g.Change
	c.Floor, c.Definition.Capacity = g.Need-g.Count, g.capacity()
	if !g.prefetches() {
		g.Taken, err = t.Take(ctx, pool, false, &c, now)
		return err
	}
	args := append(takeArguments(false, &c, now), micros(g.lasts()), g.Prefetch, g.Out, g.Spent.Spent, orNull(g.SpentEnd))
	err = g.Taken.scan(pool.QueryRow(ctx, t.of(&c.Definition)["prefetch_row"], args...), &c.Definition, &g.Taken.At)
	g.Taken.charge(&c.Definition, now)
	return err
}

func (t distributedTable) Read(ctx context.Context, q Querier, r *Rows, now *time.Time) error {
	var batch pgx.Batch
	t.queueFind(&batch, r)
	QueueNow(&batch, now, &r.At)
	return q.SendBatch(ctx, &batch).Close()
}

func (t distributedTable) Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer Release(ctx, conn)
	rows, made, err := t.lockEach(ctx, conn, d, now)
	if err != nil {
		return err
	}
	changed, err := d.decide(rows)
	if err != nil {
		return err
	}
	var batch pgx.Batch
	for _, n := range changed {
		t.QueuePut(&batch, rows.Rows[n], rows.States[n])
		made[n] = false
	}
	for n, row := range rows.Rows {
		if made[n] && d.Definitions[n].Missing(rows.States[n]) == 0 { // full, and so by us
			t.QueueRemove(&batch, row)
		}
	}
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, &batch).Close()
}

// lockEach begins a transaction that locks a decision's rows, and those that are missing, one
// after another by giving them nothing. It tells which of them were not there before, and so
// may have been made.
func (t distributedTable) lockEach(ctx context.Context, conn *pgxpool.Conn, d *Decision, now *time.Time) (rows *Rows, made []bool, err error) {
	rows = &Rows{Rows: d.Rows}
	if err := t.FindEach(ctx, conn, rows); err != nil {
		return nil, nil, err
	}
	given := make([]Taken, len(d.Rows))
	made = make([]bool, len(d.Rows))
	batch := t.begin(0)
	for i, row := range d.Rows {
		made[i] = !rows.Found[i] && (d.Await != nil && *d.Await == row || slices.Contains(d.Missing, row))
		if rows.Found[i] = rows.Found[i] || made[i]; rows.Found[i] {
			t.QueueTouch(batch, &decide.Change{Row: row, Definition: d.Definitions[i]}, now, &given[i])
		}
	}
	QueueNow(batch, now, &rows.At)
	err = conn.SendBatch(ctx, batch).Close()
	rows.States = make([]bucket.State, len(d.Rows))
	for i := range given {
		rows.States[i] = given[i].After
	}
	return rows, made, err
}

func (t distributedTable) Return(ctx context.Context, q Querier, r *Return, now *time.Time) (done bool, err error) {
	_, err = q.Exec(ctx, t.of(&r.Definition)["return_row"], r.arguments(now)...)
	return err == nil, err
}
