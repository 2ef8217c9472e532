package ratelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgratelimit/ratelimit/internal/valid"
)

// ErrLeaseLost is the error of a permit that is not held any more: its lease ended, or it was
// released or reset. Renew and Release return it, and have changed nothing then. It is also the
// cause with which the context of a held function ends.
var ErrLeaseLost = errors.New("ratelimit: the permit is not held any more")

// Bounds on limits of how many at once.
const (
	MaxInFlight  = 10_000           // largest Limit of an InFlight
	MinLease     = time.Millisecond // shortest lease
	DefaultLease = 30 * time.Second
)

// InFlight limits how many pieces of work of a key are under way at a time, over all processes:
// for work that takes long. It is a plain value, as a [Limit] is, but not a Limit, since
// nothing is refilled as time passes. There are Limit permits. A holder has a permit for the Lease,
// renews it before that ends, and releases it when the work is done.
//
// At no instant, on the database's clock, are there more than Limit leases that have not ended.
// A holder that was stopped past its lease may still be at work when another one has its permit.
// Where that does harm, have the resource that is worked on compare [Permit.Fence].
//
// Limit may change at any time. When it shrinks, the permits beyond it are not given out any
// more; until their leases end, as many as before may be held.
//
// A name belongs to one limit: to an InFlight, or to one of the other kinds.
type InFlight struct {
	Name  string        `json:"name"`
	Limit int           `json:"limit"` // permits for each key, 1 to MaxInFlight
	Lease time.Duration `json:"lease"` // whole microseconds; 0 means DefaultLease

	// Mode is [ModeRefuse] or [ModeEnforce], which is the zero Mode. See In.
	Mode Mode `json:"mode,omitempty"`

	// RefusedUntil is the NotBefore of refusals by [ModeRefuse]: when the catalog's override
	// ends. Zero, or an instant that is past, is [RefusedFor] from the refusal.
	RefusedUntil time.Time `json:"refused_until,omitzero"`
}

// PermitRequest asks a limit of how many at once for a permit of a key. Make one with
// [InFlight.For].
type PermitRequest struct {
	Limit InFlight
	Key   string `json:"-"`
}

// For asks for one permit of the limit for key. Each key is a limit of its own; "" is the usual key
// of a global limit.
func (l InFlight) For(key string) PermitRequest { return PermitRequest{Limit: l, Key: key} }

// String returns the limit in a line, without the key.
func (r PermitRequest) String() string { return "a permit of " + r.Limit.String() }

// LogValue returns the limit as a group, without the key.
func (r PermitRequest) LogValue() slog.Value { return r.Limit.LogValue() }

// In returns l in a mode, in which permits are acquired:
//
//	permit, err := store.Permits().Acquire(ctx, Calls.In(ratelimit.ModeRefuse).For(org))
//
// [ModeRefuse] gives no permit to anybody, also to callers that would wait; permits that are held
// are renewed and released as ever. [ModeShadow] is [ErrInvalid]: to try a limit out, give it a
// Limit that is never reached and look at how many permits are held. Package catalog has modes by
// name and by key, which are changed while programs run.
func (l InFlight) In(mode Mode) InFlight {
	l.Mode = mode
	return l
}

// Validate reports every invalid field of the definition: a *FieldError for one, several
// joined. All of them are [ErrInvalid].
func (l InFlight) Validate() error {
	f := faults{limit: l.Name}
	if reason := valid.Text(l.Name, MaxNameLength); reason != "" {
		f.add("Name", l.Name, reason)
	} else if l.Name == "" {
		f.add("Name", l.Name, "must not be empty")
	}
	if l.Limit < 1 || l.Limit > MaxInFlight {
		f.add("Limit", l.Limit, fmt.Sprintf("must be from 1 to %d", MaxInFlight))
	}
	if l.Lease != 0 {
		reason := badPeriod(l.Lease)
		if reason == "" && l.Lease < MinLease {
			reason = fmt.Sprintf("must be at least %v (0 means %v)", MinLease, span(DefaultLease))
		}
		if reason != "" {
			f.add("Lease", l.Lease, reason)
		}
	}
	if l.Mode == ModeShadow || l.Mode > ModeRefuse {
		f.add("Mode", l.Mode, "must be enforce or refuse for a limit of how many at once")
	}
	return f.err()
}

// ValidateKey is Validate, and reports a key that cannot be one.
func (l InFlight) ValidateKey(key string) error {
	if err := l.Validate(); err != nil {
		return err
	}
	if reason := valid.Text(key, MaxKeyLength); reason != "" {
		return &FieldError{Limit: l.Name, Field: "Key", Value: key, Reason: reason}
	}
	return nil
}

