// Package exact is how exactly token counts are compared. The statements of package table
// have the same tolerance.
package exact

import "math"

// units is 64 units in the last place of a float64.
const units = 0x1p-46

// Tolerance returns how far rounding may have moved a comparison of token counts:
// 64 units in the last place of the largest number that took part. It only
// ever decides whether a call that fits exactly still fits. Stored numbers are not
// rounded to it. They are float64, so each refill can be wrong by half a unit in the last
// place of the number of tokens. Those errors do add up, where the refill between two calls
// is not much more than that unit: of 1e12 tokens in a century, asked for each microsecond,
// some 15 %.
func Tolerance(a, b, c float64) float64 {
	return max(math.Abs(a), math.Abs(b), math.Abs(c)) * units
}
