package bucket_test

import (
	"fmt"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

func TestFixedWindow(t *testing.T) {
	window := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	run(t, window, []step{
		{t1, allow(2), true, 0, 1},
		{t2, allow(1), true, 0, 0},
		{t2, allow(1), false, 2 * d, 0},
		{t3, allow(3), false, 1 * d, 0},
		{t4.Add(-time.Microsecond), allow(1), false, time.Microsecond, 0},
		{t4, allow(1), true, 0, 2},
		{t8, allow(3), true, 0, 0}, // nothing rolled over
		{t8, allow(1), false, 4 * d, 0},
	})
}

// A capacity above the rate lets unused windows roll over.
func TestFixedWindowRollover(t *testing.T) {
	window := FixedWindow{Name: "a", Rate: 3, Period: 2 * d, Capacity: 7, Start: t0}
	run(t, window, []step{
		{t1, allow(7), true, 0, 0}, // no row: full
		{t1, allow(1), false, 1 * d, 0},
		{t1, allow(4), false, 3 * d, 0},
		{t1, allow(7), false, 5 * d, 0},
		{t2, allow(1), true, 0, 2},
		{t4, allow(0), true, 0, 5},
		{t6, allow(7), true, 0, 0}, // eight came, seven fit
		{t7, allow(1), false, 1 * d, 0},
	})

	// Capacity below the rate caps every window.
	capped := FixedWindow{Name: "a", Rate: 3, Period: 2 * d, Capacity: 2, Start: t0}
	run(t, capped, []step{
		{t0, allow(2), true, 0, 0},
		{t2, allow(2), true, 0, 0},
		{t3, allow(2), false, 1 * d, 0},
	})
}

// A clock that goes back opens no window twice.
func TestFixedWindowClockGoesBack(t *testing.T) {
	window := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	run(t, window, []step{
		{t5, allow(3), true, 0, 0},
		{t3, allow(1), false, 5 * d, 0},
		{t4, allow(1), false, 4 * d, 0},
		{t8, allow(2), true, 0, 1},
		{t0, allow(1), true, 0, 0}, // there was one left
		{t0, allow(1), false, 12 * d, 0},
		{t9, allow(1), false, 3 * d, 0},
	})
}

func TestFixedWindowRedefined(t *testing.T) {
	small := FixedWindow{Name: "a", Rate: 3, Period: 4 * d, Start: t0}
	large := FixedWindow{Name: "a", Rate: 8, Period: 4 * d, Start: t0}
	short := FixedWindow{Name: "a", Rate: 3, Period: 2 * d, Start: t0}
	run(t, large, []step{
		{t1, allow(1), true, 0, 7},
		{t1, as(small, allow(1)), true, 0, 2}, // lowered: the rest is gone
		{t1, as(large, allow(3)), false, 3 * d, 2},
		{t4, allow(8), true, 0, 0}, // raised: from the next window
		{t4, as(short, allow(1)), false, 2 * d, 0},
		{t6, allow(3), true, 0, 0},
	})
}

// An edge is at Start and every Period from it, in both directions.
func TestFixedWindowStart(t *testing.T) {
	utc := func(y int, m time.Month, day, hour int) time.Time {
		return time.Date(y, m, day, hour, 0, 0, 0, time.UTC)
	}
	now := utc(2025, 3, 14, 12) // a Friday
	tests := []struct {
		name   string
		start  time.Time
		period time.Duration
		now    time.Time
		want   time.Time // the edge before now
	}{
		{"a Monday past", utc(2025, 1, 6, 0), 7 * 24 * time.Hour, now, utc(2025, 3, 10, 0)},
		{"a Monday to come", utc(2031, 3, 3, 0), 7 * 24 * time.Hour, now, utc(2025, 3, 10, 0)},
		{"before 1970", utc(1969, 12, 29, 0), 7 * 24 * time.Hour, now, utc(2025, 3, 10, 0)},
		{"long ago", utc(1, 1, 1, 0).Add(time.Microsecond), 24 * time.Hour, now, utc(2025, 3, 14, 0).Add(time.Microsecond)},
		{"now", now, time.Hour, now, now},
		{"in an hour", now.Add(time.Hour), time.Hour, now, now},
		{"in a microsecond", now.Add(time.Microsecond), time.Hour, now, now.Add(time.Microsecond - time.Hour)},
		{"a microsecond ago", now.Add(-time.Microsecond), time.Hour, now, now.Add(-time.Microsecond)},
		{"now before 1970", utc(2025, 1, 6, 0), 7 * 24 * time.Hour, utc(1969, 12, 31, 23), utc(1969, 12, 29, 0)},
		{"1970 itself", utc(1970, 1, 1, 0), 24 * time.Hour, now, utc(2025, 3, 14, 0)},
		{"another zone's midnight", time.Date(2025, 1, 1, 0, 0, 0, 0, time.FixedZone("", 5*3600)), 24 * time.Hour, now, utc(2025, 3, 13, 19)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			window := definition(FixedWindow{Name: "a", Rate: 5, Period: tt.period, Start: tt.start})
			if got, want := window.Fresh("k", tt.now), row(5, tt.want); got != want {
				t.Errorf("Fresh() = %v, want %v", got, want)
			}
			if got := window.Origin("k"); got.Before(utc(1, 1, 1, 0)) || !got.Before(utc(1, 1, 1, 0).Add(tt.period)) {
				t.Errorf("Origin = %v, want the first edge since year 1", got)
			}
			if got := window.Fresh("another", tt.now).TS; !got.Equal(tt.want) {
				t.Errorf("another key's edge = %v, want %v", got, tt.want)
			}
		})
	}
}

