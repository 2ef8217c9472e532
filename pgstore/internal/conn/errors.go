package conn

import (
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/watch"
)

// Table is the table that holds the limits.
const Table = "rate_limits"

// The errors of a Store, which package pgstore exports and documents.
var (
	ErrNoPool         = errors.New("pgstore: this needs a pool, and New was given nil")
	ErrOutcomeUnknown = errors.New("pgstore: the connection was lost during commit, and whether it was committed is not known")
	ErrClosed         = errors.New("pgstore: the store is closed")
	ErrLocked         = errors.New("pgstore: waited for a lock")
	ErrNotMigrated    = errors.New("pgstore: table " + Table + " is missing or not up to date; bring it there with `ratelimit migrate up` or migrate.Up")
)

// ErrCommitted is a function that failed after it had committed.
var ErrCommitted = errors.New("pgstore: the function committed the transaction itself, so it is not run again")

// LockNotAvailable is the SQLSTATE of a lock that was waited for as long as lock_timeout.
const LockNotAvailable = "55P03"

// TimedOut reports whether a statement of the Store's own with a lock_timeout did nothing since a
// lock was not available in time. When the time is over in the moment in which the lock is had,
// PostgreSQL takes it for a request to cancel the statement (8 of 250,000 calls on hot rows). It says
// otherwise of statement_timeout, and a context that asked is over: whoever tries again finds that.
// A server that speaks another language than English is not understood: its error stays one.
func TimedOut(err error) bool {
	var pgErr *pgconn.PgError
	return Code(err) == LockNotAvailable ||
		errors.As(err, &pgErr) && pgErr.Code == "57014" && pgErr.Message == "canceling statement due to user request"
}

// Fault wraps an error of the database. The original stays within reach of errors.As, 40001 and
// 40P01 among them.
func (c *Conn) Fault(doing string, err error) error {
	switch Code(err) {
	case "42P01", "42703": // undefined_table, undefined_column
		where := "the search_path of the connection (Config.Schema names another)"
		if c.Schema != "" {
			where = fmt.Sprintf("schema %q, which is Config.Schema", c.Schema)
		}
		return fmt.Errorf("%w; looked in %s: %w", ErrNotMigrated, where, err)
	case "42P05", "26000", "08P01": // duplicate_prepared_statement, invalid_sql_statement_name, protocol_violation: the statement of that name has other parameters
		return fmt.Errorf("pgstore: %s: %w (behind a pooler in transaction mode, have pgx prepare nothing: default_query_exec_mode=exec in the pool's URL)", doing, err)
	}
	return fmt.Errorf("pgstore: %s: %w", doing, err)
}

// Locked returns the error of a decision that waited for a lock on a row of a limit until its time
// was over.
func Locked(limit string, err error) error {
	return fmt.Errorf("%w: a transaction has locked a row of limit %q: %w", ErrLocked, limit, err)
}

// Code returns the SQLSTATE of the server's error in err, of any driver, "" if there is none.
func Code(err error) string {
	if err == nil {
		return ""
	}
	var state interface{ SQLState() string }
	if errors.As(err, &state) {
		return state.SQLState()
	}
	return ""
}

// Class returns the class of an error in a word, for [ratelimit.Event]; "" if it is none of a
// Store's.
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

// Answered reports whether err is the server's own statement that a request was not carried out,
// rather than a lost connection: also a pooler's, which states it by an error of class 08 or one
// that ends the connection.
func Answered(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && pgErr.Code[:min(2, len(pgErr.Code))] != "08"
}

// OfValues reports whether the server did nothing because of the values sent, so that others might
// do: errors of data and constraints, of a trigger that raises one, and the server's own limits on a
// statement. Any other error would meet them as well.
func OfValues(err error) bool {
	code := Code(err)
	if !Answered(err) || len(code) != 5 || code == "54001" { // statement_too_complex: the depth of the stack
		return false
	}
	return slices.Contains([]string{"22", "23", "44", "54", "P0"}, code[:2])
}

// Forgotten reports whether the server did nothing, since the connection does not have a statement
// any more that pgx had prepared.
func Forgotten(err error) bool {
	return Code(err) == "26000" && !Done(err) // invalid_sql_statement_name
}

// Done reports whether an attempt was committed, or may have been.
func Done(err error) bool {
	return errors.Is(err, ErrOutcomeUnknown) || errors.Is(err, ErrCommitted)
}
