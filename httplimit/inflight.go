package httplimit

import (
	"context"
	"net/http"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/edge"
)

// InFlightPolicy limits how many requests of a key are handled at a time, over all processes. A
// request holds a permit of Limit until its handler has returned or panicked, also while the handler
// streams or works on for a client that has gone. Applies, Key and Tier are as in a [Policy]; Weight
// is how many permits a request takes, by default one. If the database does not answer for a lease,
// the permit is lost, and the handler's context ends with the [context.Cause]
// [ratelimit.ErrLeaseLost]. The permits of a process that dies are free within a lease.
//
// A handler that takes its connection over (http.Hijacker) should return only when the connection
// no longer counts.
//
// Without a permit the request is answered 429, since the clients of the key have too many requests
// under way. (A 503 would blame the server, and load balancers would try the next one in vain.)
// Retry-After is then a guess: see Config.FullRetryAfter.
type InFlightPolicy = edge.InFlight[*http.Request]

// PermitOf returns the permit that ctx's request holds of the limit named policy. It is for
// ReleaseTx in the transaction that finishes the work, and for its Fence. It returns false if there
// is none: the policy does not apply, or the request was let through in shadow or because the store
// failed.
func PermitOf(ctx context.Context, policy string) (permit ratelimit.Permit, ok bool) {
	return edge.PermitOf(ctx, policy)
}
