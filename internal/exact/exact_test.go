package exact_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/exact"
)

// The tolerance goes by the largest number, whatever its sign.
func TestTolerance(t *testing.T) {
	const factor = 64 * 0x1p-52
	for _, v := range []float64{0, 1, -3, 1e12} {
		want := max(v, -v) * factor
		for _, got := range []float64{exact.Tolerance(v, 0, 0), exact.Tolerance(0, v, 0), exact.Tolerance(0, 0, v)} {
			if got != want {
				t.Errorf("Tolerance of %v = %v, want %v", v, got, want)
			}
		}
	}
}
