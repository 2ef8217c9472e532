package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/valid"
)

// None in a Capacity or MaxReserved field means none at all, where zero would
// mean the field's default: a bucket that holds nothing and only spaces
// reservations out, or a limit that takes no reservations into debt.
//
// It is the smallest positive float64, so arithmetic that meets it unawares is
// off by nothing that matters.
const None = math.SmallestNonzeroFloat64

// Bounds on definitions and calls. They are far beyond practical limits; past
// them the promises of this package could not be kept in a float64, in a
// time.Duration or in a B-tree page.
const (
	MaxTokens     = valid.MaxTokens // largest rate, capacity, max reserved and count: above it a float64 tells small counts apart no longer
	MaxSpan       = bucket.MaxSpan  // 100 years: longest period, longest time to fill an empty limit, and longest wait for a reservation
	MaxRequests   = 64              // most limits in one call
	MaxChecks     = 10_000          // most rows that a CheckEach reads: one for each request, or as many as its limit has shards
	MaxNameLength = 255             // bytes in a limit's name
	MaxKeyLength  = 2048            // bytes in a key
)

// Kind is how a limit refills. Its String is in words, such as "token bucket".
type Kind = bucket.Kind

// The kinds of limits.
const (
	KindTokenBucket   = bucket.TokenBucket   // continuously
	KindFixedWindow   = bucket.FixedWindow   // at the edge of each window
	KindSlidingWindow = bucket.SlidingWindow // slot by slot, as taken tokens leave the window
)

// Limit is a limit's definition: a [TokenBucket], a [FixedWindow] or a [SlidingWindow]. All are
// plain values: copy one and change its Rate to give a customer's plan a rate of its own. Nothing
// of a definition is stored; changing it in code changes it for all keys at their next call.
type Limit interface {
	// For asks for one token of this limit for key. Each key is a limit of
	// its own; "" is the usual key of a global limit. See Key for keys of
	// several parts.
	For(key string) Request

	// ForN asks for n tokens, which may be a fraction. Zero tokens is a legal
	// question: is this key in debt?
	ForN(key string, n float64) Request

	// Validate reports every invalid field of the definition: a *FieldError for one, several
	// joined. All of them are ErrInvalid.
	Validate() error

	// Definition is the limit with its defaults filled in.
	Definition() Definition

	sealed()
}

// Definition is a limit with its defaults filled in: for programs that show limits, and for
// configuration files, as JSON. Make one with a limit's Definition method.
type Definition struct {
	Name        string
	Kind        Kind
	Rate        float64       // tokens per Period
	Period      time.Duration // whole microseconds
	Capacity    float64       // 0 is an empty bucket; Rate for a sliding window
	MaxReserved float64       // 0 is no debt, +Inf unlimited
	Shards      int           // at least 1
	Start       time.Time     // of a window: an edge; zero for a phase by key
	Slots       int           // sliding window: into how many its period is cut; otherwise 0

	Every  Unit          // of a fixed window by the calendar; otherwise 0. Period is the longest then
	Zone   string        // the name of its time zone
	Anchor Date          // the day of one of its edges
	Time   time.Duration // of the day, at which edges are: from midnight, by clocks; whole minutes
}

// bucket is d as the type that has the arithmetic.
func (d *Definition) bucket() *bucket.Definition { return (*bucket.Definition)(d) }

// Limit returns the definition as a limit. Its Definition is d again, so a definition that
// was read from JSON can be used. It is nil if d's Kind is none of this package's.
func (d Definition) Limit() Limit {
	w := FixedWindow{
		Name: d.Name, Rate: d.Rate, Period: d.Period, Capacity: orNone(d.Capacity),
		MaxReserved: orNone(d.MaxReserved), Shards: d.Shards, Start: d.Start,
		Every: d.Every, Zone: d.Zone, Anchor: d.Anchor, Time: d.Time,
	}
	if d.Every != 0 {
		w.Period = 0 // which follows from it
	}
	if math.IsInf(d.MaxReserved, 1) {
		w.MaxReserved = 0 // unlimited by default
	}
	if limit := shapeOf(d.Kind).limit; limit != nil {
		return limit(w, d.Slots)
	}
	return nil
}

// Validate reports every invalid field of the definition, as its limit's Validate does.
func (d Definition) Validate() error {
	if limit := d.Limit(); limit != nil {
		return limit.Validate()
	}
	return &FieldError{Limit: d.Name, Field: "Kind", Value: d.Kind, Reason: badKind}
}

