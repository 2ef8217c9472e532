// Package exact is how exactly token counts are compared. The statements of package table
// have the same tolerance.
package exact

import "math"

// units is 64 units in the last place of a float64.
const units = 0x1p-46

// Tolerance is how far rounding may have moved a comparison of token counts:
// 64 units in the last place of the largest number that took part. It only
// ever decides whether a call that fits exactly still fits. What is stored is
// never rounded, so nothing is lost or gained, and nothing adds up.
func Tolerance(a, b, c float64) float64 {
	return max(math.Abs(a), math.Abs(b), math.Abs(c)) * units
}
