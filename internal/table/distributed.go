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

// distributed decides by the statements of callers' transactions, which change one row each,
// and wait for it.
type distributed struct{ *Table }

// Prefetches implements [Decider]: what is left of a sliding window's lease cannot be put
// back into its slot by an upsert.
func (distributed) Prefetches(kind bucket.Kind) bool { return kind != bucket.SlidingWindow }

func (t distributed) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, _ bool, now *time.Time) (err error) {
	if len(grants) != 1 {
		return fmt.Errorf("%d grants, of which a distributed table takes one", len(grants))
	}
	g := &grants[0]
	if g.Taken = (Taken{}); g.Need > g.capacity() { // which a row that is not there would grant
		return nil
	}
	c := g.Change
	c.Floor, c.Definition.Capacity = g.Need-g.Count, g.capacity()
	if g.Lasts == 0 {
		g.Taken, err = t.Take(ctx, pool, false, &c, now)
		return err
	}
	args := append(takeArguments(false, &c, now), g.Prefetch)
	g.Taken, err = t.of(&g.Definition).takeAhead.take(ctx, pool, &g.Definition, args, now)
	return err
}

func (t distributed) Read(ctx context.Context, q Querier, r *Rows, now *time.Time) error {
	r.States, r.Found = make([]bucket.State, len(r.Rows)), make([]bool, len(r.Rows))
	var batch pgx.Batch
	for i, row := range r.Rows {
		batch.Queue(t.readOne, row.Name, row.Key.Key, int32(row.Shard)).Query(func(rows pgx.Rows) error {
			var s state
			_, err := pgx.ForEachRow(rows, s.fields(), func() error { return nil })
			r.States[i], r.Found[i] = s.get()
			return err
		})
	}
	QueueNow(&batch, now, &r.At)
	return q.SendBatch(ctx, &batch).Close()
}

func (t distributed) Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer Release(ctx, conn)
	rows, err := t.lockEach(ctx, conn, d, now)
	if err != nil {
		return err
	}
	changed, err := d.Decide(rows)
	if err != nil {
		return err
	}
	slices.Sort(changed)
	var batch pgx.Batch
	for _, n := range changed {
		t.QueuePut(&batch, rows.Rows[n], rows.States[n])
	}
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, &batch).Close()
}

// lockEach begins a transaction that locks a decision's rows, and those that are missing, one
// after another by giving them nothing.
func (t distributed) lockEach(ctx context.Context, conn *pgxpool.Conn, d *Decision, now *time.Time) (*Rows, error) {
	rows := &Rows{Rows: d.Rows}
	if err := t.FindEach(ctx, conn, rows); err != nil {
		return nil, err
	}
	given := make([]Taken, len(d.Rows))
	batch := t.begin(0)
	for i, row := range d.Rows {
		awaited := d.Await != nil && *d.Await == row
		if rows.Found[i] = rows.Found[i] || awaited || slices.Contains(d.Missing, row); rows.Found[i] {
			t.QueueGive(batch, &decide.Change{Row: row, Definition: d.Definitions[i]}, 0, 0, now, &given[i])
		}
	}
	QueueNow(batch, now, &rows.At)
	err := conn.SendBatch(ctx, batch).Close()
	rows.States = make([]bucket.State, len(d.Rows))
	for i := range given {
		rows.States[i] = given[i].After
	}
	return rows, err
}

func (t distributed) Return(ctx context.Context, q Querier, r *Return, now *time.Time) (done bool, err error) {
	d := &r.Definition
	c := decide.Change{Row: r.Row, Definition: *d, Seen: bucket.State{TS: r.Taken}} // with its ticks
	args := append(arguments(&c, r.Count, now), r.Taken, r.End)
	if d.Kind == bucket.TokenBucket {
		args = append(args, d.Rate, micros(d.Period))
	}
	_, err = q.Exec(ctx, t.of(d).bringBack, args...)
	return err == nil, err
}
