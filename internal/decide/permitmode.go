package decide

import (
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Modes of limits of how many at once. As with requests, a store knows nothing of them: it is
// asked as if the limit were enforced, and its answer is changed then.

// PermitRefused returns the refusal of a permit by ModeRefuse at an instant.
func PermitRefused(limit ratelimit.InFlight, key string, at time.Time) ratelimit.Permit {
	permit := ratelimit.Permit{InFlight: limit, Key: key, At: at, NotBefore: at.Add(ratelimit.RefusedFor)}
	if until := limit.RefusedUntil; !until.IsZero() {
		permit.NotBefore = bucket.Later(until, at.Add(time.Microsecond))
	}
	return permit
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
