package httplimit

import (
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dunglas/httpsfv"
)

// Advice is what a response says about its server's limits. Waits begin with the response, and are
// from 0 to 366 days.
type Advice struct {
	// RetryAfter is the wait of Retry-After, and the longest of several. Told is true if there was
	// a readable one. It takes precedence over Reset.
	RetryAfter time.Duration
	Told       bool

	// Exhausted is true if a limit has nothing left. Reset is then the longest wait of the
	// exhausted limits. Otherwise Reset is the shortest wait of all limits, or 0 if none was given.
	Exhausted bool
	Reset     time.Duration
}

// ReadAdvice reads the limits from a response's header:
//
//   - Retry-After, and fields whose names contain that, such as x-ms-retry-after-ms;
//   - RateLimit, as in draft 7 (a dictionary), and from draft 8 on (a list);
//   - without a readable RateLimit: fields for what remains and for the reset, whose names
//     contain ratelimit or rate-limit, such as x-ratelimit-reset-tokens.
//
// Of several values the longest wait counts, and the least that remains. Instants count from the
// response's Date, or without one from now. Impossible values are ignored, such as negative numbers
// and waits of more than 366 days. At most 256 values of the last kind of field are read. Units and
// formats: https://github.com/pgratelimit/ratelimit/blob/main/docs/reservations.md#after-a-429.
func ReadAdvice(h http.Header, now time.Time) Advice {
	if date, ok := readDate(h.Get("Date")); ok {
		now = date
	}
	var a Advice
	draft := readDraft(h)
	named, read := map[string]*window{}, 0
	for field, values := range h {
		if len(field) > maxValue {
			continue
		}
		name := strings.ToLower(field)
		for _, value := range each(values) {
			switch {
			case strings.Contains(name, "retry-after"):
				if wait, ok := readWait(name, value, now); ok {
					a.RetryAfter, a.Told = max(a.RetryAfter, wait), true
				}
			case len(draft) == 0 && read < maxRead && (strings.Contains(name, "ratelimit") || strings.Contains(name, "rate-limit")):
				readNamed(named, name, value, now)
				read++
			}
		}
	}
	for _, w := range named {
		draft = append(draft, *w)
	}
	a.Exhausted, a.Reset = worst(draft)
	return a
}

// each returns the values of a field. A field that is stated in several lines, as by a proxy and by
// the server behind it, may come as one line with commas. Dates have commas as well.
func each(values []string) (all []string) {
	for _, line := range values[:min(len(values), maxValues)] {
		if len(line) > maxValue {
			continue
		}
		if several := strings.Split(line, ","); !slices.ContainsFunc(several, isNoNumber) {
			all = append(all, several...)
		} else {
			all = append(all, line)
		}
	}
	return all
}

// isNoNumber reports whether s is no number by itself. It also reports true for the thousands in
// 1,000.
func isNoNumber(s string) bool {
	_, ok := readNumber(s)
	return !ok || strings.HasPrefix(strings.TrimSpace(s), "00")
}

const (
	maxField  = 8 << 10 // the longest structured field that is parsed
	maxValue  = 128     // the longest other value, and the longest name of a field
	maxValues = 16      // the most lines of another field
	maxRead   = 256     // the most values of other fields than RateLimit and Retry-After
	maxSaid   = 366 * 24 * time.Hour
)

// window is the rest of a limit, and the time until it is refilled.
type window struct {
	exhausted bool
	timed     bool // reset is known
	reset     time.Duration
}

// worst returns the longest reset of the exhausted limits, or if there are none, the shortest of
// all.
func worst(windows []window) (exhausted bool, reset time.Duration) {
	shortest := maxSaid
	for _, w := range windows {
		switch {
		case w.exhausted:
			exhausted, reset = true, max(reset, w.reset)
		case w.timed:
			shortest = min(shortest, w.reset)
		}
	}
	if !exhausted && shortest < maxSaid {
		return false, shortest
	}
	return exhausted, reset
}

// apart separates words that some servers write together, such as userremaining (Imgur).
var apart = strings.NewReplacer("remaining", "-remaining", "reset", "-reset")

// readNamed adds a field to the window of its limit. The limit's name is that of the field, without
// the words for what the field says.
func readNamed(named map[string]*window, name, value string, now time.Time) {
	remains, resets := false, false
	limit := slices.DeleteFunc(strings.Split(apart.Replace(name), "-"), func(word string) bool {
		switch word {
		case "remaining":
			remains = true
		case "reset", "resettime":
			resets = true
		case "", "after", "at", "time", "date", "ms", "milliseconds", "seconds", "minutes":
		default:
			return false
		}
		return true
	})
	if !remains && !resets {
		return
	}
	key := strings.Join(limit, "-")
	w := named[key]
	if w == nil {
		w = &window{}
		named[key] = w
	}
	if remains {
		value, _, _ = strings.Cut(value, ";") // parameters, as Docker Hub sends them
		n, ok := readNumber(value)
		w.exhausted = w.exhausted || ok && n < 1
	} else if wait, ok := readWait(name, value, now); ok {
		w.timed, w.reset = true, max(w.reset, wait)
	}
}

