package ratelimit

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
	MaxPermits   = 1_000            // permits that one call acquires, of all its limits together
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

// PermitRequest asks limits of how many at once for permits of keys, all or nothing. Make one with
// [InFlight.For] or [InFlight.ForN].
type PermitRequest struct {
	Limit InFlight
	Key   string          `json:"-"`
	N     int             // permits, 1 to MaxPermits; more than Limit has are never granted
	More  []PermitRequest // of other limits or keys: see And
}

// For asks for one permit of the limit for key. Each key is a limit of its own; "" is the usual key
// of a global limit.
func (l InFlight) For(key string) PermitRequest { return l.ForN(key, 1) }

// ForN asks for n permits of the limit for key, for work that weighs as much as n: a job that takes
// three GPUs, a query that takes half of the memory. They are one [Permit].
func (l InFlight) ForN(key string, n int) PermitRequest {
	return PermitRequest{Limit: l, Key: key, N: n}
}

// And asks for the permits of r and of others: for work that stands under several limits, such as its
// tenant's and its partner's. They are one [Permit], acquired all or nothing and released together.
func (r PermitRequest) And(others ...PermitRequest) PermitRequest {
	r.More = slices.Clip(r.More)
	for _, other := range others {
		r.More = append(r.More, other.Parts()...)
	}
	return r
}

// Parts returns the requests of each limit and key, without More.
func (r PermitRequest) Parts() []PermitRequest {
	parts := append([]PermitRequest{r}, r.More...)
	parts[0].More = nil
	return parts
}

// Validate reports a request that no limit could be asked: every fault of a part, which is
// [ErrInvalid]; or more permits than a limit has, which is [ErrExceedsCapacity].
func (r PermitRequest) Validate() error {
	if err := r.validate(); err != nil || len(r.More) == 0 {
		return err
	}
	total := 0
	type id struct{ name, key string }
	seen := make(map[id]bool)
	for _, part := range r.Parts() {
		if err := part.validate(); err != nil {
			return err
		}
		if it := (id{part.Limit.Name, part.Key}); !seen[it] {
			seen[it] = true
		} else {
			return &FieldError{Limit: part.Limit.Name, Field: "Key", Value: part.Key, Reason: "is asked twice in one call; ask with ForN"}
		}
		if total += part.N; total > MaxPermits {
			return &FieldError{Limit: part.Limit.Name, Field: "N", Value: total, Reason: fmt.Sprintf("must be at most %d in one call", MaxPermits)}
		}
	}
	return nil
}

// validate is Validate of one part.
func (r PermitRequest) validate() error {
	switch err := r.Limit.ValidateKey(r.Key); {
	case err != nil:
		return err
	case r.N < 1 || r.N > MaxPermits:
		return &FieldError{Limit: r.Limit.Name, Field: "N", Value: r.N, Reason: fmt.Sprintf("must be from 1 to %d", MaxPermits)}
	}
	return r.Fits()
}

// Fits returns an [ExceedsLimitError] if the limit has fewer permits than are asked of it.
func (r PermitRequest) Fits() error {
	if r.N > r.Limit.Limit && r.Limit.Mode != ModeRefuse {
		return &ExceedsLimitError{r}
	}
	return nil
}

// ExceedsLimitError is a request for more permits than its limit has. It is [ErrExceedsCapacity].
type ExceedsLimitError struct {
	Request PermitRequest
}

func (e *ExceedsLimitError) Error() string {
	return fmt.Sprintf("ratelimit: limit %s: %d permits can never be acquired at once, at most %d can",
		quoteShort(e.Request.Limit.Name), e.Request.N, e.Request.Limit.Limit)
}

// Unwrap makes errors.Is(err, ErrExceedsCapacity) true.
func (e *ExceedsLimitError) Unwrap() error { return ErrExceedsCapacity }

// String returns the limits in a line, without keys.
func (r PermitRequest) String() string {
	text := "a permit of " + r.Limit.String()
	if r.N != 1 {
		text = fmt.Sprintf("%d permits of %s", r.N, r.Limit)
	}
	for _, part := range r.More {
		text += " and " + part.String()
	}
	return text
}

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

