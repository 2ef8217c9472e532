package table

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Decider makes decisions on their own, in transactions of their own: either with all that
// PostgreSQL can do, or on a distributed table.
type Decider interface {
	// Grant takes the tokens of grants from the rows that have enough for them; Taken reports which
	// had. It passes over rows that another transaction has locked. If it meets a lock all the
	// same, nothing is taken, and the error is lock_not_available. With await there is one grant,
	// and it waits for its row, for conn.Awaited at most. On a distributed table there is always
	// one grant, and it always waits.
	Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, await bool, now *time.Time) error

	// Decide locks rows, calls d.Decide, writes the changed rows, and commits. It passes over rows
	// that another transaction has locked, which are not found, unless the table is distributed:
	// then it waits for each. The error is lock_not_available if the awaited row stayed locked for
	// conn.Awaited.
	Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error
}

// PassesOver reports whether decisions on their own pass over rows that other transactions have
// locked. On a distributed table they wait for them.
func (t *Table) PassesOver() bool { return !t.distributed }

// Part returns the Decider for rows of one part of a distributed table. Its Grant waits only shortly: if
// a row stays locked, nothing is taken, and the error is lock_not_available. Its Decide finds no row.
func (t *Table) Part() Decider { return partTable{distributedTable{t}} }

// InParts reports whether the Decider of a part can grant from limits of d's kind.
func (t *Table) InParts(d *bucket.Definition) bool { return t.of(d).parts != nil }

// Level returns the isolation level of transactions that take for a caller's function. Nodes of a
// distributed database do not serialize with each other: at SERIALIZABLE one of them may fail at COMMIT
// when another has committed. A take is right at READ COMMITTED.
func (t *Table) Level() pgx.TxIsoLevel {
	if t.distributed {
		return pgx.ReadCommitted
	}
	return pgx.Serializable
}

// Batch returns how many rows are pruned within one timeout, and on a plain table in one
// transaction: few, so that no caller waits for it long. On a distributed table each row is a round
// trip.
func (t *Table) Batch() int {
	if t.distributed {
		return 100
	}
	return 1000
}

// ReportsMade reports whether a statement returns which rows it has made. On a distributed table it
// does not.
func (t *Table) ReportsMade() bool { return !t.distributed }

// Decider returns the Decider for the table.
func (t *Table) Decider() Decider {
	if t.distributed {
		return distributedTable{t}
	}
	return plainTable{t}
}
