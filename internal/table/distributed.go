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

// distributedTable decides by the statements of callers' transactions, which change one row
// each, and wait for it. The rest is decided here, with the row locked, as the statements for
// several rows decide it.
type distributedTable struct{ *Table }

func (t distributedTable) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, _ bool, now *time.Time) (err error) {
	if len(grants) != 1 {
		return fmt.Errorf("%d grants, of which a distributed table takes one", len(grants))
	}
	g := &grants[0]
	if g.Taken = (Taken{}); g.never() { // but as a missing row would grant
		return nil
	}
	if g.prefetches() {
		return t.prefetch(ctx, pool, g, now)
	}
	c := g.Change
	c.Floor = g.Need - g.Count
	g.Taken, err = t.Take(ctx, pool, false, &c, now)
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
	rows, err := t.lockEach(ctx, conn, d, now)
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
	}
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, &batch).Close()
}

// lockEach begins a transaction that locks a decision's rows, and those that are missing, one
// after another.
func (t distributedTable) lockEach(ctx context.Context, conn *pgxpool.Conn, d *Decision, now *time.Time) (*Rows, error) {
	rows := &Rows{Rows: d.Rows}
	if err := t.FindEach(ctx, conn, rows); err != nil {
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

// prefetch is a grant that prefetches.
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
	last, stop := heard(ctx)
	defer stop()
	if err := t.write(last, conn, g.Row, after, out); err != nil {
		return err
	}
	g.Taken = Taken{OK: true, After: after, At: row.At, prefetched: more}
	g.Taken.charge(&g.Definition, &row.At)
	return nil
}

// write writes a row that a transaction has locked, and commits it.
func (t distributedTable) write(ctx context.Context, conn *pgxpool.Conn, row decide.Row, s bucket.State, out bucket.Out) error {
	var ahead []float64
	if !out.Until.IsZero() {
		ahead = outNumbers(out)
	}
	var batch pgx.Batch
	batch.Queue(t.common["write_ahead"], row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, numbers(&s), ahead)
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, &batch).Close()
}

// from returns the row after a grant that prefetches; ok is false if it has too few tokens.
func (g *Grant) from(row *Taken) (after bucket.State, out bucket.Out, more float64, ok bool) {
	d := g.Definition
	d.Capacity = g.capacity()
	left, ok := d.Take(row.After, row.At, g.Count, g.Need-g.Count)
	if !ok || row.After.Paused.After(row.At) || left.Slots != nil && (left.Slots.Ahead > 0 || left.Value < g.Need-g.Count) {
		return after, out, 0, false
	}
	if was := (bucket.Out{Tokens: row.Ahead, Until: row.Until}); !d.Forgets(was, left.TS) {
		out = g.Spent.off(&d, was, left.TS)
	}
	more = max(0, min(g.Prefetch, left.Value/2, d.Capacity/2-out.Tokens-g.Out))
	out.Tokens += g.Out + more
	if end := g.ends(left.TS); end.After(out.Until) {
		out.Until = end
	}
	return d.Spend(left, row.At, more), out, more, true
}

// off returns the tokens that are out less those that were spent, if these are counted in them
// at an instant.
func (s *Spent) off(d *bucket.Definition, out bucket.Out, at time.Time) bucket.Out {
	if counted(d, s.SpentEnd).After(at) {
		out.Tokens = max(0, out.Tokens-s.Spent)
	}
	return out
}

func (t distributedTable) Return(ctx context.Context, pool *pgxpool.Pool, r *Return, _ bool, now *time.Time) (done bool, err error) {
	conn, err := acquire(ctx, pool)
	if err != nil {
		return false, err
	}
	defer Release(ctx, conn)
	var (
		s     state
		ahead []float64
		at    time.Time
	)
	batch := t.begin(Awaited)
	batch.Queue(t.common["find_locked"], r.Row.Name, r.Row.Key.Key, int32(r.Row.Shard)).Query(func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, s.fields(&ahead), func() error { return nil })
		return err
	})
	QueueNow(batch, now, &at)
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return false, unsentError{err}
	}
	before, there := s.get()
	if !there {
		return true, nil
	}
	after, out := r.into(before, readOut(ahead), at)
	err = t.write(ctx, conn, r.Row, after, out)
	return err == nil, err
}

// into returns a row and the tokens of it that are out at an instant, after a return.
func (r *Return) into(s bucket.State, out bucket.Out, at time.Time) (bucket.State, bucket.Out) {
	d, leftover, t, end := &r.Definition, !r.End.IsZero(), at, r.End
	if s.TS.After(t) {
		t = s.TS
	}
	if d.Slotted() { // of the slot that until is the end of, whenever it comes
		t, end = out.Until.Add(-1), r.Taken.Add(d.SlotWidth())
	}
	past := t
	if r.Known.After(past) && !d.Slotted() {
		past = r.Known
	}
	out = r.Spent.off(d, out, past)
	if leftover && counted(d, end).After(past) {
		out.Tokens = max(0, out.Tokens-r.Count)
	}
	swallowed, room := leftover && s.Paused.After(at) && d.Every == 0, d.Capacity-d.Owed(out, at)
	switch {
	case d.Slotted():
		return d.Refund(s, s.TS, r.Count, r.Taken.UnixMicro()), out
	case d.Stands():
		switch {
		case swallowed || leftover && (!s.TS.Equal(r.Taken) || !past.Before(end)):
		case room < d.Capacity:
			s.Value = max(min(s.Value, d.Capacity), min(s.Value+r.Count, room))
		default:
			s.Value = min(s.Value+r.Count, max(s.Value, room))
		}
		return s, out
	}
	n := r.Count
	if late := past.Sub(end); leftover && late > 0 {
		n = max(0, n-float64(late.Microseconds())*d.Rate/float64(d.Period.Microseconds()))
	}
	if s = d.Settle(s, at); !swallowed {
		s.Value = max(s.Value, min(s.Value+n, room))
	}
	return s, out
}
