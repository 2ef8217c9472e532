package ratelimit

import (
	"context"
	"encoding/json"
	"iter"
	"log/slog"
	"strconv"
	"strings"
	"time"
)

// Observe hears each decision of a store or a middleware: Config.Observe of packages pgstore,
// memstore, httplimit and grpclimit, and MiddlewareConfig.Observe of riverlimit. One function can
// be given to all of them; see [Event] for how to count a decision once.
//
// It is called on the goroutine of the caller and with its context, so that a span that is
// in there is the caller's, also of a decision that shared its statement with others. It is
// called once for each decision, after that is in the database or in memory and before the
// caller has the answer. So it must not block, and must be safe for concurrent use. A decision
// in a transaction may still be rolled back: the event is of the decision.
type Observe = func(ctx context.Context, e Event)

// Observers returns an Observe that calls others in their order; those that are nil are left
// out, and if all are, so is it.
func Observers(others ...Observe) Observe {
	var all []Observe
	for _, o := range others {
		if o != nil {
			all = append(all, o)
		}
	}
	switch len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	}
	return func(ctx context.Context, e Event) {
		for _, o := range all {
			o(ctx, e)
		}
	}
}

// Verb is the method that a caller called. The verbs that are made of others are told as those:
// Take as VerbAllow; Wait as VerbReserve, and VerbCancel if it gives up; Keep and Hold as the
// verbs of permits that they call. Reads for people are not told: CheckEach, Rows and their like.
type Verb string

const (
	VerbAllow       Verb = "allow"
	VerbReserve     Verb = "reserve"
	VerbAllowAtMost Verb = "allow_at_most"
	VerbAllowFirst  Verb = "allow_first"
	VerbCheck       Verb = "check" // takes nothing
	VerbSettle      Verb = "settle"
	VerbCancel      Verb = "cancel"
	VerbCredit      Verb = "credit"
	VerbPause       Verb = "pause"
	VerbResume      Verb = "resume"
	VerbReset       Verb = "reset"
	VerbChange      Verb = "change"
	VerbAcquire     Verb = "acquire" // of a permit, as the two that follow
	VerbRenew       Verb = "renew"
	VerbRelease     Verb = "release"
)

// Takes reports whether the verb asks for tokens or for a permit, and can be refused.
func (v Verb) Takes() bool {
	switch v {
	case VerbAllow, VerbReserve, VerbAllowAtMost, VerbAllowFirst, VerbAcquire:
		return true
	}
	return false
}

// Form is where a decision was made.
type Form string

const (
	FormTx     Form = "tx"     // in the caller's transaction
	FormOwn    Form = "own"    // on its own, in the database
	FormRunner Form = "runner" // in a transaction of AllowFunc or ReserveFunc
	FormMemory Form = "memory" // in this process: of a memstore, or with Config.Escrow of pgstore
)

// Outcome is how a call ended, or how one of its limits decided.
type Outcome string

const (
	// OutcomeGranted is tokens that were taken, a check that says that they could be, or an
	// edit, a settlement or a release that was made.
	OutcomeGranted Outcome = "granted"

	// OutcomeRefused is too few tokens or permits; of VerbSettle and VerbCancel, a receipt of
	// which nothing is left to settle.
	OutcomeRefused Outcome = "refused"

	// OutcomePaused is a refusal of a limit that is paused.
	OutcomePaused Outcome = "paused"

	// OutcomeWithheld is, of one of several limits, that it would have granted, or was not asked:
	// another refused.
	OutcomeWithheld Outcome = "withheld"

	// OutcomeShadowed is, of a limit in [ModeShadow], that it would have refused the call or put
	// it off. The call went on as if it had granted; how that ended is the Event's Outcome.
	OutcomeShadowed Outcome = "shadowed"

	// OutcomeTooLarge is [ErrExceedsCapacity].
	OutcomeTooLarge Outcome = "too_large"

	// OutcomeInvalid is [ErrInvalid], and of a door a request without a usable key or cost.
	OutcomeInvalid Outcome = "invalid"

	// OutcomeFailed is every other error. Nothing was taken, unless a decision on its own was
	// given up while its statement was under way: then it was or was not.
	OutcomeFailed Outcome = "failed"

	// OutcomeUnknown is a transaction of AllowFunc or ReserveFunc of which nobody found out
	// whether it was committed.
	OutcomeUnknown Outcome = "unknown"

	// OutcomeRolledBack is a grant of AllowFunc or ReserveFunc whose function failed: nothing is
	// spent.
	OutcomeRolledBack Outcome = "rolled_back"

	// OutcomeLost is a permit that was not held any more when it was renewed or released.
	OutcomeLost Outcome = "lost"
)

