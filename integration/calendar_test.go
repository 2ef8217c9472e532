package integration

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// In every time zone, from 1990 to 2050 and from every sort of anchor on, the edges of quotas
// by the calendar are the first instants of the days that they should be, by a calculation
// that knows neither months' arithmetic nor a zone's bounds; and between two instants as many
// are counted as there are.
func TestCalendarEdges(t *testing.T) {
	names, err := zoneNames()
	if err != nil {
		t.Fatal(err)
	}
	edges, hours := 0, map[time.Duration]int{}
	for i, name := range names {
		if testing.Short() && i%20 != 0 {
			continue
		}
		location, err := time.LoadLocation(name)
		if err != nil {
			t.Fatal(err)
		}
		days, first := daysOf(location, 1990, 2051)
		if days == nil {
			t.Errorf("%s changes twice a day, which this test does not understand", name)
			continue
		}
		for _, every := range []ratelimit.Unit{ratelimit.Day, ratelimit.Week, ratelimit.Month, ratelimit.Year} {
			for _, anchor := range []ratelimit.Date{
				{}, {Year: 2026, Month: 1, Day: 31}, {Year: 2024, Month: 2, Day: 29}, {Year: 1995, Month: 4, Day: 30}, {Year: 2049, Month: 12, Day: 28},
			} {
				if every == ratelimit.Day && !anchor.IsZero() {
					continue // of which each day is one
				}
				limit := ratelimit.FixedWindow{Name: "l", Rate: 1, Capacity: 1e5, Every: every, Zone: name, Anchor: anchor}
				if every == ratelimit.Year {
					limit.Capacity = 90
				}
				d := bucket.Definition(limit.Definition())
				want := edgesOf(d, days, first)
				edges += len(want)
				checkEdges(t, &d, want)
				if every == ratelimit.Day {
					for i := range want[1:] {
						hours[want[i+1].Sub(want[i])]++
					}
				}
			}
		}
	}
	t.Logf("%d edges in %d zones; days of %v", edges, len(names), hours)
}

// edgesOf picks the days on which windows begin, and for one that there was not the next one.
func edgesOf(d bucket.Definition, days []int64, first map[int64]int64) (edges []time.Time) {
	for n, day := range days {
		date := time.Unix(day*daySeconds, 0).UTC()
		begins := func(date time.Time) bool {
			lastOfMonth := date.AddDate(0, 0, 1).Day() == 1
			onDay := date.Day() == d.Anchor.Day || lastOfMonth && date.Day() < d.Anchor.Day
			switch d.Every {
			case ratelimit.Week:
				return date.Weekday() == time.Date(d.Anchor.Year, d.Anchor.Month, d.Anchor.Day, 0, 0, 0, 0, time.UTC).Weekday()
			case ratelimit.Month:
				return onDay
			case ratelimit.Year:
				return onDay && date.Month() == d.Anchor.Month
			}
			return true
		}
		is := begins(date)
		if n > 0 && days[n-1] == day-2 { // the one between was skipped
			is = is || begins(date.AddDate(0, 0, -1))
		}
		if is {
			edges = append(edges, time.Unix(first[day], 0).UTC())
		}
	}
	return edges
}

func checkEdges(t *testing.T, d *bucket.Definition, edges []time.Time) {
	t.Helper()
	what := fmt.Sprintf("%v in %s from %v", d.Every, d.Zone, d.Anchor)
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
		if got := d.Settle(empty, edges[j]); got.Value != float64(j-i) || !got.TS.Equal(edges[j]) {
			t.Fatalf("%s: from %v to %v it is %+v, want %d", what, edges[i], edges[j], got, j-i)
		}
		if at := d.When(empty, float64(j-i)); !at.Equal(edges[j]) {
			t.Fatalf("%s: %d after %v it is %v, want %v", what, j-i, edges[i], at, edges[j])
		}
	}
	around, had := d.Edges(edges[len(edges)/2])
	for i, edge := range around {
		if n := len(edges)/2 - (d.Sent() - 4) + i; n >= 0 && n < len(edges) && !edge.Equal(edges[n]) || edge.Before(had[i]) {
			t.Fatalf("%s: SQL is told of %v, %d-th of %v", what, edge, i, around)
		}
	}
}
