package ratelimit_test

import (
	"encoding/json"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

// A Unit is as many days or months as it reads, in code and in text.
func TestUnits(t *testing.T) {
	for unit, want := range map[Unit]string{
		Day: "day", Week: "week", Month: "month", Year: "year",
		5 * Day: "5 days", 14 * Day: "2 weeks", 15 * Day: "15 days", 3 * Month: "3 months", 18 * Month: "18 months", 24 * Month: "2 years",
	} {
		if got := unit.String(); got != want {
			t.Errorf("String() = %q, want %q", got, want)
		}
		if got, err := ParseUnit(want); err != nil || got != unit {
			t.Errorf("ParseUnit(%q) = %v, %v", want, got, err)
		}
	}
	for _, text := range []string{"", "3", "months", "0 months", "-3 months", "1.5 years", "3 fortnights", "3  months", "40000 days", "99999999999999 years"} {
		if got, err := ParseUnit(text); err == nil {
			t.Errorf("ParseUnit(%q) = %v, want an error", text, got)
		}
	}
	if got, err := ParseUnit("1 Month"); err != nil || got != Month {
		t.Errorf(`ParseUnit("1 Month") = %v, %v`, got, err)
	}
}

// A quota by the calendar is the same after it was written and read, and in words.
func TestCalendarText(t *testing.T) {
	quarter := FixedWindow{
		Name: "q", Rate: 10, Every: 3 * Month, Zone: "America/New_York",
		Anchor: Date{Year: 2025, Month: time.April, Day: 1}, Time: 9*time.Hour + 5*time.Minute,
	}
	for want, limit := range map[string]FixedWindow{
		`fixed window "q": 10 per 3 months in "America/New_York" from 2025-04-01 at 09:05, capacity 10, max reserved unlimited`: quarter,
		`fixed window "d": 1 per 2 weeks in "UTC" from 2024-01-01, capacity 1, max reserved unlimited`:                          {Name: "d", Rate: 1, Every: 2 * Week},
	} {
		d := limit.Definition()
		if got := d.String(); got != want {
			t.Errorf("String() = %s, want %s", got, want)
		}
		var read Definition
		text, err := json.Marshal(d)
		if err == nil {
			err = json.Unmarshal(text, &read)
		}
		if err != nil || read != d {
			t.Errorf("%s: read %v, %v", text, read, err)
		}
	}
	text, _ := json.Marshal(quarter.Definition())
	if want := `{"name":"q","kind":"fixed window","rate":10,"every":"3 months","zone":"America/New_York","anchor":"2025-04-01","time":"09:05","capacity":10,"maxReserved":"unlimited","shards":1}`; string(text) != want {
		t.Errorf("JSON %s, want %s", text, want)
	}
}

// What no quota by the calendar can have is an error that names field and value, in code and in
// JSON.
func TestCalendarInvalid(t *testing.T) {
	const hour = time.Hour
	for _, tt := range []struct {
		limit FixedWindow
		want  []string
	}{
		{FixedWindow{Every: 36_500 * Day}, nil},
		{FixedWindow{Every: 99 * Year, Time: 23*hour + 59*time.Minute}, nil},
		{FixedWindow{Every: 36_501 * Day}, []string{"Every 36501 days"}},
		{FixedWindow{Every: 100 * Year}, []string{"Every 100 years"}},
		{FixedWindow{Every: Month + 15*Day}, []string{"Every month and 15 days"}},
		{FixedWindow{Every: -Day}, []string{"Every Unit(-1)"}},
		{FixedWindow{Every: Day, Period: hour, Start: monday}, []string{"Period 1h0m0s", "Start 2025-01-06 00:00:00 +0000 UTC"}},
		{FixedWindow{Every: Day, Time: 24 * hour}, []string{"Time 24h0m0s"}},
		{FixedWindow{Every: Day, Time: -hour}, []string{"Time -1h0m0s"}},
		{FixedWindow{Every: Day, Time: 9*hour + time.Second}, []string{"Time 9h0m1s"}},
		{FixedWindow{Every: Day, Zone: "Europe/Nowhere", Anchor: Date{Year: 2026, Month: 2, Day: 30}}, []string{"Zone Europe/Nowhere", "Anchor 2026-02-30"}},
		{FixedWindow{Period: hour, Zone: "UTC", Anchor: Date{Year: 2026, Month: 1, Day: 1}, Time: hour}, []string{"Zone UTC", "Anchor 2026-01-01", "Time 1h0m0s"}},
	} {
		tt.limit.Name, tt.limit.Rate = "q", 1
		checkFields(t, tt.limit, tt.limit.Validate(), tt.want)
	}
	for text, want := range map[string][]string{
		`"kind": "fixed window", "every": "fortnight"`:                {"every fortnight"},
		`"kind": "fixed window", "every": 3`:                          {"every 3"},
		`"kind": "fixed window", "every": "200 years"`:                {"every 200 years"},
		`"kind": "fixed window", "every": "day", "time": "9:00"`:      {"time 9:00"},
		`"kind": "fixed window", "every": "day", "time": "24:00"`:     {"time 24:00"},
		`"kind": "fixed window", "every": "day", "anchor": "1.1.26"`:  {"anchor 1.1.26"},
		`"kind": "fixed window", "period": "1h", "time": "09:00"`:     {"Time 9h0m0s"},
		`"kind": "token bucket", "period": "1h", "time": "09:00"`:     {"time 09:00"},
		`"kind": "sliding window", "period": "1h", "every": "2 days"`: {"every 2 days"},
	} {
		var d Definition
		checkFields(t, text, json.Unmarshal([]byte(`{"name": "q", "rate": 1, `+text+`}`), &d), want)
	}
}
