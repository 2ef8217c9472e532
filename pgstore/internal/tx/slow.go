package tx

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// slow is how long a take lasts, while others are under way here, after which the next ones of its
// row wait for it first.
const slow = 20 * time.Millisecond

// take takes from one row, for which it waits first if a take was slow lately.
func (b *Taker) take(ctx context.Context, tx pgx.Tx, reserve bool, c *decide.Change) (taken table.Taken, err error) {
	if b.takes.Load() == 0 { // beside no other
		b.takes.Add(1)
		defer b.takes.Add(-1)
		return b.table.Take(ctx, tx, reserve, c, b.Clock())
	}
	var batch pgx.Batch
	b.queueWait(&batch, c.Row)
	defer b.taking()(c.Row)
	if batch.Len() == 0 {
		return b.table.Take(ctx, tx, reserve, c, b.Clock())
	}
	b.table.QueueTake(&batch, reserve, c, b.Clock(), &taken)
	err = tx.SendBatch(ctx, &batch).Close()
	return taken, err
}

// queueWait puts into a batch the wait for a row of which a take was slow lately. An upsert that
// waits looks the row up anew each time that a transaction before it has ended, among all versions
// that a snapshot keeps. A statement that locks the row goes on from the version that it waited for.
// After five minutes of a snapshot 200 transactions a second made 46 without it, and 140 to 170 with
// it (docs/scaling.md). Where nothing is kept, it makes no difference.
func (b *Taker) queueWait(batch *pgx.Batch, row decide.Row) {
	if len(b.slow.Among(func() []int64 { return []int64{table.Lock(b.Schema, row)} })) > 0 {
		b.table.QueueAwait(batch, row)
	}
}

// taking begins a take, and returns its end, which remembers the rows if it was slow.
func (b *Taker) taking() (end func(rows ...decide.Row)) {
	begun := time.Now()
	b.takes.Add(1)
	return func(rows ...decide.Row) {
		if b.takes.Add(-1) == 0 || !b.table.PassesOver() || time.Since(begun) < slow {
			return
		}
		for _, row := range rows {
			b.slow.Note(table.Lock(b.Schema, row), engine.Contended)
		}
	}
}
