package grpclimit

import (
	"context"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// InFlightPolicy limits how many calls of a key are handled at a time, over all processes. A call
// holds a permit until its handler has returned or panicked. The lease is renewed meanwhile, also
// while a stream is open or the handler works on for a client that has gone. If the database does
// not answer for a lease, the permit is lost, and the handler's context ends with the
// [context.Cause] [ratelimit.ErrLeaseLost]. The permits of a process that dies are free within a
// lease.
//
// Without a permit the answer is ResourceExhausted. Its RetryInfo is then a guess: see
// Config.FullRetryAfter.
type InFlightPolicy struct {
	// Limit is required. Its name is public, as a Policy's is, and differs from those of all
	// policies.
	Limit ratelimit.InFlight

	// Methods selects calls as a Policy's Methods do. The default is all.
	Methods []string

	// Key returns the key of a call. Nil is one key for all.
	Key Key

	// Tier chooses the limit for a call: a copy of Limit with another number or lease, of the same
	// name. With a zero InFlight the policy does not apply. Its errors are answered as Key's. Nil
	// means Limit for all.
	Tier func(*Call) (ratelimit.InFlight, error)

	// Weight returns how many permits a call holds, all or nothing. More than the limit has is
	// never granted. Its errors are answered as Key's. Nil means one.
	Weight func(*Call) (int, error)
}

// PermitOf returns the permit that a call holds of a policy in flight, by its limit's name. Use it
// for its Fence, and for ReleaseTx in the transaction that finishes the work. ctx is the handler's.
// PermitOf returns false if the policy does not apply, or if the call passed in shadow mode or
// because the store failed.
func PermitOf(ctx context.Context, policy string) (permit ratelimit.Permit, ok bool) {
	return edge.PermitOf(ctx, policy)
}

// inFlight returns ps with defaults filled in.
func inFlight(ps []InFlightPolicy) []edge.InFlight[*Call] {
	policies := make([]edge.InFlight[*Call], len(ps))
	for i, p := range ps {
		if p.Key == nil {
			p.Key = ForAll
		}
		policies[i] = edge.InFlight[*Call]{Limit: p.Limit, Key: p.Key, Tier: of(p.Methods, p.Limit, p.Tier), Weight: p.Weight}
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
