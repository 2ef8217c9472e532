package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// answer is the answer to a call. Instants are offsets from the base
// instant.
type answer struct {
	OK         *bool     `json:"ok,omitempty"`
	RetryAfter *duration `json:"retryAfter,omitempty"`
	Taken      *float64  `json:"taken,omitempty"` // of at most, when ok
	Value      *float64  `json:"value,omitempty"` // of one limit only
	Remaining  *int64    `json:"remaining,omitempty"`
	ResetAfter *duration `json:"resetAfter,omitempty"`
	At         *duration `json:"at,omitempty"`
	RetryAt    *duration `json:"retryAt,omitempty"`
	Error      string    `json:"error,omitempty"`
	Never      bool      `json:"never,omitempty"`
}

// receipts are those of a scenario's calls, nil for calls that took nothing.
type receipts []*ratelimit.Receipt

// ask puts c to s, whose clock must stand at c.at. A call that the limits
// cannot make sense of has an answer too; the error is the store's failure.
func (c call) ask(ctx context.Context, s ratelimit.Store, taken *receipts) (answer, error) {
	*taken = append(*taken, nil)
	a, err := c.put(ctx, s, *taken)
	if errors.Is(err, ratelimit.ErrSettled) {
		return answer{Error: err.Error()}, nil
	}
	if errors.Is(err, ratelimit.ErrExceedsCapacity) || errors.Is(err, ratelimit.ErrInvalid) {
		return answer{Error: err.Error(), Never: errors.Is(err, ratelimit.ErrExceedsCapacity)}, nil
	}
	return a, err
}

func (c call) put(ctx context.Context, s ratelimit.Store, taken receipts) (answer, error) {
	decision := func(r ratelimit.Result, err error) (answer, error) {
		taken[len(taken)-1] = r.Receipt
		return c.decision(r, err)
	}
	switch c.do {
	case "allow":
		return decision(s.Allow(ctx, c.requests...))
	case "reserve":
		return decision(s.Reserve(ctx, c.requests...))
	case "at most":
		r, err := s.AllowAtMost(ctx, c.requests[0])
		a, err := decision(r, err)
		if r.OK {
			a.Taken = &r.Taken
		}
		return a, err
	case "settle":
		result, err := s.Settle(ctx, taken[c.of], c.used)
		return answer{Value: &result.Value}, err
	case "check":
		if c.reserve {
			return decision(s.CheckReserve(ctx, c.requests...))
		}
		return decision(s.Check(ctx, c.requests...))
	case "credit":
		status, err := s.Credit(ctx, c.requests[0])
		return answer{Value: &status.Value}, err
	}
	limit, key := c.requests[0].Limit, c.requests[0].Key
	switch c.do {
	case "reset":
		return answer{}, s.Reset(ctx, limit, key)
	case "pause": // stores take a duration, and add it to the clock that decides
		_, err := s.Pause(ctx, limit, key, c.until.Sub(c.at))
		return answer{}, err
	case "resume":
		return answer{}, s.Resume(ctx, limit, key)
	case "change":
		status, err := s.Change(ctx, limit, c.to, key)
		return answer{Value: &status.Value}, err
	}
	return answer{}, fmt.Errorf("no call is named %q", c.do)
}

func (c call) decision(r ratelimit.Result, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	a := answer{
		OK: &r.OK, RetryAfter: new(duration(r.RetryAfter)),
		At: c.since(r.At), RetryAt: c.since(r.RetryAt),
	}
	if len(r.Several) < 2 {
		a.Value, a.Remaining, a.ResetAfter = &r.Value, &r.Remaining, new(duration(r.ResetAfter))
	}
	return a, nil
}

// since is how far t is after the base instant.
func (c call) since(t time.Time) *duration { return new(duration(t.Sub(c.base))) }

// want is the answer that a call must have. A field that is left out may be anything, except
// that an error must be wanted.
type want struct {
	OK         *bool     `json:"ok,omitempty"`
	RetryAfter *duration `json:"retryAfter,omitempty"`
	Taken      *float64  `json:"taken,omitempty"`
	Value      *float64  `json:"value,omitempty"`
	Error      string    `json:"error,omitempty"`
}

// The errors that can be wanted.
const (
	wantNever   = "never"   // the limit can never grant the call
	wantInvalid = "invalid" // the call makes no sense, such as a negative count
)

func (w *want) validate() error {
	if w == nil || w.Error == "" || w.Error == wantNever || w.Error == wantInvalid {
		return nil
	}
	return fmt.Errorf("want error %q: want %q or %q", w.Error, wantNever, wantInvalid)
}

// valueTolerance is how far a value may be from the one that is wanted, in
// tokens: values are written in decimal, and stores compute them in binary.
const valueTolerance = 1e-6

// differs names the first field in which a is not as wanted, or is "".
func (w want) differs(a answer) string {
	switch {
	case w.Error != a.kind():
		return "error"
	case w.OK != nil && (a.OK == nil || *a.OK != *w.OK):
		return "ok"
	case w.RetryAfter != nil && (a.RetryAfter == nil || a.RetryAfter.micros() != w.RetryAfter.micros()):
		return "retryAfter"
	case w.Taken != nil && (a.Taken == nil || *a.Taken != *w.Taken):
		return "taken"
	case w.Value != nil && (a.Value == nil || math.Abs(*a.Value-*w.Value) > valueTolerance):
		return "value"
	}
	return ""
}

// kind is a's error in the words of a want.
func (a answer) kind() string {
	switch {
	case a.Never:
		return wantNever
	case a.Error != "":
		return wantInvalid
	}
	return ""
}

func (d duration) micros() int64 { return time.Duration(d).Microseconds() }

// difference is an answer that was not the one wanted.
type difference struct {
	file  string
	line  int
	field string
	want  want
	got   answer
}

func (d *difference) Error() string {
	return fmt.Sprintf("%s:%d: %s differs\n\twant %s\n\tgot  %s",
		d.file, d.line, d.field, compact(d.want), compact(d.got))
}

// compact is v as JSON. Answers and wants hold nothing that JSON has no words
// for.
func compact(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
