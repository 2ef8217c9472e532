package ratelimit

import (
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/internal/receipt"
)

// Request asks a limit for tokens. Make one with a limit's For or ForN.
//
// The key is often a person's address or a secret, so it leaves by no log, no String and
// no JSON, nor does that of a [Status], a [Result] or an error: see [LogKeys].
type Request struct {
	Limit Limit
	Key   string `json:"-"`
	Count float64

	// AboveShare is the share of the limit's capacity that must be left when Count is taken:
	// see Above.
	AboveShare float64 `json:",omitempty"`

	// Mode says whether a refusal holds; the zero Mode is [ModeEnforce]. See In.
	Mode Mode `json:",omitempty"`

	// RefusedUntil is the RetryAt of refusals by [ModeRefuse]: when the catalog's override is
	// over. It ends nothing by itself. When it is zero or past, the end is not known, and
	// RetryAfter is [RefusedFor].
	RefusedUntil time.Time `json:",omitzero"`

	// Overridden is true when Limit is that of the key's own override in the catalog, which binds
	// no other key: Prune heeds it for the rows of this key only. A plan, which is a copy of a
	// limit with other numbers, can be any key's.
	Overridden bool `json:",omitempty"`
}

// Above returns r for a call that leaves a share of the limit's Capacity to others, from 0 to 1. The
// call is granted only if at least that share is left afterwards. So classes of priority share one
// limit: critical calls ask without it, others above 0.2, and batch work above 0.5. Then batch work
// leaves half of the limit to the others, and a fifth is for critical calls alone.
//
//	store.Allow(ctx, API.For(customer).Above(0.2))
//
// A refusal's RetryAt is when the call would be granted with that share left. A count above the
// capacity less the share is [ErrExceedsCapacity]. It works with Allow, Take, Check, AllowAtMost and
// AllowFirst; a reservation or a credit with it is [ErrInvalid]. If a call asks for the same limit and
// key several times, the largest share applies.
func (r Request) Above(share float64) Request {
	r.AboveShare = share
	return r
}

// Key joins the parts of a key with colons, as in Key("org 7", "alice"), which is "org
// 7:alice". Different parts make different keys: a colon or a backslash within a part has a
// backslash before it, so that a user named "alice:admin" does not share the key of
// Key("alice", "admin").
func Key(part string, parts ...string) string {
	if len(parts) == 0 && !strings.ContainsAny(part, keySpecial) {
		return part
	}
	var b strings.Builder
	keyEscaper.WriteString(&b, part) // a strings.Builder takes all that it is given
	for _, p := range parts {
		b.WriteByte(':')
		keyEscaper.WriteString(&b, p)
	}
	return b.String()
}

