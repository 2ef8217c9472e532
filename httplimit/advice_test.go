package httplimit_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/httplimit"
)

func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}

func TestReadAdvice(t *testing.T) {
	type advice = httplimit.Advice
	const second = time.Second
	retryAfter := func(d time.Duration) advice { return advice{RetryAfter: d, Told: true} }
	exhausted := func(d time.Duration) advice { return advice{Exhausted: true, Reset: d} }
	left := func(d time.Duration) advice { return advice{Reset: d} }
	const date = "Sat, 14 Mar 2026 12:00:00 GMT" // noon
	for _, test := range []struct {
		name   string
		header []string
		want   advice
	}{
		{"nothing", nil, advice{}},

		{"Retry-After", []string{"Retry-After", "12"}, retryAfter(12 * second)},
		{"Retry-After in two lines", []string{"Retry-After", "1", "Retry-After", "12"}, retryAfter(12 * second)},
		{"Retry-After in two lines, one of them a date", []string{"Retry-After", "Sat, 14 Mar 2026 12:00:30 GMT", "Retry-After", "12"}, retryAfter(30 * second)},
		{"Retry-After twice in a line", []string{"Retry-After", "12, 1"}, retryAfter(12 * second)},
		{"fields of two hops", []string{"X-RateLimit-Remaining", "5", "X-RateLimit-Reset", "9", "X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "30"}, exhausted(30 * second)},
		{"fields of two hops in a line", []string{"X-RateLimit-Remaining", "5,0", "X-RateLimit-Reset", "9,30"}, exhausted(30 * second)},
		{"thousands", []string{"X-RateLimit-Remaining", "1,000", "X-RateLimit-Reset", "30"}, left(30 * second)},
		{"Retry-After 0", []string{"Retry-After", "0"}, retryAfter(0)},
		{"Retry-After with a fraction", []string{"Retry-After", "1.5"}, retryAfter(1500 * time.Millisecond)},
		{"Retry-After, a date", []string{"Retry-After", "Sat, 14 Mar 2026 12:00:30 GMT"}, retryAfter(30 * second)},
		{"Retry-After, a date that is over", []string{"Retry-After", "Sat, 14 Mar 2026 11:00:30 GMT"}, retryAfter(0)},
		{"Retry-After, a date on the server's clock", []string{"Retry-After", "Sat, 14 Mar 2026 13:00:30 GMT", "Date", "Sat, 14 Mar 2026 13:00:00 GMT"}, retryAfter(30 * second)},
		{"Retry-After, a date in obsolete form", []string{"Retry-After", "Saturday, 14-Mar-26 12:00:30 GMT"}, retryAfter(30 * second)},
		{"Retry-After, a date with an offset", []string{"Retry-After", "Sat, 14 Mar 2026 13:00:30 +0100"}, retryAfter(30 * second)},
		{"Retry-After, a date of JavaScript", []string{"Retry-After", "Sat Mar 14 2026 13:00:30 GMT+0100 (Central European Standard Time)"}, retryAfter(30 * second)},
		{"Retry-After, the date of asctime", []string{"Retry-After", "Sat Mar 14 12:00:30 2026"}, retryAfter(30 * second)},
		{"Retry-After, a date of Ruby", []string{"Retry-After", "2026-03-14 12:00:30 UTC"}, retryAfter(30 * second)},
		{"Retry-After, a date of Ruby, with an offset", []string{"Retry-After", "2026-03-14 13:00:30 +0100"}, retryAfter(30 * second)},
		{"Retry-After, a date of Python", []string{"Retry-After", "2026-03-14 13:00:30.5+01:00"}, retryAfter(30*second + 500*time.Millisecond)},
		{"Retry-After, a date of Go", []string{"Retry-After", "2026-03-14 13:00:30.5 +0100 CET"}, retryAfter(30*second + 500*time.Millisecond)},
		{"Retry-After, a date of date(1)", []string{"Retry-After", "Sat Mar 14 12:00:30 UTC 2026"}, retryAfter(30 * second)},
		{"Retry-After, a date of date(1) in another zone", []string{"Retry-After", "Sat Mar 14 16:00:30 PST 2026"}, advice{}},
		{"Retry-After in minutes", []string{"Retry-After-Minutes", "2"}, retryAfter(2 * time.Minute)},
		{"Retry-After, a date in another zone", []string{"Retry-After", "Sat, 14 Mar 2026 12:00:30 PST"}, advice{}},
		{"Retry-After, a date by a clock that is told in UTC", []string{"Retry-After", "Sat, 14 Mar 2026 13:00:30 GMT", "Date", "Sat, 14 Mar 2026 13:00:00 UTC"}, retryAfter(30 * second)},
		{"Retry-After, an instant", []string{"Retry-After", "1773489630"}, retryAfter(30 * second)},
		{"Retry-After, a duration", []string{"Retry-After", "6m0s"}, retryAfter(6 * time.Minute)},
		{"Retry-After, two years", []string{"Retry-After", "63072000"}, advice{}},
		{"Retry-After, a year", []string{"Retry-After", "31622400"}, retryAfter(366 * 24 * time.Hour)},
		{"Retry-After in milliseconds", []string{"Retry-After-Ms", "1500"}, retryAfter(1500 * time.Millisecond)},
		{"Retry-After in milliseconds, which are many and no instant", []string{"Retry-After-Ms", "1773489630"}, retryAfter(1773489630 * time.Millisecond)},
		{"Retry-After, absurd", []string{"Retry-After", strings.Repeat("9", 400)}, advice{}},
		{"Retry-After, negative", []string{"Retry-After", "-5"}, advice{}},
		{"Retry-After, an exponent", []string{"Retry-After", "1e9"}, advice{}},
		{"Retry-After, garbage", []string{"Retry-After", "soon"}, advice{}},
		{"Retry-After, and the rest", []string{"Retry-After", "12", "RateLimit", `"a";r=0;t=10`}, advice{12 * second, true, true, 10 * second}},

		{"a list", []string{"RateLimit", `"a";r=0;t=10`}, exhausted(10 * second)},
		{"a list of several", []string{"RateLimit", `"a";r=5;t=10, "b";r=0;t=20, "c";r=0;t=15`}, exhausted(20 * second)},
		{"a list in several lines", []string{"RateLimit", `"a";r=5;t=10`, "RateLimit", `"b";r=0;t=20`}, exhausted(20 * second)},
		{"a list with something left", []string{"RateLimit", `"a";r=5;t=10, "b";r=9;t=2`}, left(2 * second)},
		{"a list with tokens, as in revision 8", []string{"RateLimit", `default;r=0;t=10`}, exhausted(10 * second)},
		{"a list without t", []string{"RateLimit", `"a";r=0`}, exhausted(0)},
		{"a list with other parameters", []string{"RateLimit", `"a";r=0;t=10;pk=:YQ==:;x=1.5`}, exhausted(10 * second)},
		{"a list without r", []string{"RateLimit", `"a";t=10`}, advice{}},
		{"a list with a negative r", []string{"RateLimit", `"a";r=-1;t=10`}, advice{}},
		{"a list with a negative t", []string{"RateLimit", `"a";r=0;t=-10`}, exhausted(0)},
		{"a list, too many digits", []string{"RateLimit", `"a";r=0;t=9999999999999999`}, advice{}},
		{"a list, malformed", []string{"RateLimit", `"a";r=0;t=10,`}, advice{}},
		{"a list, endless", []string{"RateLimit", strings.Repeat(`"a";r=0;t=10, `, 1000) + `"a";r=0;t=10`}, advice{}},
		{"an inner list", []string{"RateLimit", `("a" "b");r=0;t=10`}, advice{}},

		{"a dictionary, as in revision 7", []string{"RateLimit", "limit=100, remaining=0, reset=5"}, exhausted(5 * second)},

		{"the triple", []string{"RateLimit-Limit", "100", "RateLimit-Remaining", "0", "RateLimit-Reset", "50"}, exhausted(50 * second)},
		{"the list before the triple", []string{"RateLimit", `"a";r=0;t=10`, "RateLimit-Remaining", "0", "RateLimit-Reset", "50"}, exhausted(10 * second)},

		{"X, in seconds", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "50"}, exhausted(50 * second)},
		{"X, since 1970", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489650"}, exhausted(50 * second)},
		{"X, since 1970, with a fraction", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489650.5"}, exhausted(50*second + 500*time.Millisecond)},
		{"X, since 1970, on the server's clock", []string{"Date", "Sat, 14 Mar 2026 12:00:20 GMT", "X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489650"}, exhausted(30 * second)},
		{"X, in milliseconds since 1970", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489650000"}, exhausted(50 * second)},
		{"X, written otherwise", []string{"X-Rate-Limit-Remaining", "0", "X-Rate-Limit-Reset", "50"}, exhausted(50 * second)},
		{"X, absurd", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", strings.Repeat("9", 400)}, exhausted(0)},
		{"X, negative", []string{"X-RateLimit-Remaining", "-1", "X-RateLimit-Reset", "-50"}, advice{}},
		{"X, in nanoseconds since 1970", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489650000000000"}, exhausted(50 * second)},
		{"X, in picoseconds since 1970", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489650000000000000"}, exhausted(0)},
		{"X, many seconds and no instant", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset-Seconds", "1773489650"}, exhausted(0)},
		{"X, both ways to say it", []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1773489650", "X-RateLimit-Reset-After", "50.5"}, exhausted(50*second + 500*time.Millisecond)},
		{"X, nothing left for a time that is unknown", []string{"X-RateLimit-Remaining", "0"}, exhausted(0)},
		{"several limits", []string{"X-RateLimit-Remaining-Requests", "0", "X-RateLimit-Reset-Requests", "20ms", "X-RateLimit-Remaining-Tokens", "0", "X-RateLimit-Reset-Tokens", "6m0s"}, exhausted(6 * time.Minute)},
		{"several limits, of which the longer is not exhausted", []string{"X-RateLimit-Remaining-Requests", "0", "X-RateLimit-Reset-Requests", "20ms", "X-RateLimit-Remaining-Tokens", "7", "X-RateLimit-Reset-Tokens", "6m0s"}, exhausted(20 * time.Millisecond)},
	} {
		if got := httplimit.ReadAdvice(header(test.header...), noon); got != test.want {
			t.Errorf("%s: got %+v, want %+v", test.name, got, test.want)
		}
	}
	if got := noon.Format(http.TimeFormat); got != date {
		t.Errorf("noon is %s, want %s", got, date)
	}
}

// Whatever a server sends, waits are bounded, and nothing panics.
func FuzzAdvice(f *testing.F) {
	for _, s := range []string{
		"", "12", "-1", "1e999", "NaN", ".5", "9999999999999999999", "Sat, 14 Mar 2026 12:00:30 GMT", "2026-03-14T13:00:50+01:00",
		`"a";r=0;t=10`, `"a";r=0;t=999999999999999`, `("a");r=0`, "limit=1, remaining=0, reset=5", `"a`, "a;r=?1;t=:YQ==:", "@1;r=0", "%\"a\"", "1773489650",
		"1773489650000", "6m0s", "-6m0s", "99999999h", "Sat, 14 Mar 2026 12:00:30 PST", "\x00", `"a";r=0;t=10,,`, "*=1",
	} {
		f.Add(s, s)
	}
	names := []string{"Retry-After", "Retry-After-Ms", "X-RateLimit-Reset-Tokens", "RateLimit", "RateLimit-Remaining", "RateLimit-Reset", "X-RateLimit-Remaining", "X-RateLimit-Reset", "X-Rate-Limit-Reset", "Date"}
	const most = 366 * 24 * time.Hour
	f.Fuzz(func(t *testing.T, a, b string) {
		headers := []http.Header{{}}
		for _, name := range names {
			headers = append(headers, header(name, a), header(name, a, name, b))
			headers[0].Add(name, a)
			headers[0].Add(name, b)
			for _, other := range names {
				headers = append(headers, header(name, a, other, b))
			}
		}
		for _, h := range headers {
			got := httplimit.ReadAdvice(h, noon)
			if got.RetryAfter < 0 || got.RetryAfter > most || got.Reset < 0 || got.Reset > most {
				t.Fatalf("%v: got %+v, want waits from 0 to %v", h, got, most)
			}
			if !got.Told && got.RetryAfter != 0 {
				t.Fatalf("%v: got %+v: a wait that was not told", h, got)
			}
		}
	})
}

// A header of megabytes costs little more than looking at the names of its fields, and hides no
// Retry-After.
func TestReadAdviceOfMegabytes(t *testing.T) {
	const fields = 50_000
	long := "X-Ratelimit" + strings.Repeat("-Remaining", fields)
	h := http.Header{"Retry-After": {"60"}, long: {"0"}}
	for i := range fields {
		h[fmt.Sprintf("X-Ratelimit-Reset-%d", i)] = []string{"30"}
	}
	var got httplimit.Advice
	allocs := testing.AllocsPerRun(1, func() { got = httplimit.ReadAdvice(h, noon) })
	if want := (httplimit.Advice{RetryAfter: time.Minute, Told: true, Reset: 30 * time.Second}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if allocs > 4*fields { // 20 for each field that is read
		t.Errorf("%.0f allocations for %d fields", allocs, fields)
	}
}
