package ratelimit_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	. "github.com/pgratelimit/ratelimit"
)

var monday = time.Date(2025, 1, 6, 0, 0, 0, 0, time.UTC)

func TestString(t *testing.T) {
	api := TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20}
	ok := Status{Request: api.ForN("alice", 2), OK: true, Value: 17.5, Remaining: 17, Capacity: 20}
	due := Status{Request: api.ForN("alice", 2), OK: true, Value: -1.5, Capacity: 20, RetryAfter: 9 * time.Second}
	some := Status{Request: api.ForN("alice", 2), OK: true, Taken: 1, Value: 17.5, Remaining: 17, Capacity: 20}
	refused := Status{Request: api.For("al\"ice"), Value: 0.5, Capacity: 20, RetryAfter: 3 * time.Second}
	paused := refused
	paused.PausedUntil = monday
	both := Result{Status: refused, Several: []Status{ok, refused}}
	tests := []struct {
		value any
		want  string
	}{
		{api, `token bucket "api": 10 per 1m, capacity 20, max reserved unlimited`},
		{&api, `token bucket "api": 10 per 1m, capacity 20, max reserved unlimited`},
		{api.Definition(), `token bucket "api": 10 per 1m, capacity 20, max reserved unlimited`},
		{
			TokenBucket{Name: "x", Rate: 2.5, Period: 90 * time.Minute, Capacity: None, MaxReserved: None, Shards: 8},
			`token bucket "x": 2.5 per 1h30m, capacity none, max reserved none, 8 shards`,
		},
		{
			FixedWindow{Name: "w\n", Rate: 1e9, Period: 24 * time.Hour, MaxReserved: 7, Start: monday},
			`fixed window "w\n": 1000000000 per 24h, capacity 1000000000, max reserved 7, start 2025-01-06T00:00:00Z`,
		},
		{
			SlidingWindow{Name: "s", Rate: 100, Period: time.Minute, Shards: 2, Start: monday},
			`sliding window "s": 100 per 1m, max reserved unlimited, 16 slots, 2 shards, start 2025-01-06T00:00:00Z`,
		},
		{FixedWindow{Name: "w", Rate: 1, Period: 100 * time.Microsecond}, `fixed window "w": 1 per 100µs, capacity 1, max reserved unlimited`},
		{TokenBucket{Name: strings.Repeat("n", 99)}, `token bucket "` + strings.Repeat("n", 64) + `"…: 0 per 0s, capacity none, max reserved unlimited`},
		{TokenBucket{}, `token bucket "": 0 per 0s, capacity none, max reserved unlimited`},
		{FixedWindow{}, `fixed window "": 0 per 0s, capacity none, max reserved unlimited`},
		{(*TokenBucket)(nil), `<nil>`},
		{Definition{}, `Kind(0) "": 0 per 0s, capacity none, max reserved none`},

		{api.ForN("alice", 2.5), `2.5 of "api"`},
		{Request{}, `0 of no limit`},
		{Request{Limit: (*FixedWindow)(nil), Key: "k"}, `0 of no limit`},

		{ok, `2 of "api": ok, 17 of 20 left`},
		{due, `2 of "api": ok after 9s, 1.5 in debt`},
		{some, `2 of "api": ok, 1 taken, 17 of 20 left`},
		{refused, `1 of "api": refused, retry after 3s, 0 of 20 left`},
		{paused, `1 of "api": refused, retry after 3s, 0 of 20 left, paused until 2025-01-06T00:00:00Z`},
		{Status{}, `0 of no limit: refused, retry after 0s, 0 of 0 left`},

		{Result{Status: ok, Several: []Status{ok}}, `2 of "api": ok, 17 of 20 left`},
		{Result{Status: ok, Several: []Status{ok, due}}, `2 of "api": ok, 17 of 20 left (decides for 2 limits)`},
		{both, `1 of "api": refused, retry after 3s, 0 of 20 left (decides for 2 limits)`},
		{LogKeys(api.ForN("alice", 2.5)), `2.5 of "api" for "alice"`},
		{LogKeys(Request{}), `0 of no limit for ""`},
		{LogKeys(refused), `1 of "api" for "al\"ice": refused, retry after 3s, 0 of 20 left`},
		{LogKeys(both), `1 of "api" for "al\"ice": refused, retry after 3s, 0 of 20 left (decides for 2 limits)`},
		{Page{Prefix: "al", After: "alice", Most: 10}, `at most 10 keys (0 is no bound)`},
		{Result{}, `0 of no limit: refused, retry after 0s, 0 of 0 left`},
	}
	for _, tt := range tests {
		if got := fmt.Sprint(tt.value); got != tt.want {
			t.Errorf("%T:\n got %s\nwant %s", tt.value, got, tt.want)
		}
	}
}

