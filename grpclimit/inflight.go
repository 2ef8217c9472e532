package grpclimit

import (
	"context"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// InFlightPolicy is a limit of how many calls of a key are handled at a time, over all
// processes. A call holds a permit from before its handler begins until it has returned or
// panicked, and the lease is renewed meanwhile: also while a stream is open, or the handler works
// on for a client that has gone. When the permit is lost all the same, since the database did not
// answer for a lease, the handler's context ends with [ratelimit.ErrLeaseLost] as its
// [context.Cause]. The permits of a process that dies are free within a lease.
//
// Without a permit the answer is ResourceExhausted. Its RetryInfo is no promise: see
// Config.FullRetryAfter.
type InFlightPolicy struct {
	// Limit is the limit. Required. Its name is public as that of a Policy is, and differs
	// from those of all policies.
	Limit ratelimit.InFlight

	// Methods are those to which the policy applies, as those of a Policy. The default is all.
	Methods []string

	// Key says whose limit it is. Nil is one for all.
	Key Key

	// Tier chooses the limit for a call: a copy of Limit with another number or lease, of the
	// same name. A zero InFlight means that the policy does not apply to the call. An error
	// is answered as one of Key. Nil is Limit for all.
	Tier func(*Call) (ratelimit.InFlight, error)

	// Weight says how many permits a call holds, as it weighs: all or nothing. More than the
	// limit has are never granted. An error is answered as one of Key. Nil is one.
	Weight func(*Call) (int, error)
}

// PermitOf returns the permit that a call holds of a policy in flight, named by its limit: for
// ReleaseTx of the store in the transaction that finishes the work, and for its Fence. ctx is
// that of the handler. It returns false if there is none: the policy does not apply, or the call
// was let through in shadow mode or because the store failed.
func PermitOf(ctx context.Context, policy string) (permit ratelimit.Permit, ok bool) {
	return edge.PermitOf(ctx, policy)
}

// inFlight returns ps with their defaults.
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
