package catalog

import (
	"errors"
	"maps"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// ErrUnknown reports an override for a limit that no program has published.
var ErrUnknown = errors.New("catalog: no program has published a limit of this name")

// UnknownError reports an override for a limit that no program has published. It is [ErrUnknown].
type UnknownError struct{ Name string }

func (e *UnknownError) Error() string {
	return ErrUnknown.Error() + ": " + strings.ToValidUTF8(e.Name, "?")
}

// Unwrap makes errors.Is(err, ErrUnknown) true.
func (e *UnknownError) Unwrap() error { return ErrUnknown }

// An Edit is a change of an override, with the override before and after.
type Edit struct {
	Name string // of the limit
	Key  string // or AllKeys

	Was, Became *Override // nil if there was none, or is none any more

	// Lower names the fields by which the override grants less than the published definition:
	// "Rate", "Capacity", "MaxReserved", "AtOnce", or "Mode" if it is refuse. It is nil if the edit
	// changes the note and nothing else.
	Lower []string

	// Left is what is left of the key before and afterwards; nil for all keys, without a
	// [Config.Store], and if it does not change.
	Left *Left

	// AsIs makes [Catalog.Apply] leave the rows as they are, even with a [Config.Store].
	AsIs bool

	by            *Override // nil for a removal
	before, after *view     // the catalog before and after, for Resolve
	keeps         bool      // the edit keeps what was used, unless AsIs
}

// ErrChanged reports an override that was changed after its edit was previewed.
var ErrChanged = errors.New("catalog: the override has been changed meanwhile")

// Changes reports whether the override differs afterwards.
func (e *Edit) Changes() bool {
	return !sameOverride(e.Was, e.Became)
}

// sameOverride reports whether two overrides are the same, or both nil.
func sameOverride(a, b *Override) bool {
	if a == nil || b == nil {
		return a == b
	}
	return *a == *b
}

// Resolve returns r as [Catalog.Resolve] does before the edit, and after it. The Edit must come
// from [Catalog.Preview].
func (e *Edit) Resolve(r ratelimit.Request) (before, after ratelimit.Request) {
	before, after = r, r
	e.before.choose(&before, nil)
	e.after.choose(&after, nil)
	return before, after
}

// LeftOf returns what the edit leaves of a key, or nil if rows stay as they are. before is the
// key's status by the definition before the edit, as Resolve returns it.
func (e *Edit) LeftOf(before *ratelimit.Status) *Left {
	published := ratelimit.Request{Limit: before.Request.Limit, Key: before.Request.Key}
	if f := e.before.limits[e.Name]; f != nil && f.published != nil {
		published.Limit = f.published.Limit()
	}
	from, to := e.Resolve(published)
	if !e.keeps || e.AsIs || !changes(from.Limit, to.Limit) {
		return nil
	}
	return leftOf(before, to.Limit, 0)
}

// InFlight returns the limit of a key as [Catalog.InFlight] does before and after the edit.
func (e *Edit) InFlight(limit ratelimit.InFlight, key string) (before, after ratelimit.InFlight) {
	return e.before.inFlight(limit, key, nil), e.after.inFlight(limit, key, nil)
}

// edited returns the Edit that an override makes of a key's override; nil by removes it.
func (v *view) edited(name, key string, by *Override) (Edit, error) {
	f := v.limits[name]
	made := Edit{Name: name, Key: key, by: by, before: v}
	if was := f.entry(key); was != nil {
		made.Was = &was.Override
	}
	if (by != nil || made.Was == nil) && (f == nil || f.published == nil) {
		return Edit{}, &UnknownError{Name: name} // but its leftover override can be removed
	}
	edition := f.edition()
	edition.unset(key)
	if by != nil {
		var became Override
		if made.Was != nil {
			became = *made.Was
		}
		became = became.edited(by)
		e := Entry{Name: name, Key: key, Override: became}
		if err := e.checkEdit(by, f.published); err != nil {
			return Edit{}, err
		}
		made.Became = &became
		if was := made.Was; was == nil || was.Note == became.Note || was.without(FieldNote) != became.without(FieldNote) {
			made.Lower = f.lower(&became)
		}
		edition.put(newEntry(&e))
	}
	after := *v
	after.limits = maps.Clone(v.limits)
	after.limits[name], made.after = edition.finish(), &after
	return made, nil
}

// checkEdit returns the fault of an edited override.
func (e *Entry) checkEdit(by *Override, p *published) error {
	bad := func(field string, value any, reason string) error {
		return &ratelimit.FieldError{Package: "catalog", Limit: e.Name, Field: field, Value: value, Reason: reason}
	}
	if *by == (Override{}) {
		return bad("Override", "", "names no field")
	}
	if by.Clear > AllFields {
		return bad("Clear", by.Clear, "must be fields of an Override")
	}
	if err := e.check(p); err != nil {
		return err
	}
	if !e.replaces() && *by == (Override{Switch: by.Switch}) {
		return bad("Override", "", "there is none to turn on or off")
	}
	if !e.replaces() {
		return bad("Override", "", "would replace no field of the limit: remove it, or name one")
	}
	return nil
}

// lower returns the fields by which an override grants less than the published definition.
func (f *family) lower(o *Override) (fields []string) {
	add := func(so bool, field string) {
		if so && o.Switch != Off {
			fields = append(fields, field)
		}
	}
	if p := f.published; p.inFlight != nil {
		made, _ := o.inFlight(*p.inFlight) // it has been checked
		add(made.Limit < p.inFlight.Limit, "AtOnce")
	} else if limit, err := o.limit(p.Definition); err == nil {
		d := limit.Definition()
		add(d.Rate*float64(p.Period) < p.Rate*float64(d.Period), "Rate")
		add(d.Capacity < p.Capacity, "Capacity")
		add(d.MaxReserved < p.MaxReserved, "MaxReserved")
	}
	add(o.Mode == ratelimit.ModeRefuse, "Mode")
	return fields
}

// changes reports whether rows change when one limit replaces another.
func changes(from, to ratelimit.Limit) bool {
	a, b := from.Definition(), to.Definition()
	a.MaxReserved = b.MaxReserved
	return a != b
}

// leftOf returns what is left of a key, from its status before the edit.
func leftOf(before *ratelimit.Status, to ratelimit.Limit, within time.Duration) *Left {
	d, was := to.Definition(), before.Request.Limit.Definition()
	l := &Left{Before: before.Value, Of: was.Capacity, AfterOf: d.Capacity, After: before.Value + d.Capacity - was.Capacity}
	if d.Kind != ratelimit.KindSlidingWindow {
		l.After = min(d.Capacity, max(l.After, min(before.Value, 0)))
		if d.Capacity > was.Capacity {
			l.Within = within
		}
	}
	return l
}
