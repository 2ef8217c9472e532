package table

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Decision holds rows to lock, and the function that decides on them.
type Decision struct {
	Rows        []decide.Row        // in order
	Definitions []bucket.Definition // of the rows' shards
	Missing     []decide.Row        // some of Rows, to be made full before they are locked
	Await       *decide.Row         // one of Rows, to be made if it is missing, and waited for; nil for none

	// Decide is called once, with the rows that are locked as found. It sets the States of the
	// rows that it changes, and returns their places, in order.
	Decide func(read *Rows) (changed []int, err error)

	// OnLocked is called with each of Missing that another transaction has made and not committed.
	OnLocked func(decide.Row)
}

// run begins a transaction by lock, which locks and reads the rows. It decides, puts the changed
// rows into a batch by write, and commits.
func (d *Decision) run(ctx context.Context, pool *pgxpool.Pool, lock func(*pgxpool.Conn) (*Rows, error), write func(*pgx.Batch, *Rows)) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer Release(ctx, conn)
	rows, err := lock(conn)
	if err != nil {
		return err
	}
	changed, err := d.decide(rows)
	if err != nil {
		return err
	}
	var batch pgx.Batch
	if len(changed.Rows) > 0 {
		write(&batch, changed)
	}
	batch.Queue("COMMIT")
	return conn.SendBatch(ctx, &batch).Close()
}

// decide calls Decide, and returns the rows that were changed, in order.
func (d *Decision) decide(rows *Rows) (*Rows, error) {
	places, err := d.Decide(rows)
	if err != nil {
		return nil, err
	}
	changed := &Rows{}
	for _, n := range places {
		if !rows.Found[n] {
			return nil, fmt.Errorf("row %v is to be written and was not locked", rows.Rows[n])
		}
		changed.Rows, changed.States = append(changed.Rows, rows.Rows[n]), append(changed.States, rows.States[n])
	}
	return changed, nil
}

// definitionsOf returns the definitions of some of a decision's rows.
func (d *Decision) definitionsOf(rows []decide.Row) []bucket.Definition {
	definitions := make([]bucket.Definition, len(rows))
	for i, row := range rows {
		n, _ := slices.BinarySearchFunc(d.Rows, row, decide.Row.Compare)
		definitions[i] = d.Definitions[n]
	}
	return definitions
}
