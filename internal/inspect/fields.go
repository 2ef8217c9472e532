package inspect

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// A Field is a field of an override, as the command's flags and the console's forms have it.
type Field struct {
	Name, Label string
	Usage       string // for a flag

	words string // a text with the value in place of {}
	of    func(o *catalog.Override) any
}

// A Bound is a capacity or a largest debt, as a limit's field has it; in texts and in JSON a number,
// "none" or "unlimited".
type Bound float64

// Fields are the fields of an override; the field i is the bit i of [catalog.Fields].
var Fields = [...]Field{
	{"rate", "Rate", "tokens that are refilled in each period", "rate {}", func(o *catalog.Override) any { return &o.Rate }},
	{"period", "Period", "the period, such as 1m", "period {}", func(o *catalog.Override) any { return &o.Period }},
	{"capacity", "Capacity", `the most tokens that accumulate, or "none"`, "capacity {}", func(o *catalog.Override) any { return (*Bound)(&o.Capacity) }},
	{"max-reserved", "Max reserved", `the deepest debt, "none" or "unlimited"`, "max reserved {}", func(o *catalog.Override) any { return (*Bound)(&o.MaxReserved) }},
	{"slots", "Slots", "of a sliding window", "{} slots", func(o *catalog.Override) any { return &o.Slots }},
	{"at-once", "At once", "of a limit of how many at once: permits for each key", "{} at once", func(o *catalog.Override) any { return &o.AtOnce }},
	{"lease", "Lease", "of a limit of how many at once", "lease {}", func(o *catalog.Override) any { return &o.Lease }},
	{"mode", "Mode", `"shadow" decides and refuses nobody, "refuse" refuses all calls, "enforce" is as usual`, "mode {}", func(o *catalog.Override) any { return &o.Mode }},
	{"until", "Ends after or at", `when it ends: an instant such as 2026-12-31T00:00:00Z, a duration from now such as 48h, or "never"`, "until {}", func(o *catalog.Override) any { return &o.Until }},
	{"note", "Note", "why, and for whom", "({})", func(o *catalog.Override) any { return &o.Note }},
}

// Text returns the field's value exactly, as Read reads it; "" if o does not name the field.
func (f *Field) Text(o *catalog.Override) string {
	switch v := f.of(o).(type) {
	case *float64:
		return amount(*v)
	case *Bound:
		return amount(float64(*v))
	case *int:
		if *v != 0 {
			return strconv.Itoa(*v)
		}
	case *time.Duration:
		if *v != 0 {
			return visible.Period(*v)
		}
	case *ratelimit.Mode:
		if *v != 0 {
			return v.String()
		}
	case *time.Time:
		if !v.IsZero() {
			return v.Format(time.RFC3339Nano)
		}
	case *string:
		return *v
	}
	return ""
}

func amount(v float64) string {
	switch {
	case v == 0:
		return ""
	case v == ratelimit.None:
		return "none"
	case math.IsInf(v, 1):
		return "unlimited"
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// Read sets the field to the value of a text. The error says what the text must be.
func (f *Field) Read(o *catalog.Override, text string, now time.Time) (err error) {
	was := *o
	switch v := f.of(o).(type) {
	case *float64:
		*v, err = Number(text)
	case *Bound:
		*v, err = readBound(text)
	case *int:
		if *v, err = strconv.Atoi(text); err != nil {
			err = errors.New("must be a whole number")
		}
	case *time.Duration:
		*v, err = Duration(text)
	case *ratelimit.Mode:
		if *v, err = ratelimit.ParseMode(text); err != nil {
			err = errors.New("must be enforce, shadow or refuse")
		}
	case *time.Time:
		if text == "never" {
			o.Clear |= catalog.FieldUntil
		} else {
			*v, err = readEnd(text, now)
		}
	case *string:
		*v = text
	}
	if err == nil && *o == was {
		err = errors.New("must not be 0 or empty: clear it to have it as in code")
	}
	return err
}

func readBound(text string) (Bound, error) {
	switch text {
	case "none", "0":
		return ratelimit.None, nil
	case "unlimited":
		return Bound(math.Inf(1)), nil
	}
	v, err := Number(text)
	if err != nil {
		err = errors.New(`must be a number, "none" or "unlimited"`)
	}
	return Bound(v), err
}

// MarshalJSON returns a number or a text.
func (b Bound) MarshalJSON() ([]byte, error) {
	text := amount(float64(b))
	if b == ratelimit.None || math.IsInf(float64(b), 1) {
		text = strconv.Quote(text)
	}
	return []byte(text), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (b *Bound) UnmarshalJSON(text []byte) (err error) {
	if *b, err = readBound(strings.Trim(string(text), `"`)); err != nil {
		err = fmt.Errorf("%s: %w", text, err)
	}
	return err
}

func readEnd(text string, now time.Time) (end time.Time, err error) {
	if lasts, err := time.ParseDuration(text); err == nil {
		end = now.Add(lasts)
	} else if end, err = time.Parse(time.RFC3339, text); err != nil {
		return end, errors.New("must be an instant such as 2026-12-31T00:00:00Z, a duration such as 48h, or never")
	}
	if !end.After(now) {
		return end, errors.New("is over")
	}
	return end, nil
}

// Number reads a finite number.
func Number(text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0, errors.New("must be a number")
	}
	return v, nil
}

// Duration reads a duration as Go writes it.
func Duration(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil {
		err = errors.New(`must be a duration, such as "90s" or "2h"`)
	}
	return d, err
}

// Override writes the fields that an override replaces, in a line; "none" for no override.
func Override(o *catalog.Override) string {
	if o == nil {
		return "none"
	}
	var parts []string
	for _, f := range Fields {
		text := f.Text(o)
		if f.Name == "note" && o.Switch == catalog.Off {
			parts = append(parts, "off")
		}
		switch {
		case text == "":
			continue
		case f.Name == "note":
			text = visible.Text(text)
		case f.Name == "until":
			text = Instant(o.Until)
		}
		parts = append(parts, strings.ReplaceAll(f.words, "{}", text))
	}
	return strings.Join(parts, ", ")
}
