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
// and wait for it. Grants that prefetch are computed here on the locked row, as the plain
// statements compute them.
type distributedTable struct{ *Table }

func (t distributedTable) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, _ bool, now *time.Time) (err error) {
	if len(grants) != 1 {
		return fmt.Errorf("%d grants, of which a distributed table takes one", len(grants))
	}
	g := &grants[0]
	if g.Taken = (Taken{}); g.never() { // although a missing row would grant
		return nil
	}
	if g.TakesExtra() {
		return t.prefetch(ctx, pool, g, now)
	}
	c := g.Change
	c.Floor = g.Need - g.Count
	g.Taken, err = t.Take(ctx, pool, false, &c, now)
	return err
}

func (t distributedTable) Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error {
	lock := func(conn *pgxpool.Conn) (*Rows, error) { return t.lockEach(ctx, conn, d, now) }
	return d.run(ctx, pool, lock, func(batch *pgx.Batch, changed *Rows) {
		for i, row := range changed.Rows {
			t.QueuePut(batch, row, changed.States[i])
		}
	})
}

// lockEach begins a transaction that locks a decision's rows one after another: those that exist,
// and those to be made.
func (t distributedTable) lockEach(ctx context.Context, conn *pgxpool.Conn, d *Decision, now *time.Time) (*Rows, error) {
	rows := &Rows{Rows: d.Rows}
	if err := t.Read(ctx, conn, rows, now); err != nil {
		return nil, err
	}
	given := make([]Taken, len(d.Rows))
	batch := t.begin(0)
	for i, row := range d.Rows {
		awaited := d.Await != nil && *d.Await == row
		if rows.Found[i] = rows.Found[i] || awaited || slices.Contains(d.Missing, row); rows.Found[i] {
			t.QueueTouch(batch, &decide.Change{Row: row, Definition: d.Definitions[i]}, now, &given[i])
		}
	}
	QueueNow(batch, now, &rows.At)
	err := conn.SendBatch(ctx, batch).Close()
	for i := range given {
		rows.States[i] = given[i].After
	}
	return rows, err
}

// prefetch makes a grant that prefetches.
func (t distributedTable) prefetch(ctx context.Context, pool *pgxpool.Pool, g *Grant, now *time.Time) error {
	conn, err := acquire(ctx, pool)
	if err != nil {
		return err
	}
	defer Release(ctx, conn)
	var row Taken
	batch := t.begin(0)
	t.QueueTouch(batch, &g.Change, now, &row)
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	after, out, more, ok := g.from(&row)
	if !ok {
		return nil
	}
	last, stop := Outlast(ctx)
	defer stop()
	if err := t.write(last, conn, g.Row, after, out); err != nil {
		return err
	}
	g.Taken = Taken{OK: true, After: after, At: row.At, Prefetched: more}
	g.Taken.charge(&g.Definition, &row.At)
	return nil
}

// from returns the row after a grant that prefetches; ok is false if it takes nothing.
func (g *Grant) from(row *Taken) (after bucket.State, out bucket.Out, more float64, ok bool) {
	d := g.Definition
	if g.Count == 0 && row.After.Value > d.Capacity { // raised meanwhile; see bucketPrefetch
		return after, out, 0, false
	}
	d.Capacity = g.capacity()
	left, ok := d.Take(row.After, row.At, g.Count, g.Need-g.Count)
	if !ok || row.After.Paused.After(row.At) || left.Value < g.Need-g.Count {
		return after, out, 0, false
	}
	if !d.Forgets(row.Out, left.TS) {
		out = d.Less(row.Out, g.Spent, left.TS)
	}
	more = max(0, min(g.Prefetch, left.Value/2, d.Capacity/2-out.Tokens-g.Out))
	out.Tokens += g.Out + more
	if end := g.ends(left.TS); end.After(out.Until) {
		out.Until = end
	}
	return d.Spend(left, row.At, more), out, more, true
}
