package bucket

import (
	"fmt"
	"math"
	"sort"
	"sync"
	"time"
)

// Unit is a unit of the calendar, by which a quota is refilled.
type Unit uint8

// The units of the calendar. Their bits are others than those of a Kind: see kinds.
const (
	Day Unit = (iota + 1) << 4
	Week
	Month
	Year
)

var units = [...]struct {
	name    string
	longest time.Duration // about: with an hour of winter time in it, a month is longer
	slack   time.Duration // see Definition.slack
}{
	Day:   {"day", 24 * time.Hour, 0},
	Week:  {"week", 7 * 24 * time.Hour, zones},
	Month: {"month", 31 * 24 * time.Hour, zones},
	Year:  {"year", 366 * 24 * time.Hour, zones},
}

// zones is how far apart the clocks of time zones are, from 12 hours behind to 14 ahead.
const zones = 26 * time.Hour

// ParseUnit returns the unit that has a text as its String.
func ParseUnit(text string) (u Unit, ok bool) {
	for u := Day; u <= Year; u += Day {
		if text == u.String() {
			return u, true
		}
	}
	return 0, false
}

// String returns the unit in a word, such as "month".
func (u Unit) String() string {
	if u.Longest() == 0 {
		return fmt.Sprintf("Unit(%d)", uint8(u))
	}
	return units[u].name
}

// Longest returns how long a unit is at most, but for an hour or so of summer time; 0 for
// none of the units.
func (u Unit) Longest() time.Duration {
	if u > Year {
		return 0
	}
	return units[u].longest
}

// Date is a day of the calendar, in no time zone.
type Date struct {
	Year  int
	Month time.Month
	Day   int
}

// DateOf returns the day on which an instant falls in its own location: for a subscription,
// pass subscribed.In(location).
func DateOf(t time.Time) (d Date) {
	d.Year, d.Month, d.Day = t.Date()
	return d
}

// ParseDate reads a date such as "2026-01-31".
func ParseDate(text string) (Date, error) {
	t, err := time.Parse(time.DateOnly, text)
	return DateOf(t), err
}

// String returns the date as "2026-01-31".
func (d Date) String() string { return fmt.Sprintf("%04d-%02d-%02d", d.Year, int(d.Month), d.Day) }

// IsZero reports whether d is the zero Date, which is none.
func (d Date) IsZero() bool { return d == Date{} }

// Valid reports whether there is such a day, in the years 1 to 9999.
func (d Date) Valid() bool {
	return d.Year >= 1 && d.Year <= 9999 && d == DateAt(d.Days())
}

// Days returns how many days after 1 January 1970 the date is.
func (d Date) Days() int64 {
	return floorDiv(time.Date(d.Year, d.Month, d.Day, 0, 0, 0, 0, time.UTC).Unix(), daySeconds)
}

// DateAt returns the date a number of days after 1 January 1970.
func DateAt(days int64) Date { return DateOf(time.Unix(days*daySeconds, 0).UTC()) }

// clamped is a day of a month, or the last one if the month has not as many. The month may be
// any number.
func clamped(year int, month time.Month, day int) int64 {
	last := Date{year, month + 1, 0}.Days()
	return min(Date{year, month, 1}.Days()+int64(day-1), last)
}

const daySeconds = 24 * 60 * 60

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

// zone is a time zone.
type zone struct {
	location *time.Location
	skipped  []int64 // days that there were not, since the zone went over to the other side of the date line
}

var zonesByName sync.Map // of *zone

// zoneOf returns the time zone of a name. It caches the zones that it has read.
func zoneOf(name string) (*zone, error) {
	if z, ok := zonesByName.Load(name); ok {
		return z.(*zone), nil
	}
	if name == "" || name == "Local" {
		return nil, fmt.Errorf("must be a name such as \"Europe/Berlin\"")
	}
	location, err := time.LoadLocation(name)
	if err != nil {
		return nil, err
	}
	z, _ := zonesByName.LoadOrStore(name, &zone{location, skippedIn(location)})
	return z.(*zone), nil
}

// BadZone says why a name is not that of a time zone, or "".
func BadZone(name string) string {
	if _, err := zoneOf(name); err != nil {
		return "must be the name of a time zone that this machine knows, such as \"Europe/Berlin\" " +
			"(a program that imports time/tzdata knows all of them)"
	}
	return ""
}

// skippedIn returns the days that a zone never had.
func skippedIn(location *time.Location) (days []int64) {
	for at := time.Unix(-1<<36, 0).In(location); at.Unix() < 1<<31; {
		end := sameUntil(at)
		_, before := at.Zone()
		_, after := end.Zone()
		for day := floorDiv(end.Unix()+int64(before)+daySeconds-1, daySeconds); (day+1)*daySeconds <= end.Unix()+int64(after); day++ {
			days = append(days, day)
		}
		at = end
	}
	return days
}

// sameUntil returns an instant up to which the zone has the offset that it has at another.
// [time.Time.ZoneBounds] goes no further than to the end of a year where a zone's rule goes on
// for ever, and on the last day of a leap year not even there.
func sameUntil(at time.Time) time.Time {
	_, end := at.ZoneBounds()
	switch {
	case end.IsZero():
		return time.Unix(math.MaxInt64/2, 0)
	case !end.After(at):
		return at.Add(time.Hour)
	}
	return end
}

// skippedUpTo is how many days up to one the zone never had.
func (z *zone) skippedUpTo(day int64) int64 {
	return int64(sort.Search(len(z.skipped), func(i int) bool { return z.skipped[i] > day }))
}

// start returns the first instant, in microseconds, at which a clock in the zone shows a day
// or a later one: midnight, unless summer time begins then.
func (z *zone) start(day int64) int64 {
	const farthest = 16 * 60 * 60 // from Greenwich
	shown := day * daySeconds
	at := time.Unix(shown-farthest, 0).In(z.location)
	for {
		_, offset := at.Zone()
		end := sameUntil(at)
		if first := max(at.Unix(), shown-int64(offset)); first < end.Unix() {
			return first * 1_000_000
		}
		at = end
	}
}

// day is the day that a clock in the zone shows at an instant, in microseconds.
func (z *zone) day(micros int64) int64 {
	seconds := floorDiv(micros, 1_000_000)
	_, offset := time.Unix(seconds, 0).In(z.location).Zone()
	return floorDiv(seconds+int64(offset), daySeconds)
}
