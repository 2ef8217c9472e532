package table

import (
	"context"
	"fmt"
	"math/bits"
	"sort"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// partTable grants from rows of one part of a distributed table by one transaction. (Citus calls a part a
// shard; it is on one node.) The transaction waits for a locked row for [partWait], and then takes
// nothing. Rows are in the order in which all transactions lock them, so there are no deadlocks.
type partTable struct{ distributedTable }

// partWait is the lock_timeout of a transaction for several rows. A row that a caller's transaction
// has locked holds up the rest of its part for as long, once. Such a transaction of another process mostly
// takes less.
const partWait = 50 * time.Millisecond

// mostRows is the largest number of rows of a statement. Each text costs a session 3.5 kB for a row.
const mostRows = 64

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
		batch.Queue(t.of(&rows[0].Definition).parts[n], partArgs(rows, now)...).Query(scanPart(rows, &at, now))
		grants = grants[n:]
	}
}

// inPart reports whether a statement for several rows can make a grant. Its conflict clause has no other
// number of each row than the value for a new row, so the count must be exactly what that lacks.
func (g *Grant) inPart() bool {
	return !g.TakesExtra() && !g.never() && g.Need == g.Count && g.Definition.Capacity-(g.Definition.Capacity-g.Count) == g.Count
}

// rowsOf returns how many of n rows the next statement has. Only numbers of four leading bits have a text,
// since a session keeps what it has prepared.
func rowsOf(n int) int {
	n = min(n, mostRows)
	return n &^ (1<<max(bits.Len(uint(n))-4, 0) - 1)
}

// The rows of a statement have their key, their shard and the value that a new row is left with; those of a
// window also an instant from which to count its edges.
const (
	bucketRow = "($1::text, $%[1]d::text, $%[2]d::int4, $%[3]d::float8, coalesce($5::timestamptz, clock_timestamp()))"
	windowRow = "($1::text, $%[1]d::text, $%[2]d::int4, $%[3]d::float8, " +
		"date_bin($4::float8 * interval '1 microsecond', coalesce($5::timestamptz, clock_timestamp()), $%[4]d::timestamptz))"
)

// partTexts returns the statements by their number of rows. text is all but the rows.
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

func partArgs(grants []Grant, now *time.Time) []any {
	d := &grants[0].Definition
	args := append(make([]any, 0, 5+4*len(grants)), grants[0].Name, d.Capacity, d.Rate, micros(d.Period), now)
	for i := range grants {
		g := &grants[i]
		if args = append(args, g.Key.Key, int32(g.Shard), d.Capacity-g.Count); d.Stepped() {
			args = append(args, origin(d, g.Key.Key, time.Time{}, now))
		}
	}
	return args
}

// scanPart returns the function that reads the rows of a statement for several grants of a part. Of a window
// at is the clock before the statement; of a bucket, the row has it.
func scanPart(grants []Grant, at, now *time.Time) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var (
			r     returned
			row   = grants[0].Row
			shard int32
		)
		_, err := pgx.ForEachRow(rows, []any{&row.Key.Key, &shard, &r.value, &r.ts}, func() error {
			row.Shard = int(shard)
			i := sort.Search(len(grants), func(i int) bool { return grants[i].Compare(row) >= 0 })
			if r.at = r.ts; at.After(r.ts.Time) {
				r.at.Time = *at
			}
			r.report(&grants[i], now)
			return nil
		})
		return err
	}
}

const hasPartsSQL = `SELECT to_regproc('get_shard_id_for_distribution_column') IS NOT NULL`

const partsSQL = `SELECT array_agg(get_shard_id_for_distribution_column($1::text::regclass, key) ORDER BY i)
FROM unnest($2::text[]) WITH ORDINALITY AS u (key, i)`

// Parts returns the parts of keys; none if the table is not distributed. A part that has moved to another
// node is the same.
func (t *Table) Parts(ctx context.Context, q Querier, keys []string) (parts []int64, err error) {
	var has bool
	if err = q.QueryRow(ctx, hasPartsSQL).Scan(&has); err == nil && has {
		err = q.QueryRow(ctx, partsSQL, t.name, keys).Scan(&parts)
	}
	return parts, err
}
