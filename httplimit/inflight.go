package httplimit

import (
	"context"
	"net/http"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// InFlightPolicy is a limit of how many requests of a key are handled at a time, over all
// processes. A request holds a permit from before its handler begins until it has returned or
// panicked, and the lease is renewed meanwhile: also while a handler streams, or works on for a
// client that has gone. If the permit is lost, since the database did not answer for a lease, the
// handler's context ends with [ratelimit.ErrLeaseLost] as its [context.Cause]. The permits of a
// process that dies are free within a lease.
//
// A handler that takes its connection over (http.Hijacker) holds the permit until it returns: it
// should stay for as long as the connection is to count.
//
// Without a permit the request is answered 429: the clients that share the key have too many
// requests under way. (503 would say that the server is at fault, and have load balancers try
// the next one, where there is no permit either.) Retry-After is then no promise: see
// Config.FullRetryAfter.
type InFlightPolicy struct {
	// Limit is the limit. Required. Its name is public as that of a Policy is, and differs
	// from those of all policies.
	Limit ratelimit.InFlight

	// Key returns the key of a request. Nil is one key for all requests.
	Key Key

	// Tier chooses the limit for a request: a copy of Limit with another number or lease, of
	// the same name. A zero InFlight means that the policy does not apply to the request.
	// An error is answered as one of Key. Nil is Limit for all.
	Tier func(*http.Request) (ratelimit.InFlight, error)

	// Weight says how many permits a request holds, as it weighs: all or nothing. More than the
	// limit has are never granted. An error is answered as one of Key. Nil is one.
	Weight func(*http.Request) (int, error)
}

// PermitOf returns the permit that a request holds of a policy in flight, named by its limit: for
// ReleaseTx of the store in the transaction that finishes the work, and for its Fence. ctx is
// that of the handler's request. It returns false if there is none: the policy does not apply,
// or the request was let through in shadow mode or because the store failed.
func PermitOf(ctx context.Context, policy string) (permit ratelimit.Permit, ok bool) {
	return edge.PermitOf(ctx, policy)
}

// inFlight returns ps with their defaults.
func inFlight(ps []InFlightPolicy) []edge.InFlight[*http.Request] {
	policies := make([]edge.InFlight[*http.Request], len(ps))
	for i, p := range ps {
		if p.Key == nil {
			p.Key = ForAll
		}
		policies[i] = edge.InFlight[*http.Request](p)
	}
	return policies
}

func permitLimits(ps []InFlightPolicy) []ratelimit.InFlight {
	limits := make([]ratelimit.InFlight, len(ps))
	for i, p := range ps {
		limits[i] = p.Limit
	}
	return limits
}

// checkInFlight notes the faults of the policies in flight.
func checkInFlight(f *edge.Faults, c *Config) {
	for _, p := range c.InFlight {
		checkName(f, p.Limit.Name)
	}
	edge.CheckInFlight(f, c.Permits, permitLimits(c.InFlight), c.limits())
}
