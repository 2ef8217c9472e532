package edge

import (
	"slices"

	"github.com/pgratelimit/ratelimit"
)

// Told returns the parts of a result that clients are told: not that of a limit in shadow, which
// keeps nobody, nor of one that was not asked, since another refuses by its mode.
func Told(result ratelimit.Result) []ratelimit.Status {
	return slices.DeleteFunc(slices.Clone(result.Each()), func(s ratelimit.Status) bool {
		return s.Request.Mode == ratelimit.ModeShadow || s.At.IsZero()
	})
}
