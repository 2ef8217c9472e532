package table

import (
	"context"
	"sort"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// partTable grants from rows of one part of a distributed table by one transaction. (Citus calls a part a
// shard; it is on one node.) The transaction waits for a locked row for [partWait], and then takes
// nothing. Rows are in the order in which all transactions lock them, so there are no deadlocks.
type partTable struct{ distributedTable }

// partWait is the lock_timeout of a transaction for several rows. If a caller's transaction has
// locked one of the rows, the rest of its part waits for that long, once. A transaction for several
// rows of another process mostly takes less.
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
		batch.Queue(t.of(&rows[0].Definition).parts[n], partArgs(rows, now)...).Query(scanPart(rows, &at, now))
		grants = grants[n:]
	}
}

// inPart reports whether a statement for several rows can make a grant. Of each row, the conflict
// clause knows only the value of a new row. So the capacity less that value must be exactly the
// count.
func (g *Grant) inPart() bool {
	return !g.TakesExtra() && !g.never() && g.Need == g.Count && g.Definition.Capacity-(g.Definition.Capacity-g.Count) == g.Count
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

// Parts returns the parts of keys; none if the server has no Citus. A part keeps its ID when it
// moves to another node.
func (t *Table) Parts(ctx context.Context, q Querier, keys []string) (parts []int64, err error) {
	var has bool
	if err = q.QueryRow(ctx, hasPartsSQL).Scan(&has); err == nil && has {
		err = q.QueryRow(ctx, partsSQL, t.name, keys).Scan(&parts)
	}
	return parts, err
}
