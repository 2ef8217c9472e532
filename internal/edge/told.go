package edge

import (
	"slices"

	"github.com/pgratelimit/ratelimit"
)

// Told returns the statuses that clients may see. It omits limits in shadow, which stop nobody, and
// limits that were not asked because another's mode refused.
func Told(result ratelimit.Result) []ratelimit.Status {
	return slices.DeleteFunc(slices.Clone(result.Each()), func(s ratelimit.Status) bool {
		return s.Request.Mode == ratelimit.ModeShadow || s.At.IsZero()
	})
}
