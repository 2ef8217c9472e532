package ratelimit_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

func TestDefinitionJSON(t *testing.T) {
	tests := []struct {
		limit Limit
		want  string
	}{
		{
			TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20, MaxReserved: 5, Shards: 8},
			`{"name":"api","kind":"token bucket","rate":10,"period":"1m","capacity":20,"maxReserved":5,"shards":8}`,
		},
		{
			TokenBucket{Name: "<größe>\n", Rate: 10.25, Period: time.Microsecond, Capacity: None, MaxReserved: None},
			`{"name":"\u003cgröße\u003e\n","kind":"token bucket","rate":10.25,"period":"1µs","capacity":"none","maxReserved":"none","shards":1}`,
		},
		{
			FixedWindow{Name: "w", Rate: 0.5, Period: 100 * year, Capacity: 0.5},
			`{"name":"w","kind":"fixed window","rate":0.5,"period":"876000h","capacity":0.5,"maxReserved":"unlimited","shards":1}`,
		},
		{
			FixedWindow{Name: "w", Rate: 1, Period: time.Hour + time.Second, Start: monday.In(time.FixedZone("", 3600)).Add(1)},
			`{"name":"w","kind":"fixed window","rate":1,"period":"1h0m1s","capacity":1,"maxReserved":"unlimited","shards":1,"start":"2025-01-06T00:00:00.000000001Z"}`,
		},
		{
			SlidingWindow{Name: "s", Rate: 100, Period: time.Minute, MaxReserved: 50},
			`{"name":"s","kind":"sliding window","rate":100,"period":"1m","maxReserved":50,"shards":1,"slots":16}`,
		},
		{
			SlidingWindow{Name: "s", Rate: 2.5, Period: time.Minute, Slots: 60, MaxReserved: None, Shards: 2, Start: monday},
			`{"name":"s","kind":"sliding window","rate":2.5,"period":"1m","maxReserved":"none","shards":2,"start":"2025-01-06T00:00:00Z","slots":60}`,
		},
	}
	for _, tt := range tests {
		d := tt.limit.Definition()
		text, err := json.Marshal(d)
		if err != nil || string(text) != tt.want {
			t.Errorf("Marshal(%v):\n got %s, %v\nwant %s", d, text, err, tt.want)
		}
		var back Definition
		if err := json.Unmarshal(text, &back); err != nil || back != d {
			t.Errorf("Unmarshal(%s) = %v, %v, want %v", text, back, err, d)
		}
		if got := back.Limit().Definition(); got != d {
			t.Errorf("Limit().Definition() = %v, want %v", got, d)
		}
	}
	if got := (Definition{}).Limit(); got != nil {
		t.Errorf("Limit() of the zero Definition = %v, want nil", got)
	}
}

// What is left out has its default.
func TestUnmarshalDefaults(t *testing.T) {
	inf := math.Inf(1)
	least := Definition{Name: "a", Kind: KindFixedWindow, Rate: 10, Period: time.Minute, Capacity: 10, MaxReserved: inf, Shards: 1}
	with := func(change func(d *Definition)) Definition {
		d := least
		change(&d)
		return d
	}
	tests := []struct {
		more string
		want Definition
	}{
		{``, least},
		{`, "shards": 1, "maxReserved": "unlimited", "capacity": 10`, least},
		{`, "capacity": "none"`, with(func(d *Definition) { d.Capacity = 0 })},
		{`, "maxReserved": "none"`, with(func(d *Definition) { d.MaxReserved = 0 })},
		{`, "capacity": 1e2, "maxReserved": 0.25`, with(func(d *Definition) { d.Capacity, d.MaxReserved = 100, 0.25 })},
		{`, "start": "2025-01-06T01:00:00+01:00"`, with(func(d *Definition) { d.Start = monday })},
	}
	for _, tt := range tests {
		var got Definition
		text := `{"name": "a", "kind": "fixed window", "rate": 10, "period": "60s"` + tt.more + "}"
		if err := json.Unmarshal([]byte(text), &got); err != nil || got != tt.want {
			t.Errorf("Unmarshal(%s) = %v, %v, want %v", text, got, err, tt.want)
		}
	}
}

