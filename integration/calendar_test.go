package integration

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// In every time zone, from 1990 to 2050 and from every sort of anchor on, the edges of quotas
// by the calendar are the first instants of the days that they should be, by a calculation
// that knows neither months' arithmetic nor a zone's bounds; and between two instants as many
// are counted as there are. Of zones whose clocks have always shown the same, one is looked at.
func TestCalendarEdges(t *testing.T) {
	names, err := zoneNames()
	must(t, err)
	every := 8 // of which one is compared
	switch {
	case testing.Short():
		every = 20
	case checks(t) >= 1000: // as in .ci/run
		every = 1
	}
	zones := map[string][]stretch{}
	alike := map[string]string{} // a zone of each history
	for i, name := range names {
		if i%every != 0 {
			continue
		}
		location, err := time.LoadLocation(name)
		must(t, err)
		stretches, err := stretchesOf(location, 1990, 2051)
		if err != nil {
			t.Error(err)
		}
		if history := fmt.Sprint(stretches); alike[history] == "" {
			alike[history], zones[name] = name, stretches
		}
	}
	quotas := sold()
	var edges atomic.Int64
	t.Run("zone", func(t *testing.T) {
		for name, stretches := range zones {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				for limit, beginnings := range quotas {
					limit.Zone = name
					d := definition(limit)
					days, first := daysIn(stretches, limit.Time)
					want := edgesOf(beginnings, days, first)
					edges.Add(int64(len(want)))
					checkEdges(t, &d, want)
				}
			})
		}
	})
	t.Logf("%d edges in %d zones, of which %d differ", edges.Load(), len(names), len(zones))
}

// sold are quotas of each unit from each sort of anchor, and the days on which their windows
// begin by the calendar, which are the same in all zones.
func sold() map[ratelimit.FixedWindow][]int64 {
	all := map[ratelimit.FixedWindow][]int64{}
	begin, end := dayOf(time.Date(1989, 1, 1, 0, 0, 0, 0, time.UTC).Unix()), dayOf(time.Date(2052, 1, 1, 0, 0, 0, 0, time.UTC).Unix())
	for _, every := range []ratelimit.Unit{
		ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Year, 2 * ratelimit.Day, 5 * ratelimit.Day, 3 * ratelimit.Month, 2 * ratelimit.Year,
	} {
		for i, anchor := range []ratelimit.Date{
			{}, {Year: 2026, Month: 1, Day: 31}, {Year: 2024, Month: 2, Day: 29}, {Year: 1995, Month: 4, Day: 30}, {Year: 2049, Month: 12, Day: 28},
		} {
			limit := ratelimit.FixedWindow{Name: "l", Rate: 1, Every: every, Anchor: anchor, Time: timesOfDay[i]}
			limit.Capacity = float64(ratelimit.MaxSpan / every.Longest())
			all[limit] = beginnings(limit.Definition(), begin, end)
		}
	}
	return all
}

// timesOfDay are midnight, and times that clocks leave out or show twice in some zones.
var timesOfDay = []time.Duration{0, 2*time.Hour + 30*time.Minute, 23 * time.Hour, 9 * time.Hour, time.Hour + 30*time.Minute}

// beginnings returns the days from one to another on which windows begin.
func beginnings(d ratelimit.Definition, begin, end int64) (days []int64) {
	anchor := time.Date(d.Anchor.Year, d.Anchor.Month, d.Anchor.Day, 0, 0, 0, 0, time.UTC)
	for day := begin; day < end; day++ {
		date := time.Unix(day*daySeconds, 0).UTC()
		lastOfMonth := date.AddDate(0, 0, 1).Day() == 1
		is := date.Day() == d.Anchor.Day || lastOfMonth && date.Day() < d.Anchor.Day
		if months := int(d.Every / ratelimit.Month); months > 0 {
			is = is && ((date.Year()-anchor.Year())*12+int(date.Month()-anchor.Month()))%months == 0
		} else {
			is = (day-dayOf(anchor.Unix()))%int64(d.Every/ratelimit.Day) == 0
		}
		if is {
			days = append(days, day)
		}
	}
	return days
}

// edgesOf returns when the days begin on which windows do, in a zone whose clocks show some
// days. For one that there was not it is the next one.
func edgesOf(beginnings, days []int64, first map[int64]int64) (edges []time.Time) {
	for n := 0; len(days) > 0 && n < len(beginnings); {
		switch day := days[0]; {
		case beginnings[n] > day:
			days = days[1:]
		case beginnings[n] < day && !skipped(beginnings[n], day, first):
			n++ // before all of them
		default:
			if edge := time.Unix(first[day], 0).UTC(); len(edges) == 0 || !edges[len(edges)-1].Equal(edge) {
				edges = append(edges, edge)
			}
			n++
		}
	}
	return edges
}

// skipped reports whether a zone went from the day before one to another.
func skipped(day, next int64, first map[int64]int64) bool {
	_, before := first[day-1]
	_, known := first[day]
	return before && !known && next == day+1
}

func checkEdges(t *testing.T, d *bucket.Definition, edges []time.Time) {
	t.Helper()
	what := fmt.Sprintf("%v in %s from %v at %v", d.Every, d.Zone, d.Anchor, d.Time)
	for i, edge := range edges[:len(edges)-1] {
		next := edges[i+1]
		if !next.After(edge) {
			t.Fatalf("%s: %v is not after %v", what, next, edge)
		}
		if got := d.Fresh("", next.Add(-time.Microsecond)).TS; !got.Equal(edge) {
			t.Fatalf("%s: before %v it is %v, want %v", what, next, got, edge)
		}
		if got := d.Next(edge); !got.Equal(next) {
			t.Fatalf("%s: after %v it is %v, want %v", what, edge, got, next)
		}
	}
	random := rand.New(rand.NewPCG(1, uint64(len(edges))))
	for range 40 {
		i := random.IntN(len(edges))
		j := i + random.IntN(len(edges)-i)
		empty := bucket.State{TS: edges[i]}
		if got := d.Refill(empty, edges[j]); got.Value != float64(j-i) || !got.TS.Equal(edges[j]) {
			t.Fatalf("%s: from %v to %v it is %+v, want %d", what, edges[i], edges[j], got, j-i)
		}
		if at := d.When(empty, float64(j-i)); !at.Equal(edges[j]) {
			t.Fatalf("%s: %d after %v it is %v, want %v", what, j-i, edges[i], at, edges[j])
		}
	}
	around, had := d.Edges(edges[len(edges)/2])
	for i, edge := range around {
		n := len(edges)/2 - (d.Sent() - 4) + i
		if n >= 0 && n < len(edges) && !edge.Equal(edges[n]) || n > 0 && n < len(edges) && !had[i].After(edges[n-1]) || edge.Before(had[i]) {
			t.Fatalf("%s: SQL is told of %v, %d-th of %v", what, edge, i, around)
		}
	}
}
