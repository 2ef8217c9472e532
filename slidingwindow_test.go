package ratelimit_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

func TestSlidingWindowValidate(t *testing.T) {
	for _, tt := range []struct {
		name string
		with func(*SlidingWindow)
		want string // the bad field
	}{
		{"sound", func(*SlidingWindow) {}, ""},
		{"one slot", func(l *SlidingWindow) { l.Slots = 1 }, ""},
		{"most slots", func(l *SlidingWindow) { l.Slots = MaxSlots }, ""},
		{"too many slots", func(l *SlidingWindow) { l.Slots = MaxSlots + 1 }, "Slots"},
		{"negative slots", func(l *SlidingWindow) { l.Slots = -1 }, "Slots"},
		{"more slots than microseconds", func(l *SlidingWindow) { l.Period = time.Microsecond }, ""},
		{"no token fits", func(l *SlidingWindow) { l.Rate = 0.5 }, "Rate"},
		{"no rate", func(l *SlidingWindow) { l.Rate = 0 }, "Rate"},
		{"start", func(l *SlidingWindow) { l.Start = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }, "Start"},
		{"shards", func(l *SlidingWindow) { l.Shards = 11 }, "Shards"},
	} {
		l := SlidingWindow{Name: "a", Rate: 10, Period: time.Second, Slots: 10}
		tt.with(&l)
		err := l.Validate()
		if tt.want == "" {
			if err != nil {
				t.Errorf("%s: %v", tt.name, err)
			}
			continue
		}
		if bad := fieldErrors(err); len(bad) != 1 || bad[0].Field != tt.want || !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v, want %s to be at fault", tt.name, err, tt.want)
		}
	}
	if err := (SlidingWindow{Name: "a", Rate: 0.5, Period: 1}).Validate(); err == nil || strings.Contains(err.Error(), "Capacity") {
		t.Errorf("%v, which has a field that there is not", err)
	}
}

func TestSlotWidth(t *testing.T) {
	for _, tt := range []struct {
		limit Limit
		want  time.Duration
	}{
		{SlidingWindow{Period: time.Minute, Slots: 12}, 5 * time.Second},
		{SlidingWindow{Period: time.Minute}, 3750 * time.Millisecond},
		{SlidingWindow{Period: 10 * time.Microsecond, Slots: 3}, 4 * time.Microsecond}, // rounded up
		{TokenBucket{Period: time.Minute}, 0},
		{FixedWindow{Period: time.Minute}, 0},
	} {
		d := tt.limit.Definition()
		if got := d.SlotWidth(); got != tt.want {
			t.Errorf("%v: SlotWidth() = %v, want %v", tt.limit, got, tt.want)
		}
	}
}
