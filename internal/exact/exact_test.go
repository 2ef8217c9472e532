package exact_test

import (
	"strconv"
	"testing"

	"github.com/pgratelimit/ratelimit/internal/exact"
)

// The tolerance goes by the largest number, and is the same in SQL.
func TestTolerance(t *testing.T) {
	factor, err := strconv.ParseFloat(exact.SQL, 64)
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []float64{0, 1, -3, 1e12} {
		want := max(v, -v) * factor
		for _, got := range []float64{exact.Tolerance(v, 0, 0), exact.Tolerance(0, v, 0), exact.Tolerance(0, 0, v)} {
			if got != want {
				t.Errorf("Tolerance of %v = %v, want %v", v, got, want)
			}
		}
	}
}
