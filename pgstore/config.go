package pgstore

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// Table is the table that holds the limits; package migrations makes it.
const Table = conn.Table

var (
	// ErrNoPool is the error of a verb that needs a pool, on a Store that has none.
	ErrNoPool = conn.ErrNoPool

	// ErrOutcomeUnknown is the error of a COMMIT that was not answered: the connection was lost and
	// the server could not be asked, or the context of an edit ended. The work and its tokens are
	// there both or neither. On a distributed database it is also the error of a COMMIT that failed
	// with XX000: some nodes may have committed, and others not.
	ErrOutcomeUnknown = conn.ErrOutcomeUnknown

	// ErrClosed is the error of a decision on its own after Close.
	ErrClosed = conn.ErrClosed

	// ErrLocked is the error of a decision on its own that waited until its context ended for a row
	// that a transaction has locked; or of one in a transaction that waited for longer than the
	// server's lock_timeout. The message names the limits of the statement. If the whole table is
	// locked, or a migration waits for its lock, the message names that session by pid and
	// application_name, while the pool has a connection left to ask by. The error also wraps that
	// of the context or the server.
	ErrLocked = conn.ErrLocked

	// ErrNotMigrated is the error of a database that lacks the table, or a column of it, where
	// the Store looks: the message says where that is.
	ErrNotMigrated = conn.ErrNotMigrated
)

var errNilFunc = &ratelimit.FieldError{Field: "Func", Value: nil, Reason: "must not be nil"}

// NoTimeout as Config.Timeout sets no bound.
const NoTimeout = conn.NoTimeout

// MaxEscrow is the longest Config.Escrow.
const MaxEscrow = 10 * time.Second

// Config says how a Store works. The zero value is a good one.
type Config struct {
	// Schema is the schema that holds the table. The default, "", leaves it to
	// the connection's search_path.
	Schema string

	// Clock returns the instant that decides, for tests. The default, nil, is the database's
	// clock, read by the deciding statement itself. Outside of tests any other clock lets
	// several processes disagree. Its instants must be before 5 June 2285: from then on
	// PostgreSQL and this package compute durations differently, by some microseconds.
	Clock func() time.Time

	// Portable keeps every statement to the SQL that a PostgreSQL with distributed tables (Citus)
	// accepts. Calls for one limit and key that arrive while a statement for them is under way share
	// the next one. While many calls are under way, those for other keys of the same Citus shard
	// share it too. Calls for several limits, limits with shards, and checks do not.
	//
	// AllowFunc and its like run at READ COMMITTED, since nodes do not serialize with each other. A
	// decision on its own waits for a locked row, on one connection for each such row, and its error
	// is the context's, not [ErrLocked]. A caller that gives up may have paid. Do not settle or cancel
	// a take of AllowTx that was rolled back: that gives away tokens. All differences:
	// https://github.com/pgratelimit/ratelimit/blob/main/docs/beyond-one-server.md#what-portable-changes.
	Portable bool

	// Escrow is for how long the Store may decide from memory after it has read a row, at most
	// [MaxEscrow]. A tenth of a second is much already. The default, 0, asks the row each time.
	//
	// The Store prefetches tokens of keys that are taken from often. Allow, Take, Reserve, Wait, AllowFunc,
	// ReserveFunc and AllowOnCommit hand them out without asking the database. All other verbs, and
	// limits with shards, ask the row. In every stretch of time a limit still grants at most its
	// bound. While a process prefetches, the largest burst is smaller by the tokens refilled during
	// Escrow. A killed process loses the tokens that it held. All costs are in
	// https://github.com/pgratelimit/ratelimit/blob/main/docs/scaling.md#from-memory.
	Escrow time.Duration

	// Timeout bounds a decision on its own whose context has no deadline, its waits for a connection
	// and for a locked row included. It is for the verbs without Tx, but not for AllowFunc,
	// ReserveFunc and AllowOnCommit. The default is 5 seconds; [NoTimeout] is none.
	Timeout time.Duration

	// RetryBudget bounds AllowFunc, ReserveFunc and AllowOnCommit when their context has no deadline:
	// the waits for their turn and for a connection, all attempts, and COMMIT. The time of their
	// functions counts too, but only the context that a function uses bounds its waits. After a COMMIT
	// without an answer they may ask the server for a second more. The default is 10 seconds.
	RetryBudget time.Duration

	// Catalog chooses the definitions by which AllowFunc, ReserveFunc and AllowOnCommit decide: a
	// *catalog.Catalog, so that callers write limit.For(key). The other verbs decide by the
	// requests as they are, since these may have been read in the caller's transaction. With nil,
	// the default, AllowFunc and its like do too.
	Catalog ratelimit.Catalog

	// Observe is called for every decision and edit, once, when it is in the database: see
	// [ratelimit.Observe]. A decision in a caller's transaction may still be rolled back.
	// It must not block, and be safe for concurrent use. The default, nil, costs nothing.
	Observe ratelimit.Observe
}

func (c *Config) validate() error {
	bad := func(field string, value any, reason string) error {
		return &ratelimit.FieldError{Package: "pgstore", Field: field, Value: value, Reason: reason}
	}
	switch {
	case c.RetryBudget < 0:
		return bad("RetryBudget", c.RetryBudget, "must not be negative")
	case c.Escrow < 0 || c.Escrow > MaxEscrow:
		return bad("Escrow", c.Escrow, "must be from 0 (none) to "+MaxEscrow.String())
	case c.Escrow%time.Microsecond != 0:
		return bad("Escrow", c.Escrow, "must be whole microseconds")
	case c.Timeout < 0 && c.Timeout != NoTimeout:
		return bad("Timeout", c.Timeout, "must not be negative, unless it is NoTimeout")
	}
	return nil
}
