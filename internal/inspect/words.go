package inspect

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/visible"
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

// Override writes the fields that an override replaces, in a line.
func Override(o *catalog.Override) string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	if o.Rate != 0 {
		add("rate %s", Amount(o.Rate))
	}
	if o.Period != 0 {
		add("period %s", o.Period)
	}
	if o.Capacity != 0 {
		add("capacity %s", bound(o.Capacity))
	}
	if o.MaxReserved != 0 {
		add("max reserved %s", bound(o.MaxReserved))
	}
	if o.Slots != 0 {
		add("%d slots", o.Slots)
	}
	if o.AtOnce != 0 {
		add("%d at once", o.AtOnce)
	}
	if o.Lease != 0 {
		add("lease %s", o.Lease)
	}
	if o.Mode != 0 {
		add("mode %s", o.Mode)
	}
	if !o.Until.IsZero() {
		add("until %s", Instant(o.Until))
	}
	if o.Off {
		add("off")
	}
	if o.Note != "" {
		add("(%s)", visible.Text(o.Note))
	}
	return strings.Join(parts, ", ")
}

// bound writes a capacity or the bound of a debt as an override has it.
func bound(v float64) string {
	if v == ratelimit.None {
		return "none"
	}
	return Amount(v)
}