// Every fault names its field and value, and leaves the definition as it was.
func TestUnmarshalInvalid(t *testing.T) {
	const least = `{"name": "a", "kind": "fixed window", "rate": 10, "period": "60s"`
	tests := []struct {
		text string
		want []string // each bad field and its value
	}{
		{`{}`, []string{"kind ", "period "}}, // found first, so that Rate and Name are not looked at
		{`{"kind": "token bucket", "period": "1s"}`, []string{"Name ", "Rate 0"}},
		{`null`, []string{"Definition null"}},
		{`[]`, []string{"Definition []"}},
		{`"api"`, []string{`Definition "api"`}},
		{least + `, "Capacity": 20}`, []string{"Capacity 20"}},
		{least + `, "burst": {"a":1}, "color": "red"}`, []string{`burst {"a":1}`, "color red"}},
		{least + `, "rate": 11}`, []string{"rate 11"}},
		{least + `, "capacity": 0}`, []string{"capacity 0"}},
		{least + `, "capacity": "lots"}`, []string{"capacity lots"}},
		{least + `, "capacity": "unlimited"}`, []string{"capacity unlimited"}},
		{least + `, "capacity": null}`, []string{"capacity null"}},
		{least + `, "capacity": -1}`, []string{"Capacity -1"}},
		{least + `, "capacity": 1e999}`, []string{"capacity 1e999"}},
		{least + `, "capacity": 5e-324}`, []string{"capacity 5e-324"}},
		{least + `, "maxReserved": -0}`, []string{"maxReserved -0"}},
		{least + `, "maxReserved": true}`, []string{"maxReserved true"}},
		{least + `, "shards": 1.5}`, []string{"shards 1.5"}},
		{least + `, "shards": "8"}`, []string{"shards 8"}},
		{least + `, "shards": -1}`, []string{"Shards -1"}},
		{least + `, "start": "yesterday"}`, []string{"start yesterday"}},
		{least + `, "start": "0001-01-01T00:00:00Z"}`, []string{"start 0001-01-01T00:00:00Z"}},
		{least + `, "start": "0001-01-01T00:00:00+01:00"}`, []string{"Start 0001-01-01 00:00:00 +0100 +0100"}},
		{least + `, "start": 7}`, []string{"start 7"}},
		{`{"name": 7, "kind": "token bucket", "rate": "10", "period": 60}`, []string{"name 7", "rate 10", "period 60"}},
		{`{"name": "a", "kind": "leaky bucket", "rate": 10, "period": "60 s"}`, []string{"kind leaky bucket", "period 60 s"}},
		{`{"name": "a", "kind": "token bucket", "rate": 10, "period": "1ns"}`, []string{"Period 1ns"}},
		{`{"name": "a", "kind": "token bucket", "rate": 0.5, "period": "1s"}`, []string{"Rate 0.5"}},
		{`{"name": "a", "kind": "token bucket", "rate": 1, "period": "1s", "start": "2025-01-06T00:00:00Z"}`, []string{"start 2025-01-06T00:00:00Z"}},
		{least + `, "slots": 6}`, []string{"slots 6"}},
		{`{"name": "a", "kind": "sliding window", "rate": 1, "period": "1s", "slots": 1.5}`, []string{"slots 1.5"}},
		{`{"name": "a", "kind": "sliding window", "rate": 1, "period": "1s", "slots": 1001}`, []string{"Slots 1001"}},
		{`{"name": "a", "kind": "sliding window", "rate": 1, "period": "1s", "capacity": 5}`, []string{"capacity 5"}},
		{`{"name": "a", "kind": "sliding window", "rate": 0.5, "period": "1s"}`, []string{"Rate 0.5"}},
	}
	for _, tt := range tests {
		var d Definition
		checkFields(t, tt.text, json.Unmarshal([]byte(tt.text), &d), tt.want)
		if d != (Definition{}) {
			t.Errorf("Unmarshal(%s) left %v behind", tt.text, d)
		}
	}
}

func TestParseKind(t *testing.T) {
	for want, texts := range map[Kind][]string{
		KindTokenBucket:   {"token bucket", "token_bucket", "Token Bucket", "TOKEN_BUCKET"},
		KindFixedWindow:   {"fixed window", "fixed_window", "Fixed_window"},
		KindSlidingWindow: {"sliding window", "sliding_window", "Sliding Window"},
		0:                 {"", "bucket", "tokenbucket", "token-bucket", " token bucket", "token__bucket", "leaky bucket"},
	} {
		for _, text := range texts {
			if got, err := ParseKind(text); got != want || (err == nil) != (want != 0) || err != nil && !errors.Is(err, ErrInvalid) {
				t.Errorf("ParseKind(%q) = %v, %v, want %v", text, got, err, want)
			}
			var d Definition
			err := json.Unmarshal([]byte(`{"name": "a", "rate": 1, "period": "1s", "kind": "`+text+`"}`), &d)
			if d.Kind != want || (err == nil) != (want != 0) {
				t.Errorf("Unmarshal of kind %q = %v, %v, want %v", text, d.Kind, err, want)
			}
		}
	}
}

