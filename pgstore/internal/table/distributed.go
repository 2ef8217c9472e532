package table

import (
	"context"
	"fmt"
	"math/bits"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Decider returns the Decider for the table.
func (t *Table) Decider() Decider {
	if t.distributed {
		return distributedTable{t}
	}
	return plainTable{t}
}

// Part returns the Decider for rows of one part of a distributed table. Its Grant waits only shortly: if
// a row stays locked, nothing is taken, and the error is lock_not_available. Its Decide finds no row.
func (t *Table) Part() Decider { return partTable{distributedTable{t}} }

// distributedTable decides by the statements of callers' transactions, which change one row each,
// and wait for it. Grants that prefetch are computed here on the locked row, as the plain
// statements compute them.
type distributedTable struct{ *Table }

func (t distributedTable) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, _ bool, now *time.Time) (err error) {
	if len(grants) != 1 {
		return fmt.Errorf("%d grants, of which a distributed table takes one", len(grants))
	}
	g := &grants[0]
	if g.Taken = (Taken{}); g.never() { // the statement would grant it from a missing row
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
	g.Taken = Taken{OK: true, After: after, At: row.At, Extra: more}
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

// partTable grants from rows of one part of a distributed table by one transaction. (Citus calls a part a
// shard; it is on one node.) The transaction waits for a locked row for [partWait], and then takes
// nothing. Rows are in the order in which all transactions lock them, so there are no deadlocks.
type partTable struct{ distributedTable }

// partWait is the lock_timeout of a transaction for several rows. If a caller's transaction has
// locked one of the rows, the rest of its part waits for that long, once. Another process's
// transaction for several rows is mostly shorter.
const partWait = 50 * time.Millisecond

func (t partTable) Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, _ bool, now *time.Time) error {
	batch := t.begin(partWait)
	began := batch.Len()
	t.queueParts(batch, grants, now)
	if batch.Len() == began {
		return nil
	}
	batch.Queue("COMMIT")
	pooled, err := acquire(ctx, pool)
	if err != nil {
		return err
	}
	defer Release(ctx, pooled)
	if err = pooled.SendBatch(ctx, batch).Close(); err != nil {
		for i := range grants {
			grants[i].Taken = Taken{}
		}
	}
	return err
}

// Decide finds no row, so that each call goes on in the queue of its row.
func (t partTable) Decide(_ context.Context, _ *pgxpool.Pool, d *Decision, _ *time.Time) error {
	_, err := d.Decide(&Rows{Rows: d.Rows, States: make([]bucket.State, len(d.Rows)), Found: make([]bool, len(d.Rows)), At: time.Now()})
	return err
}

// queueParts puts into a batch the statements for grants, in the order of their rows. The rows of a
// statement have one definition.
func (t partTable) queueParts(batch *pgx.Batch, grants []Grant, now *time.Time) {
	var at time.Time
	for len(grants) > 0 {
		n := 0
		for n < len(grants) && grants[n].inPart() && grants[n].Definition == grants[0].Definition {
			n++
		}
		if n == 0 {
			grants = grants[1:]
			continue
		}
		n = rowsOf(n)
		rows := grants[:n:n]
		if rows[0].Definition.Stepped() {
			QueueNow(batch, now, &at)
		}
		batch.Queue(t.kinds[rows[0].Definition.Form()].parts[n], partArgs(rows, now)...).Query(scanPart(rows, &at, now))
		grants = grants[n:]
	}
}

// inPart reports whether a statement for several rows can make a grant. Its conflict clause knows
// only the value of a new row. So the capacity less that value must be exactly the count.
func (g *Grant) inPart() bool {
	return !g.TakesExtra() && !g.never() && g.Need == g.Count && g.Definition.Capacity-(g.Definition.Capacity-g.Count) == g.Count
}

// scanPart returns the function that reads the rows of a statement for several grants of a part.
// For windows at is the clock before the statement; a bucket's row has it.
func scanPart(grants []Grant, at, now *time.Time) func(pgx.Rows) error {
	var (
		r     returned
		row   = grants[0].Row
		shard int32
	)
	return each([]any{&row.Key.Key, &shard, &r.value, &r.ts}, func() {
		row.Shard = int(shard)
		i := sort.Search(len(grants), func(i int) bool { return grants[i].Compare(row) >= 0 })
		if r.at = r.ts; at.After(r.ts.Time) {
			r.at.Time = *at
		}
		r.report(&grants[i], now)
	})
}

const hasPartsSQL = `SELECT to_regproc('get_shard_id_for_distribution_column') IS NOT NULL`

const partsSQL = `SELECT array_agg(get_shard_id_for_distribution_column($1::text::regclass, key) ORDER BY i)
FROM unnest($2::text[]) WITH ORDINALITY AS u (key, i)`

// Parts returns the parts of keys; none if the server has no Citus. A part keeps its ID when it
// moves to another node.
func (t *Table) Parts(ctx context.Context, q Querier, keys []string) (parts []int64, err error) {
	var has bool
	if err = q.QueryRow(ctx, hasPartsSQL).Scan(&has); err == nil && has {
		err = q.QueryRow(ctx, partsSQL, t.name, keys).Scan(&parts)
	}
	return parts, err
}

// mostRows is the largest number of rows of a statement. Each text costs a session 3.5 kB per row.
const mostRows = 64

// rowsOf returns how many of n rows the next statement has. A session keeps each text that it has
// prepared. So only numbers whose bits after the first four are 0 have a text.
func rowsOf(n int) int {
	n = min(n, mostRows)
	return n &^ (1<<max(bits.Len(uint(n))-4, 0) - 1)
}

// A row of a statement has its key, its shard and the value of a new row. A window's also has the
// instant from which its edges are counted.
const (
	bucketRow = "($1::text, $%[1]d::text, $%[2]d::int4, $%[3]d::float8, coalesce($5::timestamptz, clock_timestamp()))"
	windowRow = "($1::text, $%[1]d::text, $%[2]d::int4, $%[3]d::float8, " +
		"date_bin($4::float8 * interval '1 microsecond', coalesce($5::timestamptz, clock_timestamp()), $%[4]d::timestamptz))"
)

// partTexts returns the statements by their number of rows. text is the statement without rows.
func partTexts(text, row string) map[int]string {
	if text == "" {
		return nil
	}
	texts, rows, columns := make(map[int]string), make([]string, mostRows), strings.Count(row, "%")
	for i := range rows {
		first := 6 + columns*i
		rows[i] = fmt.Sprintf(row, first, first+1, first+2, first+3)
		if n := i + 1; n == rowsOf(n) {
			texts[n] = fmt.Sprintf(text, strings.Join(rows[:n], ", "))
		}
	}
	return texts
}

// partArgs returns the arguments of a statement: those of the definition, and then those of each row.
func partArgs(grants []Grant, now *time.Time) []any {
	d := &grants[0].Definition
	args := append(make([]any, 0, 5+4*len(grants)), grants[0].Name, d.Capacity, d.Rate, d.Micros(), now)
	for i := range grants {
		g := &grants[i]
		if args = append(args, g.Key.Key, int32(g.Shard), d.Capacity-g.Count); d.Stepped() {
			args = append(args, origin(d, g.Key.Key, time.Time{}, now))
		}
	}
	return args
}

// InParts reports whether the Decider of a part can grant from limits of d's kind.
func (t *Table) InParts(d *bucket.Definition) bool { return t.kinds[d.Form()].parts != nil }