// Permit is a permit that is held, or several that are held together, or a refusal if it is not OK:
// then InFlight and Key are those that refused. It is a plain value. Another process can renew and
// release it: as JSON, which has its key, it is some 200 bytes, and 40 for each of More.
type Permit struct {
	InFlight InFlight `json:"in_flight"`
	Key      string   `json:"key"`
	N        int      `json:"n,omitempty"` // permits that were asked of the limit

	OK     bool  `json:"ok"`
	Number int   `json:"number"` // from 0 to Limit-1
	Fence  int64 `json:"fence"`  // grows each time that the permit is taken

	// More are the other permits of the limit that are held with this one, after [InFlight.ForN];
	// With those of other limits, after [PermitRequest.And].
	More []PermitNumber `json:"more,omitempty"`
	With []Permit       `json:"with,omitempty"`

	// At is when it was decided, and Until when the lease ends, on the database's clock. The clock is
	// read before the permit's row, so a permit that was released in between has an At before that.
	// Fences are always in order.
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

// PermitNumber is one of several permits of a limit that are held together.
type PermitNumber struct {
	Number int   `json:"number"`
	Fence  int64 `json:"fence"`
}

// Parts returns the permits of each limit and key that are held together, without With. Each can be
// renewed and released by itself; then not as one with the others any more.
func (s Permit) Parts() []Permit {
	parts := append([]Permit{s}, s.With...)
	parts[0].With = nil
	return parts
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

// Ends returns when its holder must take the permit for lost, on this machine's clock: with the first
// of its leases.
func (s Permit) Ends() time.Time {
	until := s.Until
	for _, p := range s.With {
		if p.Until.Before(until) {
			until = p.Until
		}
	}
	return s.Asked.Add(until.Sub(s.At))
}

// Lease returns the shortest lease of its limits.
func (s Permit) Lease() time.Duration {
	lease := s.InFlight.LeaseOrDefault()
	for _, p := range s.With {
		lease = min(lease, p.InFlight.LeaseOrDefault())
	}
	return lease
}

// Validate reports every fault of a permit that is to be renewed or released.
func (s Permit) Validate() error {
	if err := s.InFlight.ValidateKey(s.Key); err != nil {
		return err
	}
	acquired := s.OK && held(s.Number, s.Fence) && 1+len(s.More) <= MaxPermits && len(s.With) < MaxPermits
	for i, m := range s.More {
		twice := func(o PermitNumber) bool { return o.Number == m.Number }
		acquired = acquired && held(m.Number, m.Fence) && m.Number != s.Number && !slices.ContainsFunc(s.More[:i], twice)
	}
	nested := slices.ContainsFunc(s.With, func(p Permit) bool { return len(p.With) > 0 })
	if !acquired || nested {
		return &FieldError{Limit: s.InFlight.Name, Field: "Permit", Value: s, Reason: "must be one that was acquired"}
	}
	for _, p := range s.With {
		if err := p.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// held reports whether a permit may have such a number and fence.
func held(number int, fence int64) bool { return fence >= 1 && number >= 0 && number < MaxInFlight }

// String is the permit in a line, without the key:
//
//	permit 3 of "calls", fence 1780000000000000
func (s Permit) String() string {
	if !s.OK {
		return fmt.Sprintf("no permit of %s", quoteShort(s.InFlight.Name))
	}
	text := fmt.Sprintf("permit %d of %s, fence %d", s.Number, quoteShort(s.InFlight.Name), s.Fence)
	if len(s.More) > 0 {
		text += fmt.Sprintf(" and %d more", len(s.More))
	}
	for _, p := range s.With {
		text += "; " + p.String()
	}
	return text
}

// LogValue is the permit as a group, without the key.
func (s Permit) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("limit", s.InFlight.Name), slog.Bool("ok", s.OK)}
	if !s.OK {
		return slog.GroupValue(append(attrs, slog.Time("not_before", s.NotBefore))...)
	}
	attrs = append(attrs, slog.Int("number", s.Number), slog.Int64("fence", s.Fence), slog.Time("until", s.Until))
	if len(s.More) > 0 {
		attrs = append(attrs, slog.Int("n", 1+len(s.More)))
	}
	return slog.GroupValue(attrs...)
}

// FullError is the refusal of a permit as an error: too few are free, or the limit is in
// [ModeRefuse]. It is [ErrRefused].
type FullError struct {
	Permit Permit
}

func (e *FullError) Error() string {
	if e.Permit.InFlight.Mode == ModeRefuse {
		return fmt.Sprintf("ratelimit: limit %s refused by its mode", quoteShort(e.Permit.InFlight.Name))
	}
	if e.Permit.N > 1 {
		return fmt.Sprintf("ratelimit: limit %s: fewer than %d of %d permits are free", quoteShort(e.Permit.InFlight.Name), e.Permit.N, e.Permit.InFlight.Limit)
	}
	return fmt.Sprintf("ratelimit: limit %s: all %d permits are held", quoteShort(e.Permit.InFlight.Name), e.Permit.InFlight.Limit)
}

// MarshalJSON returns Error as a JSON string.
func (e *FullError) MarshalJSON() ([]byte, error) { return json.Marshal(e.Error()) }

// Unwrap makes errors.Is(err, ErrRefused) true.
func (e *FullError) Unwrap() error { return ErrRefused }
