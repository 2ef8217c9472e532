package ratelimit

import (
	"fmt"
	"slices"
	"time"
)

// Mode is how a request, or the acquiring of a permit, is treated: see [Request.In] and
// [InFlight.In]. The zero Mode is ModeEnforce.
type Mode uint8

const (
	// ModeEnforce grants or refuses, by the tokens there are. It is the default.
	ModeEnforce Mode = iota + 1

	// ModeShadow decides and takes as ModeEnforce does, and keeps nobody from his work: for
	// trying a limit out. A request that would be refused takes nothing and refuses nothing;
	// a reservation that would be put off takes its tokens, and puts nothing off. The result
	// says so: see [Status.Shadowed]. It is for allow, reserve, take and check. AllowAtMost and
	// AllowFirst enforce such a limit, and an [InFlight] cannot be in it.
	ModeShadow

	// ModeRefuse refuses, without asking the limit: a kill switch. See
	// [Request.RefusedUntil].
	ModeRefuse
)

var modes = [...]string{"enforce", "enforce", "shadow", "refuse"}

// String returns the mode as the catalog's table has it: "enforce", "shadow" or "refuse".
func (m Mode) String() string {
	if int(m) < len(modes) {
		return modes[m]
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

// ParseMode returns the mode of a text, which is one that String returns. Its error is
// [ErrInvalid].
func ParseMode(text string) (Mode, error) {
	if m := slices.Index(modes[1:], text); m >= 0 {
		return Mode(m + 1), nil
	}
	return 0, &FieldError{Field: "Mode", Value: text, Reason: badMode}
}

const badMode = "must be enforce, shadow or refuse"

// MarshalText returns String. A mode that is none is [ErrInvalid].
func (m Mode) MarshalText() ([]byte, error) {
	if int(m) >= len(modes) {
		return nil, &FieldError{Field: "Mode", Value: m, Reason: badMode}
	}
	return []byte(m.String()), nil
}

// UnmarshalText reads a text of MarshalText.
func (m *Mode) UnmarshalText(text []byte) (err error) {
	read, err := ParseMode(string(text))
	if err == nil {
		*m = read
	}
	return err
}

// RefusedFor is the RetryAfter of a refusal by [ModeRefuse] without a known end. It is
// no promise, but when to ask again.
const RefusedFor = time.Minute

// In returns r in a mode, in all verbs that take or check (but see [ModeShadow]):
//
//	result, err := store.Allow(ctx, SignUp.For(ip), NewLimit.For(ip).In(ratelimit.ModeShadow))
//
// Requests of one call can be in different modes, but not those for one limit and key. Those
// in ModeShadow never refuse the others, nor each other: the call is granted, and takes from
// all that are not short, if and only if those that are enforced grant it. Package catalog
// has modes by name and by key, which are changed while programs run.
func (r Request) In(mode Mode) Request {
	r.Mode = mode
	return r
}