// A period that is written as others write it is told as it must be.
func TestPeriodHints(t *testing.T) {
	for text, want := range map[string]string{
		"1d": `for 1d write "24h"`, "7d": `for 7d write "168h"`, "0.5d": `for 0.5d write "12h"`, "2w": `for 2w write "336h"`,
		"1 day": "", "d": "", "-1d": "", "1e999d": "", "1h1d": "",
	} {
		var d Definition
		err := json.Unmarshal([]byte(`{"name": "a", "kind": "token bucket", "rate": 1, "period": "`+text+`"}`), &d)
		const reason = `must be a duration such as "1m30s"`
		if err == nil || !strings.Contains(err.Error(), reason) || want != "" && !strings.HasSuffix(err.Error(), ": "+want) || want == "" && !strings.HasSuffix(err.Error(), reason) {
			t.Errorf("period %q: got %v, want %q", text, err, want)
		}
	}
	for period, want := range map[time.Duration]string{
		60:  "Period 60ns: must be whole microseconds: for 60 seconds write 60 * time.Second",
		999: "for 999 seconds write 999 * time.Second",
	} {
		if err := (TokenBucket{Name: "a", Rate: 1, Period: period}).Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Period: %d: got %v, want %q", period, err, want)
		}
	}
	if err := (TokenBucket{Name: "a", Rate: 1, Period: 1500}).Validate(); err == nil || strings.Contains(err.Error(), "time.Second") {
		t.Errorf("Period of 1.5 µs: got %v, want no hint", err)
	}
}

func TestMarshalInvalid(t *testing.T) {
	for _, d := range []Definition{
		{},
		{Kind: KindTokenBucket},
		{Name: "a", Kind: 7, Rate: 1, Period: 1, Capacity: 1},
		{Name: "a", Kind: KindTokenBucket, Rate: math.NaN(), Period: time.Second, Capacity: math.Inf(1)},
	} {
		if text, err := json.Marshal(d); !errors.Is(err, ErrInvalid) {
			t.Errorf("Marshal(%v) = %s, %v, want ErrInvalid", d, text, err)
		}
	}
}

// Whatever is read is an error or a sound definition that is written and read
// again the same.
func FuzzDefinitionJSON(f *testing.F) {
	for _, seed := range []string{
		`{"name":"api","kind":"token bucket","rate":10,"period":"1m","capacity":20,"maxReserved":5,"shards":8}`,
		`{"name":"w","kind":"fixed window","rate":0.1,"period":"24h","capacity":"none","maxReserved":"unlimited","start":"2025-01-06T00:00:00.5+14:00"}`,
		`{"name":"w","kind":"fixed window","rate":1e12,"period":"876000h","capacity":1e-15,"maxReserved":"none"}`,
		`{"name":"\ud800","kind":"token bucket","rate":1e-320,"period":"-1ns"}`,
		`{"name":"a","name":"a","kind":null,"period":{},"rate":[],"shards":1e400,"start":"9999-12-31T23:59:59-01:00"}`,
		`{"":{}}`, `null`, `{`, "\x00", "", "}", `{"name"`, `{"name":`, `{"name": "a",}`, `{"name": "a"} {}`, `{7: 1}`, "\xff", strings.Repeat("[", 1e6),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var d Definition
		if err := d.UnmarshalJSON(text); err != nil {
			if !errors.Is(err, ErrInvalid) || d != (Definition{}) || len(err.Error()) > 300 && !json.Valid(text) {
				t.Fatalf("UnmarshalJSON() = %.400v, want a short ErrInvalid and nothing read", err)
			}
			return
		}
		if err := Validate(d.Limit()); err != nil {
			t.Fatalf("read %v, which is bad: %v", d, err)
		}
		written, err := json.Marshal(d)
		if err != nil {
			t.Fatalf("read %v, which cannot be written: %v", d, err)
		}
		var back Definition
		if err := json.Unmarshal(written, &back); err != nil || back != d {
			t.Fatalf("wrote %s, read %v, %v, want %v", written, back, err, d)
		}
		_, _ = d.String(), d.LogValue()
	})
}
