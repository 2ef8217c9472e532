package inspect

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// Instant writes an instant for people, in UTC, to the millisecond.
func Instant(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.000Z") }

// By writes who made a change: the person that the program named and PostgreSQL's role, or the role
// alone.
func By(c *catalog.Change) string {
	if c.Who == "" {
		return visible.Text(c.Role)
	}
	return visible.Text(c.Who) + " (" + visible.Text(c.Role) + ")"
}

// Span writes a duration for people in its two largest units, such as "4 d 11 h" or "2.5 s",
// rounded up as waits are.
func Span(d time.Duration) string {
	const day = 24 * time.Hour
	up := func(unit time.Duration) time.Duration { return (d + unit - 1).Truncate(unit) }
	two := func(large, small time.Duration, names [2]string) string {
		text := fmt.Sprintf("%d %s", up(small)/large, names[0])
		if rest := up(small) % large / small; rest > 0 {
			text += fmt.Sprintf(" %d %s", rest, names[1])
		}
		return text
	}
	switch {
	case d == 0:
		return "0 s"
	case up(time.Minute) >= day:
		return two(day, time.Hour, [2]string{"d", "h"})
	case up(time.Second) >= time.Hour:
		return two(time.Hour, time.Minute, [2]string{"h", "min"})
	case up(time.Second) >= time.Minute:
		return two(time.Minute, time.Second, [2]string{"min", "s"})
	case up(100*time.Millisecond) >= 10*time.Second:
		return fmt.Sprintf("%d s", up(time.Second)/time.Second)
	case up(time.Millisecond) >= time.Second:
		return strconv.FormatFloat(up(100*time.Millisecond).Seconds(), 'f', -1, 64) + " s"
	}
	return fmt.Sprintf("%d ms", up(time.Millisecond)/time.Millisecond)
}

// Period writes a duration exactly, as Go does, without trailing units of 0.
func Period(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// Override writes the fields that an override replaces, in a line.
func Override(o *catalog.Override) string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	if o.Rate != 0 {
		add("rate %s", visible.Amount(o.Rate))
	}
	if o.Period != 0 {
		add("period %s", Period(o.Period))
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
		add("lease %s", Period(o.Lease))
	}
	if o.Mode != 0 {
		add("mode %s", o.Mode)
	}
	if !o.Until.IsZero() {
		add("until %s", Instant(o.Until))
	}
	if o.Switch == catalog.Off {
		add("off")
	}
	if o.Note != "" {
		add("(%s)", visible.Text(o.Note))
	}
	return strings.Join(parts, ", ")
}

// Edit writes what an override was and what it becomes.
func Edit(e *catalog.Edit) string {
	side := func(o *catalog.Override) string {
		if o == nil {
			return "none"
		}
		return Override(o)
	}
	return side(e.Was) + " → " + side(e.Became)
}

// Lower says by which fields an edit grants less than the program published; "" if by none.
func Lower(e *catalog.Edit) string {
	if len(e.Lower) == 0 {
		return ""
	}
	return "it grants less than the program has published, by its " + strings.Join(e.Lower, ", ")
}

// bound writes a capacity or a largest debt as an override has it.
func bound(v float64) string {
	if v == ratelimit.None {
		return "none"
	}
	return visible.Amount(v)
}
