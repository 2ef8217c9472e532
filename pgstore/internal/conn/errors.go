package conn

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/intx"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// Table is the table that holds the limits.
const Table = "rate_limits"

// The errors of a Store. Package pgstore exports and documents them.
var (
	ErrNoPool         = errors.New("pgstore: this needs a pool, and New was given nil")
	ErrOutcomeUnknown = intx.ErrUnknown
	ErrClosed         = errors.New("pgstore: the store is closed")
	ErrLocked         = errors.New("pgstore: waited for a lock")
	ErrNotMigrated    = errors.New("pgstore: table " + Table + " is missing or not up to date; bring it there with `ratelimit migrate up` or migrate.Up")
)

// ErrCommitted reports that a caller's function failed after it had committed.
var ErrCommitted = errors.New("pgstore: the function committed the transaction itself, so it is not run again")

// The SQLSTATEs of package intx.
const (
	LockNotAvailable = intx.LockNotAvailable
	QueryCanceled    = intx.QueryCanceled
)

// TimedOut reports whether a statement with a lock_timeout did nothing because a lock was not available
// in time. If the lock comes in the same moment, PostgreSQL reports a canceled statement instead (8 of
// 250,000 calls on hot rows). A statement_timeout has another message. A canceled context has the
// same one, and the next attempt finds that context over. Messages in other languages than English are
// not recognized: they stay errors.
func TimedOut(err error) bool {
	var pgErr *pgconn.PgError
	return Code(err) == LockNotAvailable ||
		errors.As(err, &pgErr) && pgErr.Code == QueryCanceled && pgErr.Message == "canceling statement due to user request"
}

// Fault wraps an error of the database, and explains it if the table is missing or locked, or a pooler
// is in the way. errors.As reaches the original.
func (c *Conn) Fault(doing string, err error) error {
	code := Code(err)
	if code == QueryCanceled || errors.Is(err, context.DeadlineExceeded) {
		if by := c.tableLock(); by != "" && !errors.Is(err, ErrLocked) {
			return fmt.Errorf("%w: %s: %s: %w", ErrLocked, by, doing, err)
		}
	}
	switch {
	case code == "42P01" || code == "42703": // undefined_table, undefined_column
		where := "the search_path of the connection (Config.Schema names another)"
		if c.Schema != "" {
			where = fmt.Sprintf("schema %q, which is Config.Schema", c.Schema)
		}
		return fmt.Errorf("%w; looked in %s: %w", ErrNotMigrated, where, err)
	case code == "0A000" && !c.Portable && !strings.Contains(err.Error(), "cached plan"): // which is of a table that was altered
		return fmt.Errorf("pgstore: %s: %w (on a table that Citus distributes, set Config.Portable)", doing, err)
	case code == "42P05" || code == "26000" || code == "08P01" && strings.Contains(err.Error(), "prepared statement"):
		// duplicate_prepared_statement, invalid_sql_statement_name; protocol_violation is the statement of
		// that name with other parameters, and what PgBouncer says of all else, such as a lost server.
		return fmt.Errorf("pgstore: %s: %w (behind a pooler in transaction mode, have pgx prepare nothing: default_query_exec_mode=exec in the pool's URL)", doing, err)
	}
	return fmt.Errorf("pgstore: %s: %w", doing, err)
}

// FaultOf is Fault for a statement that needs rows of limits, which it names. If the statement waited
// in vain for a lock, the error is that of Locked.
func (c *Conn) FaultOf(doing string, limits []string, err error) error {
	if Code(err) == LockNotAvailable {
		return c.Locked(err, limits...)
	}
	return c.Fault(doing+" "+named(limits), err)
}

// Locked returns the error of a decision whose time was over while it waited for a lock: of a row of one
// of some limits, or of the table.
func (c *Conn) Locked(err error, limits ...string) error {
	if by := c.tableLock(); by != "" {
		return fmt.Errorf("%w: %s: %s: %w", ErrLocked, by, named(limits), err)
	}
	return fmt.Errorf("%w: a transaction has locked a row of %s: %w", ErrLocked, named(limits), err)
}

// named writes the names of limits, each once.
func named(limits []string) string {
	var names []string
	for _, limit := range limits {
		if name := strconv.Quote(limit); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return "limit " + strings.Join(names, " or ")
}

// Code returns the SQLSTATE in err, of any driver; "" if there is none.
func Code(err error) string {
	return intx.Code(err)
}

// Class returns a word for an error that only a Store has, for [ratelimit.Event]; "" for any other.
func Class(err error) string {
	for _, c := range []struct {
		is    error
		class string
	}{
		{ErrOutcomeUnknown, watch.OutcomeUnknown},
		{ErrLocked, "locked"},
		{ErrNotMigrated, "not_migrated"},
		{ErrClosed, "closed"},
		{ErrNoPool, "no_pool"},
	} {
		if errors.Is(err, c.is) {
			return c.class
		}
	}
	if Code(err) == "" && pgconn.SafeToRetry(err) { // nothing was sent
		return "connection"
	}
	return ""
}

// Retriable reports whether PostgreSQL asks for the transaction to be run again:
// serialization_failure or deadlock_detected.
func Retriable(err error) bool {
	c := Code(err)
	return c == "40001" || c == "40P01"
}

// OfValues reports whether the server did nothing because of the values sent, so that the same
// statement with other values may succeed. Such are errors of data and constraints, of a trigger, and
// of the server's own limits on a statement.
func OfValues(err error) bool {
	code := Code(err)
	if !intx.Answered(err) || len(code) != 5 || code == "54001" { // statement_too_complex: the depth of the stack
		return false
	}
	return slices.Contains([]string{"22", "23", "44", "54", "P0"}, code[:2])
}

// Forgotten reports whether the server did nothing because the connection has lost a statement that
// pgx had prepared.
func Forgotten(err error) bool {
	return Code(err) == "26000" && !Done(err) // invalid_sql_statement_name
}

// Done reports whether an attempt was committed, or may have been.
func Done(err error) bool {
	return errors.Is(err, ErrOutcomeUnknown) || errors.Is(err, ErrCommitted)
}