// logged is the attribute "v" of a log line in JSON.
func logged(t *testing.T, v any) string {
	t.Helper()
	var line bytes.Buffer
	slog.New(slog.NewJSONHandler(&line, nil)).Info("", "v", v)
	var fields struct{ V json.RawMessage }
	if err := json.Unmarshal(line.Bytes(), &fields); err != nil {
		t.Fatalf("%T: %v in %s", v, err, line.Bytes())
	}
	return string(fields.V)
}

func TestLogValue(t *testing.T) {
	api := TokenBucket{Name: "api", Rate: 10, Period: time.Minute, Capacity: 20}
	window := FixedWindow{Name: "w", Rate: 10, Period: time.Second, Capacity: None, MaxReserved: 5.5, Shards: 2, Start: monday}
	ok := Status{Request: api.ForN("alice", 2), OK: true, Value: 17.5, Remaining: 17, Capacity: 20, ResetAfter: time.Second}
	paused := Status{Request: window.For("alice"), Value: -1, RetryAfter: time.Second, PausedUntil: monday}
	both := Result{Status: paused, Several: []Status{ok, paused}}
	const (
		api1    = `{"name":"api","kind":"token bucket","rate":10,"period":60000000000,"capacity":20,"max_reserved":"unlimited","shards":1}`
		okText  = `"count":2,"ok":true,"retry_after":0,"value":17.5,"remaining":17,"capacity":20,"reset_after":1000000000`
		pausing = `"count":1,"ok":false,"retry_after":1000000000,"value":-1,"remaining":0,"capacity":0,"reset_after":0,"paused_until":"2025-01-06T00:00:00Z"`
	)
	tests := []struct {
		value any
		want  string
	}{
		{api, api1},
		{&api, api1},
		{api.Definition(), api1},
		{window, `{"name":"w","kind":"fixed window","rate":10,"period":1000000000,"capacity":"none","max_reserved":5.5,"shards":2,"start":"2025-01-06T00:00:00Z"}`},
		{api.For("alice"), `{"limit":"api","count":1}`},
		{LogKeys(api.For("alice")), `{"limit":"api","key":"alice","count":1}`},
		{ok, `{"limit":"api",` + okText + `}`},
		{LogKeys(ok), `{"limit":"api","key":"alice",` + okText + `}`},
		{paused, `{"limit":"w",` + pausing + `}`},
		{Result{Status: ok, Several: []Status{ok}}, `{"limit":"api",` + okText + `}`},
		{both, `{"limit":"w",` + pausing + `,"limits":["api","w"]}`},
		{LogKeys(both), `{"limit":"w","key":"alice",` + pausing + `,"limits":["api","w"]}`},
	}
	for _, tt := range tests {
		if got := logged(t, tt.value); got != tt.want {
			t.Errorf("%T:\n got %s\nwant %s", tt.value, got, tt.want)
		}
	}
}

// Values that make no sense have a text and a log line too.
func TestTextOfAnything(t *testing.T) {
	odd := Definition{Kind: 9, Rate: math.NaN(), Capacity: math.Inf(-1), MaxReserved: math.NaN(), Shards: -1}
	for _, v := range []any{
		odd,
		Definition{},
		TokenBucket{},
		FixedWindow{},
		Request{},
		Status{},
		Result{},
		Result{Several: make([]Status, 2)},
		(*TokenBucket)(nil), (*FixedWindow)(nil), (*Result)(nil),
		Request{Limit: (*TokenBucket)(nil)},
		Request{Limit: FixedWindow{Rate: math.NaN()}, Count: math.Inf(1)},
		LogKeys(Request{}), LogKeys(Status{}), LogKeys(Result{Several: make([]Status, 2)}),
	} {
		if got := fmt.Sprintf("%v %+v %s", v, v, v); got == "" {
			t.Errorf("%T has no text", v)
		}
		var line bytes.Buffer
		slog.New(slog.NewTextHandler(&line, nil)).Info("", "v", v)
		if line.Len() == 0 {
			t.Errorf("%T is not logged", v)
		}
	}
	for _, err := range []error{
		&ExceedsCapacityError{}, &RefusedError{}, &FieldError{}, &RefusedError{Result{Status: Status{Request: Request{Limit: (*TokenBucket)(nil)}}}},
		&ExceedsCapacityError{Request: Request{Limit: (*FixedWindow)(nil)}},
	} {
		if got := err.Error(); !strings.HasPrefix(got, "ratelimit: ") {
			t.Errorf("%T: %q", err, got)
		}
	}
}
