package ratelimit

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// The sentinels that errors.Is finds. Faults of the database are none of them:
// they are wrapped, so that errors.As still reaches a *pgconn.PgError.
var (
	// ErrInvalid is a malformed definition, key, count, call or receipt. As a
	// *FieldError, which all but a receipt's text are, it names the field and the
	// value. Nothing was changed.
	ErrInvalid = receipt.ErrInvalid

	// ErrExceedsCapacity is the error of a count that the limit can never grant, however long
	// the caller waits: one above Capacity, less the share that a request keeps by Above, or
	// above Capacity + MaxReserved for a reservation. A *ExceedsCapacityError names the
	// request. Nothing was changed.
	ErrExceedsCapacity = errors.New("ratelimit: can never be granted")

	// ErrRefused is a refusal as an error: see Result.Err. As a *RefusedError
	// it carries the result.
	ErrRefused = errors.New("ratelimit: refused")

	// ErrSettled is the error of a receipt that has nothing left to settle: it was settled or
	// cancelled before, or the call that took was rolled back. Nothing was changed.
	ErrSettled = errors.New("ratelimit: settled before, or rolled back")
)

// FieldError is a field that has a value that it cannot have. It is
// [ErrInvalid].
type FieldError struct {
	Package string // of the field, such as "httplimit"; "" is ratelimit
	Limit   string // the limit's name, "" when the fault is not in one limit
	Field   string // as in the source: "Rate", "Count", "Key"
	Value   any
	Reason  string
}

// Error names the field and its value. Of a key it tells only the length, since errors
// are logged.
func (e *FieldError) Error() string {
	value := fmt.Sprint(e.Value)
	switch v := e.Value.(type) {
	case string:
		value = quoteShort(v)
		if e.Field == "Key" {
			value = fmt.Sprintf("of %d bytes", len(v))
		}
	case float64:
		value = amount(v)
	}
	of := cmp.Or(e.Package, "ratelimit") + ": "
	if e.Limit != "" {
		of += "limit " + quoteShort(e.Limit) + ": "
	}
	return fmt.Sprintf("%s%s %s: %s", of, e.Field, value, e.Reason)
}

// MarshalJSON returns Error as a JSON string.
func (e *FieldError) MarshalJSON() ([]byte, error) { return json.Marshal(e.Error()) }

// Unwrap makes errors.Is(err, ErrInvalid) true.
func (e *FieldError) Unwrap() error { return ErrInvalid }

// ExceedsCapacityError is a request that its limit can never grant. It is [ErrExceedsCapacity].
type ExceedsCapacityError struct {
	Request Request
	Reserve bool    // was it a reservation?
	Most    float64 // the largest count that could be granted
}

func (e *ExceedsCapacityError) Error() string {
	verb := "allowed"
	if e.Reserve {
		verb = "reserved"
	}
	return fmt.Sprintf("ratelimit: limit %s: %g tokens can never be %s at once, at most %g can",
		quoteShort(NameOf(e.Request.Limit)), e.Request.Count, verb, e.Most)
}

// Unwrap makes errors.Is(err, ErrExceedsCapacity) true.
func (e *ExceedsCapacityError) Unwrap() error { return ErrExceedsCapacity }

// RefusedError is a refusal as an error, for callers that return one.
// It is [ErrRefused].
type RefusedError struct {
	Result Result
}

func (e *RefusedError) Error() string {
	limit := e.Result.Request.Limit
	if missing(limit) { // the zero Result, of a call that failed
		return "ratelimit: refused"
	}
	refused := "refused"
	if e.Result.Request.Mode == ModeRefuse {
		refused = "refused by its mode"
	}
	return fmt.Sprintf("ratelimit: limit %s %s, retry after %v", quoteShort(NameOf(limit)), refused, e.Result.RetryAfter)
}

// Unwrap makes errors.Is(err, ErrRefused) true.
func (e *RefusedError) Unwrap() error { return ErrRefused }

// quoteShort quotes s for an error message, cut to a length that a log line
// bears.
func quoteShort(s string) string {
	const most = 64
	if len(s) > most {
		return fmt.Sprintf("%q…", s[:most])
	}
	return fmt.Sprintf("%q", s)
}
