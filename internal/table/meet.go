package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Meet takes the tokens of a grant, if its row has enough, and reads the row, which Rows names,
// in the same round trip: for a key of which nothing is known. Like [Decider.Grant] it passes
// over a row that is locked; the error is lock_not_available if the lock is found too late.
func (t *Table) Meet(ctx context.Context, q Querier, g *Grant, r *Rows, now *time.Time) error {
	var batch pgx.Batch
	sql, args := t.forGrant("grant", g, now)
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return g.scan(row, now) })
	t.QueueRead(&batch, r, now)
	err := q.SendBatch(ctx, &batch).Close()
	if err != nil { // nothing is taken, even if the row was read
		g.Taken = Taken{}
	}
	return err
}

// Make makes a row in a state, unless it is there. The error is lock_not_available if
// another transaction is making it.
func (t *Table) Make(ctx context.Context, q Querier, row decide.Row, s bucket.State) (made bool, err error) {
	var batch pgx.Batch
	t.QueueBounds(&batch, PassOver)
	batch.Queue(t.common["make"], row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, numbers(&s)).Exec(func(tag pgconn.CommandTag) error {
		made = tag.RowsAffected() > 0
		return nil
	})
	return made, q.SendBatch(ctx, &batch).Close()
}
