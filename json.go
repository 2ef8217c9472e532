package ratelimit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// definitionJSON is a Definition as JSON has it.
type definitionJSON struct {
	Name        string  `json:"name"`
	Kind        string  `json:"kind"`
	Rate        float64 `json:"rate"`
	Period      string  `json:"period,omitempty"`
	Every       string  `json:"every,omitempty"`
	Zone        string  `json:"zone,omitempty"`
	Anchor      string  `json:"anchor,omitempty"`
	Time        string  `json:"time,omitempty"`
	Capacity    any     `json:"capacity,omitempty"`
	MaxReserved any     `json:"maxReserved"`
	Shards      int     `json:"shards"`
	Start       string  `json:"start,omitempty"`
	Slots       int     `json:"slots,omitempty"`
}

// MarshalJSON writes the definition as UnmarshalJSON reads it. A definition that
// is not sound is an error: that of Validate.
func (d Definition) MarshalJSON() ([]byte, error) {
	if err := d.Validate(); err != nil {
		return nil, err
	}
	d = d.Limit().Definition()
	out := definitionJSON{
		Name: d.Name, Kind: d.Kind.String(), Rate: d.Rate, Period: span(d.Period),
		Capacity: jsonAmount(d.Capacity), MaxReserved: jsonAmount(d.MaxReserved), Shards: d.Shards, Slots: d.Slots,
	}
	if !shapeOf(d.Kind).has("capacity") {
		out.Capacity = nil
	}
	if d.Every != 0 {
		out.Period, out.Every, out.Zone, out.Anchor = "", d.Every.String(), d.Zone, d.Anchor.String()
	}
	if d.Time != 0 {
		out.Time = bucket.TimeOfDay(d.Time)
	}
	if !d.Start.IsZero() {
		out.Start = d.Start.Format(time.RFC3339Nano)
	}
	return json.Marshal(out)
}

func jsonAmount(v float64) any {
	if v == 0 || math.IsInf(v, 1) {
		return amountOrNone(v)
	}
	return v
}

// UnmarshalJSON reads a definition, for limits from a file:
//
//	{"name": "api", "kind": "token bucket", "rate": 10, "period": "1m",
//	 "capacity": 20, "maxReserved": 5, "shards": 8}
//
// The kind is "token bucket", "fixed window" or "sliding window", in any case, with spaces or
// underscores. The period is a duration as Go writes it. These fields are optional:
//
//   - capacity, maxReserved: a number or "none"; maxReserved also "unlimited"
//   - shards
//   - start of a fixed window: an instant by RFC 3339
//   - slots of a sliding window, which has no capacity
//
// A quota by the calendar is a fixed window with every ("day", "week", "month", "year", or several:
// "3 months") in place of period and start. Optional are zone, anchor ("2026-01-31") and time
// ("09:00").
//
// A field that is unknown, given twice or invalid is an error that names it: a *FieldError, or several
// joined. Each is [ErrInvalid]. After an error d is as before.
func (d *Definition) UnmarshalJSON(text []byte) error {
	r := reader{raw: map[string]json.RawMessage{}}
	if err := r.read(text); err != nil {
		return &FieldError{Field: "Definition", Value: string(text), Reason: err.Error()}
	}
	limit := r.limit()
	if err := r.faults.err(); err != nil {
		return err
	}
	if err := limit.Validate(); err != nil {
		return err
	}
	*d = limit.Definition()
	return nil
}

// reader reads a definition from the fields of a JSON object, each by itself, so
// that every fault names its field. encoding/json would match names in any case
// and take the last of two.
type reader struct {
	raw    map[string]json.RawMessage // fields that are not read yet
	order  []string
	faults faults
}

// read splits the object in text into its fields.
func (r *reader) read(text []byte) error {
	d := json.NewDecoder(bytes.NewReader(text))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return errNoObject
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return errNoObject
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return errNoObject
		}
		r.field(name.(string), value)
	}
	if _, err := d.Token(); err != nil { // the closing brace
		return errNoObject
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errNoObject
	}
	return nil
}

var errNoObject = errors.New("must be one JSON object")

func (r *reader) field(name string, value json.RawMessage) {
	if _, twice := r.raw[name]; twice {
		r.faults.add(name, jsonValue(value), "is given twice")
	}
	r.raw[name], r.order = value, append(r.order, name)
}

