package catalog

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit"
)

// AllKeys stands in place of a key for all keys of a limit. No key can be the same.
const AllKeys = "\x00all keys"

// MaxNoteLength is the most bytes that the Note of an [Override] has.
const MaxNoteLength = 2048

// Override replaces fields of a limit's definition. A zero field is not named: it replaces nothing,
// and an edit keeps the earlier override's.
//
// A limit's Shards and Start cannot be overridden: other shards would be full at once, and
// another start moves no existing row.
type Override struct {
	// Rate is tokens per Period. A capacity that is the same as the rate in code follows it.
	Rate float64

	// Period is the time in which Rate tokens are refilled.
	Period time.Duration

	// Capacity is the most tokens that accumulate; [ratelimit.None] for none.
	Capacity float64

	// MaxReserved is the deepest debt; [ratelimit.None] for none, +Inf for no bound.
	MaxReserved float64

	// Slots is the number of parts into which a sliding window's period is cut.
	Slots int

	// AtOnce is the Limit of a [ratelimit.InFlight]: how many permits a key has.
	AtOnce int

	// Lease is the Lease of a [ratelimit.InFlight], of permits that are taken from then on.
	Lease time.Duration

	// Mode is how calls are treated: [ratelimit.ModeRefuse] refuses all of them, a kill switch;
	// [ratelimit.ModeShadow] decides and takes, and refuses none; [ratelimit.ModeEnforce] for a
	// key goes before the Mode of the override for all keys. Zero leaves it as the request
	// has it, which mostly is enforced.
	Mode ratelimit.Mode

	// Until is when the override ends, on the database's clock: from then on the definition
	// is that of the code again. Zero is never.
	Until time.Time

	// Switch is [On] or [Off]: Off keeps the override, and does not use it. A new override is on.
	Switch Switch

	// Note is for people: why, and for whom. It has at most MaxNoteLength bytes.
	Note string

	// Clear names the fields that an edit removes from the override before it sets its own. An
	// Entry has none.
	Clear Fields
}

// Switch says whether an override is used. Zero is not named.
type Switch uint8

// The positions of a Switch.
const (
	On Switch = iota + 1
	Off
)

// Fields are fields of an Override, for its Clear.
type Fields uint16

// Every field but Switch, which is On or Off.
const (
	FieldRate Fields = 1 << iota
	FieldPeriod
	FieldCapacity
	FieldMaxReserved
	FieldSlots
	FieldAtOnce
	FieldLease
	FieldMode
	FieldUntil
	FieldNote

	AllFields = 1<<iota - 1 // in Clear: only the fields that the edit sets remain
)

// Entry is an override in the catalog.
type Entry struct {
	Name string // of the limit
	Key  string // or AllKeys, for fields that a key's own override does not replace
	Override

	UpdatedAt time.Time
}

// Change is a change of a definition or an override. Was and Became are the row before and
// after, in the words of the table; nil if there was none. An override has no kind.
type Change struct {
	Version     int64
	At          time.Time
	Role        string // PostgreSQL's
	Who         string // the author by [WithWho]; "" for none
	Name        string // of the limit; "" if all was forgotten by TRUNCATE
	Key         string // AllKeys for all keys, and for the definition itself
	Was, Became json.RawMessage
}

// replaces reports whether o replaces any field of a limit.
func (o *Override) replaces() bool { return o.over(Override{}) != Override{} }

// edited returns o after an edit, which first clears the fields of its Clear and then sets those
// that it names.
func (o Override) edited(by *Override) Override {
	o = by.over(o.without(by.Clear))
	o.Until = cmp.Or(by.Until.UTC().Truncate(time.Microsecond), o.Until)
	o.Note, o.Switch = cmp.Or(by.Note, o.Note), cmp.Or(by.Switch, o.Switch, On)
	return o
}

// without returns o without some fields.
func (o Override) without(fields Fields) Override {
	for i, zero := range [...]func(){
		func() { o.Rate = 0 },
		func() { o.Period = 0 },
		func() { o.Capacity = 0 },
		func() { o.MaxReserved = 0 },
		func() { o.Slots = 0 },
		func() { o.AtOnce = 0 },
		func() { o.Lease = 0 },
		func() { o.Mode = 0 },
		func() { o.Until = time.Time{} },
		func() { o.Note = "" },
	} {
		if fields&(1<<i) != 0 {
			zero()
		}
	}
	return o
}

