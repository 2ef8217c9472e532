package console

import (
	"cmp"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// bad returns an error for an invalid value in a form or address.
func bad(field string, value any, reason string) error {
	return &ratelimit.FieldError{Package: "console", Field: field, Value: value, Reason: reason}
}

// size is the length of a text in bytes. In errors it stands for a text that may be a key.
type size int

func (n size) String() string { return "of " + strconv.Itoa(int(n)) + " bytes" }

// readForm reads a request's parameters. It rejects texts that PostgreSQL cannot store.
func readForm(r *http.Request) error {
	if err := r.ParseForm(); err != nil {
		return bad("form", r.ContentLength, err.Error())
	}
	for name, values := range r.Form {
		for _, v := range values {
			if !utf8.ValidString(v) || strings.ContainsRune(v, 0) {
				return bad(name, size(len(v)), "must be valid UTF-8 without zero bytes")
			}
		}
	}
	return nil
}

// number reads a number.
func number(field, text string) (float64, error) {
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		return 0, bad(field, text, "must be a number")
	}
	return v, nil
}

// duration reads a duration as Go writes it.
func duration(field, text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, bad(field, text, `must be a duration, such as "90s" or "2h"`)
	}
	return d, nil
}

// overrideForm is the form of an override, filled in with the present one.
type overrideForm struct {
	Fields []field
	There  bool // there is an override
	Off    bool
}

// A field is a form's field. The form also posts the text that the field showed, so that an edit
// contains the changed fields only.
type field struct {
	Name, Label, Text string
	As                string   // the value if it is empty
	Options           []string // the choices
	Size              int
}

// newForm returns the form of an override with the fields that the limit has; e is nil without an
// override.
func newForm(d *ratelimit.Definition, l *ratelimit.InFlight, e *catalog.Entry) overrideForm {
	var o catalog.Override
	if e != nil {
		o = e.Override
	}
	f := overrideForm{There: e != nil, Off: o.Switch == catalog.Off}
	add := func(name, label, text, as string, size int) {
		f.Fields = append(f.Fields, field{Name: name, Label: label, Text: text, As: as, Size: size})
	}
	if l != nil {
		add("at_once", "At once", whole(o.AtOnce), whole(l.Limit), 6)
		add("lease", "Lease", span(o.Lease), inspect.Period(l.LeaseOrDefault()), 8)
	} else {
		add("rate", "Rate", amount(o.Rate), amount(d.Rate), 8)
		if d.Every == 0 {
			add("period", "Period", span(o.Period), inspect.Period(d.Period), 8)
		}
		if d.Kind == ratelimit.KindSlidingWindow {
			add("slots", "Slots", whole(o.Slots), whole(d.Slots), 5)
		} else {
			add("capacity", "Capacity", amount(o.Capacity), amount(cmp.Or(d.Capacity, ratelimit.None)), 8)
		}
		add("max_reserved", "Max reserved", amount(o.MaxReserved), amount(cmp.Or(d.MaxReserved, ratelimit.None)), 8)
	}
	mode, modes := "", []string{"", "enforce", "shadow", "refuse"}
	if l != nil { // it has no ModeShadow
		modes = []string{"", "enforce", "refuse"}
	}
	if o.Mode != 0 {
		mode = o.Mode.String()
	}
	f.Fields = append(f.Fields, field{Name: "mode", Label: "Mode", Text: mode, Options: modes})
	until := ""
	if !o.Until.IsZero() {
		until = o.Until.Format(time.RFC3339Nano)
	}
	add("until", "Ends after or at", until, "never", 26)
	add("note", "Note", oneLine.Replace(visible.Lines(o.Note)), "", 24)
	return f
}

// oneLine writes a text on one line, as browsers do in a field.
var oneLine = strings.NewReplacer("\n", `\n`, "\t", `\t`)

func whole(n int) string {
	if n == 0 {
		return ""
	}
	return strconv.Itoa(n)
}

func span(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return inspect.Period(d)
}

// amount writes a number of a form exactly.
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

// readers set an override's fields from texts, which are not empty.
var readers = map[string]struct {
	field catalog.Fields
	read  func(o *catalog.Override, name, text string) error
}{
	"rate": {catalog.FieldRate, func(o *catalog.Override, name, text string) (err error) { o.Rate, err = number(name, text); return err }},
	"period": {catalog.FieldPeriod, func(o *catalog.Override, name, text string) (err error) {
		o.Period, err = duration(name, text)
		return err
	}},
	"capacity": {catalog.FieldCapacity, func(o *catalog.Override, name, text string) (err error) {
		o.Capacity, err = bound(name, text)
		return err
	}},
	"max_reserved": {catalog.FieldMaxReserved, func(o *catalog.Override, name, text string) (err error) {
		o.MaxReserved, err = bound(name, text)
		return err
	}},
	"slots": {catalog.FieldSlots, func(o *catalog.Override, name, text string) (err error) {
		o.Slots, err = integer(name, text)
		return err
	}},
	"at_once": {catalog.FieldAtOnce, func(o *catalog.Override, name, text string) (err error) {
		o.AtOnce, err = integer(name, text)
		return err
	}},
	"lease": {catalog.FieldLease, func(o *catalog.Override, name, text string) (err error) {
		o.Lease, err = duration(name, text)
		return err
	}},
	"mode": {catalog.FieldMode, func(o *catalog.Override, _, text string) (err error) {
		o.Mode, err = ratelimit.ParseMode(text)
		return err
	}},
	"until": {catalog.FieldUntil, func(o *catalog.Override, name, text string) (err error) { o.Until, err = end(name, text); return err }},
	"note":  {catalog.FieldNote, func(o *catalog.Override, _, text string) error { o.Note = text; return nil }},
}

// editOf returns the edit that a form makes: of the fields whose texts differ from those shown. An
// emptied field is cleared. An end given as a duration becomes an instant in form, so that posting
// it again means the same.
func editOf(form url.Values, now time.Time) (o catalog.Override, err error) {
	if lasts, err := time.ParseDuration(strings.TrimSpace(form.Get("until"))); err == nil {
		form.Set("until", now.Add(lasts).UTC().Truncate(time.Millisecond).Format(time.RFC3339Nano))
	}
	for name, reader := range readers {
		text, shown := strings.TrimSpace(form.Get(name)), strings.TrimSpace(form.Get("was_"+name))
		switch {
		case text == shown:
		case text == "":
			o.Clear |= reader.field
		default:
			was := o
			if err := reader.read(&o, name, text); err != nil {
				return o, err
			}
			if o == was {
				return o, bad(name, text, "must not be 0: leave it empty for what is in code")
			}
		}
	}
	if !o.Until.IsZero() && !o.Until.After(now) {
		return o, bad("until", form.Get("until"), "is over")
	}
	return o, nil
}

// bound reads a capacity or a bound of debt.
func bound(name, text string) (float64, error) {
	switch text {
	case "none", "0":
		return ratelimit.None, nil
	case "unlimited":
		return math.Inf(1), nil
	}
	return number(name, text)
}

func integer(name, text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, bad(name, text, "must be a whole number")
	}
	return n, nil
}

func end(name, text string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return t, bad(name, text, `must be a duration, such as "48h", or an instant, such as 2026-12-31T00:00:00Z`)
	}
	return t, nil
}