// limit returns the limit that the fields are of, nil when they are of none.
func (r *reader) limit() Limit {
	given := maps.Clone(r.raw)
	w := FixedWindow{Name: take[string](r, "name", "must be a text")}
	r.faults.limit = w.Name
	kind := r.kind()
	w.Rate = take[float64](r, "rate", "must be a number")
	w.Period = r.period()
	w.Capacity = r.amount("capacity", `must be a number or "none"`)
	w.MaxReserved = r.maxReserved()
	w.Shards = take[int](r, "shards", "must be a whole number")
	w.Start = parsed(r, "start", `must be an instant such as "2025-01-06T00:00:00Z"`, parseStart)
	w.Every = parsed(r, "every", badUnit, ParseUnit)
	w.Zone = take[string](r, "zone", "must be the name of a time zone")
	w.Anchor = parsed(r, "anchor", badDate, ParseDate)
	w.Time = parsed(r, "time", badTime, ParseTimeOfDay)
	slots := take[int](r, "slots", "must be a whole number")
	shape := shapeOf(kind)
	for _, lack := range shape.without {
		if raw, ok := given[lack.field]; ok && !r.faults.have(lack.field) {
			r.faults.add(lack.field, jsonValue(raw), lack.reason)
		}
	}
	for _, name := range r.order {
		if value, left := r.raw[name]; left {
			r.faults.add(name, jsonValue(value), "is no field of a definition")
			delete(r.raw, name)
		}
	}
	if shape.limit == nil {
		return nil
	}
	return shape.limit(w, slots)
}

// take reads a field, which may be left out.
func take[T any](r *reader, name, reason string) (v T) {
	raw, ok := r.raw[name]
	delete(r.raw, name)
	if !ok {
		return v
	}
	var p *T
	if err := json.Unmarshal(raw, &p); err != nil || p == nil { // null is none of the values
		r.faults.add(name, jsonValue(raw), reason)
		return v
	}
	return *p
}

const badKind = `must be "token bucket", "fixed window" or "sliding window"`

func (r *reader) kind() Kind {
	text := take[string](r, "kind", badKind)
	k, err := ParseKind(text)
	if err != nil && !r.faults.have("kind") {
		r.faults.add("kind", text, badKind)
	}
	return k
}

// ParseKind reads a kind as [Kind.String] writes it, in any case and with spaces or
// underscores. An error is a *[FieldError].
func ParseKind(text string) (Kind, error) {
	if k, ok := bucket.ParseKind(strings.ToLower(strings.ReplaceAll(text, "_", " "))); ok {
		return k, nil
	}
	return 0, &FieldError{Field: "Kind", Value: text, Reason: badKind}
}

// parsed reads a field that is a text, which may be left out.
func parsed[T any](r *reader, name, reason string, parse func(string) (T, error)) (v T) {
	_, given := r.raw[name]
	text := take[string](r, name, reason)
	if !given || r.faults.have(name) {
		return v
	}
	v, err := parse(text)
	if err != nil {
		r.faults.add(name, text, reason)
	}
	return v
}

func (r *reader) period() time.Duration {
	if _, by := r.raw["every"]; by && r.raw["period"] == nil {
		return 0 // it has none
	}
	const reason = `must be a duration such as "1m30s"`
	text := take[string](r, "period", reason)
	period, err := time.ParseDuration(text)
	if err != nil && !r.faults.have("period") {
		r.faults.add("period", text, reason+inHours(text))
	}
	return period
}

// inHours says how a period of days or weeks is written, which time.ParseDuration does
// not read: days are not all of one length.
func inHours(text string) string {
	for unit, hours := range map[string]float64{"d": 24, "w": 7 * 24} {
		number, found := strings.CutSuffix(text, unit)
		if n, err := strconv.ParseFloat(number, 64); found && err == nil && n > 0 && !math.IsInf(n, 0) {
			return fmt.Sprintf(": for %s write %q", text, amount(n*hours)+"h")
		}
	}
	return ""
}

// amount returns the value of a limit's field that holds an amount: 0 when it is left out.
func (r *reader) amount(name, reason string) float64 {
	if string(r.raw[name]) == `"none"` {
		delete(r.raw, name)
		return None
	}
	_, given := r.raw[name]
	v := take[float64](r, name, reason)
	if given && (v == 0 || v == None) && !r.faults.have(name) {
		r.faults.add(name, v, `could mean the default or none: leave it out, or write "none"`)
	}
	return v
}

func (r *reader) maxReserved() float64 {
	if string(r.raw["maxReserved"]) == `"unlimited"` {
		delete(r.raw, "maxReserved")
		return 0
	}
	return r.amount("maxReserved", `must be a number, "none" or "unlimited"`)
}

func parseStart(text string) (time.Time, error) {
	start, err := time.Parse(time.RFC3339, text)
	if start.IsZero() {
		err = errors.New("would be no start")
	}
	return start, err
}

// jsonValue returns a value for a FieldError: a text without its quotes, a number or
// the JSON as it is.
func jsonValue(raw json.RawMessage) any {
	var v any
	if err := json.Unmarshal(raw, &v); err == nil {
		switch v.(type) {
		case string, float64, bool:
			return v
		}
	}
	return string(raw)
}
