package console

import (
	"cmp"
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

// read reads a value of a form or address.
func read[T any](field, text string, parse func(string) (T, error)) (T, error) {
	v, err := parse(text)
	if err != nil {
		err = bad(field, text, err.Error())
	}
	return v, err
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
	var code, o catalog.Override // the limit's fields in code, and the override's
	modes := []string{"", "enforce", "shadow", "refuse"}
	if l != nil { // it has no ModeShadow
		code.AtOnce, code.Lease, modes = l.Limit, l.LeaseOrDefault(), []string{"", "enforce", "refuse"}
	} else {
		code.Rate, code.Slots, code.MaxReserved = d.Rate, d.Slots, cmp.Or(d.MaxReserved, ratelimit.None)
		if d.Every == 0 {
			code.Period = d.Period
		}
		if d.Kind != ratelimit.KindSlidingWindow {
			code.Capacity = cmp.Or(d.Capacity, ratelimit.None)
		}
	}
	if e != nil {
		o = e.Override
		o.Note = oneLine.Replace(visible.Lines(o.Note))
	}
	f := overrideForm{There: e != nil, Off: o.Switch == catalog.Off}
	for _, of := range inspect.Fields {
		shown := field{Name: of.Name, Label: of.Label, Text: of.Text(&o), As: of.Text(&code), Size: 8}
		switch of.Name {
		case "mode":
			shown.Options = modes
		case "until":
			shown.As, shown.Size = "never", 26
		case "note":
			shown.Size = 24
		default:
			if shown.As == "" {
				continue
			}
		}
		f.Fields = append(f.Fields, shown)
	}
	return f
}

// oneLine writes a text on one line, as browsers do in a field.
var oneLine = strings.NewReplacer("\n", `\n`, "\t", `\t`)

// editOf returns the edit that a form makes: of the fields whose texts differ from those shown. An
// emptied field is cleared. An end given as a duration becomes an instant in form, so that posting
// it again means the same.
func editOf(form url.Values, now time.Time) (o catalog.Override, err error) {
	if lasts, err := time.ParseDuration(strings.TrimSpace(form.Get("until"))); err == nil {
		form.Set("until", now.Add(lasts).UTC().Truncate(time.Millisecond).Format(time.RFC3339Nano))
	}
	for i, f := range inspect.Fields {
		text, shown := strings.TrimSpace(form.Get(f.Name)), strings.TrimSpace(form.Get("was_"+f.Name))
		switch {
		case text == shown:
		case text == "":
			o.Clear |= 1 << i
		default:
			if err := f.Read(&o, text, now); err != nil {
				return o, bad(f.Name, text, err.Error())
			}
		}
	}
	return o, nil
}