// LeaseOrDefault returns Lease, or [DefaultLease] if that is 0.
func (l InFlight) LeaseOrDefault() time.Duration {
	if l.Lease == 0 {
		return DefaultLease
	}
	return l.Lease
}

// String is the definition in a line:
//
//	"calls": 10 at a time, lease 30s
func (l InFlight) String() string {
	text := fmt.Sprintf("%s: %d at a time, lease %s", quoteShort(l.Name), l.Limit, span(l.LeaseOrDefault()))
	if l.Mode > ModeEnforce {
		text += ", mode " + l.Mode.String()
	}
	return text
}

// LogValue is the definition as a group.
func (l InFlight) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("name", l.Name), slog.Int("limit", l.Limit), slog.Duration("lease", l.LeaseOrDefault())}
	if l.Mode > ModeEnforce {
		attrs = append(attrs, slog.String("mode", l.Mode.String()))
	}
	return slog.GroupValue(attrs...)
}

// Permit is a permit that is held, or a refusal if it is not OK. It is a plain value. Another
// process can renew and release it: as JSON, which has its key, it is some 200 bytes.
type Permit struct {
	InFlight InFlight `json:"in_flight"`
	Key      string   `json:"key"`

	OK     bool  `json:"ok"`
	Number int   `json:"number"` // from 0 to Limit-1
	Fence  int64 `json:"fence"`  // grows each time that the permit is taken

	// At is when it was decided, and Until when the lease ends, on the database's clock.
	At    time.Time `json:"at"`
	Until time.Time `json:"until"`

	// NotBefore, of a refusal for want of a permit, is the first end of a lease: a permit may be
	// free earlier, if it is released, or later, if it is renewed. It is no promise.
	NotBefore time.Time `json:"not_before,omitzero"`

	// Rates is the result of the rate limits that were asked with the permit. When it is a
	// refusal, so is the Permit; its receipt settles the tokens that were taken.
	Rates Result `json:"-"`

	// Asked is before the database was asked, on this machine's clock. The holder's lease
	// ends a Lease after that, which is not after Until. It is zero in a Permit that was read
	// from JSON.
	Asked time.Time `json:"-"`
}

// Err returns nil if the permit is held, and the refusal as an error if not, which is
// [ErrRefused]: a *[FullError], or for its rate limits a *[RefusedError].
func (s Permit) Err() error {
	switch {
	case s.OK:
		return nil
	case s.Rates.Request.Limit != nil && !s.Rates.OK:
		return s.Rates.Err()
	}
	return &FullError{Permit: s}
}

// Ends returns when its holder must take the permit for lost, on this machine's clock.
func (s Permit) Ends() time.Time { return s.Asked.Add(s.Until.Sub(s.At)) }

// Validate reports every fault of a permit that is to be renewed or released.
func (s Permit) Validate() error {
	if err := s.InFlight.ValidateKey(s.Key); err != nil {
		return err
	}
	if !s.OK || s.Fence < 1 || s.Number < 0 || s.Number >= MaxInFlight {
		return &FieldError{Limit: s.InFlight.Name, Field: "Permit", Value: s, Reason: "must be one that was acquired"}
	}
	return nil
}

// String is the permit in a line, without the key:
//
//	permit 3 of "calls", fence 1780000000000000
func (s Permit) String() string {
	if !s.OK {
		return fmt.Sprintf("no permit of %s", quoteShort(s.InFlight.Name))
	}
	return fmt.Sprintf("permit %d of %s, fence %d", s.Number, quoteShort(s.InFlight.Name), s.Fence)
}

// LogValue is the permit as a group, without the key.
func (s Permit) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("limit", s.InFlight.Name), slog.Bool("ok", s.OK)}
	if !s.OK {
		return slog.GroupValue(append(attrs, slog.Time("not_before", s.NotBefore))...)
	}
	return slog.GroupValue(append(attrs, slog.Int("number", s.Number), slog.Int64("fence", s.Fence), slog.Time("until", s.Until))...)
}

// FullError is the refusal of a permit as an error: all are held, or the limit is in
// [ModeRefuse]. It is [ErrRefused].
type FullError struct {
	Permit Permit
}

func (e *FullError) Error() string {
	if e.Permit.InFlight.Mode == ModeRefuse {
		return fmt.Sprintf("ratelimit: limit %s refused by its mode", quoteShort(e.Permit.InFlight.Name))
	}
	return fmt.Sprintf("ratelimit: limit %s: all %d permits are held", quoteShort(e.Permit.InFlight.Name), e.Permit.InFlight.Limit)
}

// MarshalJSON returns Error as a JSON string.
func (e *FullError) MarshalJSON() ([]byte, error) { return json.Marshal(e.Error()) }

// Unwrap makes errors.Is(err, ErrRefused) true.
func (e *FullError) Unwrap() error { return ErrRefused }
