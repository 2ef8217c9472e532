package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/catalog"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/scenario"
)

// A definitionsFile is definitions and overrides, as catalog export prints them: JSON values
// one after the other, or in an array. A definition may stand by itself, or as
// {"limit": {…}}, as in a scenario; a limit of how many at once is {"inFlight": {…}}, and an
// override {"override": {…}}.
type definitionsFile struct {
	name    string
	entries []fileEntry
}

// A fileEntry is one of these, and where it stands.
type fileEntry struct {
	line       int
	definition *ratelimit.Definition
	inFlight   *ratelimit.InFlight
	override   *catalog.Entry
}

// readDefinitions reads a file of definitions; - is standard input.
func readDefinitions(stdin io.Reader, file string) (*definitionsFile, error) {
	name, text, err := readFile(stdin, file)
	if err != nil {
		return nil, badInput{err}
	}
	return parseDefinitions(name, text)
}

func parseDefinitions(name string, text []byte) (*definitionsFile, error) {
	f := &definitionsFile{name: name}
	if !utf8.Valid(text) {
		return nil, bad("%s: not valid UTF-8", name)
	}
	text = withoutComments(text)
	d := json.NewDecoder(bytes.NewReader(text))
	array := bytes.HasPrefix(bytes.TrimSpace(text), []byte("["))
	if array {
		_, _ = d.Token()
	}
	for d.More() {
		at := len(text) - len(bytes.TrimLeft(text[d.InputOffset():], " \t\r\n,"))
		line := 1 + bytes.Count(text[:at], []byte("\n"))
		var raw json.RawMessage
		var entry fileEntry
		err := d.Decode(&raw)
		if err != nil {
			err = scenario.Plain(err)
		} else {
			entry, err = parseEntry(raw)
		}
		if err != nil {
			return nil, bad("%s:%d: %w", name, line, err)
		}
		entry.line = line
		f.entries = append(f.entries, entry)
	}
	if array {
		if _, err := d.Token(); err != nil {
			return nil, bad("%s: the array does not end", name)
		}
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, bad("%s: unexpected text after the definitions", name)
	}
	return f, nil
}

// withoutComments empties lines that begin with #, which are comments.
func withoutComments(text []byte) []byte {
	var kept bytes.Buffer
	for line := range bytes.Lines(text) {
		if bytes.HasPrefix(bytes.TrimSpace(line), []byte("#")) {
			line = []byte("\n")
		}
		kept.Write(line)
	}
	return kept.Bytes()
}

// parseEntry reads a definition or an override.
func parseEntry(raw json.RawMessage) (fileEntry, error) {
	var wrapped map[string]json.RawMessage
	if err := json.Unmarshal(raw, &wrapped); err != nil {
		return fileEntry{}, errors.New("want a JSON object")
	}
	if of, ok := wrapped["override"]; ok && len(wrapped) == 1 {
		var o overrideJSON
		if err := scenario.Decode(of, &o, true); err != nil {
			return fileEntry{}, err
		}
		entry, err := o.entry()
		return fileEntry{override: entry}, err
	}
	if of, ok := wrapped["inFlight"]; ok && len(wrapped) == 1 {
		var l inFlightJSON
		if err := scenario.Decode(of, &l, true); err != nil {
			return fileEntry{}, err
		}
		limit := ratelimit.InFlight{Name: l.Name, Limit: l.Limit, Lease: time.Duration(l.Lease)}
		return fileEntry{inFlight: &limit}, limit.Validate()
	}
	if of, ok := wrapped["limit"]; ok && len(wrapped) == 1 {
		raw = of
	}
	var d ratelimit.Definition
	if err := d.UnmarshalJSON(raw); err != nil {
		return fileEntry{}, err
	}
	return fileEntry{definition: &d}, nil
}

// catalog returns the file as a catalog in memory. An error names the line.
func (f *definitionsFile) catalog(ctx context.Context) (*catalog.Catalog, error) {
	c, err := catalog.NewInMemory(&catalog.Config{Logger: silent})
	if err != nil {
		return nil, err
	}
	if err := f.publish(ctx, c); err != nil {
		return nil, badInput{err}
	}
	return c, c.Refresh(ctx)
}

