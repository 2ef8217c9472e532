package httplimit

import "github.com/pgratelimit/ratelimit/internal/edge"

// Decision is the decision of a [Middleware] on a request. Its String is in words.
type Decision = edge.Decision

const (
	Granted      = edge.Granted      // there were tokens
	Refused      = edge.Refused      // there were not: 429
	TooLarge     = edge.TooLarge     // there can never be so many: 413 or 422
	BadRequest   = edge.BadRequest   // the request has no usable key or cost: 400, or the status of the [RequestError]
	Failed       = edge.Failed       // the limit could not be asked: 503, or let through
	SettleFailed = edge.SettleFailed // after the answer: the tokens taken could not be settled, and stay spent
	LeaseLost    = edge.LeaseLost    // while the handler ran: it lost its slot, and its context ended
)

// Event is what Config.Observe hears:
//
//	Decision Decision
//	Passed   bool             // was the request let through?
//	Shadow   bool             // was it only in shadow mode?
//	Result   ratelimit.Result // of Granted and Refused
//	Err      error            // of the others, and a *ratelimit.FullError of a refusal for want of a slot
//
// Its Told is the event as stores tell theirs: see [ratelimit.Event]. Logged, printed and in JSON it is without the keys of the limits: [ratelimit.LogKeys] has
// those of its Result, and Err may name one.
type Event = edge.Event
