package grpclimit

import (
	"context"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// InFlightPolicy limits how many calls of a key are handled at a time, over all processes. A call
// holds a permit of Limit until its handler has returned or panicked, also while a stream is open or
// the handler works on for a client that has gone. Applies, Key and Tier are as in a [Policy]; Weight
// is how many permits a call holds, by default one. If the database does not answer for a lease, the
// permit is lost, and the handler's context ends with the [context.Cause] [ratelimit.ErrLeaseLost].
// The permits of a process that dies are free within a lease.
//
// Without a permit the answer is ResourceExhausted. Its RetryInfo is then a guess: see
// Config.FullRetryAfter.
type InFlightPolicy = edge.InFlight[*Call]

// PermitOf returns the permit that a call holds of a policy in flight, by its limit's name. Use it
// for its Fence, and for ReleaseTx in the transaction that finishes the work. ctx is the handler's.
// PermitOf returns false if the policy does not apply, or if the call passed in shadow mode or
// because the store failed.
func PermitOf(ctx context.Context, policy string) (permit ratelimit.Permit, ok bool) {
	return edge.PermitOf(ctx, policy)
}
