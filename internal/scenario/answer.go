package scenario

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// Answer is the answer to a call. Instants are offsets from the base
// instant.
type Answer struct {
	OK         *bool     `json:"ok,omitempty"`
	RetryAfter *Duration `json:"retryAfter,omitempty"`
	Taken      *float64  `json:"taken,omitempty"` // of at most, when ok
	Value      *float64  `json:"value,omitempty"` // of one limit only
	Remaining  *int64    `json:"remaining,omitempty"`
	ResetAfter *Duration `json:"resetAfter,omitempty"`
	At         *Duration `json:"at,omitempty"`
	RetryAt    *Duration `json:"retryAt,omitempty"`
	Error      string    `json:"error,omitempty"`
	Never      bool      `json:"never,omitempty"`
}

// Receipts are those of a scenario's calls, nil for calls that took nothing.
type Receipts []*ratelimit.Receipt

// Ask puts c to s, whose clock must stand at c.At. A call that the limits
// cannot make sense of has an answer too; the error is the store's failure.
func (c Call) Ask(ctx context.Context, s ratelimit.Store, taken *Receipts) (Answer, error) {
	*taken = append(*taken, nil)
	a, err := c.put(ctx, s, *taken)
	never := errors.Is(err, ratelimit.ErrExceedsCapacity)
	if never || errors.Is(err, ratelimit.ErrInvalid) || errors.Is(err, ratelimit.ErrSettled) {
		return Answer{Error: err.Error(), Never: never}, nil
	}
	return a, err
}

func (c Call) put(ctx context.Context, s ratelimit.Store, taken Receipts) (Answer, error) {
	decision := func(r ratelimit.Result, err error) (Answer, error) {
		taken[len(taken)-1] = r.Receipt
		return c.decision(r, err)
	}
	switch c.Do {
	case "allow":
		return decision(s.Allow(ctx, c.Requests...))
	case "reserve":
		return decision(s.Reserve(ctx, c.Requests...))
	case "at most":
		r, err := s.AllowAtMost(ctx, c.Requests[0])
		a, err := decision(r, err)
		if r.OK {
			a.Taken = &r.Taken
		}
		return a, err
	case "settle":
		result, err := s.Settle(ctx, taken[c.of], c.used)
		return Answer{Value: &result.Value}, err
	case "check":
		if c.reserve {
			return decision(s.CheckReserve(ctx, c.Requests...))
		}
		return decision(s.Check(ctx, c.Requests...))
	case "credit":
		status, err := s.Credit(ctx, c.Requests[0])
		return Answer{Value: &status.Value}, err
	}
	limit, key := c.Requests[0].Limit, c.Requests[0].Key
	switch c.Do {
	case "reset":
		return Answer{}, s.Reset(ctx, limit, key)
	case "pause": // stores take a duration, and add it to the clock that decides
		_, err := s.Pause(ctx, limit, key, c.until.Sub(c.At))
		return Answer{}, err
	case "resume":
		return Answer{}, s.Resume(ctx, limit, key)
	case "change":
		status, err := s.Change(ctx, limit, c.to, key)
		return Answer{Value: &status.Value}, err
	}
	return Answer{}, fmt.Errorf("no call is named %q", c.Do)
}

func (c Call) decision(r ratelimit.Result, err error) (Answer, error) {
	if err != nil {
		return Answer{}, err
	}
	a := Answer{
		OK: &r.OK, RetryAfter: pointer(r.RetryAfter),
		At: c.since(r.At), RetryAt: c.since(r.RetryAt),
	}
	if len(r.Several) < 2 {
		a.Value, a.Remaining, a.ResetAfter = &r.Value, &r.Remaining, pointer(r.ResetAfter)
	}
	return a, nil
}

// since is how far t is after the base instant.
func (c Call) since(t time.Time) *Duration { return pointer(t.Sub(c.base)) }

func pointer(d time.Duration) *Duration { return (*Duration)(&d) }

// Want is the answer that a call must have. A field that is left out may be anything, except
// that an error must be wanted.
type Want struct {
	OK         *bool     `json:"ok,omitempty"`
	RetryAfter *Duration `json:"retryAfter,omitempty"`
	Taken      *float64  `json:"taken,omitempty"`
	Value      *float64  `json:"value,omitempty"`
	Error      string    `json:"error,omitempty"`
}

// The errors that can be wanted.
const (
	WantNever   = "never"   // the limit can never grant the call
	WantInvalid = "invalid" // the call makes no sense, such as a negative count
)

func (w *Want) validate() error {
	if w == nil || w.Error == "" || w.Error == WantNever || w.Error == WantInvalid {
		return nil
	}
	return fmt.Errorf("want error %q: want %q or %q", w.Error, WantNever, WantInvalid)
}

// valueTolerance is how far a value may be from the one that is wanted, in
// tokens: values are written in decimal, and stores compute them in binary.
const valueTolerance = 1e-6

// Differs names the first field in which a is not as wanted, or is "".
func (w Want) Differs(a Answer) string {
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
func (a Answer) kind() string {
	switch {
	case a.Never:
		return WantNever
	case a.Error != "":
		return WantInvalid
	}
	return ""
}

func (d Duration) micros() int64 { return time.Duration(d).Microseconds() }