// over returns below with the limit's fields that o replaces.
func (o *Override) over(below Override) Override {
	below.Rate, below.Period = cmp.Or(o.Rate, below.Rate), cmp.Or(o.Period, below.Period)
	below.Capacity, below.MaxReserved = cmp.Or(o.Capacity, below.Capacity), cmp.Or(o.MaxReserved, below.MaxReserved)
	below.Slots, below.Mode = cmp.Or(o.Slots, below.Slots), cmp.Or(o.Mode, below.Mode)
	below.AtOnce, below.Lease = cmp.Or(o.AtOnce, below.AtOnce), cmp.Or(o.Lease, below.Lease)
	return below
}

// follows reports whether a limit's capacity is its rate, as it is by default. The catalog then
// stores NULL. (Below a rate of 1 that is no default.)
func follows(d ratelimit.Definition) bool { return d.Capacity == d.Rate && d.Rate >= 1 }

// on returns d with the fields that o replaces. A capacity that is the rate follows it, so a raised
// rate does not keep its earlier burst. SQL stores such a capacity as NULL.
func (o Override) on(d ratelimit.Definition) ratelimit.Definition {
	follows := follows(d)
	d.Rate, d.Period, d.Slots = cmp.Or(o.Rate, d.Rate), cmp.Or(o.Period, d.Period), cmp.Or(o.Slots, d.Slots)
	if follows && d.Rate > 0 { // an invalid rate is reported as such, not as a capacity
		d.Capacity = d.Rate
	}
	if o.Capacity != 0 {
		d.Capacity = orZero(o.Capacity)
	}
	if o.MaxReserved != 0 {
		d.MaxReserved = orZero(o.MaxReserved)
	}
	return d
}

// orZero converts an amount from a limit's field to a Definition's: None becomes 0.
func orZero(v float64) float64 {
	if v == ratelimit.None {
		return 0
	}
	return v
}

// orNone converts an amount from a Definition's to a limit's field: 0 becomes None.
func orNone(v float64) float64 {
	if v == 0 {
		return ratelimit.None
	}
	return v
}

// limit returns the limit that o makes of d. Its errors are ErrInvalid.
func (o Override) limit(d ratelimit.Definition) (ratelimit.Limit, error) {
	switch {
	case o.AtOnce != 0:
		return nil, &ratelimit.FieldError{Limit: d.Name, Field: "AtOnce", Value: o.AtOnce, Reason: "is for a limit of how many at once only"}
	case o.Lease != 0:
		return nil, &ratelimit.FieldError{Limit: d.Name, Field: "Lease", Value: o.Lease, Reason: "is for a limit of how many at once only"}
	case o.Period != 0 && d.Every != 0:
		return nil, &ratelimit.FieldError{Limit: d.Name, Field: "Period", Value: o.Period, Reason: "is not for a quota by the calendar"}
	case o.Slots != 0 && d.Kind != ratelimit.KindSlidingWindow:
		return nil, &ratelimit.FieldError{Limit: d.Name, Field: "Slots", Value: o.Slots, Reason: "is for a sliding window only"}
	case o.Capacity != 0 && d.Kind == ratelimit.KindSlidingWindow:
		return nil, &ratelimit.FieldError{Limit: d.Name, Field: "Capacity", Value: o.Capacity, Reason: "is not for a sliding window, whose capacity is its rate"}
	}
	made := o.on(d)
	if follows(d) && o.Capacity == 0 && made.Rate > 0 && made.Rate < 1 {
		return nil, &ratelimit.FieldError{
			Limit: d.Name, Field: "Rate", Value: made.Rate,
			Reason: "can never grant a whole token while the capacity is the rate: override Capacity too",
		}
	}
	limit := made.Limit()
	if limit == nil {
		return nil, d.Validate()
	}
	return limit, limit.Validate()
}

