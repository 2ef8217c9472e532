package bucket

import (
	"fmt"
	"math"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Unit is a number of days or of months between the edges of a quota by the calendar.
type Unit int64

// A Unit counts days in its lower half and months in its upper half, so 3 * Month is three months.
// One half is 0.
const (
	Day   Unit = 1
	Week       = 7 * Day
	Month Unit = 1 << 32
	Year       = 12 * Month
)

// zones is the largest difference between the clocks of two time zones: from UTC−12 to UTC+14.
const zones = 26 * time.Hour

// units lists the units, of each sort the larger ones first.
var units = [...]struct {
	unit Unit
	name string
}{{Year, "year"}, {Month, "month"}, {Week, "week"}, {Day, "day"}}

// split returns the days or the months of a unit.
func (u Unit) split() (days, months int64) { return int64(u % Month), int64(u / Month) }

// Longest returns the longest time that a unit can last, without an hour of summer time. It returns
// 0 for an invalid unit, and for one that may be longer than MaxSpan.
func (u Unit) Longest() time.Duration {
	const day = 24 * time.Hour
	days, months := u.split()
	if days < 0 || months < 0 || days > 0 && months > 0 {
		return 0
	}
	if days += months/12*366 + months%12*31; days > int64(MaxSpan/day) {
		return 0
	}
	return time.Duration(days) * day
}

// ParseUnit reads a unit as String writes it. It also reads "1 month".
func ParseUnit(text string) (u Unit, ok bool) {
	n, name := uint64(1), text
	if number, several, found := strings.Cut(text, " "); found {
		n, _ = strconv.ParseUint(number, 10, 16) // 0 and too many units are invalid
		name = strings.TrimSuffix(several, "s")
	}
	for _, of := range units {
		if u = Unit(n) * of.unit; name == of.name && u.Longest() > 0 {
			return u, true
		}
	}
	return 0, false
}

// String returns the unit in words, such as "month" or "2 weeks".
func (u Unit) String() string {
	days, months := u.split()
	if days > 0 && months > 0 { // invalid
		return (u - Unit(days)).String() + " and " + Unit(days).String()
	}
	for _, of := range units {
		switch n := u / of.unit; {
		case n < 1 || u%of.unit != 0:
		case n == 1:
			return of.name
		default:
			return fmt.Sprintf("%d %ss", n, of.name)
		}
	}
	return fmt.Sprintf("Unit(%d)", int64(u))
}

// TimeOfDay returns a time of day, the time since midnight, as "09:00".
func TimeOfDay(d time.Duration) string {
	return fmt.Sprintf("%02d:%02d", int(d/time.Hour), int(d%time.Hour/time.Minute))
}

// ParseTimeOfDay reads a time of day such as "09:00".
func ParseTimeOfDay(text string) (d time.Duration, ok bool) {
	t, err := time.Parse("15:04", text)
	d = time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute
	return d, err == nil && TimeOfDay(d) == text
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

// IsZero reports whether d is the zero Date, which stands for no date.
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

// clamped returns a day of a month, or the month's last day if the month is shorter. The month may
// be any number.
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
	skipped  []int64 // days that the zone does not have, since it crossed the date line
}

var zonesByName sync.Map // *zone by name

// zoneOf returns a time zone by its name. It caches zones.
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

// BadZone says why name is no time zone; "" if it is one.
func BadZone(name string) string {
	if _, err := zoneOf(name); err != nil {
		return "must be the name of a time zone that this machine knows, such as \"Europe/Berlin\" " +
			"(a program that imports time/tzdata knows all of them)"
	}
	return ""
}

// skippedIn returns the days that a zone does not have.
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

// sameUntil returns an instant up to which the zone keeps the offset that it has at an instant.
// Where a zone's rule never ends, [time.Time.ZoneBounds] returns the end of the year, or on the
// last day of a leap year an instant that is past.
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

// skippedUpTo returns how many days up to day the zone does not have.
func (z *zone) skippedUpTo(day int64) int64 {
	return int64(sort.Search(len(z.skipped), func(i int) bool { return z.skipped[i] > day }))
}

// start returns the first instant of a day at which clocks in the zone show a time or later, in
// microseconds; clock is in seconds. For 0 that is midnight, unless summer time begins then.
func (z *zone) start(day, clock int64) int64 {
	const farthest = 16 * 60 * 60 // the largest offset from UTC, in seconds
	shown := day*daySeconds + clock
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

// shown returns the local clock of the zone at an instant, in seconds since 1970; micros is in
// microseconds.
func (z *zone) shown(micros int64) int64 {
	seconds := floorDiv(micros, 1_000_000)
	_, offset := time.Unix(seconds, 0).In(z.location).Zone()
	return seconds + int64(offset)
}
