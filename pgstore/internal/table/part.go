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

// partTable grants from rows of one part of a distributed table, which is on one node, by one
// transaction there. (Citus calls a part a shard.) It waits for locked rows for [partWait], and then
// takes nothing. A statement has its rows in their order, so it meets no transaction of others in a
// deadlock.
type partTable struct{ distributedTable }

// partWait is the lock_timeout of a transaction for several rows. A row that a caller's transaction
// has locked holds up the other rows of the part for as long, once. It is longer than another
// process' transaction for several rows takes.
const partWait = 20 * time.Millisecond

// mostRows is the largest number of rows of a statement for several rows, a power of 2.
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
	_, err := d.Decide(&Rows{Rows: d.Rows, States: make([]bucket.State, len(d.Rows)), Found: make([]bool, len(d.Rows))})
	return err
}

// queueParts puts into a batch the statements for grants: for each run of grants with one definition, as
// few as have a power of 2 rows each, so that there are few texts to prepare.
func (t partTable) queueParts(batch *pgx.Batch, grants []Grant, now *time.Time) {
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
		batch.Queue(t.of(&rows[0].Definition).parts[n], partArgs(rows, now)...).Query(scanPart(rows, now))
		grants = grants[n:]
	}
}

// inPart reports whether a statement for several rows can make a grant: the row is to have the count
// itself, and the statement, which only sees what is left of a full row, finds the count in it.
func (g *Grant) inPart() bool {
	return !g.TakesExtra() && !g.never() && g.Need == g.Count && g.Definition.Capacity-(g.Definition.Capacity-g.Count) == g.Count
}

// rowsOf returns of n rows how many the next statement has: not all numbers have a text, since a session
// keeps what it has prepared.
func rowsOf(n int) int {
	n = min(n, mostRows)
	return n &^ (1<<max(bits.Len(uint(n))-4, 0) - 1)
}

// partTexts returns the statements by their number of rows. A row has its key, its shard and the value that
// a new row is left with.
func partTexts(text string) map[int]string {
	if text == "" {
		return nil
	}
	texts, rows := make(map[int]string), make([]string, mostRows)
	for i := range rows {
		rows[i] = fmt.Sprintf("($1::text, $%d::text, $%d::int4, $%d::float8, coalesce($5::timestamptz, clock_timestamp()))", 3*i+6, 3*i+7, 3*i+8)
		if n := i + 1; n == rowsOf(n) {
			texts[n] = fmt.Sprintf(text, strings.Join(rows[:n], ", "))
		}
	}
	return texts
}

func partArgs(grants []Grant, now *time.Time) []any {
	d := &grants[0].Definition
	args := append(make([]any, 0, 5+3*len(grants)), grants[0].Name, d.Capacity, d.Rate, micros(d.Period), now)
	for i := range grants {
		g := &grants[i]
		args = append(args, g.Key.Key, int32(g.Shard), d.Capacity-g.Count)
	}
	return args
}

// scanPart returns the function that reads the rows of a statement for several grants of a part.
func scanPart(grants []Grant, now *time.Time) func(pgx.Rows) error {
	return func(rows pgx.Rows) error {
		var (
			r     returned
			row   = grants[0].Row
			shard int32
		)
		_, err := pgx.ForEachRow(rows, []any{&row.Key.Key, &shard, &r.value, &r.ts}, func() error {
			row.Shard = int(shard)
			i := sort.Search(len(grants), func(i int) bool { return grants[i].Compare(row) >= 0 })
			r.at = r.ts // of a bucket
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
