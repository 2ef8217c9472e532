package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"

	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Return gives tokens of a definition back to a row from memory, with the row locked. If another
// transaction has it locked, done is false, and the caller must try again. With await, and on a
// distributed table, Return first waits for the row for [conn.Awaited] at most. A missing row is
// full, and gets nothing back. An [Unsent] error came before anything was changed.
func (t *Table) Return(ctx context.Context, pool *pgxpool.Pool, row decide.Row, d *bucket.Definition, r *bucket.Return, await bool, now *time.Time) (done bool, err error) {
	pooled, err := acquire(ctx, pool)
	if err != nil {
		return false, err
	}
	defer Release(ctx, pooled)
	wait := conn.PassOver
	if await || t.distributed {
		wait = conn.Awaited
	}
	var (
		s     state
		ahead []float64
		at    time.Time
	)
	batch := t.begin(wait)
	batch.Queue(t.common["await"], row.Name, row.Key.Key, int32(row.Shard)).Query(each(s.fields(&ahead), func() {}))
	QueueNow(batch, now, &at)
	if err := pooled.SendBatch(ctx, batch).Close(); conn.TimedOut(err) {
		return false, nil
	} else if err != nil {
		return false, unsentError{err}
	}
	before, there := s.get()
	if !there {
		return true, nil
	}
	after, out := d.Return(before, readOut(ahead), r, at)
	ctx, stop := Outlast(ctx)
	defer stop()
	err = t.write(ctx, pooled, row, after, out)
	return err == nil, err
}

// write writes a row that its transaction has locked, and commits.
func (t *Table) write(ctx context.Context, pooled *pgxpool.Conn, row decide.Row, s bucket.State, out bucket.Out) error {
	var ahead []float64
	if !out.Until.IsZero() {
		ahead = []float64{out.Tokens, micros(out.Until.Sub(epoch)) / 1e6} // see readOut
	}
	var batch pgx.Batch
	batch.Queue(t.common["write_ahead"], row.Name, row.Key.Key, int32(row.Shard), s.Value, s.TS, numbers(&s), ahead)
	batch.Queue("COMMIT")
	return pooled.SendBatch(ctx, &batch).Close()
}