// Event is one decision. It is a plain value, which may be kept. Printed, logged and in JSON it
// is without keys, which its Each has.
type Event struct {
	Verb    Verb
	Form    Form
	Outcome Outcome

	// Result is the answer: of a grant, a refusal, a check and a settlement. Otherwise it is
	// zero.
	Result Result

	// Requests are those of the call, if there is no Result; of VerbSettle and VerbCancel, always
	// those that the receipt says were taken.
	Requests []Request

	// Permit is that of VerbAcquire, VerbRenew and VerbRelease, otherwise nil. The rates that were
	// asked with it have an event of their own. A door has one event for both, with the Permit
	// that was missing, if it is a refusal, and without it if rates refused.
	Permit *Permit

	// Err is the error that the caller gets, and ErrorClass its kind, in a few words: the
	// SQLSTATE of the server's error, such as "40001", or one of "invalid", "too_large",
	// "settled", "lease_lost", "deadline_exceeded", "canceled", "locked", "closed", "no_pool",
	// "not_migrated", "outcome_unknown", "connection" and "other"; of package fallback "silent" and
	// "pool_in_use". It is "" of no error and of a refusal.
	Err        error
	ErrorClass string

	// Took is from the call to the answer. It is 0 of a decision from memory, for which no clock
	// is read.
	Took time.Duration

	// Queued is the part of Took in which the call waited in this process: for the statement
	// before its own, or for its turn to begin a transaction. Waits in the server, and for a
	// connection of the pool, are not in it.
	Queued time.Duration

	// Batch is how many calls the statement decided together that decided this one, itself
	// included, if it was on its own. Otherwise it is 0.
	Batch int

	// Retries is how often a statement or transaction was run again for a call that takes or
	// checks, since PostgreSQL asked for that, by 40001 or 40P01. It is 0 of FormTx, whose
	// transaction is the caller's to run again, and of permits.
	Retries int

	// Door is the middleware that decided on a request, call or job, by its package: "httplimit",
	// "grpclimit" or "riverlimit". It is "" of a store. A function that hears both hears of such a
	// request twice, once from each: count those without a Door, or those with one.
	Door string

	// Passed reports whether the door let the request through, and Shadow whether the door is in
	// shadow mode, in which all pass. A limit in [ModeShadow] is one of Each.
	Passed, Shadow bool
}

// Part is one limit and key of an event. Its Status is as in the result; without one it has the
// Request alone.
type Part struct {
	Outcome Outcome
	Status  Status
}

// Name returns the name of the limit, which metrics and HTTP fields call the policy. It is "" of a
// request without a limit.
func (p Part) Name() string { return NameOf(p.Status.Request.Limit) }

// Each returns the Part of each limit and key that was asked, in the order of the call; of a
// permit, none.
func (e *Event) Each() iter.Seq[Part] {
	return func(yield func(Part) bool) {
		if e.Permit != nil {
			return
		}
		if e.Result.Request.Limit == nil {
			for _, r := range e.Requests {
				if !yield(Part{Outcome: e.Outcome, Status: Status{Request: r}}) {
					return
				}
			}
			return
		}
		if e.Result.Several == nil {
			yield(Part{Outcome: e.Outcome, Status: e.Result.Status})
			return
		}
		for _, s := range e.Result.Several {
			if !yield(Part{Outcome: e.of(&s), Status: s}) {
				return
			}
		}
	}
}

// of returns the outcome of one of several limits.
func (e *Event) of(s *Status) Outcome {
	switch {
	case s.Shadowed:
		return OutcomeShadowed
	case e.Outcome != OutcomeRefused && e.Outcome != OutcomePaused:
		return e.Outcome
	case s.OK, s.At.IsZero():
		return OutcomeWithheld
	case s.PausedUntil.After(s.At):
		return OutcomePaused
	}
	return OutcomeRefused
}

// Policy returns the name of the limit: of several, of the one that decides, by the result, or of
// the first. It is "" of a call without limits.
func (e *Event) Policy() string {
	switch {
	case e.Permit != nil:
		return e.Permit.InFlight.Name
	case e.Result.Request.Limit != nil:
		return NameOf(e.Result.Request.Limit)
	case len(e.Requests) > 0:
		return NameOf(e.Requests[0].Limit)
	}
	return ""
}

// Kind returns that of the limit that Policy names, in words, such as "token bucket" and "in flight".
func (e *Event) Kind() string {
	limit := e.Result.Request.Limit
	switch {
	case e.Permit != nil:
		return "in flight"
	case limit == nil && len(e.Requests) > 0:
		limit = e.Requests[0].Limit
	}
	if missing(limit) {
		return ""
	}
	return limit.Definition().Kind.String()
}

