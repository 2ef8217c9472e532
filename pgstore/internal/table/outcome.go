package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Outcomes of a transaction, as the server reports them.
const (
	Committed  = "committed"
	Aborted    = "aborted"
	InProgress = "in progress"
	Forgotten  = "" // too long ago for the server to know
)

// QueueXid puts into a batch the reading of its transaction's ID.
func QueueXid(batch *pgx.Batch, xid *string) {
	batch.Queue(tableless["xid"]).QueryRow(func(row pgx.Row) error { return row.Scan(xid) })
}

// Outcome reads the outcome of a transaction or savepoint. own means that it was on this very
// connection.
func Outcome(ctx context.Context, q Querier, xid string, own bool) (outcome string, err error) {
	err = q.QueryRow(ctx, tableless["outcome"], xid, own).Scan(&outcome)
	return outcome, err
}

// Holds reports whether an ID is that of this very transaction or of one of its
// savepoints that have not ended.
func Holds(ctx context.Context, q Querier, xid string) (holds bool, err error) {
	err = q.QueryRow(ctx, tableless["holds"], xid).Scan(&holds)
	return holds, err
}

// Server reads the incarnation of the server that a connection is to. A transaction ID that
// was told in another one may since have been given to somebody else.
func Server(ctx context.Context, q Querier) (incarnation string, err error) {
	err = q.QueryRow(ctx, tableless["server"]).Scan(&incarnation)
	return incarnation, err
}

// UpSince reports whether the server has neither crashed nor been started since an
// instant on its clock.
func UpSince(ctx context.Context, q Querier, at time.Time) (up bool, err error) {
	err = q.QueryRow(ctx, tableless["up_since"], at).Scan(&up)
	return up, err
}

// Wrote reports whether a row is still the one that a take of a transaction left
// behind. That it is proves that the transaction was committed; that it is not
// proves nothing, since others may have written it since.
func (t *Table) Wrote(ctx context.Context, q Querier, c *decide.Change, xid string) (wrote bool, err error) {
	err = q.QueryRow(ctx, t.maintenance["wrote"], c.Name, c.Key.Key, int32(c.Shard), xid, c.After.Value, c.After.TS).Scan(&wrote)
	return wrote, err
}
