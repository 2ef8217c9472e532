// Package scenario reads the scenarios of testdata/conformance, which say what every store must answer,
// and puts their calls to stores.
package scenario

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit"
)

// usual is the instant from which scenarios count that have none of their own. Which one it is
// makes no difference but to the calendar; it must not depend on the day: answers are to be the
// same.
var usual = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

// A Scenario is a file of calls.
type Scenario struct {
	Name  string
	Calls []Call

	base time.Time // from which it counts
}

// A Call is one line of a scenario, with the limits that it names looked up.
type Call struct {
	Line     int
	At       time.Time
	Do       string
	Requests []ratelimit.Request
	Want     *Want

	base    time.Time
	reserve bool            // check only
	until   time.Time       // pause only
	of      int             // settle only: the number of the call that took
	used    float64         // settle only
	to      ratelimit.Limit // change only
}

// Calls that take several limits at once, and those that do not.
var (
	decisions = []string{"allow", "reserve", "check"}
	edits     = []string{"at most", "settle", "reset", "credit", "pause", "resume", "change"}
	takes     = []string{"allow", "reserve", "at most"} // that can be settled
)

// Parse reads a whole scenario, so that nothing of a malformed one is
// replayed. Errors name the file and the line.
func Parse(name string, text []byte) (Scenario, error) {
	s := Scenario{Name: name, base: usual}
	limits := map[string]ratelimit.Limit{}
	n := 0
	for line := range bytes.Lines(text) {
		n++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		c, err := s.parseLine(line, limits)
		if err != nil {
			return Scenario{}, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		if c == nil {
			continue
		}
		if err := c.settles(s.Calls); err != nil {
			return Scenario{}, fmt.Errorf("%s:%d: %w", name, n, err)
		}
		c.Line = n
		s.Calls = append(s.Calls, *c)
	}
	return s, nil
}

// settles is the error of a settle that is not of one of the calls before it that can
// be settled.
func (c *Call) settles(before []Call) error {
	switch {
	case c.Do != "settle":
		return nil
	case c.of < 0 || c.of >= len(before):
		return fmt.Errorf("of %d: there are %d calls before this one, counted from 0", c.of, len(before))
	case !slices.Contains(takes, before[c.of].Do) || len(before[c.of].Requests) != 1:
		return fmt.Errorf("of %d: want a call of one limit that is one of %s", c.of, strings.Join(takes, ", "))
	}
	return nil
}

// parseLine returns the call of a line. It returns nil if it has added the line's definition
// to limits, where it replaces an earlier one of that name, or if the line is the
// scenario's base instant.
func (s *Scenario) parseLine(text []byte, limits map[string]ratelimit.Limit) (*Call, error) {
	var kind struct {
		Limit json.RawMessage `json:"limit"`
		Base  json.RawMessage `json:"base"`
	}
	if err := Decode(text, &kind, false); err != nil {
		return nil, err
	}
	switch {
	case kind.Base != nil && (len(limits) > 0 || len(s.Calls) > 0):
		return nil, errors.New(`"base" must come before all definitions and calls`)
	case kind.Base != nil:
		var line struct {
			Base time.Time `json:"base"`
		}
		err := Decode(text, &line, true)
		s.base = line.Base.UTC()
		return nil, err
	case !bytes.HasPrefix(kind.Limit, []byte("{")):
		return s.parseCall(text, limits)
	}
	var line struct {
		Limit definitionText `json:"limit"`
	}
	if err := Decode(text, &line, true); err != nil {
		return nil, err
	}
	limit, err := s.limit(line.Limit)
	if err == nil {
		limits[limit.Definition().Name] = limit
	}
	return nil, err
}

// definitionText is written as a [ratelimit.Definition] is, but for the start: that is a duration,
// after the base instant.
type definitionText map[string]json.RawMessage

func (s *Scenario) limit(text definitionText) (ratelimit.Limit, error) {
	if raw, ok := text["start"]; ok && string(raw) != "null" {
		var start Duration
		if err := json.Unmarshal(raw, &start); err != nil {
			return nil, Plain(err)
		}
		text["start"], _ = json.Marshal(start.after(s.base))
	}
	definition, err := json.Marshal(text)
	if err != nil {
		return nil, err
	}
	var d ratelimit.Definition
	if err := d.UnmarshalJSON(definition); err != nil {
		return nil, err
	}
	return d.Limit(), nil
}

// callLine is a call as it is written. Pointers tell what was left out.
type callLine struct {
	At *Duration `json:"at"`
	Do string    `json:"do"`
	ask
	All     []ask          `json:"all"` // in place of ask
	Reserve *bool          `json:"reserve"`
	Until   *Duration      `json:"until"`
	Of      *int           `json:"of"`
	To      definitionText `json:"to"`
	Want    *Want          `json:"want"`
}

// ask is the part of a call for one limit.
type ask struct {
	Limit *string  `json:"limit"`
	Key   *string  `json:"key"`
	Count *float64 `json:"count"`
	Above *float64 `json:"above"`
}

func (s *Scenario) parseCall(text []byte, limits map[string]ratelimit.Limit) (*Call, error) {
	var line callLine
	if err := Decode(text, &line, true); err != nil {
		return nil, err
	}
	if err := line.validate(); err != nil {
		return nil, err
	}
	c := &Call{base: s.base, At: line.At.after(s.base), Do: line.Do, Want: line.Want}
	if line.Of != nil {
		c.of, c.used = *line.Of, orElse(line.Count, 1)
		return c, nil
	}
	var err error
	if c.Requests, err = line.requests(limits); err != nil {
		return nil, err
	}
	c.reserve, c.until = orElse(line.Reserve, false), orElse(line.Until, 0).after(s.base)
	if line.To != nil {
		c.to, err = s.limit(line.To)
	}
	return c, err
}

// validate finds fields that are missing and fields that have no meaning where
// they are: to pass over them would be to replay something else.
func (l callLine) validate() error {
	switch {
	case l.Do == "" && l.Limit == nil && l.All == nil && l.Of == nil:
		return errors.New("neither a limit nor a call")
	case !slices.Contains(decisions, l.Do) && !slices.Contains(edits, l.Do):
		return fmt.Errorf("do %q: want one of %s", l.Do, strings.Join(slices.Concat(decisions, edits), ", "))
	case l.At == nil:
		return errors.New(`"at" is missing`)
	case l.All != nil && l.ask != (ask{}):
		return errors.New(`"all" stands in place of "limit", "key", "count" and "above"`)
	case l.All != nil && slices.Contains(edits, l.Do):
		return fmt.Errorf("%s takes one limit at a time", l.Do)
	case (l.Of != nil) != (l.Do == "settle"):
		return errors.New(`settle, and nothing else, has "of"`)
	case l.Of != nil && (l.Limit != nil || l.Key != nil):
		return errors.New(`settle names no limit and no key: those are of the call that it is "of"`)
	case l.Above != nil && !slices.Contains([]string{"allow", "check", "at most"}, l.Do):
		return errors.New(`"above" is for allow, check and at most`)
	case l.Reserve != nil && l.Do != "check":
		return errors.New(`"reserve" is for check only`)
	case (l.Until != nil) != (l.Do == "pause"):
		return errors.New(`pause, and nothing else, has "until"`)
	case (l.To != nil) != (l.Do == "change"):
		return errors.New(`change, and nothing else, has "to"`)
	}
	return l.Want.validate()
}

func (l callLine) requests(limits map[string]ratelimit.Limit) ([]ratelimit.Request, error) {
	asks := l.All
	if asks == nil {
		asks = []ask{l.ask}
	}
	requests := make([]ratelimit.Request, len(asks))
	for i, a := range asks {
		if a.Limit == nil {
			return nil, errors.New(`"limit" is missing`)
		}
		limit, ok := limits[*a.Limit]
		if !ok {
			return nil, fmt.Errorf("limit %q is not defined above", *a.Limit)
		}
		requests[i] = limit.ForN(orElse(a.Key, ""), orElse(a.Count, 1)).Above(orElse(a.Above, 0))
	}
	return requests, nil
}

func orElse[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// Duration is written as Go writes durations: "1m30s".
type Duration time.Duration

func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = Duration(v)
	return err
}

func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// after is the instant that far after a base instant.
func (d Duration) after(base time.Time) time.Time { return base.Add(time.Duration(d)) }

// Decode reads the one JSON value in text, without or with fields that v has
// not.
func Decode(text []byte, v any, strict bool) error {
	if !utf8.Valid(text) {
		return errors.New("not valid UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(text))
	if strict {
		d.DisallowUnknownFields()
	}
	if err := d.Decode(v); err != nil {
		return Plain(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("unexpected text after the JSON object")
	}
	return nil
}

// Plain says errors of encoding/json without the names of Go's types.
func Plain(err error) error {
	var e *json.UnmarshalTypeError
	if errors.As(err, &e) {
		if e.Field == "" {
			return fmt.Errorf("unexpected %s, want a JSON object", e.Value)
		}
		return fmt.Errorf("field %q: unexpected %s", strings.TrimPrefix(e.Field, "ask."), e.Value)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the JSON object does not end")
	}
	return errors.New(strings.TrimPrefix(err.Error(), "json: "))
}
