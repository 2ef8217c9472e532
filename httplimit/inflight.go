package httplimit

import (
	"context"
	"net/http"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// InFlightPolicy limits how many requests of a key are handled at a time, over all processes. A
// request holds a permit until its handler has returned or panicked. The lease is renewed
// meanwhile, also while the handler streams or works on for a client that has gone. If the database
// does not answer for a lease, the permit is lost, and the handler's context ends with the
// [context.Cause] [ratelimit.ErrLeaseLost]. The permits of a process that dies are free within a
// lease.
//
// A handler that takes its connection over (http.Hijacker) should return only when the connection
// no longer counts.
//
// Without a permit the request is answered 429, since the clients of the key have too many requests
// under way. (A 503 would blame the server, and load balancers would try the next one in vain.)
// Retry-After is then a guess: see Config.FullRetryAfter.
type InFlightPolicy struct {
	// Limit is the limit. Required. Its name is public like a Policy's, and differs from those
	// of all policies.
	Limit ratelimit.InFlight

	// Key returns the key of a request. Nil is one key for all requests.
	Key Key

	// Tier chooses the limit of a request: a copy of Limit with another number or lease, and
	// the same name. With a zero InFlight the policy does not apply to the request. An error is
	// answered like one of Key. The default, nil, is Limit for all.
	Tier func(*http.Request) (ratelimit.InFlight, error)

	// Weight returns how many permits a request takes, all or nothing. More permits than the
	// limit has are never granted. An error is answered like one of Key. The default, nil, is
	// one.
	Weight func(*http.Request) (int, error)
}

// PermitOf returns the permit that ctx's request holds of the limit named policy. It is for
// ReleaseTx in the transaction that finishes the work, and for its Fence. It returns false if there
// is none: the policy does not apply, or the request was let through in shadow or because the store
// failed.
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
