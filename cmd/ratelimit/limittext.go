package main

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/pgratelimit/ratelimit"
)

// limitSources are where verbs that try limits out have them from.
type limitSources struct {
	texts       []string // of --limit
	definitions string   // the file of --definitions
}

// limits returns all of them, in their order. Names may be of several limits: they are tried one
// beside the other.
func (s *limitSources) limits(stdin io.Reader) ([]ratelimit.Limit, error) {
	var limits []ratelimit.Limit
	for _, text := range s.texts {
		limit, err := parseLimit(text)
		if err != nil {
			return nil, bad("--limit %q: %w", text, err)
		}
		limits = append(limits, limit)
	}
	if s.definitions != "" {
		f, err := readDefinitions(stdin, s.definitions)
		if err != nil {
			return nil, err
		}
		for _, e := range f.entries {
			if e.definition == nil {
				return nil, bad("%s:%d: only definitions of limits by rate can be tried out", f.name, e.line)
			}
			limits = append(limits, e.definition.Limit())
		}
	}
	if len(limits) == 0 {
		return nil, bad(`no limit to try: give --limit '10 per 1m, capacity 20', or --definitions FILE`)
	}
	return limits, nil
}

const limitHelp = `a limit, in the words of its definition: "10 per 1m, capacity 20", "fixed window, 100 per 1h", "sliding window, 100 per 1m, 30 slots", "1000 per month in Europe/Berlin"; may be given several times`

var (
	limitRate = regexp.MustCompile(`^([0-9.e+]+) (?:per|a|an) ((?:[0-9]+ )?\S+)(?: in (\S+))?$`)
	limitMore = regexp.MustCompile(`^(?:(capacity|max reserved) (\S+)|([0-9]+) (slots|shards))$`)
)

// units are words for periods.
var units = map[string]string{"second": "1s", "minute": "1m", "hour": "1h"}

// parseLimit reads a limit in the words of its definition: a kind, or a token bucket, its rate,
// and the rest, with commas between them.
func parseLimit(text string) (ratelimit.Limit, error) {
	fields := map[string]any{"name": "limit", "kind": "token bucket"}
	parts := strings.Split(text, ",")
	for i := range parts {
		parts[i] = strings.Join(strings.Fields(parts[i]), " ")
	}
	if _, err := ratelimit.ParseKind(parts[0]); err == nil && len(parts) > 1 {
		fields["kind"], parts = parts[0], parts[1:]
	}
	rate := limitRate.FindStringSubmatch(parts[0])
	if rate == nil {
		return nil, fmt.Errorf(`%q: want a rate such as "10 per 1m"`, parts[0])
	}
	fields["rate"] = number64(rate[1])
	switch unit, err := ratelimit.ParseUnit(rate[2]); {
	case err == nil:
		fields["every"], fields["kind"] = unit.String(), "fixed window"
		if rate[3] != "" {
			fields["zone"] = rate[3]
		}
	case units[rate[2]] != "":
		fields["period"] = units[rate[2]]
	default:
		fields["period"] = rate[2]
	}
	for _, part := range parts[1:] {
		more := limitMore.FindStringSubmatch(part)
		switch {
		case more == nil:
			return nil, fmt.Errorf(`%q: want "capacity N", "max reserved N", "N slots" or "N shards"`, part)
		case more[1] == "capacity":
			fields["capacity"] = number64(more[2])
		case more[1] != "":
			fields["maxReserved"] = number64(more[2])
		default:
			fields[more[4]] = number64(more[3])
		}
	}
	var d ratelimit.Definition
	definition, err := json.Marshal(fields)
	if err == nil {
		err = d.UnmarshalJSON(definition)
	}
	if err != nil {
		return nil, err
	}
	return d.Limit(), nil
}

// number64 is a number for JSON, or the text as it is, so that the definition names what is wrong.
func number64(text string) any {
	if v, err := strconv.ParseFloat(text, 64); err == nil {
		return v
	}
	return text
}

// withCapacities returns each limit with each of some capacities.
func withCapacities(limits []ratelimit.Limit, capacities []float64) ([]ratelimit.Limit, error) {
	if len(capacities) == 0 {
		return limits, nil
	}
	var all []ratelimit.Limit
	for _, l := range limits {
		for _, capacity := range slices.Sorted(slices.Values(capacities)) {
			d := l.Definition()
			if d.Kind == ratelimit.KindSlidingWindow {
				return nil, bad("--capacities: %s has none, since it is its rate", d)
			}
			d.Capacity = capacity
			if err := d.Validate(); err != nil {
				return nil, badInput{err}
			}
			all = append(all, d.Limit())
		}
	}
	return all, nil
}
