package httplimit

import (
	"errors"

	"github.com/pgratelimit/ratelimit"
)

// Decision is what a [Middleware] made of a request.
type Decision uint8

const (
	Granted      Decision = iota + 1 // there were tokens
	Refused                          // there were not: 429
	TooLarge                         // there can never be so many: 413 or 422
	BadRequest                       // the request has no usable key or cost: 400, or what the [RequestError] says
	Failed                           // the limit could not be asked: 503, or let through
	SettleFailed                     // after the answer: what was taken could not be brought to what was used, and stays
)

func (d Decision) String() string {
	names := [...]string{"none", "granted", "refused", "too large", "bad request", "failed", "settle failed"}
	if int(d) < len(names) {
		return names[d]
	}
	return "unknown"
}

// Event is what Config.Observe hears.
type Event struct {
	Decision Decision
	Passed   bool             // was the request let through?
	Shadow   bool             // was it only in shadow mode?
	Result   ratelimit.Result // of Granted and Refused
	Err      error            // of the others
}

// RequestError is a fault of the request, such as a header that is missing. A [Key],
// a [Cost] and a Policy.Tier may return one; the client is told Status and Detail.
type RequestError struct {
	Status int    // 400 to 499
	Detail string // for the client: say what is missing, without the key
}

func (e *RequestError) Error() string { return "httplimit: " + e.Detail }

// decisionOf is what the answer of a store, or an error before it, comes to.
func decisionOf(result ratelimit.Result, err error) Decision {
	var request *RequestError
	var field *ratelimit.FieldError
	switch {
	case err == nil && result.OK:
		return Granted
	case err == nil, errors.Is(err, ratelimit.ErrRefused):
		return Refused
	case errors.Is(err, ratelimit.ErrExceedsCapacity):
		return TooLarge
	case errors.As(err, &request):
		return BadRequest
	case errors.As(err, &field) && (field.Field == "Key" || field.Field == "Count"):
		return BadRequest
	}
	return Failed
}
