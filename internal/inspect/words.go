package inspect

import (
	"math"
	"strconv"
	"time"
)

// Instant writes an instant for people, by UTC, to the millisecond.
func Instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.000Z") }

// Span writes a duration for people, rounded up to the millisecond, as waits are.
func Span(d time.Duration) string {
	if rounded := d.Truncate(time.Millisecond); rounded < d {
		d = rounded + time.Millisecond
	}
	return d.String()
}

// Amount writes a number of tokens for people, to a thousandth, rounded down: what is shown is
// there.
func Amount(v float64) string {
	if math.IsInf(v, 0) {
		return "unlimited"
	}
	return strconv.FormatFloat(math.Floor(v*1000+1e-6)/1000, 'f', -1, 64)
}
