package chart

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/visible"
)

// widths are those of Helvetica's printable ASCII characters, in thousandths of its size.
var widths = [...]uint16{
	278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556, 556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556,
	1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556, 833, 722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556,
	333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556, 556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584,
}

// textWidth returns how long a text is at a size of 1.
func textWidth(text string) float64 {
	sum := 0
	for _, r := range text {
		switch {
		case r >= ' ' && int(r-' ') < len(widths):
			sum += int(widths[r-' '])
		case r >= 0x1100: // wide in East Asian fonts
			sum += 1000
		default:
			sum += 600
		}
	}
	return float64(sum) / 1000
}

// wrapped cuts a text into lines that fit, between words where there are any.
func wrapped(text string, size, room float64) (lines []string) {
	rest := []rune(text)
	for len(rest) > 0 {
		n, space := 0, 0
		for n < len(rest) && textWidth(string(rest[:n+1]))*size <= room {
			n++
			if n < len(rest) && rest[n] == ' ' {
				space = n
			}
		}
		if n < len(rest) && space > 0 {
			n = space
		}
		n = max(n, 1)
		lines, rest = append(lines, strings.TrimSpace(string(rest[:n]))), rest[n:]
	}
	return lines
}

// Number writes a number for an axis: with thousands apart, and no digits that say nothing.
func Number(v float64) string {
	text := strconv.FormatFloat(math.Round(v*1e6)/1e6, 'f', -1, 64)
	whole, fraction, _ := strings.Cut(text, ".")
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "−", whole[1:]
	}
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return sign + whole
}

// steps are round durations.
var steps = []time.Duration{
	time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second, 15 * time.Second, 30 * time.Second,
	time.Minute, 2 * time.Minute, 5 * time.Minute, 10 * time.Minute, 15 * time.Minute, 30 * time.Minute,
	time.Hour, 2 * time.Hour, 3 * time.Hour, 6 * time.Hour, 12 * time.Hour, 24 * time.Hour,
}

// Time returns an axis of time from an instant on, in seconds: as what has passed since then, or
// as the time of day by UTC.
func Time(from time.Time, lasts time.Duration, clock bool) Axis {
	a := Axis{Label: "time", To: lasts.Seconds(), Text: func(tick float64) string {
		return visible.Period(time.Duration(tick * float64(time.Second)).Round(time.Millisecond))
	}}
	const most = 7
	step := 24 * time.Hour
	for step*most < lasts {
		step *= 2
	}
	for _, s := range steps {
		if lasts <= s*most && !(clock && lasts > 36*time.Hour && s < 24*time.Hour) { // times of several days say nothing
			step = s
			break
		}
	}
	first := time.Duration(0)
	if clock {
		first = from.Truncate(step).Add(step).Sub(from) % step
		layout := "15:04:05"
		switch {
		case step >= 24*time.Hour:
			layout = "2006-01-02"
		case step >= time.Minute:
			layout = "15:04"
		}
		a.Label = "time on " + from.UTC().Format("2006-01-02") + " (UTC)"
		a.Text = func(tick float64) string {
			return from.Add(time.Duration(tick * float64(time.Second))).Round(time.Second).UTC().Format(layout)
		}
	}
	if lasts < 3*time.Second {
		a.Ticks = Ticks(0, lasts.Seconds(), most)
		return a
	}
	for at := first; at <= lasts; at += step {
		a.Ticks = append(a.Ticks, at.Seconds())
	}
	return a
}
