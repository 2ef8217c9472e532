package inspect

import (
	"fmt"
	"strconv"
	"strings"
	"time"

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

// Edit writes what an override was and what it becomes.
func Edit(e *catalog.Edit) string { return Override(e.Was) + " → " + Override(e.Became) }

// Lower says by which fields an edit grants less than the program published; "" if by none.
func Lower(e *catalog.Edit) string {
	if len(e.Lower) == 0 {
		return ""
	}
	return "it grants less than the program has published, by its " + strings.Join(e.Lower, ", ")
}