// shape is how the limits of a kind are written.
type shape struct {
	limit   func(w FixedWindow, slots int) Limit // with the fields that w has
	without []lack                               // fields of other kinds
}

// lack is a field in JSON that a kind has not, and why.
type lack struct{ field, reason string }

func (s shape) has(field string) bool {
	return !slices.ContainsFunc(s.without, func(l lack) bool { return l.field == field })
}

var shapes = [...]shape{
	KindTokenBucket: {
		limit: func(w FixedWindow, _ int) Limit {
			return TokenBucket{
				Name: w.Name, Rate: w.Rate, Period: w.Period, Capacity: w.Capacity,
				MaxReserved: w.MaxReserved, Shards: w.Shards,
			}
		},
		without: append([]lack{{"start", "is not for a token bucket, which has no windows"}, {"slots", onlySliding}}, calendarFields...),
	},
	KindFixedWindow: {
		limit:   func(w FixedWindow, _ int) Limit { return w },
		without: []lack{{"slots", onlySliding}},
	},
	KindSlidingWindow: {
		limit: func(w FixedWindow, slots int) Limit {
			return SlidingWindow{
				Name: w.Name, Rate: w.Rate, Period: w.Period, Slots: slots,
				MaxReserved: w.MaxReserved, Shards: w.Shards, Start: w.Start,
			}
		},
		without: append([]lack{{"capacity", "is not for a sliding window, whose capacity is its rate"}}, calendarFields...),
	},
}

// calendarFields are those of a quota by the calendar, for the kinds that have none.
var calendarFields = []lack{{"every", onlyFixed}, {"zone", onlyFixed}, {"anchor", onlyFixed}, {"time", onlyFixed}}

const onlyFixed = "is for a fixed window only"

const onlySliding = "is for a sliding window only"

// shapeOf returns that of a kind, the zero shape if there is no such kind.
func shapeOf(kind Kind) shape {
	if int(kind) < len(shapes) {
		return shapes[kind]
	}
	return shape{}
}

// NameOf returns limit's name, without building its Definition: "" for nil.
func NameOf(limit Limit) string {
	switch l := limit.(type) {
	case TokenBucket:
		return l.Name
	case FixedWindow:
		return l.Name
	case SlidingWindow:
		return l.Name
	}
	if missing(limit) {
		return ""
	}
	return limit.Definition().Name
}

// missing reports whether limit is nil: as a pointer too, or in what a program's own type embeds.
func missing(limit Limit) bool {
	switch l := limit.(type) {
	case nil:
		return true
	case TokenBucket, FixedWindow, SlidingWindow:
		return false
	case *TokenBucket:
		return l == nil
	case *FixedWindow:
		return l == nil
	case *SlidingWindow:
		return l == nil
	}
	return embedsNil(limit)
}

// embedsNil reports whether limit is of a program's own type, and the limit that it embeds is nil.
// Only calling a promoted method tells that without reflection: it panics.
func embedsNil(limit Limit) (is bool) {
	defer func() { is = recover() != nil }()
	limit.sealed()
	return false
}

func orNone(v float64) float64 {
	if v == 0 {
		return None
	}
	return v
}

func orDefault(v, def float64) float64 {
	switch v {
	case 0:
		return def
	case None:
		return 0
	}
	return v
}

// faults are the bad fields of a limit.
type faults struct {
	limit string
	errs  []error
}

func (f *faults) add(field string, value any, reason string) {
	f.errs = append(f.errs, &FieldError{Limit: f.limit, Field: field, Value: value, Reason: reason})
}

// have reports whether a field is known to be bad.
func (f *faults) have(field string) bool {
	return slices.ContainsFunc(f.errs, func(err error) bool { return err.(*FieldError).Field == field })
}

// err returns the faults as one error: nil, the only one, or all joined.
func (f *faults) err() error { return joined(f.errs) }

