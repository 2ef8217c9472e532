package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Now reads the clock, unless now is given.
func Now(ctx context.Context, q Querier, now *time.Time) (at time.Time, err error) {
	var batch pgx.Batch
	if QueueNow(&batch, now, &at); batch.Len() > 0 {
		err = q.SendBatch(ctx, &batch).Close()
	}
	return at, err
}

// QueueNow puts into a batch the reading of the clock, unless now is given.
func QueueNow(batch *pgx.Batch, now, at *time.Time) {
	if now != nil {
		*at = *now
		return
	}
	batch.Queue("SELECT clock_timestamp()").QueryRow(func(row pgx.Row) error {
		err := row.Scan(at)
		*at = at.UTC()
		return err
	})
}
