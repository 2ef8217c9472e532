package table

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/decide"
)

// Decider is how decisions on their own are made, in transactions that begin and end with
// them: by all that PostgreSQL can do, or on a table that is distributed.
type Decider interface {
	// Grant takes what grants say from the rows that have enough for all of it; Taken tells
	// which had. It passes over rows that somebody else has locked. If that is only found
	// when it is too late to pass over them, nothing is taken, and the error is
	// lock_not_available. With await there is one grant, and it waits for its row, for
	// [Awaited] at most. On a distributed table there is always one grant, and it always
	// waits.
	Grant(ctx context.Context, pool *pgxpool.Pool, grants []Grant, await bool, now *time.Time) error

	// Read reads rows without locking them.
	Read(ctx context.Context, q Querier, rows *Rows, now *time.Time) error

	// Decide locks rows, has them decided on, writes what that changed, and commits. It
	// passes over rows that somebody else has locked, which are not found, unless the table
	// is distributed: then it waits for each. The error is lock_not_available if the awaited
	// row was not to be had for [Awaited].
	Decide(ctx context.Context, pool *pgxpool.Pool, d *Decision, now *time.Time) error

	// Return gives back to a row what is left of a lease; done is false if somebody else has
	// the row locked, and it is to be tried again. If that is only found when it is too late
	// to pass over the row, the error is lock_not_available. With await, and on a distributed
	// table, it waits for the row for [Awaited]. A row that is not there is full, and needs
	// nothing back.
	Return(ctx context.Context, pool *pgxpool.Pool, r *Return, await bool, now *time.Time) (done bool, err error)
}

// PassOver is how long a statement waits for a lock that is not to wait for one, since
// PostgreSQL cannot tell an INSERT or an UPDATE not to wait at all; and Awaited is how long
// one waits at a time that is to wait for a lock.
const (
	PassOver = time.Millisecond
	Awaited  = time.Second
)

// pipelined is how long a grant waits for its row that is [Grant.Pipelined]. Whoever gives up
// goes to the end of the line, so it is long enough for a line of a hundred processes.
const pipelined = 500 * time.Millisecond

// Decision is rows to lock, and what decides on them.
type Decision struct {
	Rows        []decide.Row        // in order
	Definitions []bucket.Definition // of the rows' shards
	Missing     []decide.Row        // some of Rows, to be made before they are locked: full, which means the same
	Await       *decide.Row         // one of Rows, to be made if it is missing, and waited for; nil for none

	// Decide is called once, with the rows that are locked as found. It returns the places of
	// those that it changed, whose States it has set.
	Decide func(read *Rows) (changed []int, err error)

	// OnLocked is told of each of Missing that somebody else has made and not committed.
	OnLocked func(decide.Row)
}

// decide decides, and returns the rows that were changed, in order.
func (d *Decision) decide(rows *Rows) ([]int, error) {
	changed, err := d.Decide(rows)
	if err != nil {
		return nil, err
	}
	slices.Sort(changed)
	for _, n := range changed {
		if !rows.Found[n] {
			return nil, fmt.Errorf("row %v is to be written and was not locked", rows.Rows[n])
		}
	}
	return changed, nil
}

// definitionsOf is the definitions of some of a decision's rows.
func (d *Decision) definitionsOf(rows []decide.Row) []bucket.Definition {
	of := make(map[decide.Row]*bucket.Definition, len(d.Rows))
	for i, row := range d.Rows {
		of[row] = &d.Definitions[i]
	}
	definitions := make([]bucket.Definition, len(rows))
	for i, row := range rows {
		definitions[i] = *of[row]
	}
	return definitions
}

// Return is tokens that come back to their row from memory.
type Return struct {
	Row        decide.Row
	Definition bucket.Definition // of the shard
	Count      float64           // tokens; may be 0, to say what was spent
	Taken      time.Time         // ts of the row when they were taken
	End        time.Time         // of the lease that they are left of; zero for tokens that somebody was told of
	Spent
}

// Spent is what a process has used of leases since it last said so. It is not out any more.
type Spent struct {
	Spent    float64
	SpentEnd time.Time // of the lease of these that ends first
}

// counted is until when what was spent is counted in a row's ahead for sure.
func (s *Spent) counted(d *bucket.Definition) *time.Time { return orNull(counted(d, s.SpentEnd)) }

// counted is until when a lease is counted in a row's ahead for sure, that ends at an instant;
// zero if there is none.
func counted(d *bucket.Definition, end time.Time) time.Time {
	if end.IsZero() || d.Stands() {
		return end
	}
	return end.Add(bucket.Grace)
}

const beginSQL = "BEGIN ISOLATION LEVEL READ COMMITTED"

// isLocked reports whether an error is that somebody else has a row locked.
func isLocked(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "55P03" // lock_not_available
}

// HeardFor is for how long a statement that prefetches is heard when nobody waits for it any
// more. The server goes on with it, so what it takes has to be returned.
const HeardFor = 5 * time.Second

// heard is a context for such a statement.
func heard(ctx context.Context) (context.Context, context.CancelFunc) { return Outlast(ctx, HeardFor) }

// Outlast returns a context that ends a time after ctx has ended, and has no other deadline.
func Outlast(ctx context.Context, by time.Duration) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(by, cancel)
		context.AfterFunc(longer, func() { timer.Stop() })
	})
	return longer, func() { stop(); cancel() }
}

// unsentError is an error before anything was changed.
type unsentError struct{ error }

func (e unsentError) Unwrap() error { return e.error }

// Unsent reports whether an error of a grant that prefetches, or of a return, is that there
// was no connection for it, so that nothing was taken, returned or told.
func Unsent(err error) bool {
	var unsent unsentError
	return errors.As(err, &unsent)
}

// acquire returns a connection of a pool, or an error that is Unsent.
func acquire(ctx context.Context, pool *pgxpool.Pool) (*pgxpool.Conn, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return nil, unsentError{err}
	}
	return conn, nil
}

// Release gives a connection back to its pool, after rolling back what a fault has left open.
func Release(ctx context.Context, conn *pgxpool.Conn) {
	rollBack(ctx, conn)
	conn.Release()
}

func rollBack(ctx context.Context, conn *pgxpool.Conn) {
	if status := conn.Conn().PgConn().TxStatus(); status != 'I' && !conn.Conn().IsClosed() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
		defer cancel()
		_, _ = conn.Exec(ctx, "ROLLBACK") // a connection on which it fails is closed
	}
}

const rollbackTime = 5 * time.Second

// begin begins a batch with a transaction that waits so long for a lock, 0 for any time.
func (t *Table) begin(wait time.Duration) *pgx.Batch {
	var batch pgx.Batch
	batch.Queue(beginSQL)
	t.QueueBounds(&batch, wait)
	return &batch
}
