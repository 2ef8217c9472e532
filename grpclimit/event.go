package grpclimit

import "github.com/pgratelimit/ratelimit/internal/edge"

// Decision is what a [Limiter] made of a call. Its String is in words.
type Decision = edge.Decision

const (
	Granted      = edge.Granted      // there were tokens
	Refused      = edge.Refused      // there were not: ResourceExhausted
	TooLarge     = edge.TooLarge     // there can never be so many: InvalidArgument
	BadRequest   = edge.BadRequest   // the call has no usable key or cost
	Failed       = edge.Failed       // the limit could not be asked: Unavailable, or let through
	SettleFailed = edge.SettleFailed // after the handler: what was taken could not be brought to what was used, and stays
	LeaseLost    = edge.LeaseLost    // while the handler ran: it lost its slot, and its context ended
)

// Event is what Config.Observe hears:
//
//	Decision Decision
//	Passed   bool             // was the call let through?
//	Shadow   bool             // was it only in shadow mode?
//	Result   ratelimit.Result // of Granted and Refused
//	Err      error            // of the others, and a *ratelimit.FullError of a refusal for want of a slot
//
// Logged, printed and in JSON it is without the keys of the limits: [ratelimit.LogKeys] has
// those of its Result, and Err may name one.
type Event = edge.Event
