package ratelimit

import (
	"errors"
	"fmt"
	"time"
)

// The sentinels that errors.Is finds. Database faults are none of them: they
// come through wrapped, so that errors.As still reaches a *pgconn.PgError.
var (
	// ErrInvalid is a malformed definition, key, count or call. As a
	// *FieldError it names the field and the value. Nothing was changed.
	ErrInvalid = errors.New("ratelimit: invalid")

	// ErrNever is a count that the limit can never grant, however long the
	// caller waits: above Capacity, or above Capacity + MaxReserved for a
	// reservation. As a *NeverError it says which. Nothing was changed.
	ErrNever = errors.New("ratelimit: can never be granted")

	// ErrRefused is a refusal as an error: see Result.Err. As a *RefusedError
	// it carries the result.
	ErrRefused = errors.New("ratelimit: refused")
)

// FieldError is a field that has a value that it cannot have. It is
// [ErrInvalid].
type FieldError struct {
	Limit  string // the limit's name, "" when the fault is not in one limit
	Field  string // as in the source: "Rate", "Count", "Key"
	Value  any
	Reason string
}

func (e *FieldError) Error() string {
	value := fmt.Sprint(e.Value)
	if s, ok := e.Value.(string); ok {
		value = quoteShort(s)
	}
	if e.Limit == "" {
		return fmt.Sprintf("ratelimit: %s %s: %s", e.Field, value, e.Reason)
	}
	return fmt.Sprintf("ratelimit: limit %s: %s %s: %s", quoteShort(e.Limit), e.Field, value, e.Reason)
}

// Unwrap makes errors.Is(err, ErrInvalid) true.
func (e *FieldError) Unwrap() error { return ErrInvalid }

// NeverError is a request that its limit can never grant. It is [ErrNever].
type NeverError struct {
	Request Request
	Reserve bool    // was it a reservation?
	Most    float64 // the largest count that could be granted
}

func (e *NeverError) Error() string {
	verb := "allowed"
	if e.Reserve {
		verb = "reserved"
	}
	return fmt.Sprintf("ratelimit: limit %s: %g tokens can never be %s at once, at most %g can",
		quoteShort(e.Request.Limit.Definition().Name), e.Request.Count, verb, e.Most)
}

// Unwrap makes errors.Is(err, ErrNever) true.
func (e *NeverError) Unwrap() error { return ErrNever }

// RefusedError is a refusal as an error, for callers who want to return one.
// It is [ErrRefused].
type RefusedError struct {
	Result Result
}

func (e *RefusedError) Error() string {
	limit := e.Result.Request.Limit
	if limit == nil { // the zero Result, of a call that failed
		return "ratelimit: refused"
	}
	return fmt.Sprintf("ratelimit: limit %s refused, retry after %v",
		quoteShort(limit.Definition().Name), e.Result.RetryAfter)
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

// Request asks a limit for tokens. Make one with a limit's For or ForN.
type Request struct {
	Limit Limit
	Key   string
	Count float64
}

// Status is what a call found of one limit and key.
type Status struct {
	// Request is what was asked. The same limit and key asked for several
	// times in one call has one Status, with the counts added up.
	Request Request

	// OK is true when the tokens were taken, or for a check could be.
	OK bool

	// RetryAfter is how long after At: for a refusal, when the same call
	// would be accepted if nobody else came; for a reservation that went into
	// debt, when the debt is paid and the work may run; otherwise 0. It is
	// rounded up to a whole microsecond, and a promise: the same call made at
	// exactly that instant succeeds.
	RetryAfter time.Duration

	// RetryAt is the instant of RetryAfter, on the clock that decided: the
	// database's. It is what a scheduler stores.
	RetryAt time.Time

	// Value is how many tokens there are: after the call when it took them,
	// otherwise as they are. Negative is debt.
	Value float64

	// Remaining is Value in whole tokens, never below 0.
	Remaining int64

	// Capacity is the limit's: what HTTP headers call the limit.
	Capacity float64

	// ResetAfter is how long after At the limit is full again if nobody comes.
	ResetAfter time.Duration
}

// Result is the answer to allow, reserve and check.
//
// A refusal is a result and not an error, so that it does not roll back a
// transaction that has other work in it; Err makes it one.
type Result struct {
	// Status is the call's answer. Of several limits in one call it is that
	// of the limit that decides: of those that refused, or else of all, the
	// one with the longest wait, and then the one with the fewest tokens left.
	Status

	// At is the instant of the decision, on the database's clock.
	At time.Time

	// Each says what was found of each limit, in the order of the call. When
	// one of several limits refuses, nothing is taken from any, and the
	// others' Status says what they have.
	Each []Status

	// Receipt is what was paid, for cancelling it; nil when nothing was taken.
	Receipt *Receipt
}

// Err is nil when r is OK and a *RefusedError otherwise.
func (r Result) Err() error {
	if r.OK {
		return nil
	}
	return &RefusedError{Result: r}
}
