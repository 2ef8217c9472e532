package integration

import (
	"sync"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"pgregory.net/rapid"
)

// Zones whose clocks change at midnight, at 00:01 and at 01:00 back to midnight, by half an
// hour, not at all, and by a day that there was not.
var calendarZones = []string{
	"UTC", "Europe/Berlin", "America/New_York", "Asia/Beirut", "America/Havana", "America/St_Johns",
	"Atlantic/Azores", "Australia/Lord_Howe", "Pacific/Apia",
}

// Years in which histories are, and those that are known on either side.
const (
	fromYear, toYear       = 1995, 2050
	firstKnown, lastBefore = 1990, 2110
)

// calendarDays are the days of a zone that begin at a time of day, as daysIn returns them.
type calendarDays struct {
	days  []int64
	first map[int64]int64
}

type zoneAndTime struct {
	zone string
	at   time.Duration
}

var daysByZone sync.Map // by zoneAndTime, of func() calendarDays

// edgesByDay returns the edges of a quota by the calendar, in microseconds, by the calculation of
// TestCalendarEdges.
func edgesByDay(d bucket.Definition) (edges []int64) {
	zone, _ := daysByZone.LoadOrStore(zoneAndTime{d.Zone, d.Time}, sync.OnceValue(func() (z calendarDays) {
		location, err := time.LoadLocation(d.Zone)
		if err != nil {
			panic(err)
		}
		stretches, err := stretchesOf(location, firstKnown, lastBefore)
		if err != nil {
			panic(err)
		}
		z.days, z.first = daysIn(stretches, d.Time)
		return z
	}))
	z := zone.(func() calendarDays)()
	begin := dayOf(time.Date(firstKnown, 1, 1, 0, 0, 0, 0, time.UTC).Unix())
	end := dayOf(time.Date(lastBefore, 1, 1, 0, 0, 0, 0, time.UTC).Unix())
	for _, edge := range edgesOf(beginnings(ratelimit.Definition(d), begin, end), z.days, z.first) {
		edges = append(edges, edge.UnixMicro())
	}
	return edges
}

// quotas draws quotas by the calendar: used up in each window, rolling over for several, with
// debts of some windows, and none of these.
func quotas() *rapid.Generator[ratelimit.FixedWindow] {
	return rapid.Custom(func(t *rapid.T) ratelimit.FixedWindow {
		q := ratelimit.FixedWindow{
			Name: "a", Rate: magnitude(1, 1e6).Draw(t, "rate"),
			Every: rapid.SampledFrom([]ratelimit.Unit{ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Year, 5 * ratelimit.Day, 3 * ratelimit.Month}).Draw(t, "every"),
			Zone:  rapid.SampledFrom(calendarZones).Draw(t, "zone"),
			Time:  rapid.SampledFrom(timesOfDay).Draw(t, "time"),
		}
		if rapid.Bool().Draw(t, "has an anchor") {
			q.Anchor = ratelimit.Date{
				Year: rapid.IntRange(1990, 2060).Draw(t, "year"), Month: time.Month(rapid.IntRange(1, 12).Draw(t, "month")),
				Day: rapid.SampledFrom([]int{1, 15, 28}).Draw(t, "day"),
			}
			if rapid.Bool().Draw(t, "the last day") {
				q.Anchor = ratelimit.DateOf(time.Date(q.Anchor.Year, q.Anchor.Month+1, 0, 0, 0, 0, 0, time.UTC))
			}
		}
		switch rapid.IntRange(0, 2).Draw(t, "capacity is") {
		case 0:
			q.Capacity = ratelimit.None
		case 1:
			q.Capacity = q.Rate * magnitude(0.1, 20).Draw(t, "capacity/rate")
		}
		q.MaxReserved = ratelimit.None
		if rapid.Bool().Draw(t, "has debts") {
			q.MaxReserved = q.Rate * magnitude(0.1, 20).Draw(t, "maxReserved/rate")
		}
		return q
	})
}

// laterByCalendar draws the next instant of a history: as later does, at an edge of the quota,
// at a change of the zone's clocks, or a microsecond before.
func laterByCalendar(t *rapid.T, h *history, back bool) int64 {
	now := h.now
	switch rapid.IntRange(0, 3).Draw(t, "calendar's step") {
	case 0:
		now = later(t, h.d, now, h.retry, back)
	case 1:
		now = h.exact.edges[h.exact.edgesUpTo(now)+rapid.IntRange(0, 3).Draw(t, "edges")] - rapid.Int64Range(0, 1).Draw(t, "µs before")
	case 2:
		location, err := time.LoadLocation(h.d.Zone)
		must(t, err)
		if _, end := instant(now).In(location).ZoneBounds(); !end.IsZero() {
			now = end.UnixMicro() - rapid.Int64Range(0, 1).Draw(t, "µs before")
		}
	}
	return min(max(now, time.Date(fromYear, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()), time.Date(toYear, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro())
}

func newCalendarHistory(t *rapid.T, quota ratelimit.FixedWindow) *history {
	h := newHistory(t, quota)
	year := rapid.IntRange(fromYear, toYear-1).Draw(t, "first year")
	h.now = time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro() + rapid.Int64Range(0, 366*24*time.Hour.Microseconds()).Draw(t, "first µs")
	h.state = h.d.Fresh("k", instant(h.now))
	h.row, h.retry = row{rat(h.d.Capacity), h.exact.edges[h.exact.edgesUpTo(h.now)-1], 0}, h.now
	h.settle(t, h.now)
	return h
}

// version is the definition of a program, and its model.
type version struct {
	quota ratelimit.FixedWindow
	d     bucket.Definition
	exact limit
}

// versions draws a quota, and one with another anchor, zone and time.
func versions(t *rapid.T) (both [2]version) {
	quota := quotas().Draw(t, "limit")
	for i := range both {
		d := definition(quota)
		both[i] = version{quota, d, newLimit(d)}
		other := quotas().Draw(t, "moved")
		quota.Anchor, quota.Zone, quota.Time = other.Anchor, other.Zone, other.Time
	}
	return both
}

// use has the program use a definition from now on. The row stays as it is.
func (h *history) use(v version) { h.d, h.limit, h.exact = v.d, v.quota, v.exact }

// Quotas by the calendar agree with exact arithmetic on edges that were computed day by day: over
// changes of summer time, leap days and ends of years, while they roll over for several windows,
// are in debt, paused, while the clock goes back, and while their anchor, zone and time change.
func TestCalendarExact(t *testing.T) {
	fewer(t, 1)
	rapid.Check(t, func(t *rapid.T) {
		both := versions(t)
		h := newCalendarHistory(t, both[0].quota)
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			h.now = laterByCalendar(t, h, true)
			switch rapid.IntRange(0, 11).Draw(t, "do") {
			case 0:
				h.credit(t, counts(h.d, true).Draw(t, "credit"))
			case 11:
				h.use(rapid.SampledFrom(both[:]).Draw(t, "version"))
			case 1:
				h.pause(t, laterByCalendar(t, h, true))
			case 2:
				h.resume(t)
			case 3, 4, 5:
				h.take(t, true, counts(h.d, true).Draw(t, "reserve"))
			default:
				h.take(t, false, counts(h.d, false).Draw(t, "allow"))
			}
			h.settle(t, h.retry)
		}
	})
}
