package tx

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/pgstore/internal/engine"
	"github.com/pgratelimit/ratelimit/pgstore/internal/table"
)

// slow is how long a take must last, while others are under way, for later takes of its row to wait
// for the row first.
const slow = 20 * time.Millisecond

// take takes from one row. If a take of the row was slow lately, it waits for the row first.
func (b *Taker) take(ctx context.Context, tx pgx.Tx, reserve bool, c *decide.Change) (taken table.Taken, err error) {
	begun := b.takeBegins()
	defer b.takeEnds(begun, c.Row)
	if begun.IsZero() || !b.waits(c.Row) {
		return b.table.Take(ctx, tx, reserve, c, b.Clock())
	}
	return b.takeBehind(ctx, tx, reserve, c)
}

// takeBehind waits for a row, and takes from it.
func (b *Taker) takeBehind(ctx context.Context, tx pgx.Tx, reserve bool, c *decide.Change) (taken table.Taken, err error) {
	var batch pgx.Batch
	b.table.QueueAwait(&batch, c.Row)
	b.table.QueueTake(&batch, reserve, c, b.Clock(), &taken)
	err = tx.SendBatch(ctx, &batch).Close()
	return taken, err
}

// waits reports whether takes of a row wait for it first, because one was slow lately. An upsert
// that waits looks the row up again each time a transaction before it ends, among all versions that
// an old snapshot keeps. A statement that locks the row continues from the version that it waited
// for. With a snapshot of five minutes, 200 transactions a second became 46 without this wait, and
// 140 to 170 with it. Without such a snapshot it makes no difference.
func (b *Taker) waits(row decide.Row) bool {
	return len(b.slow.Among(func() []int64 { return []int64{table.Lock(b.Schema, row)} })) > 0
}

// takeBegins begins a take, and returns the time. It returns the zero time if no other take is
// under way.
func (b *Taker) takeBegins() (begun time.Time) {
	if b.takes.Add(1) > 1 {
		begun = time.Now()
	}
	return begun
}

// takeEnds ends a take, and remembers its rows if the take was slow.
func (b *Taker) takeEnds(begun time.Time, rows ...decide.Row) {
	if b.takes.Add(-1) == 0 || begun.IsZero() || !b.table.PassesOver() || time.Since(begun) < slow {
		return
	}
	for _, row := range rows {
		b.slow.Note(table.Lock(b.Schema, row), engine.Contended)
	}
}