// editor is the writing half of a catalog.
type editor interface {
	Publish(ctx context.Context, limits ...ratelimit.Limit) error
	PublishInFlight(ctx context.Context, limits ...ratelimit.InFlight) error
	Set(ctx context.Context, name, key string, o catalog.Override) (catalog.Edit, error)
}

func (f *definitionsFile) publish(ctx context.Context, c editor) error {
	var limits []ratelimit.Limit
	var inFlight []ratelimit.InFlight
	first := map[string]int{}
	for _, e := range f.entries {
		var name string
		switch {
		case e.definition != nil:
			name, limits = e.definition.Name, append(limits, e.definition.Limit())
		case e.inFlight != nil:
			name, inFlight = e.inFlight.Name, append(inFlight, *e.inFlight)
		default:
			continue
		}
		if line, twice := first[name]; twice {
			return bad("%s:%d: limit %q is defined twice, first in line %d", f.name, e.line, name, line)
		}
		first[name] = e.line
	}
	err := c.Publish(ctx, limits...)
	if err == nil {
		err = c.PublishInFlight(ctx, inFlight...)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	for _, e := range f.entries {
		if e.override == nil {
			continue
		}
		o := e.override.Override
		o.Clear = catalog.AllFields // in place of one that is there
		if _, err := c.Set(ctx, e.override.Name, e.override.Key, o); err != nil {
			return fmt.Errorf("%s:%d: %w", f.name, e.line, err)
		}
	}
	return nil
}

// overrideJSON is an override as a file has it.
type overrideJSON struct {
	Name        string            `json:"name"`
	Key         *string           `json:"key,omitempty"` // left out for all keys
	Rate        float64           `json:"rate,omitempty"`
	Period      scenario.Duration `json:"period,omitzero"`
	Capacity    inspect.Bound     `json:"capacity,omitzero"`
	MaxReserved inspect.Bound     `json:"maxReserved,omitzero"`
	Slots       int               `json:"slots,omitempty"`
	AtOnce      int               `json:"atOnce,omitempty"`
	Lease       scenario.Duration `json:"lease,omitzero"`
	Mode        ratelimit.Mode    `json:"mode,omitempty"`
	Until       time.Time         `json:"until,omitzero"`
	Off         bool              `json:"off,omitempty"`
	Note        string            `json:"note,omitempty"`
}

// overrideOf returns nil for no override.
func overrideOf(e *catalog.Entry) *overrideJSON {
	if e == nil {
		return nil
	}
	o := &overrideJSON{
		Name: e.Name, Rate: e.Rate, Period: scenario.Duration(e.Period), Capacity: inspect.Bound(e.Capacity), MaxReserved: inspect.Bound(e.MaxReserved),
		Slots: e.Slots, AtOnce: e.AtOnce, Lease: scenario.Duration(e.Lease), Mode: e.Mode, Until: e.Until, Off: e.Switch == catalog.Off, Note: e.Note,
	}
	if e.Key != catalog.AllKeys {
		o.Key = &e.Key
	}
	return o
}

func (o *overrideJSON) entry() (*catalog.Entry, error) {
	if o.Name == "" {
		return nil, errors.New(`override: "name" is missing`)
	}
	e := &catalog.Entry{Name: o.Name, Key: catalog.AllKeys, Override: catalog.Override{
		Rate: o.Rate, Period: time.Duration(o.Period), Capacity: float64(o.Capacity), MaxReserved: float64(o.MaxReserved),
		Slots: o.Slots, AtOnce: o.AtOnce, Lease: time.Duration(o.Lease), Mode: o.Mode, Until: o.Until, Switch: catalog.On, Note: o.Note,
	}}
	if o.Key != nil && *o.Key == catalog.AllKeys {
		return nil, errors.New(`override: "key": no key can be this: leave it out for all keys`)
	}
	if o.Key != nil {
		e.Key = *o.Key
	}
	if o.Off {
		e.Switch = catalog.Off
	}
	return e, nil
}

// inFlightJSON is a limit of how many at once as a file has it.
type inFlightJSON struct {
	Name  string            `json:"name"`
	Limit int               `json:"limit"`
	Lease scenario.Duration `json:"lease,omitzero"`
}

func inFlightJSONOf(l ratelimit.InFlight) inFlightJSON {
	return inFlightJSON{l.Name, l.Limit, scenario.Duration(l.LeaseOrDefault())}
}
