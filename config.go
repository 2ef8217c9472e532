package ratelimit

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"
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
	MaxTokens     = 1e12                       // largest rate, capacity, max reserved and count: above it a float64 tells small counts apart no longer
	MaxSpan       = 100 * 365 * 24 * time.Hour // longest period, longest time to fill an empty limit, and longest wait for a reservation
	MaxShards     = 1024                       // most shards of a limit
	MaxRequests   = 64                         // most limits in one call
	MaxNameLength = 255                        // bytes in a limit's name
	MaxKeyLength  = 2048                       // bytes in a key
)

// Kind tells how a limit's tokens come back.
type Kind uint8

const (
	KindTokenBucket Kind = iota + 1 // continuously
	KindFixedWindow                 // all at once, at the edge of each window
)

func (k Kind) String() string {
	switch k {
	case KindTokenBucket:
		return "token bucket"
	case KindFixedWindow:
		return "fixed window"
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Limit is a limit's definition: a [TokenBucket] or a [FixedWindow]. Both are
// plain values: copy one and change its Rate to give a customer's plan a rate
// of its own. Nothing of a definition is stored; changing it in code changes
// it for all keys at their next call.
type Limit interface {
	// For asks for one token of this limit for key. Each key is a limit of
	// its own; "" is the usual key of a global limit.
	For(key string) Request

	// ForN asks for n tokens, which may be a fraction. Zero tokens is a legal
	// question: is this key in debt?
	ForN(key string, n float64) Request

	// Validate reports what is wrong with the definition, every bad field of
	// it: a *FieldError for one, several joined. All of them are ErrInvalid.
	Validate() error

	// Definition is the limit with its defaults filled in.
	Definition() Definition

	sealed()
}

// TokenBucket is a limit whose tokens come back continuously: Rate tokens a
// Period, up to Capacity. It grants at most Capacity + Rate · elapsed / Period
// over any stretch of time.
type TokenBucket struct {
	// Name is the limit's identity in the database, together with the key.
	// Required, at most MaxNameLength bytes.
	Name string

	// Rate is how many tokens come in per Period. Required, positive, may be
	// a fraction.
	Rate float64

	// Period is the time in which Rate tokens come in. Required, positive, in
	// whole microseconds (PostgreSQL's resolution).
	Period time.Duration

	// Capacity is the most tokens that gather: the largest burst, and the
	// largest count that Allow can grant. Zero means Rate; None means an
	// empty bucket, whose reservations are spaced evenly.
	Capacity float64

	// MaxReserved is how deep into debt reservations may take the limit; the
	// bound is inclusive. Zero means unlimited (in effect, what comes in
	// during MaxSpan); None means no debt.
	MaxReserved float64

	// Shards spreads each key over that many rows, so that a limit that
	// everyone takes from is not one hot row. Zero means 1.
	Shards int
}

// FixedWindow is a limit whose tokens come back all at once: Rate tokens at
// the edge of each window of length Period, up to Capacity. A Capacity above
// Rate lets unused windows roll over.
type FixedWindow struct {
	// Name is the limit's identity in the database, together with the key.
	// Required, at most MaxNameLength bytes.
	Name string

	// Rate is how many tokens come in at each window's start. Required,
	// positive, may be a fraction.
	Rate float64

	// Period is the length of a window. Required, positive, in whole
	// microseconds (PostgreSQL's resolution).
	Period time.Duration

	// Capacity is the most tokens that gather. Zero means Rate; None means
	// none, so that only reservations succeed.
	Capacity float64

	// MaxReserved is how deep into debt reservations may take the limit; the
	// bound is inclusive. Zero means unlimited (in effect, what comes in
	// during MaxSpan); None means no debt.
	MaxReserved float64

	// Shards spreads each key over that many rows, so that a limit that
	// everyone takes from is not one hot row. Zero means 1.
	Shards int

	// Start is an instant at which a window starts; the others follow from it
	// by Period, in both directions. The zero time gives each key a phase of
	// its own, a hash of name and key, so that not all customers' windows
	// open in the same instant; it is the same on every machine.
	Start time.Time
}

func (l TokenBucket) For(key string) Request             { return Request{l, key, 1} }
func (l TokenBucket) ForN(key string, n float64) Request { return Request{l, key, n} }
func (l FixedWindow) For(key string) Request             { return Request{l, key, 1} }
func (l FixedWindow) ForN(key string, n float64) Request { return Request{l, key, n} }

func (TokenBucket) sealed() {}
func (FixedWindow) sealed() {}

// Validate implements [Limit].
func (l TokenBucket) Validate() error {
	return validate(l.Name, l.Rate, l.Period, l.Capacity, l.MaxReserved, l.Shards)
}

// Validate implements [Limit].
func (l FixedWindow) Validate() error {
	err := validate(l.Name, l.Rate, l.Period, l.Capacity, l.MaxReserved, l.Shards)
	if y := l.Start.Year(); y < 1 || y > 9999 {
		return errors.Join(err, &FieldError{Limit: l.Name, Field: "Start", Value: l.Start, Reason: "must be in the years 1 to 9999"})
	}
	return err
}

// Definition implements [Limit].
func (l TokenBucket) Definition() Definition {
	return Definition{
		Name: l.Name, Kind: KindTokenBucket, Rate: l.Rate, Period: l.Period,
		Capacity:    orDefault(l.Capacity, l.Rate),
		MaxReserved: orDefault(l.MaxReserved, math.Inf(1)),
		Shards:      max(l.Shards, 1),
	}
}

// Definition implements [Limit].
func (l FixedWindow) Definition() Definition {
	return Definition{
		Name: l.Name, Kind: KindFixedWindow, Rate: l.Rate, Period: l.Period,
		Capacity:    orDefault(l.Capacity, l.Rate),
		MaxReserved: orDefault(l.MaxReserved, math.Inf(1)),
		Shards:      max(l.Shards, 1),
		Start:       l.Start.Round(0).UTC(), // comparable: no monotonic clock, one zone
	}
}

// Definition is a limit with its defaults filled in: what the algebra works
// on, and what a program that shows limits reads. Make one with a limit's
// Definition method.
type Definition struct {
	Name        string
	Kind        Kind
	Rate        float64       // tokens per Period
	Period      time.Duration // whole microseconds
	Capacity    float64       // 0 is an empty bucket
	MaxReserved float64       // 0 is no debt, +Inf unlimited
	Shards      int           // at least 1
	Start       time.Time     // fixed window: an edge; zero for a phase by key
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

func validate(name string, rate float64, period time.Duration, capacity, maxReserved float64, shards int) error {
	var errs []error
	bad := func(field string, value any, reason string) {
		errs = append(errs, &FieldError{Limit: name, Field: field, Value: value, Reason: reason})
	}
	if reason := badText(name, MaxNameLength); reason != "" {
		bad("Name", name, reason)
	} else if name == "" {
		bad("Name", name, "must not be empty")
	}
	if reason := badAmount(rate); reason != "" {
		bad("Rate", rate, reason)
	} else if rate == 0 || rate == None {
		bad("Rate", rate, "must be positive")
	}
	if reason := badAmount(capacity); reason != "" {
		bad("Capacity", capacity, reason)
	}
	if reason := badAmount(maxReserved); reason != "" {
		bad("MaxReserved", maxReserved, reason)
	}
	switch {
	case period <= 0:
		bad("Period", period, "must be positive")
	case period%time.Microsecond != 0:
		bad("Period", period, "must be whole microseconds")
	case period > MaxSpan:
		bad("Period", period, fmt.Sprintf("must be at most %v", MaxSpan))
	}
	if shards < 0 || shards > MaxShards {
		bad("Shards", shards, fmt.Sprintf("must be from 1 to %d (0 means 1)", MaxShards))
	}
	// Every call would have to take from several shards, which is slower than
	// one row for all.
	holds, field := orDefault(capacity, rate), "Capacity"
	if holds == 0 {
		holds, field = orDefault(maxReserved, math.Inf(1)), "MaxReserved"
	}
	if errs == nil && shards > 1 && float64(shards) > holds {
		bad("Shards", shards, fmt.Sprintf("leaves each shard less than one token of %s %g", field, holds))
	}
	// Only a definition that is sound so far has a time to fill.
	if errs == nil && capacity/rate*float64(period) > float64(MaxSpan) {
		bad("Capacity", capacity, fmt.Sprintf("must fill within %v at this rate", MaxSpan))
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// badAmount says why v cannot be a number of tokens, or "".
func badAmount(v float64) string {
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return "must be finite"
	case v < 0:
		return "must not be negative"
	case v > MaxTokens:
		return fmt.Sprintf("must be at most %g", float64(MaxTokens))
	}
	return ""
}

// badText says why s cannot be stored as a PostgreSQL text of at most most
// bytes, or "".
func badText(s string, most int) string {
	switch {
	case len(s) > most:
		return fmt.Sprintf("must be at most %d bytes long", most)
	case !utf8.ValidString(s):
		return "must be valid UTF-8"
	case strings.IndexByte(s, 0) >= 0:
		return "must not contain a zero byte"
	}
	return ""
}
