package pgstore

import (
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/decide"
	"github.com/pgratelimit/ratelimit/internal/watch"
)

// fault wraps an error of the database. The original stays within reach of
// errors.As, 40001 and 40P01 among them.
func fault(schema, doing string, err error) error {
	switch code(err) {
	case "42P01", "42703": // undefined_table, undefined_column
		where := "the search_path of the connection (Config.Schema names another)"
		if schema != "" {
			where = fmt.Sprintf("schema %q, which is Config.Schema", schema)
		}
		return fmt.Errorf("%w; looked in %s: %w", ErrNotMigrated, where, err)
	case "42P05", "26000": // duplicate_prepared_statement, invalid_sql_statement_name
		return fmt.Errorf("pgstore: %s: %w (behind a pooler in transaction mode, have pgx prepare nothing: default_query_exec_mode=exec in the pool's URL)", doing, err)
	}
	return fmt.Errorf("pgstore: %s: %w", doing, err)
}

// code returns the SQLSTATE of the server's error in err, of any driver, "" if there is none.
func code(err error) string {
	if err == nil {
		return ""
	}
	var state interface{ SQLState() string }
	if errors.As(err, &state) {
		return state.SQLState()
	}
	return ""
}

// class is the class of an error in a word, for [ratelimit.Event]; "" if it is none of this
// package.
func class(err error) string {
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
	if code(err) == "" && pgconn.SafeToRetry(err) { // nothing was sent
		return "connection"
	}
	return ""
}

// retriable reports whether PostgreSQL asks for the transaction to be run again:
// serialization_failure or deadlock_detected.
func retriable(err error) bool {
	c := code(err)
	return c == "40001" || c == "40P01"
}

// answered reports whether err is the server's own statement that a request was not carried
// out, rather than a lost connection: also a pooler's, which states it by an error of class 08
// or one that ends the connection.
func answered(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.SeverityUnlocalized == "ERROR" && pgErr.Code[:min(2, len(pgErr.Code))] != "08"
}

// isOfValues reports whether the server did nothing because of the values sent, and not because
// of a wait or a lack of resources.
func isOfValues(err error) bool {
	if !answered(err) || retriable(err) {
		return false
	}
	class := code(err)[:min(2, len(code(err)))]
	return !slices.Contains([]string{"42", "53", "55", "57"}, class) // the table or a right, resources, a lock, intervention
}

// locked is the error of a decision that waited for a lock until its time was over.
func locked(key decide.Key, err error) error {
	return fmt.Errorf("%w: a transaction has locked the row of limit %q, key %q: %w", ErrLocked, key.Name, key.Key, err)
}

const lockNotAvailable = "55P03"

var errNilFunc = &ratelimit.FieldError{Field: "Func", Value: nil, Reason: "must not be nil"}