// These phases are for ever: a row that was pruned must come back with the
// edges that it had, on every machine, in every version. They are FNV-1a of
// name, zero byte and key, then MurmurHash3's finalizer, modulo the period,
// worked out outside of this package.
func TestFixedWindowPhase(t *testing.T) {
	tests := []struct {
		name, key string
		period    time.Duration
		want      time.Duration
	}{
		{"sign_up", "", time.Hour, 2_265_766_406 * time.Microsecond},
		{"sign_up", "alice", time.Hour, 2_010_629_071 * time.Microsecond},
		{"sign_up", "bob", time.Hour, 934_466_738 * time.Microsecond},
		{"sign_up", "alice", 24 * time.Hour, 12_810_629_071 * time.Microsecond},
		{"a", "bc", 24 * time.Hour, 53_608_402_375 * time.Microsecond},
		{"ab", "c", 24 * time.Hour, 43_090_385_309 * time.Microsecond},
		{"größe", "日本", time.Minute, 11_461_824 * time.Microsecond},
		{"x", "y", time.Microsecond, 0},
	}
	for _, tt := range tests {
		window := definition(FixedWindow{Name: tt.name, Rate: 1, Period: tt.period})
		want := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC).Add(tt.want)
		if got := window.Origin(tt.key); !got.Equal(want) {
			t.Errorf("%s/%s each %v: Origin = %v, want %v", tt.name, tt.key, tt.period, got, want)
		}
	}
}

// Without a Start, rate, capacity and the like do not move the edges: only
// name, key and period do.
func TestFixedWindowPhaseStays(t *testing.T) {
	one := definition(FixedWindow{Name: "a", Rate: 1, Period: time.Hour})
	two := definition(FixedWindow{Name: "a", Rate: 2, Period: time.Hour, Capacity: 9, MaxReserved: None, Shards: 4})
	if got, want := two.Origin("k"), one.Origin("k"); !got.Equal(want) {
		t.Errorf("Origin = %v, want %v", got, want)
	}
}