// readWait reads a wait from the value of a field, whose name may have its unit.
func readWait(name, value string, now time.Time) (time.Duration, bool) {
	value = strings.TrimSpace(value)
	if n, ok := readNumber(value); ok {
		switch unit := name[strings.LastIndexByte(name, '-')+1:]; unit {
		case "ms", "milliseconds":
			return span(n / 1e3)
		case "seconds":
		case "minutes":
			return span(n * 60)
		default:
			if n > epoch {
				return untilEpoch(n, now)
			}
		}
		return span(n)
	}
	if d, err := time.ParseDuration(value); err == nil {
		return d, 0 <= d && d <= maxSaid
	}
	date, ok := readDate(value)
	if wait := max(0, date.Sub(now)); ok && wait <= maxSaid {
		return wait, true
	}
	return 0, false
}

// A number above epoch is an instant: as a wait in seconds it would be 31 years. Below epochs it is
// in seconds: otherwise it would lie in the year 5138. Each finer unit has a thousand times as
// many.
const (
	epoch  = 1e9
	epochs = 1e11
)

// untilEpoch returns how long it is until an instant since 1970. The number's size tells its unit.
func untilEpoch(n float64, now time.Time) (time.Duration, bool) {
	for unit := 0; n >= epochs && unit < 3; unit++ {
		n /= 1e3
	}
	return span(max(0, n-float64(now.UnixMicro())/1e6))
}

// span returns n seconds, rounded up to a microsecond. It returns false for a wait above maxSaid.
func span(n float64) (time.Duration, bool) {
	if !(n <= maxSaid.Seconds()) {
		return 0, false
	}
	return time.Duration(math.Ceil(n*1e6)) * time.Microsecond, true
}

// readNumber reads a number in digits and perhaps a fraction: no sign, no exponent.
func readNumber(s string) (float64, bool) {
	if s = strings.TrimSpace(s); s == "" || strings.Trim(s, "0123456789.") != "" || s[0] == '.' {
		return 0, false
	}
	n, err := strconv.ParseFloat(s, 64)
	return n, err == nil
}

// dates are the formats of dates: the three of HTTP, and others that servers send. Formats with MST
// and no offset have the name of a zone. Only GMT and UTC have one meaning.
var dates = []string{
	"Mon, 2 Jan 2006 15:04:05 -0700", // before the next one, which reads some offsets as names
	"Mon, 2 Jan 2006 15:04:05 MST",
	"Monday, 2-Jan-06 15:04:05 -0700",
	"Monday, 2-Jan-06 15:04:05 MST",
	time.ANSIC,
	time.RFC3339,
	"2006-01-02T15:04Z07:00",           // Jira
	"Mon Jan 2 2006 15:04:05 GMT-0700", // of JavaScript
	"2006-01-02 15:04:05Z07:00",        // of Python
	"2006-01-02 15:04:05 -0700",        // of Ruby, as is the next one
	"2006-01-02 15:04:05 MST",
	"2006-01-02 15:04:05 -0700 MST", // of Go
	time.UnixDate,
}

// readDate reads a date in one of the formats.
func readDate(s string) (time.Time, bool) {
	s, _, _ = strings.Cut(s, " (") // the name of a zone beside its offset
	for _, form := range dates {
		date, err := time.Parse(form, s)
		if err == nil {
			named := strings.Contains(form, "MST") && !strings.Contains(form, "-0700")
			return date, !named || strings.Contains(s+" ", " GMT ") || strings.Contains(s+" ", " UTC ")
		}
	}
	return time.Time{}, false
}

// readDraft reads the windows of a RateLimit field.
func readDraft(h http.Header) []window {
	lines, size := h.Values("RateLimit"), 0
	for _, l := range lines {
		size += len(l)
	}
	if size > maxField {
		return nil
	}
	if windows := readList(lines); len(windows) > 0 {
		return windows
	}
	return readDictionary(lines)
}

func readList(lines []string) (windows []window) {
	list, err := httpsfv.UnmarshalList(lines)
	if err != nil {
		return nil
	}
	for _, member := range list {
		if item, ok := member.(httpsfv.Item); ok {
			r, _ := item.Params.Get("r")
			t, _ := item.Params.Get("t")
			windows = addWindow(windows, r, t)
		}
	}
	return windows
}

func readDictionary(lines []string) []window {
	dictionary, err := httpsfv.UnmarshalDictionary(lines)
	if err != nil {
		return nil
	}
	value := func(name string) any {
		member, _ := dictionary.Get(name)
		item, _ := member.(httpsfv.Item)
		return item.Value
	}
	return addWindow(nil, value("remaining"), value("reset"))
}

// addWindow adds the window of a structured field. If an exhausted limit has no reset, the time of
// its refill is unknown.
func addWindow(windows []window, remaining, reset any) []window {
	r, ok := remaining.(int64)
	if !ok || r < 0 {
		return windows
	}
	w := window{exhausted: r == 0}
	if t, ok := reset.(int64); ok && t >= 0 {
		w.reset, w.timed = span(float64(t))
	}
	return append(windows, w)
}
