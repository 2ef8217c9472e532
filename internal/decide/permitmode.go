package decide

import (
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Modes of limits of how many at once. As with requests, a store knows nothing of them: it is
// asked as if the limit were enforced, and its answer is changed then.

// PermitRefused returns the refusal of a permit by ModeRefuse at an instant.
func PermitRefused(limit ratelimit.InFlight, key string, at time.Time) ratelimit.Permit {
	return ratelimit.Permit{InFlight: limit, Key: key, At: at, NotBefore: refusedUntil(limit.RefusedUntil, at)}
}

// PermitShadowed returns the permit that a caller has when a store has refused one: in
// ModeShadow one that is Shadowed, and otherwise the refusal.
func PermitShadowed(permit ratelimit.Permit) ratelimit.Permit {
	if !permit.OK && permit.InFlight.Mode == ratelimit.ModeShadow {
		permit.OK, permit.Shadowed = true, true
	}
	return permit
}

// PermitLost returns the error with which a permit was renewed or released, but for one that was lost
// in ModeShadow: that is Shadowed from then on.
func PermitLost(permit *ratelimit.Permit, err error) error {
	if permit.InFlight.Mode == ratelimit.ModeShadow && errors.Is(err, ratelimit.ErrLeaseLost) {
		permit.Shadowed = true
		return nil
	}
	return err
}
