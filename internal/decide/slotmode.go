package decide

import (
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Modes of limits of how many at once. As with requests, a store knows nothing of them: it is
// asked as if the limit were enforced, and its answer is changed then.

// SlotRefused returns the refusal of a slot by ModeRefuse at an instant.
func SlotRefused(limit ratelimit.InFlight, key string, at time.Time) ratelimit.Slot {
	slot := ratelimit.Slot{InFlight: limit, Key: key, At: at, NotBefore: at.Add(ratelimit.RefusedFor)}
	if until := limit.RefusedUntil; !until.IsZero() {
		slot.NotBefore = bucket.Later(until, at.Add(time.Microsecond))
	}
	return slot
}

// SlotShadowed returns the slot that a caller has when a store has refused one: in
// ModeShadow one that is Shadowed, and otherwise the refusal.
func SlotShadowed(slot ratelimit.Slot) ratelimit.Slot {
	if !slot.OK && slot.InFlight.Mode == ratelimit.ModeShadow {
		slot.OK, slot.Shadowed = true, true
	}
	return slot
}

// SlotLost returns the error with which a slot was renewed or released, but for one that was lost
// in ModeShadow: that is Shadowed from then on.
func SlotLost(slot *ratelimit.Slot, err error) error {
	if slot.InFlight.Mode == ratelimit.ModeShadow && errors.Is(err, ratelimit.ErrLeaseLost) {
		slot.Shadowed = true
		return nil
	}
	return err
}
