package bucket_test

import (
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// monthly is a quota of 100 by the month from a day of it on.
func monthly(day int) *bucket.Definition {
	return definition(FixedWindow{Name: "quota", Rate: 100, Every: Month, Anchor: Date{Year: 2024, Month: 1, Day: day}})
}

// Two versions of a program with different anchors that take in turn, every day, grant in four
// years what one of them does: nothing twice, and nothing that is never granted.
func TestCalendarTwoVersions(t *testing.T) {
	every := func(days, day int) *bucket.Definition {
		return definition(FixedWindow{Name: "quota", Rate: 100, Every: Unit(days) * Day, Anchor: Date{Year: 2024, Month: 1, Day: day}})
	}
	for _, tt := range []struct {
		versions [2]*bucket.Definition
		windows  float64
	}{
		{[2]*bucket.Definition{monthly(1), monthly(15)}, 48},
		{[2]*bucket.Definition{every(2, 1), every(2, 2)}, 731},
	} {
		now := time.Date(2024, 1, 1, 12, 0, 0, 0, time.UTC)
		state, granted := tt.versions[0].Fresh("", now), 0.0
		for day := range 4*365 + 1 {
			d := tt.versions[day%2]
			n := d.Refill(state, now).Value
			state, _ = d.Take(state, now, n, 0)
			granted += n
			now = now.AddDate(0, 0, 1)
		}
		if granted != tt.windows*100 {
			t.Errorf("%v: granted %v in %v windows of 100 each", tt.versions, granted, tt.windows)
		}
	}
}

// An anchor that moves on by a day each day refills no more often than one that stays.
func TestCalendarMovesEachDay(t *testing.T) {
	for days := 1; days < 7; days++ {
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		var state bucket.State
		granted := 0.0
		for hour := range 60 * 24 {
			d := definition(FixedWindow{Name: "quota", Rate: 1, Every: Unit(days) * Day, Anchor: Date{Year: 2026, Month: 1, Day: 1 + hour/24}})
			if hour == 0 {
				state = d.Fresh("", now)
			}
			n := d.Refill(state, now).Value
			state, _ = d.Take(state, now, n, 0)
			granted += n
			now = now.Add(time.Hour)
		}
		if granted > float64(60/days) {
			t.Errorf("%d days: granted %v quotas in 60 days", days, granted)
		}
	}
}

// A row stands on an edge for as long after it as time zones are apart, and below a week for
// summer time. A microsecond later the next edge does not count.
func TestCalendarSlack(t *testing.T) {
	for every, slack := range map[Unit]time.Duration{Month: 26 * time.Hour, Week: 26 * time.Hour, 6 * Day: 3 * time.Hour, Day: 3 * time.Hour} {
		d := definition(FixedWindow{Name: "quota", Rate: 100, Every: every})
		edge := d.Fresh("", time.Date(2026, 6, 10, 12, 0, 0, 0, time.UTC)).TS
		next := d.Next(edge)
		on, off := bucket.State{TS: edge.Add(slack)}, bucket.State{TS: edge.Add(slack + time.Microsecond)}
		if got := d.Refill(on, next); got.Value != 100 || !got.TS.Equal(next) {
			t.Errorf("%v: on the edge: %+v, want 100 since %v", every, got, next)
		}
		if got := d.Refill(off, next); got.Value != 0 || !got.TS.Equal(off.TS) || !d.Next(off.TS).Equal(d.Next(next)) {
			t.Errorf("%v: off the edge: %+v, want the row as it is until %v", every, got, d.Next(next))
		}
	}
}

// A full row that stands on no edge is not as no row, which would be refilled by the next one,
// until an edge has counted for it.
func TestCalendarIdle(t *testing.T) {
	first, fifteenth := monthly(1), monthly(15)
	on := func(month time.Month, day int) time.Time { return time.Date(2026, month, day, 12, 0, 0, 0, time.UTC) }
	row := fifteenth.Fresh("", on(1, 20))
	paused := fifteenth.Pause(row, on(1, 20), on(4, 20))
	for _, tt := range []struct {
		name  string
		d     *bucket.Definition
		state bucket.State
		now   time.Time
		want  bool
	}{
		{"on its edge", fifteenth, row, on(1, 20), true},
		{"on none", first, row, on(1, 20), false},
		{"after one that does not count", first, row, on(2, 20), false},
		{"before one that counts", first, row, time.Date(2026, 3, 1, 0, 0, 59, 0, time.UTC), false},
		{"after one that counts", first, row, on(3, 1), true},
		{"hours after an edge, in another zone", first, first.Fresh("", on(2, 1)), on(2, 2), true},
		{"before its instant", first, bucket.State{Value: 100, TS: on(3, 1)}, on(2, 20), false},
		{"not full", fifteenth, bucket.State{Value: 99, TS: row.TS}, on(1, 20), false},
		{"not full then, and now", fifteenth, bucket.State{Value: 99, TS: row.TS}, on(2, 16), true},
		{"paused", fifteenth, paused, on(4, 19), false},
		{"paused, and past", fifteenth, paused, on(4, 21), true},
	} {
		if got := tt.d.Idle("", tt.state, tt.now); got != tt.want {
			t.Errorf("%s: Idle() = %v, want %v", tt.name, got, tt.want)
		}
	}
}
