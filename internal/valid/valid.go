// Package valid says why a value that a caller gave is invalid. Each function returns "" for a
// valid one.
package valid

import (
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

const (
	// MaxTokens is the largest number of tokens. Above it a float64 tells small counts apart no
	// longer.
	MaxTokens = 1e12

	// minTokens is the smallest number of tokens above 0. It is far below practical ones, and far
	// enough above the smallest float64 that no product or quotient of a definition's fields
	// underflows, which PostgreSQL makes an error.
	minTokens = 1e-15
)

// Count says why a request of a limit with such a capacity cannot have a count.
func Count(n, capacity float64) string {
	if n > 0 && n < bucket.Tolerance(capacity, 0, 0) {
		return fmt.Sprintf("is too small to be told apart beside a Capacity of %g", capacity)
	}
	return Amount(n)
}

// Amount says why n cannot be a number of tokens.
func Amount(n float64) string {
	switch {
	case math.IsNaN(n) || math.IsInf(n, 0):
		return "must be finite"
	case n < 0:
		return "must not be negative"
	case n > MaxTokens:
		return fmt.Sprintf("must be at most %g", float64(MaxTokens))
	case n > 0 && n < minTokens:
		return fmt.Sprintf("must be at least %g", minTokens)
	}
	return ""
}

// Text says why PostgreSQL cannot store s as a text of at most most bytes.
func Text(s string, most int) string {
	switch {
	case len(s) > most:
		return fmt.Sprintf("must be at most %d bytes long", most)
	case !utf8.ValidString(s):
		return "must be valid UTF-8"
	case strings.IndexByte(s, 0) >= 0:
		return "must not contain a zero byte"
	}
	return ""
}
