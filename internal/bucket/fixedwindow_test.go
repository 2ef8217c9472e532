package bucket_test

import (
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

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
// worked out outside of this package. Rate, capacity and the like do not move them.
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
	for i, tt := range tests {
		window := definition(FixedWindow{Name: tt.name, Rate: 1 + float64(i), Period: tt.period, Capacity: 9, Shards: 1 + i%2})
		want := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC).Add(tt.want)
		if got := window.Origin(tt.key); !got.Equal(want) {
			t.Errorf("%s/%s each %v: Origin = %v, want %v", tt.name, tt.key, tt.period, got, want)
		}
	}
}