const keySpecial = `:\`

var keyEscaper = strings.NewReplacer(`\`, `\\`, `:`, `\:`)

// Status is the state of one limit and key that a call found.
type Status struct {
	// Request is the request of the call. The same limit and key in several requests of one
	// call has one Status, with the counts added up.
	Request Request

	// At is the instant of the decision, on the clock that decided: the database's. RetryAfter
	// is counted from it. Tokens that are granted at once are counted at it, and the limit is
	// kept by it. If the row was waited for, it can be earlier than the answer, and earlier
	// than a refund that this grant was made of; after the clock went back, it is later than
	// the clock's time.
	At time.Time

	// OK is true when the tokens were taken, or for a check could be.
	OK bool

	// Shadowed is true when the limit would have refused the call or put it off, or taken
	// fewer tokens for AllowAtMost, but for its request's [ModeShadow]. The Result is Shadowed
	// if one of its limits is, and tells the caller to go on: it is OK, and to be done
	// at once. The answer of that limit is in Each: OK is false there, or RetryAt later.
	Shadowed bool `json:",omitempty"`

	// Taken is how many tokens were taken: Request.Count, or of AllowAtMost up to
	// that. 0 for a refusal and a check.
	Taken float64

	// RetryAfter is how long after At: for a refusal, when the same call
	// would be accepted if there were no other; for a reservation that went into
	// debt, when the debt is paid and the work may run; otherwise 0. It is
	// rounded up to a whole microsecond, and a promise: the same call made at
	// exactly that instant succeeds.
	RetryAfter time.Duration

	// RetryAt is the instant of RetryAfter, on the same clock as At. A scheduler stores it.
	RetryAt time.Time

	// Value is how many tokens there are: after the call when it took them,
	// otherwise as they are. Negative is debt.
	Value float64

	// Before is the Value before the call took: Value and the tokens that it took. It is Value
	// when nothing was taken. See Crossed.
	Before float64

	// Remaining is Value in whole tokens, never below 0.
	Remaining int64

	// Capacity is the limit's, which HTTP headers call the limit.
	Capacity float64

	// ResetAfter is how long after At the limit is full again if nothing is taken.
	ResetAfter time.Duration

	// PausedUntil is the end of a pause that is not over, else zero. Nothing is
	// allowed before, and a reservation is due then or later. A reservation that
	// was made before the pause keeps the RetryAt that it was told: check before
	// you act on one, and look at PausedUntil.
	PausedUntil time.Time
}

// Share returns how full the limit is: Value as a share of Capacity, 0 when empty and 1 when
// full, below 0 in debt. Of a limit without capacity it is 0.
func (s Status) Share() float64 {
	if s.Capacity == 0 {
		return 0
	}
	return s.Value / s.Capacity
}

// Crossed reports whether the call has taken the use of the limit from below a share of its Capacity
// to that share or above it. So one call of many sends the warning:
//
//	if result.Crossed(0.8) {
//		// insert the mail into the outbox, in the transaction that took
//	}
//
// It is true for one call each time that the use crosses the share, under any number of concurrent
// calls. After a refill, credit, settlement or cancellation the use may cross the share again. The
// result of Settle reports it as well, when more was used than taken. A call that is rolled back has
// crossed nothing, so warn in its transaction.
//
// With Shards, and with tokens granted from memory (Config.Escrow of package pgstore), a call does not
// see all taken tokens. Then it may be true for more than one call, or for none.
func (s Status) Crossed(share float64) bool {
	kept := s.Capacity * (1 - share)
	kept += bucket.Tolerance(kept, s.Capacity, 0)
	return s.OK && s.Value <= kept && s.Before > kept
}

// FullAt returns the instant at which the limit is full again if nothing is taken, on the
// same clock as At.
func (s Status) FullAt() time.Time { return s.At.Add(s.ResetAfter) }

// Page says of which of a limit's keys Rows tells: of all, as its zero value.
type Page struct {
	// Prefix is the prefix of the keys. It is not in JSON, as keys are not.
	Prefix string `json:"-"`

	// After is a key: those up to it, in the order of bytes, are passed over; "" is
	// before all of them. With a Most of at least 2 it makes pages: the next one begins
	// after the last key of this one.
	After string `json:"-"`

	// Most is how many keys there are at most; 0 is no bound.
	Most int
}

// A Replacement is for package catalog, which has a store measure the rows of a key by another
// definition, so that what was used stays used.
type Replacement struct {
	Key      string `json:"-"`
	From, To Limit  // by what the rows are measured, and by what afterwards

	// By is what they are measured by in place of To, until all processes take by To. They are marked
	// with an instant, and found by it in Marked. A row that is paused is not.
	By   Limit
	Mark time.Time

	// Marked is how rows are measured that have a mark, in place of From; with Only, all others stay
	// as they are.
	Marked []Marked
	Only   bool

	// Cuts announces a cut: once all rows are marked, a definition of less capacity than To follows.
	Cuts bool
}

// Marked is rows that have a mark: they were measured by the first of some limits then, and have been
// taken from by all of them since.
type Marked struct {
	Mark time.Time
	By   []Limit
}

// Result is the answer to allow, reserve, check and settle.
//
// A refusal is a result and not an error, so that it does not roll back a
// transaction that has other work in it; Err makes it one.
type Result struct {
	// Status is the call's answer. Of several limits in one call it is that
	// of the limit that decides: of those that refused, or else of all, the
	// one with the longest wait, and then the one with the fewest tokens left.
	Status

	// Several is the Status of each limit, in the order of the call, if there is more than one;
	// [Result.Each] is for one as well. When one of several limits refuses, nothing is taken
	// from any, and the others' Status holds their state. When it refuses by
	// [ModeRefuse], the others are not asked, and the At of their Status is zero.
	Several []Status

	// Receipt records the tokens that a call took, to settle or cancel it.
	Receipt *Receipt `json:"-"`
}

// Each returns the Status of each limit, in the order of the call; nothing for the zero Result.
func (r Result) Each() []Status {
	if r.Several != nil || r.Request.Limit == nil {
		return r.Several
	}
	return []Status{r.Status}
}

// Receipt records the tokens that a call took, row by row. It is opaque. A store's Settle replaces
// the tokens taken by the tokens used, and Cancel gives them back, once. It is safe for concurrent
// use, and copies of a Result share it.
//
// Another process can settle a receipt that it reads as text, of some hundred bytes: by MarshalText
// and UnmarshalText (so it is a string in JSON), or by Value and Scan, for a column of type text.
// Three things to know:
//
//   - Keep it with the work, in the transaction that took. Then there is no receipt of a take that
//     was rolled back, also when the server crashes.
//   - Two receipts that were read from the same text do not know of each other. So settle in the
//     transaction that finishes the work, if it finds the work not finished yet.
//   - The text has the limits' names and keys, and is not signed. A client that changes one can
//     give tokens away: do not hand it to clients. Logs and prints show it without keys.
//
// The zero Receipt, as which NULL and an empty text are read, belongs to a call that took nothing.
// A text that no receipt has is [ErrInvalid].
type Receipt = receipt.Receipt

// Err returns nil when r is OK and a *RefusedError otherwise.
func (r Result) Err() error {
	if r.OK {
		return nil
	}
	return &RefusedError{Result: r}
}