// inFlight returns the limit that o makes of l. Its errors are ErrInvalid.
func (o Override) inFlight(l ratelimit.InFlight) (ratelimit.InFlight, error) {
	for _, f := range []struct {
		name  string
		given bool
		value any
	}{
		{"Rate", o.Rate != 0, o.Rate},
		{"Period", o.Period != 0, o.Period},
		{"Capacity", o.Capacity != 0, o.Capacity},
		{"MaxReserved", o.MaxReserved != 0, o.MaxReserved},
		{"Slots", o.Slots != 0, o.Slots},
	} {
		if f.given {
			return l, &ratelimit.FieldError{Limit: l.Name, Field: f.name, Value: f.value, Reason: "is not for a limit of how many at once"}
		}
	}
	l.Limit, l.Lease, l.Mode = cmp.Or(o.AtOnce, l.Limit), cmp.Or(o.Lease, l.Lease), cmp.Or(o.Mode, l.Mode)
	return l, l.Validate()
}

// published is what a program has published under a name: a definition; or a limit of how many at
// once, whose Definition has only the name.
type published struct {
	ratelimit.Definition
	inFlight *ratelimit.InFlight // nil for a limit
}

// kindInFlight is the table's kind of a [ratelimit.InFlight], which no other limit has.
const kindInFlight = "in flight"

// inFlightOf returns l as it is published: without a mode.
func inFlightOf(l ratelimit.InFlight) published {
	l.Lease, l.Mode, l.RefusedUntil = l.LeaseOrDefault(), 0, time.Time{}
	return published{Definition: ratelimit.Definition{Name: l.Name}, inFlight: &l}
}

// kind returns the kind as the table names it.
func (p *published) kind() string {
	if p.inFlight != nil {
		return kindInFlight
	}
	return p.Kind.String()
}

// alike reports whether the table stores both alike.
func (p *published) alike(q *published) bool {
	if p.inFlight != nil && q.inFlight != nil {
		return *p.inFlight == *q.inFlight
	}
	return p.inFlight == nil && q.inFlight == nil && alike(p.Definition, q.Definition)
}

// check returns the fault of an override of a published definition.
func (e *Entry) check(p *published) error {
	bad := func(field string, value any, reason string) error {
		return &ratelimit.FieldError{Package: "catalog", Limit: e.Name, Field: field, Value: value, Reason: reason}
	}
	if !utf8.ValidString(e.Note) || strings.ContainsRune(e.Note, 0) {
		return bad("Note", e.Note, "must be valid UTF-8 without zero bytes")
	}
	if len(e.Note) > MaxNoteLength {
		return bad("Note", e.Note, fmt.Sprintf("of %d bytes must have at most %d", len(e.Note), MaxNoteLength))
	}
	if y := e.Until.UTC().Year(); y < 1 || y > 9999 {
		return bad("Until", e.Until, "must be in the years 1 to 9999")
	}
	if e.Switch > Off {
		return bad("Switch", e.Switch, "must be On or Off")
	}
	key := e.Key
	if key == AllKeys {
		key = ""
	}
	if p.inFlight != nil {
		limit, err := e.inFlight(*p.inFlight)
		if err != nil {
			return err
		}
		return limit.ValidateKey(key)
	}
	limit, err := e.limit(p.Definition)
	if err != nil {
		return err
	}
	return ratelimit.Request{Limit: limit, Key: key, Mode: e.Mode}.Validate()
}

// amount reads a stored amount: 0 for NULL, None for 0.
func amount(v *float64) float64 {
	if v == nil {
		return 0
	}
	return orNone(*v)
}

// stored returns an amount as it is stored.
func stored(v float64) *float64 {
	if v == 0 {
		return nil
	}
	v = orZero(v)
	return &v
}

// keyOf returns a key that was read; NULL stands for all keys.
func keyOf(p *string) string {
	if p == nil {
		return AllKeys
	}
	return *p
}

// keyArg returns a key as an argument; NULL for all keys.
func keyArg(key string) *string {
	if key == AllKeys {
		return nil
	}
	return &key
}

// or returns the value of a pointer, or zero.
func or[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

// alike reports whether the catalog stores two definitions alike. It stores instants in
// microseconds.
func alike(a, b ratelimit.Definition) bool {
	a.Start, b.Start = a.Start.Truncate(time.Microsecond).UTC(), b.Start.Truncate(time.Microsecond).UTC()
	return a == b
}

// forever is the age before the first reading.
const forever = time.Duration(math.MaxInt64)