// keys returns those that were asked.
func (e *Event) keys() (keys []string) {
	for p := range e.Each() {
		keys = append(keys, p.Status.Request.Key)
	}
	for _, r := range e.Requests {
		keys = append(keys, r.Key)
	}
	if e.Permit != nil {
		for _, p := range e.Permit.Parts() {
			keys = append(keys, p.Key)
		}
	}
	return keys
}

// ErrorText returns the text of Err without the keys of the call, which the errors of some
// faults name; "" without an error.
func (e *Event) ErrorText() string {
	if e.Err == nil {
		return ""
	}
	text := e.Err.Error()
	for _, key := range e.keys() {
		if key != "" {
			text = strings.ReplaceAll(text, strconv.Quote(key), `"…"`)
		}
	}
	return text
}

// String returns the event in a line, without keys:
//
//	allow (own) refused: 1 of "api": refused, retry after 6s, 0 of 10 left
func (e Event) String() string {
	var b strings.Builder
	b.WriteString(string(e.Verb))
	if e.Door != "" {
		b.WriteString(" (" + e.Door + ")")
	} else if e.Form != "" {
		b.WriteString(" (" + string(e.Form) + ")")
	}
	b.WriteString(" " + string(e.Outcome))
	if e.Shadow {
		b.WriteString(" in shadow mode")
	}
	switch {
	case e.Err != nil:
		b.WriteString(": " + e.ErrorText())
	case e.Permit != nil:
		b.WriteString(": " + e.Permit.String())
	case e.Result.Request.Limit != nil:
		b.WriteString(": " + e.Result.String())
	case len(e.Requests) > 0:
		b.WriteString(": " + e.Requests[0].String())
	}
	return b.String()
}

// LogValue returns the event as a group, without keys.
func (e Event) LogValue() slog.Value {
	attrs := []slog.Attr{slog.String("verb", string(e.Verb)), slog.String("outcome", string(e.Outcome))}
	text := func(name, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(name, value))
		}
	}
	number := func(name string, value int64) {
		if value != 0 {
			attrs = append(attrs, slog.Int64(name, value))
		}
	}
	duration := func(name string, value time.Duration) {
		if value != 0 {
			attrs = append(attrs, slog.Duration(name, value))
		}
	}
	text("form", string(e.Form))
	text("door", e.Door)
	text("policy", e.Policy())
	if e.Door != "" {
		attrs = append(attrs, slog.Bool("passed", e.Passed))
	}
	if e.Shadow {
		attrs = append(attrs, slog.Bool("shadow", true))
	}
	switch {
	case e.Permit != nil:
		attrs = append(attrs, slog.Any("permit", *e.Permit))
	case e.Result.Request.Limit != nil:
		attrs = append(attrs, slog.Any("result", e.Result))
	}
	duration("took", e.Took)
	duration("queued", e.Queued)
	number("batch", int64(e.Batch))
	number("retries", int64(e.Retries))
	text("error", e.ErrorText())
	text("error_class", e.ErrorClass)
	return slog.GroupValue(attrs...)
}

// MarshalJSON returns the event as a JSON object, without keys. Durations are nanoseconds.
func (e Event) MarshalJSON() ([]byte, error) {
	object := struct {
		Verb       Verb          `json:"verb"`
		Form       Form          `json:"form,omitempty"`
		Door       string        `json:"door,omitempty"`
		Outcome    Outcome       `json:"outcome"`
		Policy     string        `json:"policy,omitempty"`
		Kind       string        `json:"kind,omitempty"`
		Passed     bool          `json:"passed,omitempty"`
		Shadow     bool          `json:"shadow,omitempty"`
		Result     *Result       `json:"result,omitempty"`
		Took       time.Duration `json:"took,omitempty"`
		Queued     time.Duration `json:"queued,omitempty"`
		Batch      int           `json:"batch,omitempty"`
		Retries    int           `json:"retries,omitempty"`
		Error      string        `json:"error,omitempty"`
		ErrorClass string        `json:"error_class,omitempty"`
	}{
		Verb: e.Verb, Form: e.Form, Door: e.Door, Outcome: e.Outcome, Policy: e.Policy(), Kind: e.Kind(),
		Passed: e.Passed, Shadow: e.Shadow, Took: e.Took, Queued: e.Queued, Batch: e.Batch, Retries: e.Retries,
		Error: e.ErrorText(), ErrorClass: e.ErrorClass,
	}
	if e.Result.Request.Limit != nil {
		object.Result = &e.Result
	}
	return json.Marshal(object)
}