// A fresh row's window is the one that now is in, whenever it is asked for.
func TestFixedWindowFresh(t *testing.T) {
	window := definition(FixedWindow{Name: "sign_up", Rate: 1, Period: time.Hour})
	edge := t0.Add(2_010_629_071*time.Microsecond - time.Hour) // alice's, before t0
	tests := []struct {
		now, want time.Time
	}{
		{t0, edge},
		{edge, edge},
		{edge.Add(-time.Microsecond), edge.Add(-time.Hour)},
		{edge.Add(time.Hour - time.Microsecond), edge},
		{edge.Add(time.Hour), edge.Add(time.Hour)},
		{edge.Add(-1_000_000 * time.Hour), edge.Add(-1_000_000 * time.Hour)}, // in 1910
	}
	for _, tt := range tests {
		if got := window.Fresh("alice", tt.now); got != row(1, tt.want) {
			t.Errorf("Fresh at %v = %v, want 1 token at %v", tt.now, got, tt.want)
		}
	}
}

// The windows of many keys open evenly over the period. With 100 parts of the
// period chi-square has 99 degrees of freedom: 99 in the mean, above 160 once
// in ten thousand. The hash is fixed, so this does not flake.
func TestFixedWindowPhasesSpread(t *testing.T) {
	const parts, keys, bound = 100, 10_000, 160
	kinds := []struct {
		name       string
		limit, key func(i int) string
	}{
		{"numbers", always("sign_up"), func(i int) string { return fmt.Sprint(i) }},
		{"padded numbers", always("sign_up"), func(i int) string { return fmt.Sprintf("user-%012d", i) }},
		{"names", func(i int) string { return fmt.Sprintf("limit_%d", i) }, always("")},
		{"last byte", always("a"), func(i int) string { return string(rune('0' + i)) }},
		{"addresses", always("login"), func(i int) string { return fmt.Sprintf("10.0.%d.%d", i/256, i%256) }},
	}
	for _, k := range kinds {
		for _, period := range []time.Duration{time.Second, time.Minute, 24 * time.Hour, 365 * 24 * time.Hour} {
			t.Run(fmt.Sprint(k.name, " each ", period), func(t *testing.T) {
				var counts [parts]float64
				for i := range keys {
					window := definition(FixedWindow{Name: k.limit(i), Rate: 1, Period: period})
					age := t0.Sub(window.Fresh(k.key(i), t0).TS)
					counts[int(age*parts/period)]++
				}
				const mean = float64(keys) / parts
				chi := 0.0
				for _, n := range counts {
					chi += (n - mean) * (n - mean) / mean
				}
				if chi > bound {
					t.Errorf("chi-square = %.0f, want at most %v", chi, bound)
				}
			})
		}
	}
}

func always(s string) func(int) string { return func(int) string { return s } }

func TestFixedWindowSettle(t *testing.T) {
	window := definition(FixedWindow{Name: "a", Rate: 2, Period: 2 * d, Capacity: 5})
	tests := []struct {
		name  string
		state bucket.State
		now   time.Time
		want  bucket.State
	}{
		{"at the edge", row(1, t0), t0, row(1, t0)},
		{"in the window", row(1, t0), t1, row(1, t0)},
		{"just before the next", row(1, t0), t2.Add(-time.Microsecond), row(1, t0)},
		{"at the next", row(1, t0), t2, row(3, t2)},
		{"in the one after", row(1, t0), t5, row(5, t4)},
		{"full", row(1, t0), t9, row(5, t8)},
		{"out of debt", row(-4, t0), t5, row(0, t4)},
		{"earlier", row(1, t4), t1, row(1, t4)},
		{"long before", row(1, t4), t0.Add(-100 * time.Hour), row(1, t4)},
		{"above capacity", row(9, t0), t1, row(5, t0)},
		{"edges of its own", row(1, t1), t4, row(3, t3)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := window.Refill(tt.state, tt.now); got != tt.want {
				t.Errorf("Settle() = %v, want %v", got, tt.want)
			}
		})
	}
}