func joined(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// check returns the bad fields of l that all kinds of limits have. The arguments of faults.add are put
// into interfaces, so it is called for faults only.
func (l FixedWindow) check() faults {
	f := faults{limit: l.Name}
	if reason := valid.Text(l.Name, MaxNameLength); reason != "" {
		f.add("Name", l.Name, reason)
	} else if l.Name == "" {
		f.add("Name", l.Name, "must not be empty")
	}
	if reason := badRate(l.Rate); reason != "" {
		f.add("Rate", l.Rate, reason)
	}
	if reason := valid.Amount(l.Capacity); reason != "" && l.Capacity != None && l.Capacity != l.Rate { // by default it is the rate
		f.add("Capacity", l.Capacity, reason)
	}
	if reason := valid.Amount(l.MaxReserved); reason != "" && l.MaxReserved != None {
		f.add("MaxReserved", l.MaxReserved, reason)
	}
	if reason := badPeriod(l.Period); reason != "" {
		f.add("Period", l.Period, reason)
	}
	if reason := badShards(l.Shards); reason != "" {
		f.add("Shards", l.Shards, reason)
	}
	if f.errs == nil { // the checks below compare fields that are valid by themselves
		l.checkTogether(&f)
	}
	return f
}

func (l FixedWindow) checkTogether(f *faults) {
	if l.Capacity == 0 && l.Rate < 1 {
		f.add("Rate", l.Rate, "can never grant a whole token while Capacity is left out and so is the same: "+
			"set Capacity to 1 or more, or state the rate over a longer period")
	}
	if l.Capacity/l.Rate*float64(l.Period) > float64(MaxSpan) {
		f.add("Capacity", l.Capacity, fmt.Sprintf("must fill within %v at this rate", MaxSpan))
	}
	if reason := l.thinShards(); reason != "" {
		f.add("Shards", l.Shards, reason)
	}
}

func badRate(rate float64) string {
	if rate == 0 || rate == None {
		return "must be positive"
	}
	return valid.Amount(rate)
}

func badPeriod(period time.Duration) string {
	switch {
	case period <= 0:
		return "must be positive"
	case period < time.Microsecond: // time.Duration counts nanoseconds
		return fmt.Sprintf("must be whole microseconds: for %d seconds write %[1]d * time.Second", int64(period))
	case period%time.Microsecond != 0:
		return "must be whole microseconds"
	case period > MaxSpan:
		return fmt.Sprintf("must be at most %v", MaxSpan)
	}
	return ""
}

// Validate reports every fault of limits, for a test or a program's start: each invalid field,
// a limit that is nil, and a name that is defined twice. It is a *FieldError for one fault,
// several joined. All of them are [ErrInvalid].
//
// The copies of a limit that plans have for a rate of their own share its name:
// give it one of them.
func Validate(limits ...Limit) error {
	var errs []error
	times := make(map[string]int, len(limits))
	for i, l := range limits {
		if missing(l) {
			errs = append(errs, &FieldError{Field: fmt.Sprintf("Limits[%d]", i), Value: nil, Reason: "must not be nil"})
			continue
		}
		switch err := l.Validate().(type) {
		case nil:
		case interface{ Unwrap() []error }:
			errs = append(errs, err.Unwrap()...)
		default:
			errs = append(errs, err)
		}
		name := NameOf(l)
		if times[name]++; times[name] == 2 {
			errs = append(errs, &FieldError{Limit: name, Field: "Name", Value: name, Reason: "is defined twice"})
		}
	}
	return joined(errs)
}

// Validate reports every fault of the request: of its limit, its key, its count or the share
// that it leaves, as a *FieldError. A count that is too small to be told apart beside the
// limit's capacity (less than 2⁻⁴⁶ of it) is invalid too, since it would cost nothing.
func (r Request) Validate() error {
	if missing(r.Limit) {
		return &FieldError{Field: "Limit", Value: nil, Reason: "must not be nil"}
	}
	if err := r.Limit.Validate(); err != nil {
		return err
	}
	d := r.Limit.Definition()
	if reason := valid.Text(r.Key, MaxKeyLength); reason != "" {
		return &FieldError{Limit: d.Name, Field: "Key", Value: r.Key, Reason: reason}
	}
	if reason := valid.Count(r.Count, d.Capacity); reason != "" {
		return &FieldError{Limit: d.Name, Field: "Count", Value: r.Count, Reason: reason}
	}
	if !(r.AboveShare >= 0 && r.AboveShare <= 1) {
		return &FieldError{Limit: d.Name, Field: "Above", Value: r.AboveShare, Reason: "must be a share of the capacity, from 0 to 1"}
	}
	if r.Mode > ModeRefuse {
		return &FieldError{Limit: d.Name, Field: "Mode", Value: r.Mode, Reason: badMode}
	}
	return nil
}
