package ratelimit

import (
	"cmp"
	"math"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// FixedWindow is a limit that refills all at once: with Rate tokens at the edge of each window of
// length Period, up to Capacity. A Capacity above Rate lets unused windows roll over.
//
// With Every in place of Period it is a quota by the calendar, as it is sold: by the day, week, month,
// quarter or year, in a time zone, from an anchor on.
//
//	FixedWindow{
//		Name: "quota", Rate: 10_000,
//		Every: Month, Zone: "Europe/Berlin", Anchor: Date{Year: 2026, Month: time.January, Day: 31},
//	}
//
// Its windows begin at midnight of local days, or at Time. If summer time leaves that instant out, they
// begin at the first instant after it. A month without the anchor's day begins its window on its last
// day: here on 31 January, 28 February and 31 March. A pause leaves the limit's value as it is.
//
// Anchor, Zone and Time may change at any time. What a key has used stays used. The first window that
// begins after the change refills nothing, unless only the zone moved to the east. So no window is
// granted twice, also while programs with both definitions run.
type FixedWindow struct {
	// Name is the limit's identity in the database, together with the key.
	// Required, at most MaxNameLength bytes.
	Name string

	// Rate is how many tokens are refilled at each window's start. Required,
	// positive, may be a fraction; below 1 only with a Capacity.
	Rate float64

	// Period is the length of a window. Required, positive, in whole
	// microseconds (PostgreSQL's resolution); not with Every.
	Period time.Duration

	// Capacity is the most tokens that accumulate. Zero means Rate; None means
	// none, so that only reservations succeed.
	Capacity float64

	// MaxReserved is how many tokens of debt reservations may take the limit into; the bound is
	// inclusive. Zero means unlimited (in effect, the tokens refilled during MaxSpan), which is
	// right for a queue: every job gets an instant, and none is refused. Where a person waits,
	// set it: to wait no longer than w, set Rate · w / Period, and a reservation that would be
	// due later is refused. None means no debt.
	MaxReserved float64

	// Shards spreads each key over that many rows, so that a limit that
	// all calls take from is not one hot row. Zero means 1.
	Shards int

	// Start is an instant at which a window starts; the others follow from it
	// by Period, in both directions. The zero time gives each key a phase of
	// its own, a hash of name and key, so that not all customers' windows
	// open in the same instant; it is the same on every machine.
	Start time.Time

	// Every is the number of days or months after which the quota is refilled, in place of
	// Period and Start: Day, Week, Month, Year, or several of one, such as 3 * Month.
	Every Unit

	// Zone is the name of the time zone in whose days windows begin, such as "Europe/Berlin".
	// Empty means UTC. It is for Every only. The machine must know the zone: a program that
	// imports time/tzdata does; the server need not.
	Zone string

	// Anchor is a day on which a window begins; the others follow from it, in both
	// directions. The zero Date means 1 January 2024, a Monday. With Every only.
	Anchor Date

	// Time is the time of day at which windows begin, as clocks in Zone show it: 9 * time.Hour
	// is nine in the morning, also on a day whose clocks change. In whole minutes, below 24
	// hours. Zero means midnight. With Every only.
	Time time.Duration
}

// Unit is a number of days or of months, in which [FixedWindow].Every is given, 100 years at
// most. Its String is in words, such as "month" or "2 weeks".
type Unit = bucket.Unit

// The units of the calendar, of which several are one: a quarter is 3 * Month.
const (
	Day   = bucket.Day
	Week  = bucket.Week
	Month = bucket.Month
	Year  = bucket.Year
)

// Date is a day of the calendar, in no time zone.
type Date = bucket.Date

// DateOf returns the day on which an instant falls in its own location. The anchor of a
// subscription is DateOf(subscribed.In(location)).
func DateOf(t time.Time) Date { return bucket.DateOf(t) }

// ParseUnit reads a unit as its String writes it, in any case: "month", "3 months". An error is
// a *[FieldError].
func ParseUnit(text string) (Unit, error) {
	if unit, ok := bucket.ParseUnit(strings.ToLower(text)); ok {
		return unit, nil
	}
	return 0, &FieldError{Field: "Every", Value: text, Reason: badUnit}
}

// ParseDate reads a date such as "2026-01-31". An error is a *[FieldError].
func ParseDate(text string) (Date, error) {
	if date, err := bucket.ParseDate(text); err == nil && date.Valid() {
		return date, nil
	}
	return Date{}, &FieldError{Field: "Anchor", Value: text, Reason: badDate}
}

// ParseTimeOfDay reads a time of day such as "09:00", as the time since midnight. An error is a
// *[FieldError].
func ParseTimeOfDay(text string) (time.Duration, error) {
	if d, ok := bucket.ParseTimeOfDay(text); ok {
		return d, nil
	}
	return 0, &FieldError{Field: "Time", Value: text, Reason: badTime}
}

const (
	badUnit = `must be "day", "week", "month" or "year", or several such as "3 months", and at most 100 years`
	badDate = `must be a day such as "2026-01-31"`
	badTime = `must be a time of day such as "09:00"`
)

// defaultAnchor is a Monday, so that weeks begin with one.
var defaultAnchor = Date{Year: 2024, Month: time.January, Day: 1}

// For implements [Limit].
func (l FixedWindow) For(key string) Request { return Request{Limit: l, Key: key, Count: 1} }

// ForN implements [Limit].
func (l FixedWindow) ForN(key string, n float64) Request {
	return Request{Limit: l, Key: key, Count: n}
}

// Validate implements [Limit].
func (l FixedWindow) Validate() error {
	w := l
	if l.Every != 0 && l.Period == 0 {
		w.Period = max(l.Every.Longest(), time.Microsecond)
	}
	f := w.check()
	if y := l.Start.UTC().Year(); y < 1 || y > 9999 {
		f.add("Start", l.Start, "must be in the years 1 to 9999")
	}
	l.checkCalendar(&f)
	return f.err()
}

func (l FixedWindow) checkCalendar(f *faults) {
	if l.Every == 0 {
		const reason = "is for a quota by the calendar: set Every as well"
		if l.Zone != "" {
			f.add("Zone", l.Zone, reason)
		}
		if !l.Anchor.IsZero() {
			f.add("Anchor", l.Anchor, reason)
		}
		if l.Time != 0 {
			f.add("Time", l.Time, reason)
		}
		return
	}
	if l.Every.Longest() == 0 {
		f.add("Every", l.Every, "must be a number of days or a number of months, such as Week or 3 * Month, and at most 100 years")
	}
	if l.Period != 0 {
		f.add("Period", l.Period, "is not for a quota by the calendar, which has Every in its place")
	}
	if !l.Start.IsZero() {
		f.add("Start", l.Start, "is not for a quota by the calendar, which has an Anchor in its place")
	}
	if reason := bucket.BadZone(cmp.Or(l.Zone, time.UTC.String())); reason != "" {
		f.add("Zone", l.Zone, reason)
	}
	if !l.Anchor.IsZero() && !l.Anchor.Valid() {
		f.add("Anchor", l.Anchor, "must be a day of the years 1 to 9999")
	}
	if l.Time < 0 || l.Time >= 24*time.Hour || l.Time%time.Minute != 0 {
		f.add("Time", l.Time, "must be a time of day in whole minutes, from 0 to 23h59m")
	}
}

// Definition implements [Limit].
func (l FixedWindow) Definition() Definition {
	d := Definition{
		Name: l.Name, Kind: KindFixedWindow, Rate: l.Rate, Period: l.Period,
		Capacity:    orDefault(l.Capacity, l.Rate),
		MaxReserved: orDefault(l.MaxReserved, math.Inf(1)),
		Shards:      max(l.Shards, 1),
		Start:       l.Start.Round(0).UTC(), // comparable: no monotonic clock, one zone
	}
	if l.Every != 0 {
		d.Every, d.Period, d.Start = l.Every, l.Every.Longest(), time.Time{}
		d.Zone, d.Anchor, d.Time = cmp.Or(l.Zone, time.UTC.String()), cmp.Or(l.Anchor, defaultAnchor), l.Time
	}
	return d
}

// Window returns the window of a fixed window's key that an instant is in: its start, and its
// end, when the next one starts and tokens are refilled. They are zero for the other kinds. (A
// pause moves the edges of a key, but not those of a quota by the calendar.)
func (d *Definition) Window(key string, at time.Time) (from, to time.Time) {
	if d.Kind != KindFixedWindow {
		return from, to
	}
	b := d.bucket()
	from = b.Fresh(key, at).TS
	return from, b.Next(from)
}

func (FixedWindow) sealed() {}
