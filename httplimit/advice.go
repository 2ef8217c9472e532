package httplimit

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dunglas/httpsfv"

	"github.com/pgratelimit/ratelimit"
)

// Advice is a server's statement about its limits in a response. Waits are from the response
// on, and always at least 0 and at most [ratelimit.MaxSpan].
type Advice struct {
	// RetryAfter is the wait in Retry-After, given in seconds or as a date. Told is
	// whether there was one that can be read. It takes precedence over the rest.
	RetryAfter time.Duration
	Told       bool

	// Exhausted is true when a limit has nothing left, and Reset is how long until it
	// has. When none is exhausted, Reset is the shortest wait of those that are
	// given, or 0.
	Exhausted bool
	Reset     time.Duration
}

// ReadAdvice reads the limits from a response's header. Of the forms that are there, the first
// of these that can be read counts, beside Retry-After:
//
//   - RateLimit, as the draft has it since revision 8 (a list) or in 7 (a dictionary)
//   - RateLimit-Remaining and RateLimit-Reset, in seconds
//   - X-RateLimit-Remaining and X-RateLimit-Reset, or X-Rate-Limit-…, where the reset
//     is in seconds, in seconds or milliseconds since 1970, or a date
//
// Dates count from the response's Date, if it has one, and else from now.
func ReadAdvice(h http.Header, now time.Time) Advice {
	if date, err := http.ParseTime(h.Get("Date")); err == nil {
		now = date
	}
	var a Advice
	a.RetryAfter, a.Told = readRetryAfter(h.Get("Retry-After"), now)
	for _, read := range []func(http.Header, time.Time) (windows, bool){readList, readDictionary, readTriple, readX} {
		if w, ok := read(h, now); ok {
			a.Exhausted, a.Reset = w.worst()
			break
		}
	}
	return a
}

// window is the rest of a limit, and the time until it is refilled.
type window struct {
	exhausted bool
	reset     time.Duration
}

type windows []window

// worst returns the advice to heed of several limits.
func (ws windows) worst() (exhausted bool, reset time.Duration) {
	for i, w := range ws {
		switch {
		case w.exhausted && !exhausted:
			exhausted, reset = true, w.reset
		case w.exhausted:
			reset = max(reset, w.reset)
		case !exhausted && (i == 0 || w.reset < reset):
			reset = w.reset
		}
	}
	return exhausted, reset
}

func readRetryAfter(s string, now time.Time) (time.Duration, bool) {
	if wait, ok := readSeconds(s); ok {
		return wait, true
	}
	return until(s, now)
}

// until is how long it is to a date.
func until(s string, now time.Time) (time.Duration, bool) {
	date, err := http.ParseTime(s)
	if err != nil {
		if date, err = time.Parse(time.RFC3339, s); err != nil {
			return 0, false
		}
	}
	return clamp(date.Sub(now)), true
}

func clamp(d time.Duration) time.Duration { return min(max(d, 0), ratelimit.MaxSpan) }

// readSeconds is a number of seconds, in digits and perhaps a fraction, rounded up to
// a microsecond.
func readSeconds(s string) (time.Duration, bool) {
	n, ok := readNumber(s)
	if !ok {
		return 0, false
	}
	return span(n), true
}

// span is n seconds.
func span(n float64) time.Duration {
	if n >= ratelimit.MaxSpan.Seconds() {
		return ratelimit.MaxSpan
	}
	return time.Duration(math.Ceil(n*1e6)) * time.Microsecond
}

// readNumber is a number in digits and perhaps a fraction: no sign, no exponent.
func readNumber(s string) (float64, bool) {
	s = strings.TrimSpace(s)
	if s == "" || strings.Trim(s, "0123456789.") != "" || s[0] == '.' {
		return 0, false
	}
	n, err := strconv.ParseFloat(s, 64)
	if n > math.MaxFloat64 {
		return math.MaxFloat64, true
	}
	return n, err == nil
}

// maxField is the longest field that is parsed; a server that sends more is not heeded.
const maxField = 8 << 10

func fieldLines(h http.Header, name string) []string {
	lines, size := h.Values(name), 0
	for _, l := range lines {
		size += len(l)
	}
	if size > maxField {
		return nil
	}
	return lines
}

func readList(h http.Header, _ time.Time) (ws windows, ok bool) {
	list, err := httpsfv.UnmarshalList(fieldLines(h, "RateLimit"))
	if err != nil {
		return nil, false
	}
	for _, member := range list {
		item, ok := member.(httpsfv.Item)
		if !ok {
			continue
		}
		r, _ := item.Params.Get("r")
		t, _ := item.Params.Get("t")
		if w, ok := newWindow(r, t); ok {
			ws = append(ws, w)
		}
	}
	return ws, len(ws) > 0
}

// newWindow returns the window of a structured field. Without a reset, an exhausted limit is
// one with an unknown end.
func newWindow(remaining, reset any) (window, bool) {
	r, ok := remaining.(int64)
	if !ok || r < 0 {
		return window{}, false
	}
	t, ok := reset.(int64)
	if !ok || t < 0 {
		t = 0
	}
	return window{r == 0, span(float64(t))}, true
}

func readDictionary(h http.Header, _ time.Time) (windows, bool) {
	dictionary, err := httpsfv.UnmarshalDictionary(fieldLines(h, "RateLimit"))
	if err != nil {
		return nil, false
	}
	value := func(name string) any {
		member, _ := dictionary.Get(name)
		item, _ := member.(httpsfv.Item)
		return item.Value
	}
	w, ok := newWindow(value("remaining"), value("reset"))
	return windows{w}, ok
}

func readTriple(h http.Header, _ time.Time) (windows, bool) {
	reset, ok := readSeconds(h.Get("RateLimit-Reset"))
	return windows{{exhausted(h.Get("RateLimit-Remaining")), reset}}, ok
}

func readX(h http.Header, now time.Time) (windows, bool) {
	for _, prefix := range []string{"X-RateLimit-", "X-Rate-Limit-"} {
		if reset, ok := readReset(h.Get(prefix+"Reset"), now); ok {
			return windows{{exhausted(h.Get(prefix + "Remaining")), reset}}, true
		}
	}
	return nil, false
}

func exhausted(remaining string) bool {
	n, ok := readNumber(remaining)
	return ok && n < 1
}

// Above these a reset is an instant: in seconds, it would be 31 years away, and in
// seconds since 1970, in the year 5138.
const (
	epochSeconds      = 1e9
	epochMilliseconds = 1e11
)

// readReset is a reset in any of its three meanings.
func readReset(s string, now time.Time) (time.Duration, bool) {
	n, ok := readNumber(s)
	if !ok {
		return until(s, now)
	}
	if n >= epochMilliseconds {
		n /= 1e3
	}
	if n >= epochSeconds {
		n = max(0, n-float64(now.UnixMicro())/1e6)
	}
	return span(n), true
}
